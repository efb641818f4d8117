"""Which file system a path is on, and what such file systems are like."""

from __future__ import annotations

import re

__all__ = [
    "IN_MEMORY_TYPES",
    "bucket_client",
    "file_system_type",
    "is_fuse",
    "is_network",
    "memory_mounts",
]

IN_MEMORY_TYPES = frozenset("tmpfs ramfs hugetlbfs".split())
_NETWORK_TYPES = frozenset(
    "nfs nfs4 lustre gpfs beegfs ceph cifs smb3 9p glusterfs wekafs pvfs2 orangefs afs virtiofs".split()
)
_OF_THE_SYSTEM = ("/run/", "/var/run/", "/sys/", "/proc/", "/etc/", "/dev/")
_BUCKET_CLIENTS = frozenset(
    "blobfuse blobfuse2 gcsfuse geesefs goofys mountpoint-s3 rclone riofs s3fs yas3fs".split()
)


def is_network(kind: str) -> bool:
    """Tells whether a file system of this type is, or may be, the same one on several hosts."""
    return kind in _NETWORK_TYPES or kind.startswith("fuse")


def is_fuse(kind: str) -> bool:
    """Tells whether a program serves a file system of this type; it may number files as it likes."""
    return kind == "fuse" or kind.startswith("fuse.")


def file_system_type(path: str) -> str:
    """Looks up the type of the file system that holds a path; empty where the system does not say."""
    return _mount_of(path)[0]


def bucket_client(path: str) -> str:
    """Returns the name of the program if a path is on a bucket that is mounted; empty if it is not."""
    kind, source = _mount_of(path)
    name = source if kind == "fuse" else kind.removeprefix("fuse.")
    return name if is_fuse(kind) and name in _BUCKET_CLIENTS else ""


def memory_mounts() -> list[str]:
    """Returns where file systems in memory are mounted, but for those of the system itself."""
    return [
        point
        for point, kind, _ in _mounts()
        if kind == "tmpfs" and not f"{point}/".startswith(_OF_THE_SYSTEM)
    ]


def _mount_of(path: str) -> tuple[str, str]:
    """Returns type and source of the file system that holds a path."""
    best, found = "", ("", "")
    for point, kind, source in _mounts():
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, (kind, source)
    return found


def _mounts() -> list[tuple[str, str, str]]:
    """Returns mount point, type and source of each mount; nothing where the system does not say."""
    found = []
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                fields = line.split(" ")  # a path may have other white space
                after = fields[fields.index("-") + 1 :]
                found.append((_unescape(fields[4]), after[0], _unescape(after[1])))
    except OSError:
        return []
    return found


def _unescape(field: str) -> str:
    """Undoes what the kernel does to blanks, line ends and backslashes in a path."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)
