"""Small file systems of their own, that really fill up."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["small_disk_in", "small_memory_in"]


@contextmanager
def small_disk_in(where: Path, num_mib: int, kind: str = "ext4") -> Iterator[Path]:
    """Mounts a file system of that size and kind; skips the test, loudly, where that is not possible."""
    make = f"mkfs.{kind}"
    if missing := [tool for tool in (make, "mount", "umount") if shutil.which(tool) is None]:
        pytest.skip(f"a small file system needs {', '.join(missing)}: NOT TESTED HERE")
    image, folder = where / "image", where / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(num_mib << 20)
    if os.geteuid() != 0 or subprocess.run([make, "-q", image], capture_output=True).returncode:
        pytest.skip(f"a small file system needs root and {make}: NOT TESTED HERE")
    if subprocess.run(["mount", "-t", kind, "-o", "loop", image, folder], capture_output=True).returncode:
        pytest.skip(f"cannot mount {kind} on a loop device: NOT TESTED HERE")
    try:
        for own in folder.iterdir():  # lost+found
            own.rmdir()
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def small_memory_in(where: Path, num_mib: int) -> Iterator[Path]:
    """Mounts a tmpfs of that size; skips the test, loudly, where that is not possible."""
    folder = where / "memory"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={num_mib}m", "tmpfs", folder]
    if os.geteuid() or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs: NOT TESTED HERE")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
