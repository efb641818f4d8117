"""NVIDIA's Multi-Process Service: processes run on one GPU side by side, and do not take turns."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAM = "nvidia-cuda-mps-control"
_STARTS_WITHIN_S = 3.0


def is_there() -> bool:
    """Whether the machine has it."""
    return shutil.which(PROGRAM) is not None


@contextmanager
def service(wanted: bool) -> Iterator[None]:
    """Runs it for processes that are started meanwhile; each time another one, as clients can break it.

    Args:
        wanted: Does nothing otherwise.

    Raises:
        RuntimeError: It does not start.
    """
    if not wanted:
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="mps-"))
    variables = {f"CUDA_MPS_{name}_DIRECTORY": str(folder / name.lower()) for name in ("PIPE", "LOG")}
    for path in variables.values():
        Path(path).mkdir()
    os.environ.update(variables)
    control = subprocess.Popen([PROGRAM, "-f"], stdin=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + _STARTS_WITHIN_S
        while not (folder / "pipe" / "control").exists():
            if control.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{PROGRAM} does not start")
            time.sleep(0.05)
        yield
    finally:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([PROGRAM], input="quit -t 2", text=True, timeout=4)
        for name in variables:
            del os.environ[name]
        control.kill()
        control.wait()
        for log in sorted((folder / "log").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}")
        shutil.rmtree(folder, ignore_errors=True)
