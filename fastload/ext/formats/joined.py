"""Joins what several files hold in parts: tensors, manifests, and flattened states. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from fastload.errors import ManifestError
from fastload.formats.dtypes import DTYPES
from fastload.formats.manifest import Guard, Manifest, Piece, TensorEntry, in_order
from fastload.formats.untrusted import are_sizes, parse_json, show
from fastload.formats.values import MAX_DEPTH, encode_value
from fastload.geometry.box import Box, box_text, overlap_of, row_major

_MAX_HOLES = 1000  # members of lists that were not saved; and one more for each name


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


def tiling_problem(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    """Returns why boxes do not contain each element of a tensor once; empty if they do.

    Args:
        boxes: The boxes in any order; empty ones do not count.
        shape: Shape of the tensor.
    """
    outside = next((box for box in boxes if not box.is_within(shape)), None)
    if outside is not None:
        return f"{box_text(outside)} is out of bounds for a tensor of shape {list(shape)}"
    filled = [box for box in boxes if box.numel]
    problem = overlap_of(filled, len(shape))
    numel, wanted = sum(box.numel for box in filled), prod(shape)
    if not problem and numel != wanted:
        problem = f"its boxes have {numel} of {wanted} elements"
    return problem


def join_shards(tensors: Sequence[TensorEntry], infos: Mapping[int, str], url: str) -> list[TensorEntry]:
    """Joins the shards of each tensor, of files of safetensors with offsets in their headers.

    `HuggingFaceStorageWriter` of torch.distributed.checkpoint saves them with ``save_distributed=True``.

    Args:
        tensors: The tensors in the files.
        infos: The texts of ``DCP_SHARDING_INFO`` in the headers, by index of the file.
        url: The checkpoint, for messages.

    Raises:
        ManifestError: A text is malformed, or shards do not tile a tensor.
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
    return in_order(_joined_shards(name, parts, url) for name, parts in shards.items())


def _joined_shards(name: str, parts: Sequence[tuple[Box, TensorEntry]], url: str) -> TensorEntry:
    if len({len(entry.shape) for _, entry in parts}) > 1:
        raise ManifestError(f"{url}: shards of {show(name)} have several numbers of dimensions")
    ends = [[offset + size for offset, size in zip(*box, strict=True)] for box, _ in parts]
    shape = tuple(map(max, *ends)) if len(ends) > 1 else tuple(ends[0])
    whole = [TensorPart(box, entry, Box((0,) * len(shape), entry.shape)) for box, entry in parts]
    return join_parts(name, shape, whole, url)


def _offsets(text: str, url: str) -> dict[str, tuple[int, ...]]:
    """Returns the offsets of the shards in a file, by name."""
    found = {}
    for name, info in parse_json(text.encode(), f"{url}: where shards begin").items():
        offsets = info.get("saved_offsets") if isinstance(info, dict) else None
        if not are_sizes(offsets):
            raise ManifestError(f"{url}: where shards begin: {show(name)} begins at {show(info)}")
        found[name] = tuple(offsets)
    return found


def numbered(manifest: Manifest, file: int) -> Manifest:
    """Returns the manifest of a single file, with its tensors in the file of that index."""
    tensors = (
        replace(entry, file=file, pieces=tuple(piece._replace(file=file) for piece in entry.pieces))
        for entry in manifest.tensors
    )
    return replace(manifest, tensors=tuple(tensors))


def join_manifests(
    url: str, parts: Sequence[Manifest], tensors: Iterable[TensorEntry], structure: Any, **about: Any
) -> Manifest:
    """Returns the manifest of several files, each with a manifest of its own.

    Args:
        url: The checkpoint.
        parts: The manifests of the files.
        tensors: The tensors, in any order.
        structure: Structure of the state.
        about: Other attributes of the manifest.
    """
    guards: list[Guard] = []
    heads: list[bytes] = []
    for number, part in enumerate(parts):
        guards += (Guard(number, guard.offset, len(heads) + guard.head) for guard in part.guards)
        heads += part.heads
    return Manifest(
        url,
        tuple(part.files[0] for part in parts),
        tuple(in_order(tensors)),
        structure=structure,
        guards=tuple(guards),
        heads=tuple(heads),
        **about,
    )


class _Leaf:
    """A value without keys below it."""

    def __init__(self, node: Any) -> None:
        self.node = node


_Tree = dict[str | int, Any]


def nested(nodes: Mapping[str, Any], paths: Mapping[str, Sequence[str | int]], where: str) -> Any:
    """Returns the structure of a state, see `fastload.formats.state`.

    Args:
        nodes: The nodes of its values, by flattened name.
        paths: The keys of each name: texts of dicts, numbers of lists. A name without keys is itself a key.
        where: The checkpoint, for messages.

    Raises:
        ManifestError: The paths contradict each other.
    """
    root: _Tree = {}
    for name, node in nodes.items():
        path = paths.get(name, (name,))
        if len(path) > MAX_DEPTH:
            raise ManifestError(f"{where}: {show(name)} is nested deeper than {MAX_DEPTH} levels")
        tree = root
        for key in path[:-1]:
            tree = tree.setdefault(key, {})
            if type(tree) is not dict:
                raise ManifestError(f"{where}: {show(name)} is below what is no dict and no list")
        if path[-1] in tree:
            raise ManifestError(f"{where}: the keys of {show(name)}, {show(path)}, are not its own")
        tree[path[-1]] = _Leaf(node)
    writer = _TreeWriter(where, _MAX_HOLES + len(nodes))
    return writer.dict(root, ())


class _TreeWriter:
    """Writes a tree of keys as a structure."""

    def __init__(self, where: str, max_holes: int) -> None:
        self._where = where
        self._holes_left = max_holes

    def dict(self, tree: _Tree, numbers: Collection[str | int]) -> Any:
        """Writes a dict, with numbers for keys that are texts of numbers."""
        parameters = _parameters(tree)
        parts = []
        for key, below in tree.items():
            parts.append(int(key) if key in numbers else encode_value(key))
            parts.append(self._node(below, parameters if key == "state" else ()))
        return {"dict": parts}

    def _node(self, tree: Any, numbers: Collection[str | int]) -> Any:
        if type(tree) is _Leaf:
            return tree.node
        kinds = set(map(type, tree))
        if len(kinds) > 1:
            raise ManifestError(
                f"{self._where}: keys of one container are texts and numbers: {show([*tree])}"
            )
        return self._list(tree) if kinds == {int} else self.dict(tree, numbers)

    def _list(self, tree: _Tree) -> Any:
        length = 1 + max(map(int, tree))
        self._holes_left -= length - len(tree)
        if self._holes_left < 0:
            raise ManifestError(f"{self._where}: a list of {length} has only {len(tree)} members")
        return [self._node(tree[index], ()) if index in tree else None for index in range(length)]


def _parameters(tree: _Tree) -> set[str]:
    """Returns the keys of parameters in the state of an optimizer that are numbers in its groups.

    Flattening makes all keys texts; an optimizer finds its state by number.
    """
    found = set()
    groups = tree.get("param_groups")
    for group in groups.values() if type(groups) is dict else ():
        params = group.get("params") if type(group) is dict else None
        if type(params) is _Leaf and type(params.node) is list:
            found |= {str(number) for number in params.node if type(number) is int}
    return found


def dict_node(nodes: Mapping[Any, Any]) -> Any:
    """Returns the node of a dict, given those of its values by key."""
    return {"dict": [each for key, node in nodes.items() for each in (encode_value(key), node)]}


def refused_node(text: str) -> Any:
    """Returns the node of a value that cannot be loaded.

    Args:
        text: Its place, its type, and the reason.
    """
    return {"refused": [text]}
