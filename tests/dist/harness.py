"""Runs a test body on several real ranks: processes with a real Gloo process group.

    @ranks(1, 2, 5)
    def test_sum(rank: int, world: int, tmp_path: Path) -> None:
        ones = torch.ones(3)
        torch.distributed.all_reduce(ones)
        assert ones.tolist() == [world] * 3

Every rank is a fork of the zygote (see zygote.py), so starting them costs milliseconds. Arguments other than
``rank`` and ``world`` are ordinary pytest fixtures or parameters; every rank gets an equal (pickled) copy.
Environment, working directory and warning filters are the test's own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytest
import torch.distributed as dist

from tests.dist.patience import CROWD, crowd, stretch
from tests.dist.zygote import DUMP_SIGNAL, Job, serve_store
from tests.e2e.forked import forking_python

__all__ = ["ranks", "run_ranks", "there"]

Body = Callable[..., Any]
_ENVIRONMENT = dict(os.environ)  # as it is before tests change it: modules read it when they are imported
_ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 5.0  # what the other ranks get after the first failure
_STARTUP_S = 60.0
_serial = itertools.count()


def ranks(
    *worlds: int,
    deadline_s: float = 60,
    same: bool = False,
    dies: Mapping[int, signal.Signals] | None = None,
    store: Literal["agent", "rank0"] = "agent",
    ranks_per_host: int = 0,
    accelerator: bool = False,
) -> Callable[[Body], Body]:
    """Makes a test of a function ``(rank, world, **fixtures)``: one test for each world size.

    The test fails if any rank raises, is killed, or has not returned after the deadline; a rank that hangs is
    named, with the stacks of all its threads, and killed.

    Args:
        worlds: Numbers of ranks.
        deadline_s: Seconds the ranks have together.
        same: Whether every rank must return an equal value (compared with ``==``).
        dies: Rank → the signal that must end it. A rank with SIGSTOP must stop and never go on; it is
            killed when the others have ended.
        store: Where the rendezvous store lives: in the pytest process, as with torchrun, or in rank 0,
            where it dies with that rank.
        ranks_per_host: Ranks look as if they were on hosts of so many each; 0 leaves all of them on this one,
            where they share memory.
        accelerator: Whether every rank has the emulated accelerator; see tests/accelerator.
    """

    def decorate(body: Body) -> Body:
        parameters = inspect.signature(body).parameters
        assert {"rank", "world"} <= set(parameters), f"{body.__qualname__} must take rank and world"

        @functools.wraps(body)
        def test(world: int, **fixtures: Any) -> None:
            run_ranks(
                body, world, deadline_s=deadline_s, same=same, dies=dies, store=store,
                ranks_per_host=ranks_per_host, accelerator=accelerator, **fixtures,
            )  # fmt: skip

        test.body_on_ranks = body  # type: ignore[attr-defined]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter for name, parameter in parameters.items() if name != "rank"]
        )
        sizes = pytest.mark.parametrize("world", worlds, ids=[f"{world}-ranks" for world in worlds])
        patience = pytest.mark.timeout(deadline_s * stretch() + _STARTUP_S)
        decorated: Body = patience(sizes(test))
        return pytest.mark.emulated(decorated) if accelerator else decorated

    return decorate


def there(module: str, qualname: str) -> Body:
    """Returns what stands for a body in a module that ranks import, and this process does not."""

    def body() -> None: ...

    body.__module__, body.__qualname__ = module, qualname
    return body


def run_ranks(
    body: Body,
    world: int,
    *,
    deadline_s: float = 60,
    same: bool = False,
    dies: Mapping[int, signal.Signals] | None = None,
    store: Literal["agent", "rank0"] = "agent",
    ranks_per_host: int = 0,
    accelerator: bool = False,
    **fixtures: Any,
) -> list[Any]:
    """Runs a module-level function on ranks now; `ranks` explains the options.

    Returns:
        What each rank returned, by rank; None where it was to die.

    Raises:
        pytest.fail.Exception: Any rank failed.
    """
    assert "<locals>" not in body.__qualname__, "ranks import the body by name: define it at module level"
    dies = dict(dies or {})
    zygote = _zygote()
    with tempfile.TemporaryDirectory(prefix="fastload-ranks-") as run_dir:
        job = Job(
            module=body.__module__,
            qualname=body.__qualname__,
            fixtures=fixtures,
            world=world,
            name=f"{next(_serial)}/{body.__qualname__}",
            run_dir=Path(run_dir),
            store_port=zygote.store.port,
            store_on_rank0=store == "rank0",
            num_surviving=world - len(dies),
            ranks_per_host=ranks_per_host,
            accelerator=accelerator,
            deadline_s=deadline_s * stretch(),
            cwd=os.getcwd(),
            environ={**os.environ, CROWD: f"{crowd():.2f}"},
            sys_path=list(sys.path),
            warning_filters=list(warnings.filters),
        )
        try:
            ends = zygote.run(job, dies)
        except (EOFError, OSError):
            _zygote.cache_clear()
            pytest.fail(f"the process that ranks are forked from died:\n{zygote.stderr()}", pytrace=False)
        values, failures = _judge(job, ends, dies)
    if not failures and same and any(value != values[0] for value in values):
        table = "\n".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
        failures = [f"the ranks returned different values\n{table}"]
    if failures:
        title = f"{len(failures)} of {world} ranks failed, in this order" if len(failures) > 1 else ""
        pytest.fail("\n".join([title, *failures]).lstrip(), pytrace=False)
    return values


def _judge(
    job: Job, ends: dict[int, str | int], dies: dict[int, signal.Signals]
) -> tuple[list[Any], list[str]]:
    """Returns the values by rank and a paragraph for each rank that failed, first failure first.

    Args:
        job: What was run.
        ends: Rank → wait status, or what kept it from ending, in order of time.
        dies: Rank → the signal that was to end it.
    """
    values: list[Any] = [None] * job.world
    failures = []
    for rank, end in ends.items():
        log = (job.run_dir / f"{rank}.log").read_text(errors="replace")
        wanted = dies.get(rank)
        result = job.run_dir / f"{rank}.result"
        problem = ""
        if isinstance(end, str):
            problem = "" if end == "stopped" else f"{end}\n{log}"
        elif os.WIFSIGNALED(end):
            if os.WTERMSIG(end) != wanted:
                problem = f"was killed by {signal.Signals(os.WTERMSIG(end)).name}\n{log}"
        elif not result.exists():
            problem = f"exited with status {os.WEXITSTATUS(end)} before the body had returned\n{log}"
        else:
            ok, value = pickle.loads(result.read_bytes())
            if not ok:
                problem = f"raised\n{value}"
            elif wanted:
                problem = f"returned {value!r}, but was to be ended by {wanted.name}"
            else:
                values[rank] = value
        if problem:
            text = problem.encode(errors="backslashreplace").decode()  # paths; pytest sends it elsewhere
            failures.append(f"=== rank {rank} of {job.world} {text}")
        if log and log not in problem:
            print(f"--- output of rank {rank} ---\n{log}", end="")
    return values, failures


class _Zygote:
    """The parent's end of the zygote, and the rendezvous store that outlives any rank."""

    def __init__(self) -> None:
        self.store = serve_store(timedelta(seconds=_STARTUP_S))
        ours, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open as long as the zygote)
        script = f"import sys; sys.path[:] = {sys.path!r}; from tests.dist import zygote; zygote.main()"
        with theirs:
            self._process = subprocess.Popen(
                [forking_python(), "-c", script],
                stdin=theirs.fileno(),
                stdout=self._stderr,
                stderr=self._stderr,
                cwd=_ROOT,
                env={**_ENVIRONMENT, "OMP_NUM_THREADS": "1"},  # else there are threads, and no safe forks
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        atexit.register(self.close)
        started = False
        with contextlib.suppress(EOFError):
            started = self._connection.poll(_STARTUP_S) and self._connection.recv() == "ready"
        if not started:
            self.close()
            pytest.fail(
                f"the process that ranks are forked from did not start:\n{self.stderr()}", pytrace=False
            )

    def run(self, job: Job, dies: dict[int, signal.Signals]) -> dict[int, str | int]:
        """Returns how each rank ended, in order of time; none is left running."""
        ends: dict[int, str | int] = {}
        running = set(range(job.world))
        unfinished = set(running)
        limit, why = time.monotonic() + job.deadline_s, f"hangs: still running after {job.deadline_s:g} s"
        request = ("run", job.world, job.module, pickle.dumps(job))
        try:
            self._connection.send(request)
            while unfinished and self._connection.poll(max(0.0, limit - time.monotonic())):
                rank, status = self._connection.recv()
                if os.WIFSTOPPED(status):
                    if dies.get(rank) != signal.SIGSTOP:
                        continue
                    ends[rank] = "stopped"
                else:
                    ends[rank] = status
                    running.discard(rank)
                    if status != 0 and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == dies.get(rank)):
                        dist.PrefixStore(job.name, self.store).set("all ended", "")
                        sooner = time.monotonic() + _GRACE_S
                        if sooner < limit:
                            limit, why = (
                                sooner,
                                f"was still running {_GRACE_S:g} s after rank {rank} had failed",
                            )
                unfinished.discard(rank)
            if unfinished:
                self._connection.send(("signal", unfinished, DUMP_SIGNAL))
                time.sleep(0.5)  # for the stacks to be written
                ends.update(dict.fromkeys(sorted(unfinished), why))
            return ends
        finally:
            self._kill(running)

    def _kill(self, running: set[int]) -> None:
        self._connection.send(("signal", running, signal.SIGKILL))
        while running:
            if not self._connection.poll(_STARTUP_S):
                raise EOFError
            rank, status = self._connection.recv()
            if not os.WIFSTOPPED(status):
                running.discard(rank)

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@functools.cache
def _zygote() -> _Zygote:
    return _Zygote()
