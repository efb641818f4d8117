"""Ranks of an experiment: forks of the stage's process, all on the first device, each with a deadline."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gpu_check_parts.devices import Device
from tests.gpu import one_gpu

_PR_SET_PDEATHSIG = 1
_MEETING_S = 60.0  # for the process group to be made, and of its collectives
_AFTER_ERROR_S = 5.0
_LEAVING_S = 10.0  # for the others, before a rank leaves that has ended well
_STACKS = signal.SIGUSR2


@dataclass(frozen=True)
class Rank:
    """One rank, in its process.

    Attributes:
        rank: Its number.
        world: How many there are.
        device: Its device.
        store: Shared by all of them.
    """

    rank: int
    world: int
    device: Device
    store: dist.Store

    def store_of(self, name: str) -> dist.Store:
        """Returns a namespace of the store."""
        return dist.PrefixStore(name, self.store)


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        value: What its body returned.
        problem: Why it returned nothing; empty if it did.
        at_s: When, as `time.time`.
    """

    value: Any = None
    problem: str = ""
    at_s: float = 0.0


class Ranks:
    """Starts ranks, which run ``body(rank, *arguments)`` in a process group over their devices.

    Args:
        kind: Of their devices; see `Device`.
        body: A function.
        world: How many.
        arguments: For the body.
        environment: Variables that differ from those of this process.
        ranks_per_host: Ranks look as if they were on hosts of so many each.
        num_leaving: How many come to the end of the body.
        as_programs: Whether they end as programs do, which takes as long as it takes; else at once, together.
    """

    def __init__(
        self,
        kind: str,
        body: Callable[..., Any],
        world: int,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        ranks_per_host: int = 0,
        num_leaving: int | None = None,
        as_programs: bool = False,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        listener = socket.create_server(("127.0.0.1", 0))
        self._pids: dict[int, int] = {}
        sys.stdout.flush()
        for rank in range(world):
            pid = os.fork()
            if not pid:
                os.environ.update(environment or {})
                if ranks_per_host:
                    socket.gethostname = lambda: f"host{rank // ranks_per_host}"  # noqa: B023
                result = self._folder / str(rank)
                leaving = 0 if as_programs else num_leaving or world
                _be(kind, rank, world, listener, body, arguments, leaving, result)
            self._pids[pid] = rank
        listener.close()
        self._world = world

    def wait(self, limit_s: float) -> list[Ended]:
        """Returns how each ended; one that still runs after the limit is killed, and writes its stacks.

        If a rank has raised an error, the others have little time left.
        """
        problems: dict[int, str] = {}
        ended_at_s: dict[int, float] = {}
        running, began = dict(self._pids), time.monotonic()
        limit = began + limit_s
        while running and time.monotonic() < limit:
            for pid, rank in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[pid]
                    ended_at_s[rank] = time.time()
                    if os.WIFSIGNALED(status):
                        problems[rank] = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
                    elif status:
                        limit = min(limit, time.monotonic() + _AFTER_ERROR_S)
            time.sleep(0.01)
        for pid, rank in running.items():
            print(f"--- rank {rank} still runs; its threads:", flush=True)
            os.kill(pid, _STACKS)
            time.sleep(0.2)
        for pid, rank in running.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            problems[rank] = f"still running after {time.monotonic() - began:.0f} s"
        ends = []
        for rank in range(self._world):
            path = self._folder / str(rank)
            problem, value = problems.get(rank, ""), None
            if path.exists():
                value, raised = pickle.loads(path.read_bytes())
                problem = raised or problem
            elif not problem:
                problem = "ended without a result"
            ends.append(Ended(value, problem, ended_at_s.get(rank, 0.0)))
        shutil.rmtree(self._folder)
        return ends


def run_ranks(
    kind: str, body: Callable[..., Any], world: int, *arguments: Any, limit_s: float, **given: Any
) -> list[Ended]:
    """Runs ranks to their end; see `Ranks`."""
    return Ranks(kind, body, world, *arguments, **given).wait(limit_s)


def problems_of(ends: Sequence[Ended], *, but: Sequence[int] = ()) -> str:
    """Returns what went wrong on any rank but some, in one line; empty if nothing did."""
    found = [(rank, end.problem) for rank, end in enumerate(ends) if end.problem and rank not in but]
    return "; ".join(f"rank {rank}: {problem.strip().splitlines()[-1]}" for rank, problem in found)


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def fastload_threads(limit_s: float) -> list[str]:
    """Returns the threads of loads that have not ended after some time; one serves the next load, too."""
    limit = time.monotonic() + limit_s
    while True:
        names = [thread.name for thread in threading.enumerate()]
        found = [name for name in names if name.startswith("fastload-") and name != "fastload-host"]
        if not found or time.monotonic() > limit:
            return found
        time.sleep(0.1)


def _be(
    kind: str,
    rank: int,
    world: int,
    listener: socket.socket,
    body: Callable[..., Any],
    arguments: Sequence[Any],
    num_leaving: int,
    result: Path,
) -> NoReturn:
    """Is a rank: never returns to the stage, whose process this is a copy of.

    Args:
        kind, rank, world, body, arguments: As for `Ranks`.
        listener: Where rank 0 serves the store.
        num_leaving: How many ranks leave together; 0 if each ends as a program does.
        result: File for what the body returns.
    """
    value, raised = None, ""
    try:
        end_with_parent()
        # Once, before there are threads: the first ones in a fork to set a number, each its own, abort it.
        torch.set_num_threads(torch.get_num_threads())
        faulthandler.enable()
        faulthandler.register(_STACKS)
        if kind == "cuda":
            one_gpu.enter(rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.set_debug_level_from_env()  # as the import did in the process that this is a fork of
        store = _store(rank, listener)
        device = Device(kind)
        dist.init_process_group(
            device.groups,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=_MEETING_S),
        )
        value = body(Rank(rank, world, device, store), *arguments)
    except BaseException:
        raised = traceback.format_exc()
        print(f"--- rank {rank}\n{raised}", flush=True)
    partial = result.with_suffix(".partial")
    partial.write_bytes(pickle.dumps((value, raised)))
    partial.rename(result)
    if not raised and not num_leaving:
        ctypes.pythonapi.Py_Exit(0)
    if not raised:
        with contextlib.suppress(Exception):
            _leave_together(store, num_leaving)
    sys.stdout.flush()
    os._exit(1 if raised else 0)


def _store(rank: int, listener: socket.socket) -> dist.Store:
    port, timeout = listener.getsockname()[1], timedelta(seconds=_MEETING_S)
    if rank == 0:
        return dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timeout,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    listener.close()
    return dist.TCPStore("127.0.0.1", port, timeout=timeout)


def _leave_together(store: dist.Store, num_leaving: int) -> None:
    """Waits for the other ranks: the communicators of one that leaves break those of its peers."""
    if store.add("leaving", 1) == num_leaving:
        store.set("all leaving", "")
    store.wait(["all leaving"], timedelta(seconds=_LEAVING_S))
