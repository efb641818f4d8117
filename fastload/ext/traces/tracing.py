"""Traces of all ranks on one clock, collected through the store into one file."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastload.base.stopwatch import Stopwatch
from fastload.comm.clocks import compare_clocks
from fastload.comm.world import World
from fastload.errors import FastloadError, OptionError, StorageError
from fastload.ext.traces.spans import RankTrace, Recorder, Span, chrome_events, to_json
from fastload.storage import locate

_log = logging.getLogger(__name__)


class Tracing:
    """Records the spans of this rank; rank 0 collects those of all ranks and writes the file: an `Observer`.

    A trace that cannot be written fails no call.

    Args:
        world: The ranks.
        path: The file.
        of: Name of the checkpoint, which that of the file then has before its suffix; else empty.

    Attributes:
        error: Why rank 0 could not write the last file, or None.
    """

    def __init__(self, world: World, path: str | os.PathLike[str], of: str = "") -> None:
        self._world = world
        self._hosts: Sequence[str] = ()
        self.error: FastloadError | None = None
        stem, suffix = os.path.splitext(os.fspath(path))
        self._path = _from_here(f"{stem}-{of}{suffix}" if of else path)
        self._turn = itertools.count()
        self._place = ""
        self._own: RankTrace | None = None
        self._recorder = Recorder(world.size)
        self._offset_s = 0.0

    def begin(self, hosts: Sequence[str]) -> None:
        """Compares the clocks of the hosts."""
        self._hosts = hosts
        self._offset_s = compare_clocks(self._world, hosts, time.perf_counter)[self._world.rank]

    def add(self, stage: str, began_s: float) -> None:
        """Records a span that ends now."""
        self._recorder.add(stage, began_s, time.perf_counter(), {})

    def follow(self, watches: Mapping[str, Stopwatch]) -> None:
        """Records what these stopwatches measure from now on, by stage."""
        for stage, watch in watches.items():
            self._recorder.follow(stage, watch)

    def end(self, name: str, began_s: float, error: BaseException | None) -> None:
        """Leaves this rank's spans for rank 0, before the ranks know the outcome."""
        self._place = f"trace/{next(self._turn)}"
        self._recorder.add(name, began_s, time.perf_counter(), {})
        self._own = self._recorder.trace(self._world.host, self._offset_s, error)
        self._recorder = Recorder(self._world.size)  # for the next trace
        if self._world.rank != 0:
            try:
                self._world.leave_bytes("leaving a trace", self._place, self._own.to_bytes())
            except FastloadError as lost:
                _log.debug("no trace of rank %d: %s", self._world.rank, lost)

    def close(self, about: Mapping[str, Any]) -> None:
        """Writes, on rank 0, the spans of all ranks."""
        if self._world.rank != 0:
            return
        self.error = None
        try:
            traces = {rank: self._trace_of(rank) for rank in range(self._world.size)}
            _write_text(self._path, to_json(chrome_events(traces, about)))
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


def write_trace(
    path: str, ranks: Mapping[int, tuple[str, Sequence[tuple[Any, ...]]]], about: Mapping[str, Any]
) -> None:
    """Writes a trace of work that was not observed, such as a prediction.

    Args:
        path: The file.
        ranks: For each rank its host, and its spans: values of `Span`.
        about: As for `chrome_events`.
    """
    traces = {
        rank: RankTrace(host, tuple(Span(*span) for span in spans)) for rank, (host, spans) in ranks.items()
    }
    _write_text(path, to_json(chrome_events(traces, about)))


def _from_here(path: str | os.PathLike[str]) -> str:
    try:
        return locate(path).url
    except OptionError:  # raised again by the write
        return os.fspath(path)


def _write_text(path: str, pieces: Iterable[str]) -> None:
    """Writes a text file, piece by piece.

    Raises:
        StorageError: The file cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(pieces)
    except OSError as error:
        raise StorageError(str(error.strerror), url=path) from error
