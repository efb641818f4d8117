"""Whether the ranks really hold alike what they are about to save together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import xxhash

from fastload.base.memory import allocate_staging, host_view
from fastload.comm.agreement import World
from fastload.errors import ReplicaMismatch
from fastload.saving.assign import FileRange
from fastload.saving.layout import Layout
from fastload.saving.snapshot import Source

__all__ = ["PIECE_BYTES", "compare_replicas", "pieces"]

PIECE_BYTES = 8 << 20
"""Most bytes that are copied and hashed at once."""

_DIGEST_BYTES = 8
_NUM_SHOWN = 20


def _digests(layout: Layout, source: Source) -> bytes:
    """Returns one xxh3-64 for each tensor, in layout order."""
    memory = allocate_staging(PIECE_BYTES, pinned=source.on_device)
    digests = bytearray()
    for index, file in enumerate(layout.files):
        for entry in file.tensors:
            hasher = xxhash.xxh3_64()
            for begin, end in pieces(entry.nbytes):
                piece = FileRange(index, entry.offset + begin, entry.offset + end)
                slab = memory[: piece.end - piece.begin]
                source.copy(piece, slab)
                source.settle()
                hasher.update(host_view(slab))
            digests += hasher.digest()
    return bytes(digests)


def compare_replicas(world: World, layout: Layout, source: Source, *, what: str) -> None:
    """Compares the tensors of all ranks.

    Args:
        world: The ranks.
        layout: The files.
        source: This rank's tensors.
        what: Name of the step, for messages.

    Raises:
        ReplicaMismatch: They differ; names ranks and tensors. The same on all ranks.
        PeerError: Some rank could not say.
    """
    own = b""

    def digest() -> str:
        nonlocal own
        own = _digests(layout, source)
        return xxhash.xxh3_128_hexdigest(own)

    if len(set(world.agree(what, digest))) == 1:
        return
    # A mismatch is rare: only then do the ranks learn the digests of one, and tell where theirs are others.
    first = world.share(what, 0, lambda: own)
    unlike = world.agree(what, lambda: _unlike(first, own))
    raise ReplicaMismatch(
        "the ranks hold different tensors, so nothing was saved:\n" + "\n".join(_differences(layout, unlike))
    )


def pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of so many bytes that are copied and hashed at once."""
    for begin in range(0, nbytes, PIECE_BYTES):
        yield begin, min(begin + PIECE_BYTES, nbytes)


def _unlike(first: bytes, own: bytes) -> tuple[int, list[tuple[int, str]]]:
    """Returns how many of this rank's digests are not those of the first, and the first few of them."""
    size = _DIGEST_BYTES
    unlike = [at for at in range(0, len(own), size) if first[at : at + size] != own[at : at + size]]
    few = [(at // size, own[at : at + size].hex()) for at in unlike[:_NUM_SHOWN]]
    return len(unlike), few


def _differences(layout: Layout, unlike: Sequence[tuple[int, Sequence[tuple[int, str]]]]) -> list[str]:
    """Says for the first tensors that differ which ranks have not what most have."""
    few = [dict(few) for _, few in unlike]
    numbers = sorted({number for digests in few for number in digests})
    names = [entry.name for file in layout.files for entry in file.tensors]
    lines = []
    for number in numbers[:_NUM_SHOWN]:
        found = [digests.get(number, "as the first") for digests in few]
        usual, count = Counter(found).most_common(1)[0]
        odd = [str(rank) for rank, digest in enumerate(found) if digest != usual]
        lines.append(f"  {names[number]}: rank {', '.join(odd)} not as the {count} other{'s' * (count > 1)}")
    more = max(len(numbers), *(count for count, _ in unlike)) - _NUM_SHOWN
    return lines + ([f"  and at least {more} more"] if more > 0 else [])
