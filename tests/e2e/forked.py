"""Python programs, forked from a process that has imported torch: they start in no time, not in 3 s each.

A `python` of that kind is a program like any other: see `forking_python`. Where it matters that a process is
the child of who starts it, or gets a signal that is sent to all children, take `sys.executable`.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

__all__ = ["Forked", "forking_python", "forking_variables", "make_folder", "run_forked"]

FOLDER = "FASTLOAD_FORK_FOLDER"  # environment: of the server

_ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = dict(os.environ)  # as it is before tests change it: modules read it when they are imported
_CLIENT = """#!{python} -IS
import sys
sys.path.append({folder!r})
import fork_client
fork_client.main({server!r}, {python!r}, [*{first!r}, *sys.argv[1:]])
"""


def make_folder() -> Path:
    """Makes a folder for one server, which lives as long as this process; its children find it by FOLDER.

    So the workers of one run of pytest have one server together, whichever of them starts it.
    """
    folder = tempfile.TemporaryDirectory(prefix="fastload-fork-")
    path = Path(folder.name)
    os.mkfifo(path / "alive")
    alive = os.open(path / "alive", os.O_RDWR | os.O_CLOEXEC)  # a server reads from it to the end
    atexit.register(folder.cleanup)
    atexit.register(os.close, alive)
    os.environ[FOLDER] = folder.name
    return path


@functools.cache
def _environment() -> Path:
    """Returns a folder like that of a virtual environment, with `bin/python` and `bin/torchrun` that fork."""
    path = Path(os.environ[FOLDER]) if FOLDER in os.environ else make_folder()
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path / "socket").exists():
            _start(path)
    return path


def _start(path: Path) -> None:
    binaries, socket = path / "bin", path / "socket"
    binaries.mkdir()
    for name, first in (("python", []), ("torchrun", ["-m", "torch.distributed.run"])):
        text = _CLIENT.format(
            python=sys.executable,
            folder=str(Path(__file__).parent),
            server=str(socket),
            first=first,
        )
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    # One thread only: the pools of OpenBLAS and OpenMP would start with the import.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with (path / "alive").open("rb", buffering=0) as alive:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.fork_server", str(socket)],
            stdin=alive,  # its end is that of the server
            stdout=subprocess.DEVNULL,
            cwd=_ROOT,
            env={**_ENVIRONMENT, **single, "PYTHONPATH": str(_ROOT)},
            start_new_session=True,
        )
    deadline = time.monotonic() + 300  # all tests wait for it
    while not socket.exists():
        assert time.monotonic() < deadline
        assert server.poll() is None, "the server died"
        time.sleep(0.02)
    server.returncode = 0  # it outlives this process: Popen is not to complain


def forking_python() -> str:
    """Returns the path of a `python` that starts in no time."""
    return str(_environment() / "bin" / "python")


def forking_variables() -> dict[str, str]:
    """Returns what has a program take `python` and `torchrun` from there, and torchrun for its ranks, too."""
    path = os.pathsep.join([str(_environment() / "bin"), os.environ["PATH"]])
    return {"VIRTUAL_ENV": str(_environment()), "PATH": path, "PYTHON_EXEC": forking_python()}


class Forked:
    """A program that runs, or the ranks of one, in the environment that torchrun gives to ranks of one host.

    Args:
        words: What follows ``python`` on a command line: a file, or ``-m`` and a module, and arguments.
        ranks: How many; 0 for one process that has no launcher.
        cwd: Working directory.
        env: The environment.
        out: File to which the output of all is appended.
        err: The same for what they write to stderr.
    """

    def __init__(
        self, words: Sequence[str], *, ranks: int = 0, cwd: Path, env: Mapping[str, str], out: Path, err: Path
    ) -> None:
        from tests.dist.zygote import serve_store  # not above: whoever makes a folder has no need of torch

        self._words, self._out, self._err = list(words), out, err
        self._store = serve_store(timedelta(seconds=60)) if ranks else None
        environments = [dict(env)]
        if self._store is not None:
            job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "TORCHELASTIC_RESTART_COUNT": 0}
            job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port}
            job |= {"TORCHELASTIC_USE_AGENT_STORE": True}
            own = [job | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
            environments = [{**env, **{name: str(value) for name, value in each.items()}} for each in own]
        command = [forking_python(), *words]
        with out.open("a") as output, err.open("a") as errors:
            self._processes = [
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, cwd=cwd, env=each
                )
                for each in environments
            ]

    @property
    def pids(self) -> list[int]:
        """Of its processes, by rank."""
        return [process.pid for process in self._processes]

    def lives(self) -> bool:
        """Whether one of them still runs."""
        return any(process.poll() is None for process in self._processes)

    def end(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Waits for all, and kills what still runs then; the status is the first that is not 0."""
        limit = time.monotonic() + timeout
        try:
            statuses = [process.wait(max(0.0, limit - time.monotonic())) for process in self._processes]
        finally:
            for process in self._processes:
                process.kill()  # and so its program, with whatever that started
                process.wait()
        status = next((status for status in statuses if status), 0)
        return subprocess.CompletedProcess(self._words, status, self._out.read_text(), self._err.read_text())


def run_forked(
    words: Sequence[str], *, ranks: int = 0, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Runs a program as `subprocess.run` would, with its text and without input; see `Forked`."""
    with tempfile.TemporaryDirectory(prefix="fastload-run-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        return Forked(words, ranks=ranks, cwd=cwd, env=env, out=out, err=err).end(timeout)
