"""A proxy that answers in rounds, which count the longest chain of requests that wait for each other."""

from __future__ import annotations

import threading
import time

from tests.crash.flaky_proxy import FlakyProxy
from tests.dist.patience import patient

__all__ = ["RoundTrips"]

_QUIET_S = 0.3  # in which a client sends all that it does not wait for an answer with
_PART = "partNumber"


class RoundTrips(FlakyProxy):
    """Passes requests on, and holds the answers until no more requests come.

    Args:
        endpoint: URL of the store.
        num_parts: Parts of uploads in the first round that has some, for which it waits patiently.

    Attributes:
        rounds: (method, path and query) of the requests of each round, which were answered together.
    """

    def __init__(self, endpoint: str, num_parts: int = 0) -> None:
        super().__init__(endpoint)
        self.rounds: list[list[tuple[str, str]]] = []
        self._num_parts = num_parts
        self._changed = threading.Condition()
        self._num_asked = 0  # requests whose answers the store has not given
        self._asked_s = 0.0  # when the last one came
        self._answered: list[tuple[str, str]] = []  # requests whose answers are held

    def came(self, method: str, path: str) -> None:
        super().came(method, path)
        with self._changed:
            self._num_asked += 1
            self._asked_s = time.monotonic()

    def hold(self, method: str, path: str) -> None:
        with self._changed:
            self._num_asked -= 1
            self._answered.append((method, path))
            number = len(self.rounds)
            while number == len(self.rounds):
                left_s = self._asked_s + self._pause_s() - time.monotonic()
                if not self._num_asked and left_s <= 0:
                    self.rounds.append(self._answered)
                    self._answered = []
                    self._changed.notify_all()
                else:
                    self._changed.wait(max(left_s, 0.01))

    @property
    def parts_at_once(self) -> int:
        """The most parts of uploads in a round."""
        return max(_num_parts_in(requests) for requests in self.rounds)

    def _pause_s(self) -> float:
        """Returns the seconds without a request that end a round."""
        is_first = all(_num_parts_in(requests) == 0 for requests in self.rounds)
        is_short = is_first and 0 < _num_parts_in(self._answered) < self._num_parts
        return patient(20.0 if is_short else _QUIET_S)


def _num_parts_in(requests: list[tuple[str, str]]) -> int:
    return sum(_PART in path for _, path in requests)
