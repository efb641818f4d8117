"""Joins tensors of which several files hold parts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from fastload.errors import ManifestError
from fastload.formats.dtypes import DTYPES
from fastload.formats.manifest import Piece, TensorEntry
from fastload.formats.untrusted import show
from fastload.geometry.box import Box, row_major, tiling_problem


class TensorPart(NamedTuple):
    """A box of a tensor that is stored as a box of another one, the tensor of one rank.

    Attributes:
        box: The box of the complete tensor, in elements of torch.
        stored: The tensor of the rank, within its file.
        within: The same box of that tensor.
    """

    box: Box
    stored: TensorEntry
    within: Box


def join_parts(name: str, shape: tuple[int, ...], parts: Sequence[TensorPart], where: str) -> TensorEntry:
    """Returns the entry of a complete tensor.

    Args:
        name: Name of the tensor.
        shape: Its shape in elements of torch.
        parts: At least one.
        where: The checkpoint, for messages.

    Raises:
        ManifestError: The parts do not tile the tensor, or have several dtypes.
    """
    where = f"{where}: tensor {show(name)}"
    first = parts[0].stored
    if problem := tiling_problem([part.box for part in parts], shape):
        raise ManifestError(f"{where}: {problem}")
    if any(part.stored.dtype != first.dtype for part in parts):
        raise ManifestError(f"{where}: its parts are {show(sorted({part.stored.dtype for part in parts}))}")
    if len(parts) > 1 and first.dtype == "F4":
        raise ManifestError(f"{where}: parts of F4 tensors are not read")
    pieces = [_piece(part, where) for part in parts]
    shape = (*shape, 2) if len(first.shape) > len(shape) else shape  # complex128, stored as pairs
    return join_pieces(name, first.dtype, first.shape if first.dtype == "F4" else shape, pieces)


def join_pieces(name: str, dtype: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> TensorEntry:
    """Returns the entry of a tensor whose pieces tile it.

    Args:
        name: Name of the tensor.
        dtype: safetensors name of its dtype.
        shape: Its shape in elements of that dtype.
        pieces: Its pieces, in any order.
    """
    filled = tuple(sorted((piece for piece in pieces if piece.box.numel), key=lambda piece: piece[1:3]))
    nbytes = prod(shape) * DTYPES[dtype][0] // 8
    if not filled:
        return TensorEntry(name, dtype, shape, pieces[0].file if pieces else 0, 0, 0)
    start = filled[0]
    is_plain = len(filled) == 1 and not start.strides
    return TensorEntry(name, dtype, shape, start.file, start.offset, nbytes, () if is_plain else filled)


def _piece(part: TensorPart, where: str) -> Piece:
    box, stored, within = part
    if len(stored.shape) == len(box.sizes) + 1:
        box, within = Box((*box.offsets, 0), (*box.sizes, 2)), Box((*within.offsets, 0), (*within.sizes, 2))
    if stored.dtype != "F4" and not within.is_within(stored.shape):
        sizes = f"{list(within.sizes)} at {list(within.offsets)}"
        raise ManifestError(f"{where}: the part of shape {list(stored.shape)} has no {sizes}")
    strides = stored.pieces[0].strides if stored.pieces else row_major(stored.shape)
    if within.sizes == stored.shape or stored.dtype == "F4":
        own = stored.pieces[0] if stored.pieces else stored
        return Piece(box, stored.file, own.offset, own.nbytes, strides if stored.pieces else ())
    itemsize = DTYPES[stored.dtype][0] // 8
    skipped = sum(offset * stride for offset, stride in zip(within.offsets, strides, strict=True))
    span = 1 + sum((size - 1) * stride for size, stride in zip(within.sizes, strides, strict=True))
    nbytes = span * itemsize if within.numel else 0
    is_dense = nbytes == within.numel * itemsize and not stored.pieces
    return Piece(box, stored.file, stored.offset + skipped * itemsize, nbytes, () if is_dense else strides)
