"""Whether ranks that hold the same cells hold alike what is in them; see `replicas` for whole states."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import xxhash

from fastload.base.memory import allocate_staging, host_view
from fastload.comm.world import World
from fastload.errors import ReplicaMismatch
from fastload.saving.holdings import Cell, Holdings
from fastload.saving.layout import Layout
from fastload.saving.packets import Packet, Stretch
from fastload.saving.replicas import PIECE_BYTES, pieces
from fastload.saving.shards import Shards

__all__ = ["compare_cells", "digest_cells", "group_digests"]

_DIGEST_BYTES = 8
_UNKNOWN = bytes(_DIGEST_BYTES)  # nobody looked at it
_MAX_NUM = 1024  # of the cells that the same ranks hold: a few milliseconds
_MAX_BYTES = 64 << 10  # of one cell
_MAX_BYTES_OF_ALL = 4 << 20
_NUM_SHOWN = 20


def digest_cells(
    layout: Layout,
    holdings: Holdings,
    shards: Shards,
    rank: int,
    *,
    how: str,
    skip: Callable[[str], bool] = lambda _: False,
) -> bytes:
    """Returns one xxh3-64 for each cell that this rank and others hold, in order; 0 if it was not looked at.

    Args:
        layout: The files.
        holdings: Which ranks hold which of their bytes.
        shards: What this rank holds.
        rank: This rank.
        how: ``small``: of small cells in host memory, as many as take a few milliseconds; or ``full``.
        skip: Whether not to look at a tensor, by its name.
    """
    digests, memory = bytearray(), None
    nums: Counter[tuple[int, ...]] = Counter()
    sizes: Counter[tuple[int, ...]] = Counter()
    for number, cell in holdings.shared(rank):
        name, nbytes = layout.space.extents[number].name, cell.runs.total
        is_small = nbytes <= min(_MAX_BYTES, _MAX_BYTES_OF_ALL - sizes[cell.holders])
        is_cheap = is_small and nums[cell.holders] < _MAX_NUM and shards.is_in_host_memory(name)
        if skip(name) or (how == "small" and not is_cheap):
            digests += _UNKNOWN
            continue
        nums[cell.holders] += 1
        sizes[cell.holders] += nbytes
        memory = memory if memory is not None else allocate_staging(PIECE_BYTES, pinned=shards.on_device)
        hasher = xxhash.xxh3_64()
        for begin, end in pieces(nbytes):
            slab = memory[: end - begin]
            shards.copy(Packet(rank, rank, 0, (Stretch(number, cell, begin, end),)), slab)
            shards.settle()
            hasher.update(host_view(slab))
        digests += hasher.digest()
    return bytes(digests)


def group_digests(layout: Layout, holdings: Holdings, rank: int, digests: bytes) -> dict[str, str]:
    """Returns one digest for all cells that the same ranks hold, by these ranks.

    Args:
        layout: The files.
        holdings: Which ranks hold which of their bytes.
        rank: This rank.
        digests: From `digest_cells`.
    """
    found: dict[tuple[int, ...], bytearray] = defaultdict(bytearray)
    for at, (_, cell) in enumerate(holdings.shared(rank)):
        found[cell.holders] += digests[_DIGEST_BYTES * at : _DIGEST_BYTES * (at + 1)]
    return {
        ",".join(map(str, holders)): xxhash.xxh3_64_hexdigest(bytes(sums))
        for holders, sums in found.items()
        if any(sums)
    }


def compare_cells(
    world: World, layout: Layout, holdings: Holdings, digest: Callable[[], bytes], *, what: str
) -> None:
    """Compares what ranks hold of the same cells.

    Args:
        world: The ranks.
        layout: The files.
        holdings: Which ranks hold which of their bytes.
        digest: Returns what `digest_cells` does.
        what: Name of the step, for messages.

    Raises:
        ReplicaMismatch: They differ; names ranks and tensors. The same on all ranks.
        PeerError: Some rank could not say.
    """
    found: dict[tuple[int, Cell], dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, digests in enumerate(world.gather_bytes(what, digest)):
        for at, place in enumerate(holdings.shared(rank)):
            digest_of_cell = digests[_DIGEST_BYTES * at : _DIGEST_BYTES * (at + 1)]
            if digest_of_cell and digest_of_cell != _UNKNOWN:
                found[place][digest_of_cell].append(rank)
    unlike = [(place, ranks_of) for place, ranks_of in found.items() if len(ranks_of) > 1]
    if not unlike:
        return
    lines = [
        f"  {layout.space.extents[number].name}: {_odd(list(ranks_of.values()))}"
        for (number, _), ranks_of in unlike[:_NUM_SHOWN]
    ]
    more = len(unlike) - len(lines)
    lines += [f"  and {more} more"] if more else []
    raise ReplicaMismatch("the ranks hold different tensors, so nothing was saved:\n" + "\n".join(lines))


def _odd(variants: Sequence[Sequence[int]]) -> str:
    usual = max(variants, key=len)
    odd = sorted(rank for ranks in variants if ranks is not usual for rank in ranks)
    return f"rank {_some(odd)} not as rank {_some(usual)}"


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
