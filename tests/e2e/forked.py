"""Python programs, forked from a process that has imported torch: they start in no time, not in 3 s each."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch

from tests.dist.zygote import serve_store

__all__ = ["Forked", "run_forked"]

_context = multiprocessing.get_context("forkserver")
# What the first step of an optimizer imports, for 1.5 s, is there as well.
_context.set_forkserver_preload(["torch", "torch._dynamo", "fastload.cli"])


class Forked:
    """A program that runs, or the ranks of one, in the environment that torchrun gives to ranks of one host.

    Args:
        words: What follows ``python`` on a command line: a file, or ``-m`` and a module, and arguments.
        ranks: How many; 0 for one process that has no launcher.
        cwd: Working directory.
        env: The environment, with OMP_NUM_THREADS.
        out: File to which the output of all is appended.
        err: The same for what they write to stderr.
    """

    def __init__(
        self, words: Sequence[str], *, ranks: int = 0, cwd: Path, env: Mapping[str, str], out: Path, err: Path
    ) -> None:
        self._words, self._out, self._err = list(words), out, err
        self._store = serve_store(timedelta(seconds=60)) if ranks else None
        environments = [dict(env)]
        if self._store is not None:
            job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "TORCHELASTIC_RESTART_COUNT": 0}
            job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port}
            job |= {"TORCHELASTIC_USE_AGENT_STORE": True}
            own = [job | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
            environments = [{**env, **{name: str(value) for name, value in each.items()}} for each in own]
        self._processes = [
            _context.Process(target=_be_program, args=(self._words, cwd, each, out, err, os.nice(0)))
            for each in environments
        ]
        for process in self._processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        """Of its processes, by rank."""
        return [process.pid for process in self._processes if process.pid is not None]

    def lives(self) -> bool:
        """Whether one of them still runs."""
        return any(process.is_alive() for process in self._processes)

    def end(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Waits for all, and kills what still runs then; the status is the first that is not 0."""
        limit = time.monotonic() + timeout
        for process in self._processes:
            process.join(max(0.0, limit - time.monotonic()))
        statuses = [process.exitcode for process in self._processes]
        for process in self._processes:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it started and left behind
            process.join()
        if None in statuses:
            raise subprocess.TimeoutExpired(self._words, timeout)
        status = next((status for status in statuses if status), 0)
        return subprocess.CompletedProcess(self._words, status, self._out.read_text(), self._err.read_text())


def run_forked(
    words: Sequence[str], *, ranks: int = 0, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Runs a program as `subprocess.run` would, with its text and without input; see `Forked`."""
    with tempfile.TemporaryDirectory(prefix="fastload-run-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        return Forked(words, ranks=ranks, cwd=cwd, env=env, out=out, err=err).end(timeout)


def _be_program(words: list[str], cwd: Path, env: dict[str, str], out: Path, err: Path, nice: int) -> None:
    for number, path in enumerate((Path(os.devnull), out, err)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    gc.freeze()  # what looks for garbage leaves what is here alone, and so needs no copies of its pages
    os.setsid()
    os.nice(nice - os.nice(0))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # which torch has looked at before the fork
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which the end of such a process leaves out
