"""The facts of one rank and its host, collected within seconds and without changing anything."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastload.base.memory import memory_bytes
from fastload.base.threads import within
from fastload.comm.hosts import address_of, machine
from fastload.errors import DeadlineExceeded
from fastload.storage import Location
from fastload.storage.mounts import bucket_client, file_system_type

LOOKUP_LIMIT_S = 6.0
"""Longest wait for a name server; resolvers retry after 5 s."""
_PATH_LIMIT_S = 10.0
_LOOPBACK = "lo"
_DISTRIBUTIONS = "safetensors fsspec xxhash numpy obstore boto3".split()


@dataclass(frozen=True)
class NameLookup:
    """A lookup of a host name or an address.

    Attributes:
        question: Description, such as ``name of 10.0.0.1``.
        answer: The result; empty if there is none.
        seconds: Duration, at most `LOOKUP_LIMIT_S`.
    """

    question: str
    answer: str
    seconds: float


@dataclass(frozen=True)
class PathFacts:
    """A local path as one rank sees it.

    Attributes:
        kind: Type of the file system.
        client: The program that mounts a bucket there; empty if it is not a bucket.
        exists: Whether the path exists.
        is_folder: Whether it is a directory.
        readable: Whether this process may read it.
        writable: Whether this process may write to it, or create it.
        free_bytes: Free space of the file system.
        problem: Why the path could not be examined; empty if it could.
    """

    kind: str = ""
    client: str = ""
    exists: bool = False
    is_folder: bool = False
    readable: bool = False
    writable: bool = False
    free_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Facts:
    """The facts of one rank.

    Attributes:
        host: Name of the host.
        machine: Identifier of the host, the same on its ranks only.
        versions: Versions of the installed software, by name.
        backends: Backends of torch.distributed in this torch.
        gpus: Names of the GPUs that this process sees.
        interface: Name and address of the network interface that Gloo uses.
        speed_mbits: Speed of the interface; 0 if unknown.
        infiniband: Names of InfiniBand devices.
        lookups: Lookups of names and addresses.
        open_files: Soft and hard limit of open files; -1 for no limit.
        locked_bytes: Soft limit of locked memory; -1 for no limit.
        memory_bytes: Memory of this process, and the free part of it.
        shm_bytes: Size and free space of ``/dev/shm``.
        path: The given local path; None without one.
    """

    host: str
    machine: str
    versions: dict[str, str]
    backends: list[str]
    gpus: list[str]
    interface: str
    speed_mbits: int
    infiniband: list[str]
    lookups: list[NameLookup]
    open_files: tuple[int, int]
    locked_bytes: int
    memory_bytes: tuple[int, int]
    shm_bytes: tuple[int, int]
    path: PathFacts | None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Facts:
        """Returns the facts from the result of `dataclasses.asdict`, after a round trip through JSON."""
        lookups = [NameLookup(**lookup) for lookup in fields["lookups"]]
        path = PathFacts(**fields["path"]) if fields["path"] else None
        pairs = {name: tuple(fields[name]) for name in ("open_files", "memory_bytes", "shm_bytes")}
        return cls(**{**fields, **pairs, "lookups": lookups, "path": path})


def look_around(rank: int, master: str, location: Location | None) -> Facts:
    """Collects the facts of this rank and its host, within seconds.

    Args:
        rank: This rank.
        master: Name or address of the host where the ranks meet; empty without a launcher.
        location: The given checkpoint or directory; None without one.
    """
    host = socket.gethostname()
    own = _ask(f"address of {host}", lambda: socket.gethostbyname(host))
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or _interface_with(own.answer)
    address = address_of(interface)
    addresses = dict.fromkeys(found for found in (address, _address(master)) if found)
    return Facts(
        host=host,
        machine=machine(host, rank),
        versions=_versions(),
        backends=_backends(),
        gpus=_accelerators(),
        interface=f"{interface} ({address or 'no address'})",
        speed_mbits=_number_in(f"/sys/class/net/{interface}/speed"),
        infiniband=sorted(entry.name for entry in _entries("/sys/class/infiniband")),
        lookups=[own, *(_ask(f"name of {found}", _reversed(found)) for found in addresses)],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        memory_bytes=_memory(),
        shm_bytes=_room("/dev/shm"),
        path=_look_at(location) if location is not None and not location.scheme else None,
    )


def _versions() -> dict[str, str]:
    found = {"fastload-torch": sys.modules["fastload"].__version__, "torch": torch.__version__}
    found |= {"cuda": torch.version.cuda, "python": platform.python_version()}
    if dist.is_nccl_available() and torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for name in _DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {name: text for name, text in found.items() if text}


def _backends() -> list[str]:
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return [name for name, is_there in known.items() if is_there()]


def _ask(question: str, ask: Callable[[], str]) -> NameLookup:
    began, answer = time.monotonic(), ""
    with suppress(OSError, UnicodeError, DeadlineExceeded):
        answer = within(LOOKUP_LIMIT_S, question, ask)
    return NameLookup(question, answer, time.monotonic() - began)


def _reversed(address: str) -> Callable[[], str]:
    return lambda: socket.gethostbyaddr(address)[0]


def _address(name: str) -> str:
    """Returns the address of a name; empty if there is no quick answer."""
    return _ask(name, lambda: socket.gethostbyname(name)).answer if name else ""


def _interface_with(address: str) -> str:
    """Returns the interface with an address; if none has it, Gloo uses loopback."""
    for _, name in socket.if_nameindex():
        if address and address_of(name) == address:
            return name
    return _LOOPBACK


def _accelerators() -> list[str]:
    """Returns the name of each device of the accelerator, by index."""
    served = torch.accelerator.current_accelerator()
    if served is None or not torch.accelerator.is_available():
        return []
    name_of = getattr(torch.get_device_module(served), "get_device_name", lambda number: f"{served}:{number}")
    return [name_of(number) for number in range(torch.accelerator.device_count())]


def _memory() -> tuple[int, int]:
    """Returns the memory of this process and the free part of it; zeros if unknown."""
    total, free = memory_bytes()
    return total or 0, free or 0


def _look_at(location: Location) -> PathFacts:
    try:
        return within(_PATH_LIMIT_S, f"looking at {location}", lambda: _seen(location.address))
    except (OSError, DeadlineExceeded) as error:
        return PathFacts(kind=file_system_type(location.address), problem=str(error))


def _seen(path: str) -> PathFacts:
    real = os.path.realpath(path)
    place = real
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    is_folder, kind = os.path.isdir(real), file_system_type(real)
    needed = os.R_OK | (os.X_OK if is_folder else 0)
    return PathFacts(
        kind=kind,
        client=bucket_client(real),
        exists=place == real,
        is_folder=is_folder,
        readable=os.access(real, needed),
        writable=os.access(place, os.W_OK | os.X_OK),
        free_bytes=_room(place)[1],
    )


def _room(path: str) -> tuple[int, int]:
    """Returns size and free space of a file system in bytes; zeros if there is none."""
    try:
        found = os.statvfs(path)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _number_in(path: str) -> int:
    """Returns the number in a file; 0 if there is none, or it is negative."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def _entries(path: str) -> list[Path]:
    try:
        return list(Path(path).iterdir())
    except OSError:
        return []
