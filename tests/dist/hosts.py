"""Ranks that look as if they were on several hosts, each with a disk of its own at one and the same path."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

__all__ = ["can_mount", "mount_disk", "mount_memory", "set_clock"]

_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 4096, 0x4000, 1 << 18


def can_mount() -> bool:
    try:
        probe = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return os.geteuid() == 0 and probe.returncode == 0


def mount_disk(point: Path, disks: Path, host: int) -> Path:
    """Mounts a host's disk, a folder below `disks`, where all ranks of that host see it and no others."""
    disk = disks / f"host{host}"
    disk.mkdir(parents=True, exist_ok=True)
    _become(host)
    _call("mount", os.fsencode(disk), os.fsencode(point), None, ctypes.c_ulong(_MS_BIND), None)
    return point


def mount_memory(point: Path, host: int, nbytes: int) -> Path:
    """Mounts a small file system in memory that only this rank sees.

    Its inode numbers are its own. Each would count from the same one, and files that two hosts write within
    one tick of the clock would be taken for one file.
    """
    _become(host)
    size = f"size={nbytes}".encode()
    _call("mount", b"tmpfs", os.fsencode(point), b"tmpfs", ctypes.c_ulong(0), size)
    for _ in range(100 * host):
        (point / "number").touch()
        (point / "number").unlink()
    return point


def set_clock(ahead_s: float) -> None:
    """Has this process believe that it is later than it is.

    Linux has time of day once for all namespaces, so it is the process that is wrong, and not its machine:
    files that it writes have the right time, which to it is an odd one.
    """
    right = time.time
    time.time = lambda: right() + ahead_s


def _become(host: int) -> None:
    while any(thread.name == "fastload-idle" for thread in threading.enumerate()):
        time.sleep(0.05)  # a thread that is kept for the next work would do it where it began, on no host
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    socket.gethostname = lambda: f"host{host}"


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
