"""Builds the extension once for each state of its sources, and keeps it in a folder of the user's."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

__all__ = ["compiler", "library"]

CACHE = "FASTLOAD_TEST_CACHE"  # environment: the folder, if not ~/.cache/fastload-tests
_HERE = Path(__file__).parent
_FLAGS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-Wall", "-Wno-sign-compare", "-Wno-unknown-warning-option")
_FLAGS += ("-Wno-interference-size",)
_KEPT = 4  # libraries: of the states that were used last


def compiler() -> str:
    """Returns the path of a C++ compiler, or an empty string."""
    return shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++") or ""


@functools.cache
def library() -> Path:
    """Returns the path of the built extension; the first call takes up to a minute.

    Raises:
        RuntimeError: There is no compiler, or it reports errors.
    """
    state = hashlib.sha256(repr((torch.__version__, sys.platform, _FLAGS)).encode())
    for path in sorted(_HERE.glob("*.?pp")):
        state.update(path.read_bytes())
    folder = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "fastload-tests")
    built = folder / f"accelerator-{state.hexdigest()[:16]}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes that want it, one builds
            if not built.exists():
                _build(built)
                for old in sorted(folder.glob("accelerator-*.so"), key=os.path.getmtime)[:-_KEPT]:
                    old.unlink()
    return built


def _build(built: Path) -> None:
    if not compiler():
        raise RuntimeError("there is no C++ compiler: install g++, or name one in the environment as CXX")
    root = Path(torch.__file__).parent
    work = built.with_suffix(f".{os.getpid()}")
    work.mkdir()
    try:
        # Several sources are one unit: the headers of torch take longer than what follows them.
        with_torch = ["-include", _HERE / "tensors.cpp", "-include", _HERE / "communicator.cpp"]
        units = [[_HERE / "runtime.cpp"], [_HERE / "devices.cpp"], [*with_torch, _HERE / "group.cpp"]]
        objects = [work / f"{number}.o" for number in range(len(units))]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        _run(
            [compiler(), *_FLAGS, abi, f"-I{root / 'include'}", "-c", *map(str, unit), "-o", str(made)]
            for unit, made in zip(units, objects, strict=True)
        )
        linked = work / "linked.so"
        libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", "-pthread"]
        _run([[compiler(), "-shared", "-o", str(linked), *map(str, objects), *libraries]])
        linked.rename(built)
    finally:
        shutil.rmtree(work)


def _run(commands: object) -> None:
    """Runs commands at once."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands  # type: ignore[attr-defined]
    ]
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"the emulated accelerator does not build:\n{output[-4000:]}")


if __name__ == "__main__" and compiler():
    library()
