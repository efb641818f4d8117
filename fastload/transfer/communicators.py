"""The communicators of NCCL that a rank has, one for each line of its grid, kept with the group."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from fastload.base.threads import background, within
from fastload.errors import DeadlineExceeded, Interrupted
from fastload.ranks.world import World
from fastload.transfer.grid import Grid

__all__ = ["Communicators"]

_MAX_CTAS = 8  # of each: those of all phases have to run at once
_FOREVER = timedelta(days=7)  # NCCL's watchdog ends the process; our deadlines end the load


class Communicators:
    """Those that one load uses: the group's own one, where all ranks are one line, or else some of their own.

    Args:
        world: The ranks; their group has an NCCL backend.
        grid: Where they are.
        device: This rank's CUDA device.

    Attributes:
        grid: Where the ranks are, seen by these.
        are_own: Whether the caller's group has no part in them.
    """

    def __init__(self, world: World, grid: Grid, device: torch.device) -> None:
        self.are_own = grid.num_lines > 1
        self.grid = grid if self.are_own else Grid(tuple(range(world.size)), (), world.size)
        self._world = world
        self._device = device
        self._era = world.kept.era
        self._name = f"nccl {grid.dims} {device}"
        self._made: _Made | None = world.kept.take(self._name) if self.are_own else None

    def offer(self) -> Any:
        """Says which ones this rank has; see `Exchange.offer`."""
        if not self.are_own:
            return None
        return {"token": self._made.token if self._made is not None else "", "draw": secrets.token_hex(8)}

    def renew(self) -> None:
        """Drops those that were kept; see `Exchange.renew`."""
        made, self._made = self._made, None
        if made is not None:
            made.drop()

    def accept(self, offers: Sequence[Any]) -> None:
        """Learns what the others have offered; see `Exchange.accept`."""
        if self.are_own and self._made is None:
            token = xxhash.xxh3_64_hexdigest(repr([offer["draw"] for offer in offers]).encode())
            self._made = _Made(token)

    def meet(self, give_up: Callable[[], bool]) -> Sequence[Any]:
        """Returns one for each phase, or None; the first time all of a line have to come.

        Raises:
            Interrupted: Some rank did not come, or `give_up` said so.
        """
        if self._made is None:
            assert self._world.group is not None
            return [None, self._world.group._get_backend(self._device)]
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

    def _make(self) -> list[Any]:
        assert self._made is not None
        store = self._world.store if self._world.store is not None else dist.HashStore()
        # NCCL waits for the others inside of the store's connection, which is not to be ours.
        store = store.clone() if hasattr(store, "clone") else store
        groups: list[Any] = []
        for phase in range(self.grid.num_phases):
            if not self.grid.has_line(self._world.rank, phase):
                groups.append(None)
                continue
            line = self.grid.line(self._world.rank, phase)
            corner = dist.PrefixStore(f"nccl/{self._made.token}/{phase}/{line[0]}", store)
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = _MAX_CTAS
            options._timeout = _FOREVER
            group = dist.ProcessGroupNCCL(corner, line.index(self._world.rank), len(line), options)
            group.eager_connect_single_device(self._device)
            groups.append(group)
        return groups


class _Made:
    """Some that all ranks have made together; see `ranks.kept.Keepsake`.

    Args:
        token: Names them.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.groups: list[Any] = []

    def drop(self) -> None:
        """Ends them, and what is under way on them, which other ranks may never enter."""
        groups, self.groups = self.groups, []

        def abort() -> None:
            for group in filter(None, groups):
                with contextlib.suppress(RuntimeError):
                    group.abort()

        try:
            background(abort, "fastload-down").start()
        except RuntimeError:  # at the end of the process
            abort()

    def disown(self) -> None:
        """A forked child has no use for them, nor for CUDA."""
