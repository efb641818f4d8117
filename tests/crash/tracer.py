"""Faults from the kernel's side: strace fails chosen system calls of this process, or kills it there."""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from os import getpid
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Fault", "needs_strace", "striking"]

Fault = tuple[str, str]
"""A system call, and what happens to it in strace's words: ``error=EIO`` or ``signal=SIGKILL`` (before the
call is made), perhaps with ``when=2``, which counts the calls of each thread on its own."""

_ATTACHING_S = 20.0
_PR_SET_PTRACER = 0x59616D61

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="no strace: NOT TESTED HERE")


def striking(faults: Sequence[Fault]) -> Any:
    """Lets system calls of all threads of this process go wrong until the end of the block."""
    return _striking(faults) if faults else nullcontext()


@contextmanager
def _striking(faults: Sequence[Fault]) -> Iterator[None]:
    calls = sorted({call for call, _ in faults})
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={','.join(calls)}"]
    for call, fault in faults:
        command += ["-e", f"inject={call}:{fault}"]
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1))  # where only parents may trace
    tracer = subprocess.Popen([*command, "-p", str(getpid())], stderr=subprocess.PIPE, text=True)
    try:
        _await_attached(tracer)
        yield
    finally:
        tracer.send_signal(signal.SIGTERM)  # it lets go of all threads and ends
        tracer.communicate(timeout=_ATTACHING_S)


def _await_attached(tracer: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + _ATTACHING_S
    while not _is_attached():
        if tracer.poll() is not None:
            raise OSError(f"strace ended: {tracer.communicate()[1]}")
        assert time.monotonic() < limit, "strace does not attach"
        time.sleep(0.01)


def _is_attached() -> bool:
    try:
        return all(_is_traced(task) for task in Path("/proc/self/task").iterdir())
    except OSError:
        return True  # which was a fault of ours


def _is_traced(task: Path) -> bool:
    try:
        status = (task / "status").read_text()
    except OSError:
        return True  # the thread has ended
    return "TracerPid:\t0\n" not in status
