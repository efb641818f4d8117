"""The communicators of NCCL that a rank has, one for each line or group of ranks, kept with the group."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastload.base.threads import background, within
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.ranks.world import World

__all__ = ["Communicators"]

_MAX_CTAS = 8  # of each: those of all phases have to run at once
_FOREVER = timedelta(days=7)  # NCCL's watchdog ends the process; our deadlines end the load


class Communicators:
    """Some that one load uses, made by its ranks.

    Args:
        world: The ranks; their group has an NCCL backend.
        name: Under which they are kept; the same on all ranks, and other for other members.
        members: The ranks of each one that this rank is in, in order, by its number. All ranks of it know it
            by the same number, and no others of this number have the same first rank.
        device: This rank's CUDA device.
    """

    def __init__(
        self, world: World, name: str, members: Mapping[int, Sequence[int]], device: torch.device
    ) -> None:
        self._world = world
        self._members = members
        self._device = device
        self._era = world.kept.era
        self._name = name
        self._made: _Made | None = world.kept.take(name)

    def offer(self) -> Any:
        """Says which ones this rank has; see `Exchange.offer`."""
        draw = secrets.token_hex(8) if self._world.rank == 0 else ""
        return {"token": self._made.token if self._made is not None else "", "draw": draw}

    def renew(self) -> None:
        """Drops those that were kept; see `Exchange.renew`."""
        made, self._made = self._made, None
        if made is not None:
            made.drop()

    def accept(self, offers: Sequence[Any]) -> None:
        """Learns what the others have offered; see `Exchange.accept`."""
        if self._made is None:
            self._made = _Made(offers[0]["draw"])

    def meet(self, give_up: Callable[[], bool]) -> Mapping[int, Any]:
        """Returns them by number; the first time all ranks of each have to come.

        Raises:
            Interrupted: Some rank did not come, or `give_up` said so.
        """
        assert self._made is not None
        if not self._made.groups:
            try:
                self._made.groups = within(self._world.patience_s, "connecting", self._make, give_up=give_up)
            except (RuntimeError, DeadlineExceeded) as error:
                raise Interrupted(f"the ranks could not connect: {error}") from error
        return self._made.groups

    def close(self, *, keep: bool) -> None:
        """Leaves them to the next load, or ends them, with what is under way on them."""
        made, self._made = self._made, None
        if made is None:
            return
        if keep:
            self._world.kept.put(self._name, made, self._era)
        else:
            made.drop()

    def _make(self) -> dict[int, Any]:
        assert self._made is not None
        store = self._world.store if self._world.store is not None else dist.HashStore()
        # NCCL waits for the others inside of the store's connection, which is not to be ours.
        store = store.clone() if hasattr(store, "clone") else store
        groups: dict[int, Any] = {}
        for number, members in sorted(
            self._members.items()
        ):  # in one order on all ranks: each waits for others
            corner = dist.PrefixStore(f"nccl/{self._made.token}/{number}/{members[0]}", store)
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = _MAX_CTAS
            options._timeout = _FOREVER
            place = members.index(self._world.rank)
            group = dist.ProcessGroupNCCL(corner, place, len(members), options)
            group.eager_connect_single_device(self._device)
            groups[number] = group
        return groups


class _Made:
    """Some that all ranks have made together; see `ranks.kept.Keepsake`.

    Args:
        token: Names them.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.groups: dict[int, Any] = {}

    def drop(self) -> None:
        """Ends them, and what is under way on them, which other ranks may never enter."""
        groups, self.groups = self.groups, {}

        def abort() -> None:
            for group in groups.values():
                with contextlib.suppress(RuntimeError):
                    group.abort()

        try:
            background(abort, "fastload-down").start()
        except RuntimeError:  # at the end of the process
            abort()

    def disown(self) -> None:
        """A forked child has no use for them, nor for CUDA."""
