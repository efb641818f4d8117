"""When what was begun on a device has ended."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import torch

from fastload.base.devices import use_stream
from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import background
from fastload.transfer.rounds import TICK_S, Round

__all__ = ["Endings"]

_Running = tuple[Round, torch.Event, Callable[[], None]]


class Endings:
    """A thread that waits for the rounds on a device, one after the other.

    Args:
        device: This rank's accelerator, with its number.
        watch: Stopped when a round is here.
    """

    def __init__(self, device: torch.device, watch: Stopwatch) -> None:
        self._watch = watch
        self._broke = False
        self._is_closed = False
        self._stream = torch.Stream(device)
        self._running: queue.SimpleQueue[_Running | None] = queue.SimpleQueue()
        self._thread = background(self._wait_all, "fastload-events")

    def begin(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def follow(self, work: Round, ended: torch.Event, note: Callable[[], None]) -> None:
        """Has a round end as soon as an event has come.

        Args:
            work: The round.
            ended: Recorded after all that belongs to it, unless it broke.
            note: Called then, unless it broke.
        """
        self._running.put((work, ended, note))

    def close(self) -> bool:
        """Ends the thread; returns whether all rounds have ended well. Those that have not are given up."""
        self._is_closed = True
        if self._thread.is_alive():
            self._running.put(None)
            self._thread.join(2 * TICK_S)
        return not self._broke and not self._thread.is_alive()

    def _wait_all(self) -> None:
        # A new thread is on the default stream of the first device, both of which others use.
        with torch.inference_mode(), use_stream(self._stream):
            while (running := self._running.get()) is not None:
                self._wait(*running)

    def _wait(self, work: Round, ended: torch.Event, note: Callable[[], None]) -> None:
        try:
            while work.error is None and not ended.query():
                if self._is_closed:  # a rank that is gone lets it never come
                    raise RuntimeError("the load ended before the round did")
                time.sleep(0.0002)  # a blocking wait could not be abandoned
            if work.error is None:
                note()
        except RuntimeError as error:  # of any kernel before it
            work.broke(error)
        self._broke |= work.error is not None
        self._watch.stop(work.began, round=work.index)
        work.done.set()
