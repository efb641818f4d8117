"""Which processes belong to the lab, and their end. See lab.py."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from network import LabError, call, namespaces

TERMINATE_S = 5.0


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie waiting for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def end_processes(find: Callable[[], Iterable[int]]) -> None:
    """Ask every process that `find` names to end, then make it; until none is left."""
    started = time.monotonic()
    asked: set[int] = set()
    while pids := [pid for pid in find() if pid != os.getpid() and is_running(pid)]:
        waited = time.monotonic() - started
        if waited > 2 * TERMINATE_S:
            raise LabError(f"processes that will not end: {pids}")
        for pid in pids:
            if waited > TERMINATE_S or pid not in asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if waited > TERMINATE_S else signal.SIGTERM)
        asked.update(pids)
        time.sleep(0.05)


def pids_in_namespaces() -> list[int]:
    return [int(pid) for name in namespaces() for pid in call("ip", "netns", "pids", name).split()]


def pids_of_run(run_id: str) -> Iterator[int]:
    """Every process that inherited a run's mark, however many sessions and forks away."""
    mark = f"FASTLOAD_LAB_RUN={run_id}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)
