"""Traces of all ranks, on one clock, in one file: through the store, for hosts that share no file system."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastload.base.stopwatch import Stopwatch
from fastload.base.trace import RankTrace, Recorder, chrome_events, to_json
from fastload.comm.world import World
from fastload.errors import FastloadError, OptionError
from fastload.storage import locate
from fastload.storage.own_files import write_text

__all__ = ["Tracing"]

_log = logging.getLogger(__name__)


class Tracing:
    """Records what this rank does and, in the end, brings it to rank 0, which writes the file.

    All ranks make the same calls. None of them fails because of the trace.

    Args:
        world: The ranks.
        path: The file; None to record nothing.

    Attributes:
        error: Why rank 0 could not write the file the last time; None if it could.
    """

    def __init__(self, world: World, path: str | os.PathLike[str] | None) -> None:
        self._world = world
        self._hosts: Sequence[str] = ()
        self.error: FastloadError | None = None
        self._path = _from_here(path) if path is not None else None
        self._turn = itertools.count()
        self._place = ""
        self._own: RankTrace | None = None
        self._recorder = Recorder(world.size)
        self._offset_s: float | None = None

    def synchronize(self, hosts: Sequence[str]) -> None:
        """Compares the clocks of the hosts.

        Args:
            hosts: Host of each rank.

        Raises:
            PeerError: The rendezvous store, which the clocks are compared through, is gone.
        """
        self._hosts = hosts
        if self._path is not None:
            from fastload.comm.clocks import compare_clocks  # few calls are traced

            self._offset_s = compare_clocks(self._world, hosts, time.perf_counter)

    def add(self, stage: str, began_s: float) -> None:
        """Records something that began then, by `time.perf_counter`, and ends now."""
        if self._path is not None:
            self._recorder.add(stage, began_s, time.perf_counter(), {})

    def follow(self, watches: Mapping[str, Stopwatch]) -> None:
        """Records from now on what these stopwatches measure, by stage."""
        if self._path is None:
            return
        for stage, watch in watches.items():
            self._recorder.follow(stage, watch)

    def leave(self, whole: str, began_s: float, error: BaseException | None) -> None:
        """Leaves this rank's spans for rank 0; to be called before the ranks settle how it went.

        Args:
            whole: What has ended, such as ``load``.
            began_s: When it began, by `time.perf_counter`.
            error: What ended it, if it failed.
        """
        if self._path is None:
            return
        self._place = f"trace/{next(self._turn)}"
        self._recorder.add(whole, began_s, time.perf_counter(), {})
        self._own = self._recorder.trace(self._world.host, self._offset_s, error)
        self._recorder = Recorder(self._world.size)  # what comes next is another trace
        if self._world.rank != 0:
            try:
                self._world.leave_bytes("leaving a trace", self._place, self._own.to_bytes())
            except FastloadError as lost:
                _log.debug("no trace of rank %d: %s", self._world.rank, lost)

    def write(self, about: Mapping[str, Any]) -> None:
        """Writes on rank 0 what the ranks have left; to be called once they have settled."""
        if self._world.rank != 0 or self._path is None:
            return
        self.error = None
        try:
            traces = {rank: self._trace_of(rank) for rank in range(self._world.size)}
            write_text(self._path, to_json(chrome_events(traces, about)))
        except FastloadError as error:
            self.error = error
            _log.warning("no trace in %s: %s", self._path, error)

    def _trace_of(self, rank: int) -> RankTrace:
        assert self._own is not None
        if rank == 0:
            return self._own
        packed = self._world.take_bytes("collecting traces", self._place, rank)
        if packed is None:
            return RankTrace(self._hosts[rank], (), error="it has left no trace")
        return RankTrace.from_bytes(packed)


def _from_here(path: str | os.PathLike[str]) -> str:
    try:
        return locate(path).url
    except OptionError:  # which is told when it is written
        return os.fspath(path)
