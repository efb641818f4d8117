"""Chunks of a round along the lines of a grid: collectives of a process group for each line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fastload.transfer.grid import Grid, Move, is_gather

__all__ = ["Lines"]

_NUM_KNOWN = 1024  # windows of readers


class Lines:
    """The lines of one rank, each with a process group.

    Args:
        grid: Of all ranks.
        rank: This one.
        groups: The backend of a process group for its line in each phase, with the same numbers; None where
            this rank is the only one of it.
        within: Returns what the collectives of a phase are to be called in: a stream of their own.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        groups: Sequence[Any],
        within: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        self._groups = groups
        self._within = within
        self._moves = lru_cache(_NUM_KNOWN)(lambda owners: grid.moves(owners, rank))

    def bring(self, owners: tuple[int, ...], *rows: Tensor) -> None:
        """Brings what each of some ranks has put into its part to all ranks.

        Args:
            owners: Who has put something there, in the order of their parts.
            rows: What has such parts, equally long, and nothing else; (owners x length,).
        """
        for phase, (group, moves) in enumerate(zip(self._groups, self._moves(owners), strict=True)):
            if group is not None and moves:
                with self._within(phase):
                    self._move(group, moves, rows, len(owners))

    def _move(self, group: Any, moves: Sequence[Move], rows: Sequence[Tensor], num_parts: int) -> None:
        for row in rows:
            part = row.numel() // num_parts
            if is_gather(moves, group.size()):
                own = moves[group.rank()]
                into = row[moves[0].begin * part : moves[-1].end * part]
                group._allgather_base(into, row[own.begin * part : own.end * part]).wait()
            else:
                self._broadcast(group, moves, row, part)

    def _broadcast(self, group: Any, moves: Sequence[Move], row: Tensor, part: int) -> None:
        """At once where the backend can: one after the other they would take as long as all of them."""
        at_once = group.supports_coalescing
        if at_once:
            group._start_coalescing()
        works = []
        for move in moves:
            how = dist.BroadcastOptions()
            how.rootRank = move.root
            works.append(group.broadcast([row[move.begin * part : move.end * part]], how))
        if at_once:
            works = [group._end_coalescing()]
        for work in works:
            work.wait()
