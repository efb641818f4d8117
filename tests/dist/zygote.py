"""The process that ranks are forked from: it has imported what they need, and nothing else happens in it.

That includes the modules of the tests themselves: each is imported once, not by each rank of each test. What
takes long, torch and what a first step of an optimizer imports, it has from whom it is forked itself (see
tests/e2e/forked.py).

It never starts a thread or a process group, so a fork of it is a clean process that is ready in
milliseconds. All ranks share its hash seed: a test that must notice an iteration over a set whose order
differs between ranks has to start processes of its own.

Over the connection come ``("run", world, module, pickled Job)`` and ``("signal", ranks, signum)``; back goes
``"ready"`` once, then ``(rank, wait status)`` for every rank that ends or stops. The zygote ends, and takes
its ranks with it, when the other end is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401  (of the address of each store)
import faulthandler
import gc
import importlib
import operator
import os
import pickle
import signal
import socket
import sys
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest  # noqa: F401  (every test module imports it)
import torch
import torch.distributed as dist
from _pytest.assertion import install_importhook
from _pytest.config import get_config

import fastload.comm.shared_memory
import fastload.training.manager
import fastload.transfer.host_transport  # noqa: F401  (so that no rank has to import it)
from tests.accelerator import GROUP, accelerator
from tests.e2e.huge_pages import collapse_memory

for _module in ("prefetch", "staging.stage", "streams.save", "streams.tensors"):  # likewise
    with contextlib.suppress(ModuleNotFoundError):  # scripts/check_extensions deletes it
        importlib.import_module(f"fastload.ext.{_module}")

DUMP_SIGNAL = signal.SIGUSR2  # a manager listens to SIGUSR1
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_FIRST_OWN, _MOST_DESCRIPTORS = 3, 1 << 16  # after the standard ones
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Job:
    """What every rank of one test needs to know."""

    module: str
    qualname: str
    fixtures: dict[str, Any]
    world: int
    name: str  # unique in the session
    run_dir: Path  # rank R leaves R.log and R.result here
    store_port: int
    store_on_rank0: bool
    num_surviving: int
    ranks_per_host: int
    accelerator: bool
    deadline_s: float
    cwd: str
    environ: dict[str, str]
    sys_path: list[str]
    warning_filters: list[Any]


def serve_store(timeout: timedelta) -> dist.TCPStore:
    """Returns the server of a rendezvous store, on a free port of 127.0.0.1.

    Left alone TCPStore listens on an IPv6 socket and looks up the name of each client, an IPv4 address in
    IPv6 clothes that no hosts file knows: where the name server is slow, that takes 5 s now and then.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def main() -> None:
    """Serves requests until the other end of the connection, the standard input, is closed."""
    connection = Connection(os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    gc.collect()
    gc.freeze()  # ranks that look for garbage leave what is here alone, and so need no copies of its pages
    collapse_memory()
    install_importhook(get_config())  # asserts explain themselves in the ranks too
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    connection.send("ready")
    living: dict[int, int] = {}
    while True:
        ready = wait([connection, wake_read])
        if wake_read in ready:
            os.read(wake_read, 4096)
            while living:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
                if not pid:
                    break
                connection.send((living[pid], status))
                if not os.WIFSTOPPED(status):
                    del living[pid]
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)  # what it started and left behind
        if connection in ready:
            try:
                kind, *arguments = connection.recv()
            except EOFError:
                _signal(living, set(living.values()), signal.SIGKILL)
                return
            if kind == "signal":
                _signal(living, *arguments)
            else:
                world, module, job = arguments
                _import(module)
                _fork(living, world, job, connection)


def _import(module: str) -> None:
    """Imports a module of tests, and what it names as RANKS_IMPORT: what takes its ranks long to import."""
    num_modules = len(sys.modules)
    with contextlib.suppress(BaseException):  # the ranks fail with it, and are heard
        for name in getattr(importlib.import_module(module), "RANKS_IMPORT", ()):
            importlib.import_module(name)
    if len(sys.modules) > num_modules:
        collapse_memory()  # ranks copy what is new


def _signal(living: dict[int, int], ranks: set[int], signum: int) -> None:
    for pid, rank in living.items():
        if rank in ranks and signum == signal.SIGKILL:
            os.killpg(pid, signum)  # whatever it started goes too
        elif rank in ranks:
            os.kill(pid, signum)


def _fork(living: dict[int, int], world: int, job: bytes, connection: Connection) -> None:
    assert len(os.listdir("/proc/self/task")) == 1, "the zygote has a second thread: forks are not safe"
    for rank in range(world):
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()  # the object, too: at its end it would close what has its number by then
            os.closerange(_FIRST_OWN, _MOST_DESCRIPTORS)
            _be_rank(rank, pickle.loads(job))
        os.setpgid(pid, pid)
        living[pid] = rank


def _be_rank(rank: int, job: Job) -> NoReturn:
    code = 1
    try:
        _settle(rank, job)
        timeout = timedelta(seconds=job.deadline_s)
        agent = dist.PrefixStore(job.name, dist.TCPStore("127.0.0.1", job.store_port, timeout=timeout))
        ok, value = _run_body(rank, job, agent)
        partial = job.run_dir / f"{rank}.partial"
        partial.write_bytes(pickle.dumps((ok, value)))
        partial.rename(job.run_dir / f"{rank}.result")
        # A rank that failed leaves at once and the others notice; one that did well leaves when all have
        # ended (or the parent has seen one die), so that it breaks no collective of the others.
        _arrive(agent, "ended", job.num_surviving)
        if ok:
            agent.wait(["all ended"])
            if dist.is_initialized():
                dist.destroy_process_group()
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _settle(rank: int, job: Job) -> None:
    """Makes the fork look like a process that a launcher started as this rank."""
    log = os.open(job.run_dir / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.closerange(_FIRST_OWN, _MOST_DESCRIPTORS)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _libc.prctl(_PR_SET_NAME, f"rank {rank}/{job.world}".encode())
    os.environ.clear()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world, "LOCAL_WORLD_SIZE": job.world}
    # One dict: with keywords, `update` looks through all kinds of mappings, for as long as a fork takes.
    os.environ.update(
        {"GLOO_SOCKET_IFNAME": "lo"} | job.environ | {name: str(value) for name, value in place.items()}
    )
    if job.ranks_per_host:
        socket.gethostname = lambda: f"host{rank // job.ranks_per_host}"
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    warnings.resetwarnings()
    warnings.filters[:] = job.warning_filters  # type: ignore[index]
    torch.set_num_threads(1)


def _run_body(rank: int, job: Job, agent: dist.Store) -> tuple[bool, Any]:
    """Returns (True, what the body returned) or (False, the traceback as text)."""
    try:
        body = operator.attrgetter(job.qualname)(importlib.import_module(job.module))
        body = getattr(body, "body_on_ranks", body)
        if job.accelerator:
            accelerator()
        dist.init_process_group(
            GROUP if job.accelerator else "gloo",
            store=_store(agent, rank, job),
            rank=rank,
            world_size=job.world,
            timeout=timedelta(seconds=job.deadline_s),
        )
        _arrive(agent, "connected", job.world)
        agent.wait(["all connected"])  # a body may kill its rank at once
        value = body(rank=rank, world=job.world, **job.fixtures)
        pickle.dumps(value)
        return True, value
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # begins at the body
        return False, "".join(traceback.format_exception(error))


def _arrive(agent: dist.Store, where: str, num_ranks: int) -> None:
    if agent.add(where, 1) == num_ranks:
        agent.set(f"all {where}", "")


def _store(agent: dist.Store, rank: int, job: Job) -> dist.Store:
    if not job.store_on_rank0:
        return dist.PrefixStore("group", agent)
    timeout = timedelta(seconds=job.deadline_s)
    if rank == 0:
        own = serve_store(timeout)
        agent.set("port", str(own.port))
        return own
    return dist.TCPStore("127.0.0.1", int(agent.get("port")), timeout=timeout)
