"""The rendezvous store of torch.distributed, as the ranks use it to agree: with deadlines throughout."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from fastload.errors import DeadlineExceeded, Interrupted, PeerError, to_wire
from fastload.patience import within

__all__ = ["Rendezvous"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_PIECE_BYTES = 4 << 20  # a TCPStore refuses values of more than 8 MiB
_NUM_PINGS = 8
_FIRST_POLL_S = 0.0005
_LISTENING_S = 1.0
_LAST_POLL_S = 0.05


class Rendezvous:
    """The corner of the store that one world has to itself, seen from one of its ranks.

    Args:
        store: A ``torch.distributed.Store``; None for a world of 1, which never asks.
        rank: This rank.
        size: Number of ranks.
        host: The rank that hosts the store, if one of them does.
        if_lost: What it means that the store is gone.
    """

    def __init__(self, store: Any, *, rank: int, size: int, host: int | None, if_lost: str) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._host = host
        self._if_lost = if_lost
        self._num_pieces: dict[int, int] = {}
        self._lost: str | None = None
        self._given_up = False
        self._pulse = 0
        self._heard_at = 0.0
        self._next_listening = 0.0

    def ask(self, what: str, limit_s: float, ask: Callable[[], T]) -> T:
        """Asks the store: a store whose host is stopped or cut off would keep the caller for ever."""
        if self._lost is None:
            try:
                return within(limit_s, "the rendezvous store", ask, since=lambda: self._heard_at)
            except (RuntimeError, DeadlineExceeded) as error:
                self._lost = str(error).split("\n", 1)[0]
            except BaseException:
                self._given_up = True  # else the thread that was left behind would poll on
                raise
        raise self._explain(what, self._lost)

    def tell(self, values: dict[str, str], *, limit_s: float) -> None:
        """Leaves values in the store, if it is still there."""

        def tell() -> None:
            for key, value in values.items():
                self._store.set(key, value)

        try:
            self.ask("telling the other ranks", limit_s, tell)
        except PeerError as error:
            _log.debug("not told: %s", error)

    def watch(self, key: str, *, alive: bool, limit_s: float) -> bool:
        """Whether somebody has left a value. Tells the others at the same time that this rank gets on."""

        def look() -> bool:
            if alive:
                self._store.add("pulse", 1)
            return bool(self._store.check([key]))

        return self.ask("watching the other ranks", limit_s, look)

    def post(self, what: str, key: str, text: str, *, forget: Sequence[str], limit_s: float) -> None:
        """Leaves a text for whoever wants it, and deletes others that nobody will want any more."""

        def post() -> None:
            self._store.set(key, text)
            self._delete(forget)

        self.ask(what, limit_s, post)

    def await_text(self, what: str, key: str, source: int, *, wait_s: float, grace_s: float) -> str:
        """Returns a text as soon as a rank has left it.

        Raises:
            PeerError: It has not, for so long.
        """

        def wait() -> str | None:
            return str(self._store.get(key), "utf-8") if self._poll([key], wait_s, listen=False) else None

        text = self.ask(what, wait_s + grace_s, wait)
        if text is None:
            late = DeadlineExceeded(f"did not come to it within {wait_s:.1f} s: killed, stopped or stuck")
            raise PeerError(f"{what}: waiting for rank {source}, which {late}", {source: late})
        return text

    def count(self, what: str, key: str, more: int, *, limit_s: float) -> int:
        """Adds to a number that all ranks share, and returns it."""
        return self.ask(what, limit_s, lambda: int(self._store.add(key, more)))

    def collect(
        self, what: str, step: int, mine: str, *, wait_s: float, grace_s: float
    ) -> list[dict[str, Any]]:
        """Leaves this rank's answer and returns those of all ranks, the same list on every rank.

        Args:
            what: Name of the step, for messages.
            step: Its number.
            mine: This rank's answer, a JSON object.
            wait_s: How long to wait for the others, from when one of them was last known to get on; the
                answer of one that is late is an error.
            grace_s: How long to wait, then, for the list that holds for all.
        """

        def collect() -> list[dict[str, Any]]:
            self._store.set(f"{step}/{self._rank}", mine)
            answers = self._verdict(step, wait_s, grace_s)
            if self._rank == 0 and step >= 2:
                self._forget(step - 2)  # everyone who is here has read it
            return answers

        return self.ask(what, wait_s + 1.5 * grace_s, collect)

    def put_bytes(self, what: str, step: int, data: bytes, *, limit_s: float) -> int:
        """Leaves bytes for the others; returns in how many pieces."""
        pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
        keys = self._piece_keys(step, len(pieces))

        def put() -> int:
            for key, piece in zip(keys, pieces, strict=True):
                self._store.set(key, piece)
            return len(pieces)

        return self.ask(what, limit_s, put)

    def get_bytes(self, what: str, step: int, num_pieces: int, *, limit_s: float) -> bytes:
        """Returns what one rank has left in so many pieces."""
        self._num_pieces[step] = num_pieces
        keys = self._piece_keys(step, num_pieces)
        return self.ask(what, limit_s, lambda: b"".join(self._store.get(key) for key in keys))

    def leave(self, what: str, place: str, data: bytes, *, limit_s: float) -> None:
        """Leaves bytes at a place that nobody else uses, to be taken once."""

        def leave() -> None:
            pieces = range(0, len(data), _PIECE_BYTES)
            for key, start in zip(self._piece_keys(place, len(pieces)), pieces, strict=True):
                self._store.set(key, data[start : start + _PIECE_BYTES])
            self._store.set(f"{place}/count", str(len(pieces)))

        self.ask(what, limit_s, leave)

    def take(self, what: str, place: str, *, limit_s: float) -> bytes | None:
        """Returns what was left at a place, and takes it away; None if nothing was, or not all of it."""

        def take() -> bytes | None:
            if not self._store.check([f"{place}/count"]):
                return None
            keys = self._piece_keys(place, int(self._store.get(f"{place}/count")))
            data = b"".join(self._store.get(key) for key in keys)
            self._delete([f"{place}/count", *keys])
            return data

        return self.ask(what, limit_s, take)

    def compare_clocks(
        self, what: str, step: int, leaders: Sequence[int], leader: int, *, limit_s: float
    ) -> float | None:
        """Returns what takes this rank's `time.perf_counter` to that of rank 0; None if nobody knows.

        Rank 0 asks each leader for its time, again and again; the shortest round trip says it best.
        What one leader does not answer is not known for its host only.

        Args:
            what: Name of the step, for messages.
            step: Its number.
            leaders: One rank of each host: ranks of one host have the same clock.
            leader: That of this rank's host.
            limit_s: Longest wait.
        """
        wait = timedelta(seconds=limit_s / 2)

        def await_value(key: str) -> str:
            # A blocking wait, which locks the store for other threads: there is none yet that asks.
            self._store.wait([key], wait)
            return str(self._store.get(key), "ascii")

        def ask_all() -> float | None:
            for other in leaders:
                if other == 0:
                    continue
                offset = ""
                with contextlib.suppress(RuntimeError, ValueError):
                    offset = repr(min(self._ping(step, other, n, await_value) for n in range(_NUM_PINGS))[1])
                self._store.set(f"{step}/offset/{other}", offset)
            return 0.0

        def answer() -> float | None:
            with contextlib.suppress(RuntimeError):
                for number in range(_NUM_PINGS if leader == self._rank else 0):
                    await_value(f"{step}/ping/{leader}/{number}")
                    self._store.set(f"{step}/pong/{leader}/{number}", repr(time.perf_counter()))
                offset = await_value(f"{step}/offset/{leader}") if leader else "0.0"
                return float(offset) if offset else None
            return None

        return self.ask(what, limit_s, ask_all if self._rank == 0 else answer)

    def _ping(
        self, step: int, other: int, number: int, await_value: Callable[[str], str]
    ) -> tuple[float, float]:
        """Returns a round trip to another rank, and what takes its clock to this one, in seconds."""
        began = time.perf_counter()
        self._store.set(f"{step}/ping/{other}/{number}", "")
        there = float(await_value(f"{step}/pong/{other}/{number}"))
        ended = time.perf_counter()
        return ended - began, (began + ended) / 2 - there

    def _piece_keys(self, place: int | str, num_pieces: int) -> list[str]:
        return [f"{place}/piece{index}" for index in range(num_pieces)]

    def _explain(self, what: str, error: str) -> PeerError:
        failures: dict[int, BaseException] = {}
        if self._host is not None:
            failures[self._host] = DeadlineExceeded("hosted the rendezvous store, which is gone")
        return PeerError(f"{what}: the rendezvous store is gone: {self._if_lost} ({error})", failures)

    def _verdict(self, step: int, wait_s: float, grace_s: float) -> list[dict[str, Any]]:
        """Returns the one list of answers that all ranks use: the first that anyone could publish.

        Rank 0 publishes as soon as all have answered. Where it does not, whoever runs out of patience
        first publishes in its place, so that even then all ranks see the same list.
        """
        everyone = [f"{step}/{rank}" for rank in range(self._size)]
        awaited = everyone if self._rank == 0 else [f"{step}/all"]
        present = self._poll(awaited, wait_s, listen=True)
        if not self._store.check([f"{step}/all"]):
            if (self._rank == 0 or not present) and self._store.add(f"{step}/ticket", 1) == 1:
                self._store.set(f"{step}/all", json.dumps(self._answers(everyone, wait_s)))
            elif not self._poll([f"{step}/all"], grace_s, listen=False):
                return self._answers(everyone, wait_s)  # whoever took the ticket died with it
        answers: list[dict[str, Any]] = json.loads(self._store.get(f"{step}/all"))
        return answers

    def _answers(self, keys: list[str], wait_s: float) -> list[dict[str, Any]]:
        if self._store.check(keys):
            return [json.loads(text) for text in self._store.multi_get(keys)]
        error = DeadlineExceeded(f"did not answer within {wait_s:.1f} s: killed, stopped, stuck or cut off")
        late = {"host": "", "value": None, "error": to_wire(error)}
        return [json.loads(self._store.get(key)) if self._store.check([key]) else late for key in keys]

    def _poll(self, keys: list[str], wait_s: float, *, listen: bool) -> bool:
        """Waits until all keys exist. Polls, since a blocking wait would lock the store for other threads.

        Args:
            keys: What to wait for.
            wait_s: For how long.
            listen: Whether to count from when some rank was last known to get on.
        """
        began = time.monotonic()
        while not self._store.check(keys):
            now = time.monotonic()
            if listen:
                self._listen(now, min(_LISTENING_S, wait_s / 32))
            if now >= (max(began, self._heard_at) if listen else began) + wait_s:
                return False
            if self._given_up:
                raise Interrupted("nobody waits for this any more")
            # In proportion to the time waited so far, so that polling adds a few percent to any wait.
            time.sleep(min(max(_FIRST_POLL_S, (now - began) / 16), _LAST_POLL_S))
        return True

    def _listen(self, now: float, period_s: float) -> None:
        """Looks for signs of life now and then: ranks that need not keep step may be far apart."""
        if now >= self._next_listening:
            self._next_listening = now + period_s
            pulse = self._store.add("pulse", 0)
            if pulse != self._pulse:
                self._pulse, self._heard_at = pulse, now

    def _forget(self, step: int) -> None:
        answers = [f"{step}/{name}" for name in ("all", "ticket", *range(self._size))]
        self._delete(answers + self._piece_keys(step, self._num_pieces.pop(step, 0)))

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            try:
                self._store.delete_key(key)
            except (RuntimeError, NotImplementedError):
                return  # a FileStore keeps its keys; they are small
