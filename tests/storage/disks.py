"""A small file system of its own, that really fills up."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["small_disk_in"]


@contextmanager
def small_disk_in(where: Path, num_mib: int) -> Iterator[Path]:
    """Mounts an ext4 of that size; skips the test, loudly, where that is not allowed."""
    if missing := [tool for tool in ("mkfs.ext4", "mount", "umount") if shutil.which(tool) is None]:
        pytest.skip(f"a small file system needs {', '.join(missing)}: NOT TESTED HERE")
    image, folder = where / "image", where / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(num_mib << 20)
    if os.geteuid() != 0 or subprocess.run(["mkfs.ext4", "-q", image], capture_output=True).returncode:
        pytest.skip("a small file system needs root and mkfs.ext4: NOT TESTED HERE")
    if subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True).returncode:
        pytest.skip("cannot mount a loop device: NOT TESTED HERE")
    (folder / "lost+found").rmdir()
    yield folder
    subprocess.run(["umount", folder], check=True)
