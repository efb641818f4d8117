"""How the ranks of a group agree along a tree of connections while it is whole, and else in the store."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from fastload.errors import FastloadError, PeerError
from fastload.ranks.answers import join_answers
from fastload.ranks.bonds import Bonds, BondsBroken, children_of, parent_of
from fastload.ranks.entrance import Entrance, Unreachable, come_in
from fastload.ranks.kept import Kept
from fastload.ranks.meeting import ABANDONED, Verdict
from fastload.ranks.rendezvous import Rendezvous

__all__ = ["Bonded"]

_MOST_TRIES = 3
_NOTHING = "?"


@dataclass(frozen=True)
class _Terms:
    """What a call is named, and how long it may take to say what is known, and in all."""

    call: str
    grace_s: float
    limit_s: float


@dataclass(frozen=True)
class _Where:
    """Where a call is in the store, and its number along the tree: 0 while it makes that."""

    place: str
    number: int = 0

    @property
    def is_along(self) -> bool:
        """Whether it has no number but that."""
        return self.number > 0


class Bonded(Rendezvous):
    """The corner of one call of a group, whose ranks are connected in a tree, or are about to be.

    In a step each rank sends up what it and those below it answer; the first one decides, which is to leave
    the verdict in the store, and the verdict goes down. A rank that finds the tree broken, or has waited for
    too long, lets go of its connections, which all notice, and goes on in the store (see `meeting`), where
    the verdict is if there is one. What holds is what the store took first, as ever.

    The first call of a group draws a number and makes the tree; the calls after it are numbered by the tree.
    Where that breaks in the first step of a call, some ranks may not have begun this call: the step has been
    decided, or all abandon it, draw a number, and meet there.

    Args:
        corner: Of the store, which the group has to itself.
        kept: What the group keeps, and with it the tree.
        here: What tells machines apart.
        rank: This rank.
        size: Number of ranks.
        host: The rank that hosts the store, if one of them does.
        if_lost: What it means that the store is gone.
    """

    def __init__(
        self, corner: Any, kept: Kept, here: str, *, rank: int, size: int, host: int | None, if_lost: str
    ) -> None:
        super().__init__(corner, rank=rank, size=size, host=host, if_lost=if_lost)
        self._turns = Rendezvous(corner, rank=rank, size=size, host=host, if_lost=if_lost)
        self._corner = corner
        self._kept = kept
        self._here = here
        self._terms = _Terms("", 0.0, 0.0)
        self._thread = threading.get_ident()
        self._where = _Where("")
        self._bonds: Bonds | None = None
        self._was_along = False  # whether the last verdict came along the tree
        self._own_shared: list[str] = []

    @property
    def _parent(self) -> int | None:
        return parent_of(self._rank)

    @property
    def _children(self) -> list[int]:
        return children_of(self._rank, self._size)

    def begin(self, call: str, *, grace_s: float, limit_s: float) -> Verdict | None:
        """Finds out the number of this call; see `Rendezvous.take_turn`."""
        self._terms = _Terms(call, grace_s, limit_s)
        bonds = self._kept.bonds
        if bonds is not None and bonds.are_whole():
            self._bonds, number = bonds, bonds.next_call()
            self._move_to(_Where(f"{bonds.token}/{number}", number))
            return None
        if bonds is not None:
            self._forget_tree(bonds)
        return self._draw()

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
        since = time.monotonic()
        look = self._looking(step, wait_s - min(wait_s, grace_s) / 4)
        tries = step == 0 and self._bonds is None and self._may_bond()
        try:
            if tries:
                self._bonds = self._bond(what, look, wait_s, wait_s + grace_s)
            if self._bonds is not None:
                try:
                    return self._collect_along(self._bonds, what, step, answer, along, wait_s, look)
                except BondsBroken:
                    below = self._bonds.come(self._children, (self._where.number, step))
                    answer = join_answers([answer, *(table for table, _ in below)])
                    self._bonds.drop()
            if self._where.is_along and step == 0 and (verdict := self._abandon(what)) is not None:
                return verdict
        except BaseException:
            if self._bonds is not None:
                self._bonds.drop()
            raise
        verdict = super().collect(
            what, step, answer, wait_s=wait_s, grace_s=grace_s, forget=forget, since=since
        )
        self._was_along = verdict.along_tree
        if tries and not verdict.along_tree and len(verdict.answers) == self._size:
            self._kept.num_tries += 1  # all ranks were there, and could not connect
        return verdict

    def hear(
        self, step: int, *, num_others: int, failed: bool, leavings: Sequence[str], grace_s: float
    ) -> None:
        """As `Rendezvous.hear`. Along a tree the verdict reaches all without this rank, or the store."""
        self._kept.outdate(*self._own_shared)
        self._own_shared = []
        if not self._was_along:
            super().hear(step, num_others=num_others, failed=failed, leavings=leavings, grace_s=grace_s)
            return
        if self._bonds is not None and not self._where.is_along and self._thread == threading.get_ident():
            self._keep(self._bonds)
        old = self._kept.take_old()
        if self._parent is None:
            self._kept.outdate(
                f"{self._where.place}/pulse", *([f"{self._where.place}/alarm"] if failed else [])
            )

        def tidy() -> None:
            self._delete(leavings)
            self._turns._delete(old)

        if leavings or old:
            with suppress(FastloadError):
                self.ask("ending the call", grace_s, tidy)

    def _keep(self, bonds: Bonds) -> None:
        if bonds.are_whole():
            self._kept.bond(bonds)
            if self._parent is None:
                self._kept.outdate(f"{self._where.place}/{self._step(0).called}")
        else:
            self._forget_tree(bonds)

    def note_shared(self, step: int, place: str, num_keys: int, *, own: bool) -> None:
        """As `Rendezvous.note_shared`; this rank takes its own away, later."""
        super().note_shared(step, place, num_keys, own=own)
        if own:
            self._own_shared += [f"{self._where.place}/{key}" for key in self._shared[step]]

    def part(self) -> None:
        """Lets go of the tree: something has failed, and whatever comes now is told in the store."""
        if self._bonds is not None:
            self._bonds.drop()

    def resign(self, heard: int | None, step: int, answer: str, *, limit_s: float) -> None:
        """As `Rendezvous.resign`; the others find the tree broken, and come to the store."""
        self.part()
        try:
            if self._where.is_along and step == 0 and self._abandon("leaving") is not None:
                return
        except PeerError:
            return
        super().resign(None if self._was_along else heard, step, answer, limit_s=limit_s)

    # The number of the call

    def _draw(self) -> Verdict | None:
        terms, self._bonds = self._terms, None
        number, missed = self._turns.take_turn(terms.call, wait_s=terms.grace_s, limit_s=terms.limit_s)
        self._move_to(_Where(str(number)))
        return missed

    def _move_to(self, where: _Where) -> None:
        self._where = where
        self._store = dist.PrefixStore(where.place, self._corner)

    def _abandon(self, what: str) -> Verdict | None:
        """Leaves the tree's number for one of the store's, unless the first step is decided already.

        Returns:
            The verdict of that step; or the one that the others have heard, if this rank is too late for it.
        """

        def abandon() -> str:
            self._come()
            return self._step(0).settle(ABANDONED)

        text = self.ask(what, self._terms.limit_s, abandon)
        if text != ABANDONED:
            self._was_along = True
            return Verdict.from_text(text, self._size)
        if self._parent is None:
            self._kept.outdate(f"{self._where.place}/0/verdict")
        return self._draw()

    # Along the tree

    def _collect_along(
        self,
        bonds: Bonds,
        what: str,
        step: int,
        answer: str,
        along: bytes,
        wait_s: float,
        look: Callable[[], float],
    ) -> Verdict:
        """Collects the answers and returns the verdict.

        Raises:
            BondsBroken: The tree is broken, or some rank has not come in time.
        """
        tag = self._where.number, step
        below = bonds.receive(self._children, tag, look)
        table = join_answers([answer, *(table for table, _ in below)]) if below else answer
        along = along or next((more for _, more in below if more), b"")
        if self._parent is None:
            place = self._step(step)
            text = Verdict.write(wait_s, table, along_tree=True)
            text = self.ask(what, self._terms.limit_s, partial(place.settle, text))
            if text == ABANDONED:
                raise BondsBroken
        else:
            bonds.send([self._parent], tag, table, along)
            ((text, along),) = bonds.receive([self._parent], tag, look)
        bonds.send(self._children, tag, text, along)
        with suppress(BondsBroken):  # those below find out by themselves
            bonds.flush(self._children, look)
        if self._parent is None:
            self._kept.outdate(f"{self._where.place}/{place.verdict}")
        verdict = Verdict.from_text(text, self._size, along)
        self._was_along = verdict.along_tree
        return verdict

    def _looking(self, step: int, wait_s: float) -> Callable[[], float]:
        """Returns what a rank does now and then while it waits along the tree; see `Bonds.wait`."""
        began = time.monotonic()
        period_s = self._period_s(wait_s)
        next_look = began + period_s
        was_decided = False

        def look() -> float:
            nonlocal next_look, was_decided
            now = time.monotonic()
            left_s = max(began, self._heard_at) + wait_s - now
            if left_s <= 0:
                raise BondsBroken
            if now >= next_look:
                next_look = now + period_s
                with suppress(PeerError):  # without the store, the tree may be whole all the same
                    look_around = partial(self._look_around, step)
                    is_left, is_decided = self.ask(
                        "waiting for the other ranks", left_s + self._terms.grace_s, look_around
                    )
                    if is_left or was_decided:  # for long, and it has not come here
                        raise BondsBroken
                    was_decided = is_decided
            return min(left_s, period_s)

        return look

    def _look_around(self, step: int) -> tuple[bool, bool]:
        """Notes whether ranks get on; returns whether some of them meet in the store, and have decided."""
        self._hear_pulse(time.monotonic())
        place = self._step(step)
        if self._bonds is None:
            place.call(self._terms.call)
            return bool(self._store.check([place.log])), False
        return bool(self._corner.check([_left(self._bonds)])), place.is_decided()

    def _come(self) -> None:
        """Says that this rank has let go of the tree, to those who wait in it and have not noticed."""
        if self._bonds is not None:
            self._corner.set(_left(self._bonds), "")

    def _forget_tree(self, bonds: Bonds) -> None:
        bonds.drop()
        self._kept.bond(None)
        if self._parent is None:
            last = bonds.num_calls
            self._kept.outdate(
                _left(bonds), *(f"{bonds.token}/{call}/0/verdict" for call in (last, last + 1))
            )

    # Making a tree

    def _may_bond(self) -> bool:
        """Whether this call makes a tree: the same on all ranks, as only those in order come to the next."""
        return self._thread == threading.get_ident() and self._kept.num_tries < _MOST_TRIES

    def _bond(self, what: str, look: Callable[[], float], wait_s: float, limit_s: float) -> Bonds | None:
        """Connects to the neighbours; returns None if they are to be met in the store."""
        links: dict[int, socket.socket] = {}
        entrance = Entrance(self._here, _host_of(self._corner)) if self._children else None
        own = f"at/{self._rank}"
        try:
            token = secrets.token_hex(8)
            if entrance is not None:
                self.ask(what, limit_s, partial(self._store.set, own, entrance.address))
            if self._parent is not None:
                address = self._find(what, f"at/{self._parent}", wait_s, limit_s)
                token, links[self._parent] = come_in(address, self._here, self._rank, look)
            if entrance is not None:
                for child, link in entrance.admit(self._children, token, look):
                    links[child] = link
            self._kept.age()
            return Bonds(token, links)
        except BaseException as error:
            for link in links.values():
                link.close()
            if isinstance(error, BondsBroken | Unreachable):
                return None
            raise
        finally:
            if entrance is not None:
                entrance.close()
                with suppress(FastloadError):
                    self.ask(what, limit_s, partial(self._delete, [own]))

    def _find(self, what: str, key: str, wait_s: float, limit_s: float) -> str:
        """Returns where a rank is, once it has said so.

        Raises:
            BondsBroken: Some ranks meet in the store instead, or it takes too long.
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
            raise BondsBroken
        return address

    def _peek(self, key: str) -> str | None:
        """Returns what is in the store, if it is there, in one request: `get` takes two, and waits."""
        text = str(self._store.compare_set(key, _NOTHING, _NOTHING), "utf-8")
        return text if text != _NOTHING else None


def _left(bonds: Bonds) -> str:
    return f"{bonds.token}/left"


def _host_of(store: Any) -> str:
    """Returns the host of a TCPStore; empty for other ones."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))
