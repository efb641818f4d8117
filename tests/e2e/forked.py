"""``python -m fastload``, forked from a process that has imported torch: it starts in no time, not in 2 s."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["run_forked"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "fastload.cli"])


def run_forked(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Runs the command as `subprocess.run` would, with its text and without input."""
    with tempfile.TemporaryDirectory(prefix="fastload-run-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = _context.Process(target=_be_command, args=(arguments, cwd, dict(env), out, err))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(list(arguments), timeout)
        done = subprocess.CompletedProcess(
            list(arguments), process.exitcode, out.read_text(), err.read_text()
        )
        process.close()
    return done


def _be_command(arguments: Sequence[str], cwd: Path, env: dict[str, str], out: Path, err: Path) -> None:
    for number, path in enumerate((Path(os.devnull), out, err)):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["fastload", *arguments]
    try:
        runpy.run_module("fastload", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which the end of such a process leaves out
