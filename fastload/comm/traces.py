"""Traces of all ranks on one clock, collected through the store into one file."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from fastload.base.trace import RankTrace, Recorder, Stopwatch, chrome_events, to_json
from fastload.comm.responses import Column, Each
from fastload.comm.world import World
from fastload.errors import FastloadError, OptionError
from fastload.storage import locate
from fastload.storage.single_file import write_text

_log = logging.getLogger(__name__)

_NUM_READINGS = 8


class Tracing:
    """Records the spans of this rank; rank 0 collects those of all ranks and writes the file.

    All ranks make the same calls. A trace that cannot be written fails none of them.

    Args:
        world: The ranks.
        path: The file; None disables tracing.

    Attributes:
        error: Why rank 0 could not write the last file, or None.
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
        self._offset_s = 0.0

    def synchronize(self, hosts: Sequence[str]) -> None:
        """Compares the clocks of the hosts.

        Args:
            hosts: Host of each rank.

        Raises:
            PeerError: A rank did not respond.
        """
        self._hosts = hosts
        if self._path is not None:
            self._offset_s = compare_clocks(self._world, hosts, time.perf_counter)[self._world.rank]

    def add(self, stage: str, began_s: float) -> None:
        """Records a span that began at a `time.perf_counter` and ends now."""
        if self._path is not None:
            self._recorder.add(stage, began_s, time.perf_counter(), {})

    def follow(self, watches: Mapping[str, Stopwatch]) -> None:
        """Records what these stopwatches measure from now on, by stage."""
        if self._path is None:
            return
        for stage, watch in watches.items():
            self._recorder.follow(stage, watch)

    @contextmanager
    def span(self, name: str, began_s: float) -> Iterator[None]:
        """Records a complete span that ends with the block, and leaves the spans as `leave` does."""
        try:
            yield
        except BaseException as error:
            self.leave(name, began_s, error)
            raise
        self.leave(name, began_s, None)

    def leave(self, name: str, began_s: float, error: BaseException | None) -> None:
        """Leaves this rank's spans for rank 0, before the ranks settle the outcome.

        Args:
            name: Name of the complete span, such as ``load``.
            began_s: Its beginning, by `time.perf_counter`.
            error: The error that ended it, or None.
        """
        if self._path is None:
            return
        self._place = f"trace/{next(self._turn)}"
        self._recorder.add(name, began_s, time.perf_counter(), {})
        self._own = self._recorder.trace(self._world.host, self._offset_s, error)
        self._recorder = Recorder(self._world.size)  # for the next trace
        if self._world.rank != 0:
            try:
                self._world.leave_bytes("leaving a trace", self._place, self._own.to_bytes())
            except FastloadError as lost:
                _log.debug("no trace of rank %d: %s", self._world.rank, lost)

    def write(self, about: Mapping[str, Any]) -> None:
        """Writes, on rank 0, the spans of all ranks, once they have settled the outcome."""
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
    except OptionError:  # raised again by the write
        return os.fspath(path)


def compare_clocks(world: World, hosts: Sequence[str], clock: Callable[[], float]) -> list[float]:
    """Returns the offset of each rank's clock from rank 0's, in seconds.

    The ranks read their clocks whenever a decision has reached them, which is at about the same time.

    Args:
        world: The ranks, which all call this.
        hosts: Host of each rank; ranks of one host share a clock.
        clock: Returns the time, in seconds.

    Raises:
        PeerError: A rank did not respond.
    """
    if len(set(hosts)) == 1:
        return [0.0] * world.size
    readings: list[Column] = []
    with world.together():
        for _ in range(_NUM_READINGS + 1):
            with world.step("comparing clocks") as step:
                step.answer({"clock": Each([clock()])})
            readings += step.answers[0]["clock"]
    times = [column.values() for column in readings[1:]]  # the first reading follows no decision
    return [median(each[0] - each[rank] for each in times) for rank in range(world.size)]
