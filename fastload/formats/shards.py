"""safetensors files that hold shards of tensors: each says in its header where these begin. Pure.

So does ``HuggingFaceStorageWriter`` of ``torch.distributed.checkpoint`` save with ``save_distributed=True``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastload.errors import ManifestError
from fastload.formats.manifest import Piece, TensorEntry, in_order
from fastload.formats.untrusted import are_sizes, parse_json, show
from fastload.geometry.box import Box
from fastload.geometry.tiling import tiling_problem

__all__ = ["join_shards"]


def join_shards(tensors: Sequence[TensorEntry], infos: Mapping[int, str], url: str) -> list[TensorEntry]:
    """Makes one tensor of its shards.

    Args:
        tensors: What is in the files.
        infos: What the headers have at ``DCP_SHARDING_INFO``, by index of the file.
        url: The checkpoint, for messages.

    Raises:
        ManifestError: That is malformed, or shards do not make up a tensor.
    """
    shards: dict[str, list[tuple[Box, TensorEntry]]] = {}
    offsets = {file: _offsets(text, url) for file, text in infos.items()}
    for entry in tensors:
        of_file = offsets.get(entry.file, {})
        at = of_file.get(entry.name, (0,) * len(entry.shape))
        if len(at) != len(entry.shape):
            raise ManifestError(
                f"{url}: a shard of {show(entry.name)} of shape {list(entry.shape)} begins at {list(at)}"
            )
        shards.setdefault(entry.name, []).append((Box(at, entry.shape), entry))
    return in_order(_joined(name, parts, url) for name, parts in shards.items())


def _joined(name: str, parts: Sequence[tuple[Box, TensorEntry]], url: str) -> TensorEntry:
    first = parts[0][1]
    if any((entry.dtype, len(entry.shape)) != (first.dtype, len(first.shape)) for _, entry in parts):
        raise ManifestError(
            f"{url}: shards of {show(name)} are of several dtypes, or have several dimensions"
        )
    ends = [[offset + size for offset, size in zip(*box, strict=True)] for box, _ in parts]
    shape = tuple(map(max, *ends)) if len(ends) > 1 else tuple(ends[0])
    if problem := tiling_problem([box for box, _ in parts], shape):
        raise ManifestError(f"{url}: the shards of {show(name)}: {problem}")
    if len(parts) == 1:
        return first
    if first.dtype == "F4":
        raise ManifestError(f"{url}: shards of {show(name)}: of F4 tensors none are read")
    pieces = [Piece(box, entry.file, entry.offset, entry.nbytes) for box, entry in parts if entry.nbytes]
    pieces.sort(key=lambda piece: piece[1:3])
    nbytes = sum(piece.nbytes for piece in pieces)
    file, offset = pieces[0][1:3] if pieces else (first.file, first.offset)
    return TensorEntry(name, first.dtype, shape, file, offset, nbytes, tuple(pieces))


def _offsets(text: str, url: str) -> dict[str, tuple[int, ...]]:
    """Returns where the shards in a file begin, by name."""
    found = {}
    for name, info in parse_json(text.encode(), f"{url}: where shards begin").items():
        offsets = info.get("saved_offsets") if isinstance(info, dict) else None
        if not are_sizes(offsets):
            raise ManifestError(f"{url}: where shards begin: {show(name)} begins at {show(info)}")
        found[name] = tuple(offsets)
    return found
