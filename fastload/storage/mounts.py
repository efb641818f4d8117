"""File system types of paths, and their properties."""

from __future__ import annotations

import re

IN_MEMORY_TYPES = frozenset("tmpfs ramfs hugetlbfs".split())
_NETWORK_TYPES = frozenset(
    "nfs nfs4 lustre gpfs beegfs ceph cifs smb3 9p glusterfs wekafs pvfs2 orangefs afs virtiofs".split()
)
_BUCKET_CLIENTS = frozenset(
    "blobfuse blobfuse2 gcsfuse geesefs goofys mountpoint-s3 rclone riofs s3fs yas3fs".split()
)


def is_network(kind: str) -> bool:
    """Whether several hosts may share a file system of this type."""
    return kind in _NETWORK_TYPES or kind.startswith("fuse")


def is_fuse(kind: str) -> bool:
    """Whether a file system of this type is FUSE, whose inode numbers may be unstable."""
    return kind == "fuse" or kind.startswith("fuse.")


def file_system_type(path: str) -> str:
    """Returns the file system type of a path; empty if unknown."""
    return _mount_of(path)[0]


def bucket_client(path: str) -> str:
    """Returns the name of the mounting program if a path is on a mounted bucket; otherwise empty."""
    kind, source = _mount_of(path)
    name = source if kind == "fuse" else kind.removeprefix("fuse.")
    return name if is_fuse(kind) and name in _BUCKET_CLIENTS else ""


def _mount_of(path: str) -> tuple[str, str]:
    """Returns type and source of the mount that holds a path."""
    best, mount = "", ("", "")
    for point, kind, source in mounts():
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, mount = point, (kind, source)
    return mount


def mounts() -> list[tuple[str, str, str]]:
    """Returns mount point, type and source of each mount; empty if unknown."""
    entries = []
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                fields = line.split(" ")  # a path may have other white space
                after = fields[fields.index("-") + 1 :]
                entries.append((_unescape(fields[4]), after[0], _unescape(after[1])))
    except OSError:
        return []
    return entries


def _unescape(field: str) -> str:
    """Decodes the octal escapes of the kernel in a path."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)
