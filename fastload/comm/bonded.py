"""How the ranks of a group agree along a tree of connections while it is whole, and else in the store."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from fastload.comm.links import (
    TreeBroken,
    TreeLinks,
    TreeListener,
    Unreachable,
    children_of,
    connect,
    parent_of,
)
from fastload.comm.meeting import Verdict
from fastload.comm.rendezvous import Rendezvous
from fastload.comm.responses import join_responses
from fastload.comm.turns import Standing, Turn, Turns, turns_in
from fastload.comm.versions import Versions
from fastload.errors import FastloadError, PeerError

__all__ = ["Bonded"]

_MOST_TRIES = 3
_NOTHING = "?"
_JOINING = "joining the other ranks"


@dataclass(frozen=True)
class _Terms:
    """What a call is named, and how long it may take to say what is known, and in all."""

    call: str
    grace_s: float
    limit_s: float


@dataclass
class _Leftovers:
    """Keys in the store that the first rank takes away: of steps that are over for all, and of the last."""

    over: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)


class Bonded(Rendezvous):
    """The corner of one call of a group, whose ranks are connected in a tree, or are about to be.

    In a step each rank sends up what it and those below it answer; the first one decides, which is to leave
    the verdict in the store, and the verdict goes down. A rank that finds the tree broken, or has waited for
    too long, lets go of its connections, which all notice, and goes on in the store (see `meeting`), where
    the verdict is if there is one. What holds is what the store took first, as ever.

    Calls have numbers whichever way the ranks agree, which each rank counts (see `turns`). What the others
    have done where a call is to be, if it was without this rank, it finds out when it comes to the store.

    Args:
        corner: Of the store, which the group has to itself.
        standing: What this rank has of the tree.
        here: What tells machines apart.
        call: Name of the call.
        grace_s: How long, after a failure, the others get to say what they know.
        limit_s: Longest wait for the store.
        rank: This rank.
        size: Number of ranks.
        host: The rank that hosts the store, if one of them does.
        if_lost: What it means that the store is gone.
    """

    def __init__(
        self,
        corner: Any,
        standing: Standing,
        here: str,
        *,
        call: str,
        grace_s: float,
        limit_s: float,
        rank: int,
        size: int,
        host: int | None,
        if_lost: str,
    ) -> None:
        super().__init__(
            corner, rank=rank, size=size, host=host, if_lost=if_lost, versions=Versions(corner, rank, size)
        )
        self._corner = corner
        self._standing = standing
        self._here = here
        self._terms = _Terms(call, grace_s, limit_s)
        self._thread = threading.get_ident()
        self._turn: Turn | None = None
        self._number = 0
        self._entrance: TreeListener | None = None
        self._bonds: TreeLinks | None = None
        self._was_along = False  # whether the last verdict came along the tree
        self._leftovers = _Leftovers()

    @property
    def _parent(self) -> int | None:
        return parent_of(self._rank)

    @property
    def _children(self) -> list[int]:
        return children_of(self._rank, self._size)

    def begin(self) -> Verdict | None:
        """Finds out the number of this call; see `Rendezvous.take_turn`."""
        bonds = self._standing.bonds
        self._move()
        if bonds is not None and bonds.are_whole():
            self._bonds = bonds
            return None
        if bonds is not None:
            self._standing.forget(bonds)
        missed = None
        # In the first call most ranks need not ask: who looks for the one above finds out as it does so.
        if self._number > 1 or self._parent is None:
            missed = self._look_back(_JOINING)
        if self._number == 1 and self._children and missed is None:
            with suppress(OSError):
                self._open(
                    _JOINING, self._terms.limit_s
                )  # those below come in while this one is busy with its part
        return missed

    def collect(
        self,
        what: str,
        step: int,
        answer: str,
        *,
        along: bytes = b"",
        wait_s: float,
        grace_s: float,
        forget: int | None,
        since: float | None = None,
    ) -> Verdict:
        """As `Rendezvous.collect`; in the tree while that is whole."""
        since, self._versions.are_open = time.monotonic(), step == 0
        look = self._looking(step, wait_s - min(wait_s, grace_s) / 4)
        tries = step == 0 and self._bonds is None and self._may_bond()
        try:
            if tries:
                self._bonds = self._bond(what, look, wait_s, wait_s + grace_s)
            self._shut(None if self._bonds is not None else what, wait_s + grace_s)
            if (bonds := self._bonds) is not None:
                try:
                    verdict = self._collect_along(bonds, what, step, answer, along, wait_s, look)
                except (TreeBroken, OSError, MemoryError):
                    below = bonds.take(self._children, (self._number, step))
                    answer = join_responses([answer, *(table for table, _ in below)])
                    bonds.drop()
                else:
                    if step == 0 and self._turn is not None:
                        self._turns.settle(self._turn)
                    if tries:
                        self._standing.bond(bonds)
                    return verdict
            if step == 0 and (missed := self._look_back(what)) is not None:
                return missed
        except BaseException:
            self.part()
            raise
        verdict = super().collect(
            what, step, answer, wait_s=wait_s, grace_s=grace_s, forget=forget, since=since
        )
        self._was_along = verdict.along_tree
        if tries and not verdict.along_tree and verdict.num_well == self._size:
            self._standing.num_tries += 1  # all ranks were there, and could not connect
        return verdict

    def hear(
        self, step: int, *, num_others: int, failed: bool, leavings: Sequence[str], grace_s: float
    ) -> None:
        """As `Rendezvous.hear`. Along a tree the verdict reaches all without this rank, or the store."""
        left, self._leftovers = self._leftovers, _Leftovers()
        if not self._was_along:
            self._standing.outdate(left.over + left.last)
            super().hear(step, num_others=num_others, failed=failed, leavings=leavings, grace_s=grace_s)
            return
        if self._parent is None:
            left.last += self._whole(["pulse", "alarm"] if failed else ["pulse"])
        if self._bonds is not None:
            self._standing.end_step((self._number, step), left.last, self._bonds)
        going = self._standing.take_going()

        def tidy() -> None:
            self._delete(leavings)
            self._past._delete(left.over + going)

        if leavings or left.over or going:
            with suppress(FastloadError):
                self.ask("ending the call", grace_s, tidy)

    def note_shared(self, step: int, place: str, num_keys: int) -> None:
        """As `Rendezvous.note_shared`."""
        super().note_shared(step, place, num_keys)
        if self._parent is None:
            self._leftovers.last += self._whole(self._shared[step])

    def part(self) -> None:
        """Lets go of the tree: something has failed, and whatever comes now is told in the store."""
        self._shut(None, 0.0)
        if self._bonds is not None:
            self._bonds.drop()

    def resign(
        self, heard: int | None, answers: Sequence[tuple[int, str]], *, at_once: bool, limit_s: float
    ) -> None:
        """As `Rendezvous.resign`; the others find the tree broken, and come to the store."""
        self.part()
        self._standing.outdate(self._leftovers.over + self._leftovers.last)
        try:
            if answers[0][0] == 0 and self._look_back("leaving", wait_s=0.0) is not None:
                return
        except PeerError:
            return
        heard = None if self._was_along else heard
        super().resign(heard, answers, at_once=at_once, limit_s=limit_s)

    # The number of the call

    @property
    def _past(self) -> Rendezvous:
        """Where all calls of the group are."""
        return Rendezvous(
            self._corner, rank=self._rank, size=self._size, host=self._host, if_lost=self._if_lost
        )

    @property
    def _turns(self) -> Turns:
        if self._standing.turns is None:
            find = partial(turns_in, self._corner, self._rank, self._size)
            self._standing.turns = self.ask(_JOINING, self._terms.limit_s, find)
        return self._standing.turns

    def _look_back(self, what: str, wait_s: float | None = None) -> Verdict | None:
        """Makes sure of the number of this call; returns a verdict if this rank is too late for it.

        Args:
            what: Name of the step, for messages.
            wait_s: How long to see whether the others make it again; None for as long as they get to do so.
        """
        past, patience_s = self._past, self._terms.grace_s if wait_s is None else wait_s

        def passed(turn: Turn) -> Verdict | None:
            return past.passed(turn.number, turn.call, patience_s)

        turn = self._move()
        self.ask(what, self._terms.limit_s, partial(self._turns.look_back, turn, passed))
        return self._move().missed

    def _move(self) -> Turn:
        """Goes to where the number of this call is in the store; takes one if it has none yet."""
        if self._turn is None:
            self._turn = self._turns.begin(self._terms.call)
        self._number = self._turn.number
        self._store = dist.PrefixStore(str(self._number), self._corner)
        return self._turn

    def _whole(self, keys: Sequence[str]) -> list[str]:
        """Returns keys of this call as they are called among those of all."""
        return [f"{self._number}/{key}" for key in keys]

    # Along the tree

    def _collect_along(
        self,
        bonds: TreeLinks,
        what: str,
        step: int,
        answer: str,
        along: bytes,
        wait_s: float,
        look: Callable[[], float],
    ) -> Verdict:
        """Collects the answers and returns the verdict.

        Raises:
            TreeBroken: The tree is broken, or some rank has not come in time.
        """
        tag = self._number, step
        below = bonds.receive(self._children, tag, look)
        table = join_responses([answer, *(table for table, _ in below)]) if below else answer
        along = along or next((more for _, more in below if more), b"")
        if self._parent is None:
            place = self._step(step)
            text = Verdict.write(wait_s, table, along_tree=True)
            if self.ask(what, self._terms.limit_s, partial(place.settle, text)) != text:
                raise TreeBroken  # others have decided in the store
            left = self._leftovers
            self._leftovers = _Leftovers(left.over + left.last, self._whole([place.verdict]))
        else:
            bonds.send([self._parent], tag, table, along)
            ((text, along),) = bonds.receive([self._parent], tag, look)
        bonds.send(self._children, tag, text, along)
        with suppress(TreeBroken):  # those below find out by themselves
            bonds.flush(self._children, look)
        verdict = Verdict.from_text(text, self._size, along)
        self._was_along = verdict.along_tree
        return verdict

    def _looking(self, step: int, wait_s: float) -> Callable[[], float]:
        """Returns what a rank does now and then while it waits along the tree; see `TreeLinks.wait`."""
        began = time.monotonic()
        period_s = self._period_s(wait_s)
        next_look = began + period_s
        was_decided = False

        def look() -> float:
            nonlocal next_look, was_decided
            now = time.monotonic()
            left_s = max(began, self._pulse.heard_at) + wait_s - now
            if left_s <= 0:
                raise TreeBroken
            if now >= next_look:
                next_look = now + period_s
                with suppress(PeerError):  # without the store, the tree may be whole all the same
                    look_around = partial(self._look_around, step)
                    is_left, is_decided = self.ask(
                        "waiting for the other ranks", left_s + self._terms.grace_s, look_around
                    )
                    if is_left or was_decided:  # for long, and it has not come here
                        raise TreeBroken
                    was_decided = is_decided
            return min(left_s, period_s)

        return look

    def _look_around(self, step: int) -> tuple[bool, bool]:
        """Notes whether ranks get on; returns whether some of them meet in the store, and have decided."""
        self._hear_pulse(time.monotonic())
        place = self._step(step)
        if self._bonds is None:
            place.call(self._terms.call)
        return bool(self._store.check([place.log])), self._bonds is not None and place.is_decided()

    # Making a tree

    def _may_bond(self) -> bool:
        """Whether this call makes a tree: the same on all ranks, as only those in order come to the next."""
        return self._thread == threading.get_ident() and self._standing.num_tries < _MOST_TRIES

    def _bond(self, what: str, look: Callable[[], float], wait_s: float, limit_s: float) -> TreeLinks | None:
        """Connects to the neighbours; returns None if they are to be met in the store."""
        links: dict[int, socket.socket] = {}
        try:
            if self._children:
                self._open(what, limit_s)
            if self._parent is not None:
                address = self._find(what, f"at/{self._parent}", wait_s, limit_s)
                links[self._parent] = connect(address, self._here, self._rank, look)
            if self._entrance is not None:
                for child, link in self._entrance.accept(self._children, look):
                    links[child] = link
            if self._parent is None:
                self._leftovers.last += self._whole([self._step(0).called])
            return TreeLinks(self._rank, links)
        except BaseException as error:
            for link in links.values():
                link.close()
            if isinstance(error, TreeBroken | Unreachable | OSError | MemoryError):
                return None
            raise

    def _open(self, what: str, limit_s: float) -> None:
        """Lets those below come in.

        Raises:
            OSError: The system gives nothing to listen at.
        """
        if self._entrance is None:
            self._entrance = TreeListener(self._here, self._corner)
            self.ask(what, limit_s, partial(self._store.set, f"at/{self._rank}", self._entrance.address))

    def _shut(self, what: str | None, limit_s: float) -> None:
        """Lets nobody in any more; says so in the store for some step, or else as the call ends."""
        entrance, self._entrance = self._entrance, None
        if entrance is None:
            return
        entrance.close()
        if what is None:
            self._leftovers.over += self._whole([f"at/{self._rank}"])
            return
        with suppress(FastloadError):
            self.ask(what, limit_s, partial(self._delete, [f"at/{self._rank}"]))

    def _find(self, what: str, key: str, wait_s: float, limit_s: float) -> str:
        """Returns where a rank is, once it has said so.

        Raises:
            TreeBroken: Some ranks meet in the store instead, or it takes too long.
        """

        def find() -> str | None:
            first = self._step(0)
            if (address := self._peek(key)) is not None:
                return address
            first.call(self._terms.call)
            self._wait_until(
                lambda: self._store.check([key]) or self._store.check([first.log]), wait_s, listen=True
            )
            return self._peek(key)

        address = self.ask(what, limit_s, find)
        if address is None:
            raise TreeBroken
        return address

    def _peek(self, key: str) -> str | None:
        """Returns what is in the store, if it is there, in one request: `get` takes two, and waits."""
        text = str(self._store.compare_set(key, _NOTHING, _NOTHING), "utf-8")
        return text if text != _NOTHING else None
