"""Point-to-point messages over Gloo, and what passes them on, round by round."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastload.base.stopwatch import Stopwatch
from fastload.base.threads import background, within
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.ranks.world import World
from fastload.transfer.rounds import TICK_S, Round

__all__ = ["Relay", "Wire"]

_NEVER_SENT = 2**31 - 1  # a tag


class Wire:
    """Connections between some ranks, for one load: what breaks in it does not touch the caller's group.

    Messages of one tag, from one rank to another, arrive in the order of their receives.

    Args:
        world: The ranks.
        members: Those of them that take part.
    """

    def __init__(self, world: World, members: Sequence[int]) -> None:
        self.timeout = timedelta(seconds=world.patience_s)
        self._rank = world.rank
        self._number = {rank: number for number, rank in enumerate(sorted(members))}  # in the group of Gloo
        self._store = world.corner("ring", self._number[world.rank])

    def connect(self, *, give_up: Callable[[], bool]) -> None:
        """Meets the other ranks; arguments and errors are those of `Exchange.connect`."""

        def meet() -> Any:
            # Gloo waits for the others inside of the store's connection, which is not to be ours.
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
            return dist.ProcessGroupGloo(store, self._number[self._rank], len(self._number), self.timeout)

        try:
            # Gloo's own deadline is for each step, and none of it holds when the store does not answer.
            self._group: Any = within(self.timeout.total_seconds(), "connecting", meet, give_up=give_up)
        except (RuntimeError, DeadlineExceeded) as error:
            raise Interrupted(f"the ranks could not connect: {error}") from error

    def send(self, data: Tensor, rank: int, tag: int) -> Any:
        """Begins to send, and returns what can be waited for."""
        return self._group.send([data], self._number[rank], tag)

    def receive(self, into: Tensor, rank: int, tag: int) -> Any:
        """Begins to receive, and returns what can be waited for."""
        return self._group.recv([into], self._number[rank], tag)

    def number(self, rank: int) -> int:
        """Returns which of the members a rank is: a tag of its own."""
        return self._number[rank]

    def cut(self, rank: int) -> None:
        """Wakes whoever waits for a peer that will not answer, here and, as a lost connection, there.

        Gloo has no call for it, but it closes all connections of a group when one wait times out.

        Args:
            rank: Any other member.
        """
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(RuntimeError):
            self.receive(nothing, rank, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def drop(self, *others: Any) -> None:
        """Lets go of the connections, and of what else keeps them.

        Gloo takes tens of milliseconds to take a group down, which nobody has to wait for.
        """
        dying = [self.__dict__.pop("_group", None), *others]
        threading.Thread(target=dying.clear, name="fastload-down").start()


class Relay:
    """Passes on what comes, round by round, in a thread; another one waits for what was sent.

    Args:
        pass_on: Waits for what a round receives, and passes it on.
        ended: Called when all of a round has come and this rank's chunk is handed over; has it `done`.
        watch: Stopped then.
        timeout: Longest wait for a message, a `timedelta`.
    """

    def __init__(
        self,
        pass_on: Callable[[Round], None],
        ended: Callable[[Round], None],
        watch: Stopwatch,
        timeout: timedelta,
    ) -> None:
        self._pass_on = pass_on
        self._ended = ended
        self._watch = watch
        self.timeout = timeout
        self._closed = False
        self._posted: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._passed_on: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        # A wait for a send cannot look out for alarms, so it is not for the caller's thread.
        self._threads = (
            background(self._pass_on_all, "fastload-relay"),
            background(self._await_sends, "fastload-sent"),
        )

    def begin(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def post(self, work: Round) -> None:
        """Takes the next round, whose receives are posted."""
        self._posted.put(work)

    def close(self, cut: Callable[[], object]) -> bool:
        """Ends the threads; returns whether they have ended.

        Args:
            cut: Wakes whoever waits for a peer that will not answer.
        """
        self._closed = True
        self._posted.put(None)
        if self._still_alive(TICK_S):
            cut()
            self._still_alive(10 * TICK_S)
        return not self._still_alive(0.0)

    def _still_alive(self, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        alive = [thread for thread in self._threads if thread.is_alive()]
        for thread in alive:
            thread.join(max(0.0, deadline - time.monotonic()))
        return any(thread.is_alive() for thread in alive)

    def _pass_on_all(self) -> None:
        while (work := self._posted.get()) is not None:
            self._pass_on(work)
            while work.error is None and not self._closed and not work.started.wait(TICK_S):
                pass
            if work.started.is_set():
                self._watch.stop(work.began, round=work.index)
            self._ended(work)
            self._passed_on.put(work)
        self._passed_on.put(None)

    def _await_sends(self) -> None:
        while (work := self._passed_on.get()) is not None:
            try:
                for send in work.sends:
                    send.wait(self.timeout)
            except RuntimeError as error:
                work.broke(error)
            work.sent.set()
