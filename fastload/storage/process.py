"""The identity of this process, and the process-wide state of storage."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from logging import Logger
from typing import Any

from fastload.base.threads import ProcessLock
from fastload.storage.descriptors import DescriptorPool

read_descriptors = DescriptorPool(ProcessLock())
"""Descriptors of all files that are read: the limit is one for the whole process."""

living_saves: set[str] = set()
"""Tokens of this process's running saves to object stores. A save of this process that is missing here has
ended, and its objects are orphans."""

registered_storages: dict[str, Callable[..., Any]] = {}
"""What opens the storage of a URL scheme, as users registered it."""


@lru_cache(256)  # messages
def warn_once(log: Logger, message: str, *args: object) -> None:
    """Logs a warning once, where every further save would repeat it."""
    log.warning(message, *args)


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, as owner files name it.

    Attributes:
        host: Host name, for messages only: containers share names, and one name may be many machines.
        kernel: Boot id of the running kernel: identifies a machine since its last boot.
        pids: Pid namespace; a pid means something only within it.
        pid: Process id.
        started: Start time of the process in clock ticks since boot, since pids are reused.
    """

    host: str
    kernel: str
    pids: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Owner:
        """Returns this process."""
        pid = os.getpid()
        pids = _pid_namespace()
        return cls(socket.gethostname(), _line("/proc/sys/kernel/random/boot_id"), pids, pid, _started(pid))

    @classmethod
    def parse(cls, text: bytes) -> Owner | None:
        """Parses the text of `to_bytes`; None if it is anything else, since it comes from storage."""
        try:
            fields = json.loads(text)
            owner = cls(**fields)
        except (ValueError, TypeError, RecursionError):
            return None
        return owner if isinstance(owner.pid, int) and owner.pid > 0 else None

    def to_bytes(self) -> bytes:
        """Returns the process as JSON."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @property
    def is_of_this_kernel(self) -> bool:
        """Whether the process belongs to this machine and boot."""
        here = Owner.here()
        return bool(self.kernel) and self.kernel == here.kernel

    @property
    def is_gone(self) -> bool | None:
        """Whether the process has ended; None if it is unknown on this host."""
        here = Owner.here()
        if not self.kernel or (self.kernel, self.pids) != (here.kernel, here.pids):
            return None
        return not self.started or _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _started(pid: int) -> str:
    """Returns the start time of a process; empty if there is none, or it is a zombie."""
    # The command's name stands in parentheses and may hold anything; the state follows it.
    fields = _line(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _line(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""
