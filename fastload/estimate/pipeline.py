"""One rank's rounds, from event to event: read, exchanged, placed. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Interval", "RankRounds", "Stages"]

_NUM_SIMULATED = 6144  # rounds; of a longer load the middle is extrapolated
_NUM_TYPICAL = 96  # rounds that the picture of that middle is made of
_PERIOD = 1536  # rounds, over which their pace is measured: a multiple of every depth
_NOTHING = 1e-9  # what rounding leaves of a read


class Interval(NamedTuple):
    """When one stage of one round is under way on a rank.

    Attributes:
        stage: ``read``, ``exchange`` or ``place``.
        begin_s: Since the load began.
        end_s: Since the load began.
        first_round: The round.
        num_rounds: How many of them, if the interval stands for several that follow each other.
    """

    stage: str
    begin_s: float
    end_s: float
    first_round: int
    num_rounds: int = 1

    def later(self, by_s: float, by_rounds: int = 0) -> Interval:
        """Returns the same, moved."""
        moved = self._replace(begin_s=self.begin_s + by_s, end_s=self.end_s + by_s)
        return moved._replace(first_round=self.first_round + by_rounds)


class Stages(NamedTuple):
    """What the stages of one round take, were each of them alone; in seconds.

    Attributes:
        read_s: Reading the chunks of all readers.
        exchange_s: From its start to the next one's.
        transit_s: From its start to its end.
        place_s: Placing it.
    """

    read_s: float
    exchange_s: float = 0.0
    transit_s: float = 0.0
    place_s: float = 0.0

    def times(self, factor: float) -> Stages:
        """Returns those of a longer or shorter round."""
        return Stages(*(value * factor for value in self))


class RankRounds:
    """The rounds of one reader; times are seconds since the first of them was posted.

    Args:
        num_rounds: How many there are.
        depth: How many may be in flight.
        num_reads: Of how many of them chunks are read at once.
        ahead: Rounds, from the first in flight, of which chunks may be read; 0 for those in flight.
        stages: Returns what a round takes. Rounds that are skipped take as long as those before them.
        request_s: Time to the first byte of a read.
        alone: Whether nothing is exchanged.
    """

    def __init__(
        self,
        *,
        num_rounds: int,
        depth: int,
        num_reads: int,
        ahead: int = 0,
        stages: Callable[[int], Stages],
        request_s: float,
        alone: bool,
    ) -> None:
        self._stages = stages
        self._request_s = request_s
        self._alone = alone
        self._depth = depth
        self._ahead = ahead or depth
        self._threads = num_reads
        self._num_rounds = min(num_rounds, _NUM_SIMULATED)
        self._skipped = num_rounds - self._num_rounds
        self._events: list[Interval] = []
        self._placed: list[float] = []
        self._next_start_s = self._done_s = 0.0

    def run(self) -> tuple[list[Interval], float]:
        """Returns what the rank does and how long it takes."""
        self._simulate()
        if not self._placed:
            return [], 0.0
        if not self._skipped:
            return self._events, self._placed[-1]
        return self._stretched()

    def _stretched(self) -> tuple[list[Interval], float]:
        """Puts the rounds that were not simulated into the middle, at the pace of those before."""
        middle = self._num_rounds // 2
        begin_s = self._placed[middle]
        more_s = self._skipped * (begin_s - self._placed[middle - _PERIOD]) / _PERIOD
        head = [event for event in self._events if event.first_round <= middle]
        tail = [event.later(more_s, self._skipped) for event in self._events if event.first_round > middle]
        return [*head, *self._typical(middle, more_s), *tail], self._placed[-1] + more_s

    def _typical(self, middle: int, more_s: float) -> Iterator[Interval]:
        """Shows the rounds left out as the last ones before them in slow motion: as busy, and as idle."""
        begin_s, end_s = self._placed[middle - _NUM_TYPICAL], self._placed[middle]
        slower, num_rounds = more_s / max(end_s - begin_s, 1e-12), max(1, self._skipped // _NUM_TYPICAL)
        for event in self._events:
            if event.begin_s < end_s and event.end_s > begin_s:
                since_s, until_s = max(event.begin_s, begin_s), min(event.end_s, end_s)
                yield Interval(
                    event.stage,
                    end_s + (since_s - begin_s) * slower,
                    end_s + (until_s - begin_s) * slower,
                    middle + 1 + max(0, event.first_round - middle + _NUM_TYPICAL) * num_rounds,
                    num_rounds,
                )

    def _simulate(self) -> None:
        """Goes from event to event: a chunk may be read, a read's first byte comes, or its last."""
        posted = [0.0] * min(self._ahead, self._num_rounds)
        flying: list[_Read] = []
        ended: dict[int, float] = {}
        now, begun = 0.0, 0
        while len(self._placed) < self._num_rounds:
            while begun < len(posted) and len(flying) < self._threads and posted[begun] <= now:
                flying.append(_Read(begun, self._stages_of(begun).read_s, now, now + self._request_s))
                begun += 1
            flowing = [read for read in flying if read.first_byte_s <= now]
            awaited = [read.first_byte_s for read in flying if read.first_byte_s > now]
            if begun < len(posted) and len(flying) < self._threads:
                awaited.append(posted[begun])
            shortest_s = min((read.left_s for read in flowing), default=math.inf)
            # Reads in flight share the rate evenly.
            end_s = now + shortest_s * len(flowing) if flowing else math.inf
            until_s = min([end_s, *awaited])
            progress_s = shortest_s if until_s == end_s else (until_s - now) / max(1, len(flowing))
            now = until_s
            for read in flowing:
                read.left_s -= progress_s
                if read.left_s <= _NOTHING * progress_s:
                    flying.remove(read)
                    ended[read.index] = now
                    self._events.append(Interval("read", read.begin_s, now, read.index))
            while len(self._placed) in ended:
                self._pass_on(len(self._placed), ended.pop(len(self._placed)))
                if len(posted) < self._num_rounds:
                    posted.append(self._placed[-1])

    def _stages_of(self, index: int) -> Stages:
        """Returns what a round takes: the second half of those simulated are the last ones of the load."""
        return self._stages(index + self._skipped if index > self._num_rounds // 2 else index)

    def _pass_on(self, index: int, ready_s: float) -> None:
        """Exchanges and places a round."""
        if self._alone:
            self._placed.append(max([ready_s, *self._placed[-1:]]))  # finished in order, like any round
            return
        stages = self._stages_of(index)
        posted_s = self._placed[index - self._depth] if index >= self._depth else 0.0
        start_s = max(self._next_start_s, ready_s, posted_s)
        self._next_start_s = start_s + stages.exchange_s
        self._done_s = max(self._done_s, start_s + stages.transit_s)
        place_s = max([self._done_s, *self._placed[-1:]])
        self._placed.append(place_s + stages.place_s)
        self._events.append(Interval("exchange", start_s, self._done_s, index))
        self._events.append(Interval("place", place_s, self._placed[-1], index))


@dataclass
class _Read:
    """A read in flight; `left_s` is what it still takes if no other is in flight."""

    index: int
    left_s: float
    begin_s: float
    first_byte_s: float
