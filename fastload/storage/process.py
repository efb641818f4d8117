"""This process: who it is for others, and what of storage it has once, however much it opens."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from logging import Logger
from typing import Any

from fastload.base.threads import ProcessLock
from fastload.storage.descriptors import DescriptorPool

read_descriptors = DescriptorPool(ProcessLock())
"""Of all files that are read: how many a process may have open is one number for all of them."""

living_saves: set[str] = set()
"""Tokens of this process's own saves to object stores, until they end. One whose owner is this process and
that is not here has ended, and what it could not remove is for anybody to remove."""
making_client = ProcessLock()
"""Held while a client is made of the session, which makes one at a time."""


@cache
def boto3_session() -> Any:
    """Returns the one session: it reads a description of S3 that takes most of a second."""
    import boto3

    return boto3.session.Session()


@lru_cache(256)  # texts, the latest of which are not said again
def warn_once(log: Logger, message: str, *args: object) -> None:
    """Says something that each further save would find, and say, again."""
    log.warning(message, *args)


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, as what it left behind names it.

    Attributes:
        host: Host name, for messages only: containers share names, and one name may be many machines.
        kernel: Boot id of the running kernel: the same text means the same machine since the same boot.
        pids: Pid namespace; a pid means something only within it.
        pid: Process id.
        started: When the process started, in clock ticks since boot: pids are used again.
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
        """Reads what `to_bytes` wrote, or returns None for what is no such text: it comes from storage."""
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
        """Whether it runs, or ran, on this machine since it booted."""
        here = Owner.here()
        return bool(self.kernel) and self.kernel == here.kernel

    @property
    def is_gone(self) -> bool | None:
        """Whether the process has ended; None if that cannot be known from here."""
        here = Owner.here()
        if not self.kernel or (self.kernel, self.pids) != (here.kernel, here.pids):
            return None
        return not self.started or _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _started(pid: int) -> str:
    """Looks up when a process started; empty if there is none, or only its corpse."""
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
