"""Parses the ``.metadata`` of torch.distributed.checkpoint, without importing its classes. Pure.

It is a pickle of torch's `Metadata`, or of Megatron's subclass. It has the tensors by flattened name with
their chunks, the file of each *item*, and the keys of each flattened name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastload.base.memory import uncollected
from fastload.errors import ManifestError
from fastload.formats.torch_save.unpickle import Global, PickledCall, PickledDict, sizes_of, unpickle
from fastload.formats.untrusted import MemoryBudget, is_size, is_unicode, show
from fastload.formats.values import MAX_DEPTH, num_chars
from fastload.geometry.box import Box, tiling_problem

_METADATA = ("Metadata", "MCoreMetadata")
_TENSOR, _BYTES = "TensorStorageMetadata", "BytesStorageMetadata"
_MAX_FIELDS = 64  # of an object; those of torch have five at most
_NODE_BYTES = 300  # of a name, or a key of a path, in the structure
_ITEM_BYTES, _CHUNK_BYTES = 400, 1000  # of where an item lies, of a box with all that is made of it
_NUM_TEXTS = 4  # of names at once

Path = tuple[str | int, ...]
Offsets = tuple[int, ...]


class Item(NamedTuple):
    """The byte range of a chunk of a tensor, or of a value.

    Attributes:
        file: Name of the file.
        offset: First byte in the file.
        nbytes: Length in bytes.
    """

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor, saved in one chunk or several.

    Attributes:
        dtype: Name of the dtype in torch, without ``torch.``.
        shape: Shape in elements.
        chunks: The boxes that tile it, each with its item.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, Item], ...]


@dataclass(frozen=True)
class DcpMetadata:
    """The tensors and values of a checkpoint.

    Attributes:
        tensors: By flattened name.
        values: The items of other values, by flattened name.
        paths: The keys of flattened names, as far as known.
    """

    tensors: dict[str, ChunkedTensor]
    values: dict[str, Item]
    paths: dict[str, Path]


@uncollected
def parse_dcp_metadata(
    data: bytes, where: str, budget: MemoryBudget, *, in_parts: bool = False
) -> DcpMetadata:
    """Reads a ``.metadata`` file.

    Args:
        data: Its content.
        where: Its URL, for messages.
        budget: Charged with the memory of its values.
        in_parts: Whether it is of one rank, so that its chunks need not tile tensors.

    Raises:
        ManifestError: It is malformed, or takes too much memory.
    """
    budget.add_input(len(data))
    fields = _fields(unpickle(data, where), _METADATA, where)
    items = _items(fields.get("storage_data"), where, budget)
    tensors: dict[str, ChunkedTensor] = {}
    values: dict[str, Item] = {}
    for name, what in _dict(fields.get("state_dict_metadata"), f"{where}: state_dict_metadata").items():
        if not is_unicode(name):
            raise ManifestError(f"{where}: {show(name)} is not valid Unicode")
        budget.charge(_NODE_BYTES + _NUM_TEXTS * num_chars(name))
        if _is_a(what, _BYTES):
            values[name] = _item(items, name, None, where)
        else:
            tensors[name] = _tensor(name, what, items, where, budget, in_parts)
    paths = _paths(fields.get("planner_data"), {*tensors, *values}, where, budget)
    return DcpMetadata(tensors, values, paths)


def join_metadata(parts: Sequence[DcpMetadata], where: str) -> DcpMetadata:
    """Joins the metadata of all ranks; the first rank with an entry wins.

    Raises:
        ManifestError: They contradict each other, or do not tile a tensor.
    """
    values: dict[str, Item] = {}
    paths: dict[str, Path] = {}
    boxes: dict[str, dict[Box, Item]] = {}
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        values = part.values | values
        paths = part.paths | paths
        for name, tensor in part.tensors.items():
            spec = tensor.dtype, tensor.shape
            if specs.setdefault(name, spec) != spec:
                raise ManifestError(f"{where}: {show(name)} is {show(specs[name])} and {show(spec)}")
            known = boxes.setdefault(name, {})
            for box, item in tensor.chunks:
                known.setdefault(box, item)
    tensors = {name: ChunkedTensor(*specs[name], tuple(known.items())) for name, known in boxes.items()}
    for name, tensor in tensors.items():
        _check_tiling(name, tensor, where)
        if name in values:
            raise ManifestError(f"{where}: {show(name)} is a tensor, and something else")
    return DcpMetadata(tensors, values, paths)


def _tensor(
    name: str,
    what: Any,
    items: Mapping[tuple[str, Offsets | None], Item],
    where: str,
    budget: MemoryBudget,
    in_parts: bool,
) -> ChunkedTensor:
    at = f"{where}: {show(name)}"
    fields = _fields(what, (_TENSOR,), at)
    shape = _sizes(fields.get("size"), at)
    chunks = fields.get("chunks")
    if type(chunks) is not list:
        raise ManifestError(f"{at}: its chunks are no list but {show(chunks)}")
    budget.charge(_CHUNK_BYTES * len(chunks))
    found = []
    for chunk in chunks:
        of_chunk = _fields(chunk, ("ChunkStorageMetadata",), at)
        box = Box(_sizes(of_chunk.get("offsets"), at), _sizes(of_chunk.get("sizes"), at))
        found.append((box, _item(items, name, box.offsets, where)))
    tensor = ChunkedTensor(_dtype(fields.get("properties"), at), shape, tuple(found))
    if not in_parts:
        _check_tiling(name, tensor, where)
    return tensor


def _check_tiling(name: str, tensor: ChunkedTensor, where: str) -> None:
    if problem := tiling_problem([box for box, _ in tensor.chunks], tensor.shape):
        raise ManifestError(f"{where}: {show(name)}: {problem}")


def _dtype(properties: Any, where: str) -> str:
    state = getattr(properties, "state", None)
    if not _is_a(properties, "TensorProperties") or type(state) is not tuple or not state:
        raise ManifestError(f"{where}: its properties are {show(properties)}")
    dtype, layout = state[0], state[1] if len(state) > 1 else None
    if type(dtype) is not Global or dtype.module != "torch":
        raise ManifestError(f"{where}: its dtype is {show(dtype)}")
    if type(layout) is PickledCall and layout.args != ("torch.strided",):
        raise ManifestError(f"{where}: a tensor of layout {show(layout.args)} cannot be read by bytes")
    return dtype.name


def _items(storage_data: Any, where: str, budget: MemoryBudget) -> dict[tuple[str, Offsets | None], Item]:
    """Returns the byte ranges of items, by name and offsets."""
    items: dict[tuple[str, Offsets | None], Item] = {}
    if type(storage_data) is not PickledDict:
        raise ManifestError(f"{where}: storage_data is no dict but {show(storage_data)}")
    budget.charge(_ITEM_BYTES * (len(storage_data) // 2))
    for index, info in storage_data.pairs():
        of_index = _fields(index, ("MetadataIndex",), where)
        name, offset = of_index.get("fqn"), of_index.get("offset")
        if type(name) is not str:
            raise ManifestError(f"{where}: the name of an item is {show(name)}")
        key = name, None if offset is None else _sizes(offset, where)
        fields = _fields(info, ("_StorageInfo",), where)
        if transforms := fields.get("transform_descriptors"):
            raise ManifestError(f"{where}: {show(name)} is compressed or the like: {show(transforms)}")
        file, begin, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        if type(file) is not str or not is_size(begin) or not is_size(length):
            raise ManifestError(f"{where}: {show(name)} is said to lie at {show((file, begin, length))}")
        item = Item(file, begin, length)
        if items.setdefault(key, item) != item:
            raise ManifestError(f"{where}: {show(name)} is said to lie in two places")
    return items


def _item(
    items: Mapping[tuple[str, Offsets | None], Item], name: str, offsets: Offsets | None, where: str
) -> Item:
    item = items.get((name, offsets))
    if item is None:
        at = "" if offsets is None else f" at {list(offsets)}"
        raise ManifestError(f"{where}: it does not say in which file {show(name)}{at} lies")
    return item


def _paths(planner_data: Any, names: Set[str], where: str, budget: MemoryBudget) -> dict[str, Path]:
    """Returns the keys of names; none if a planner has stored something else there."""
    if type(planner_data) is not PickledDict:
        return {}
    noted = {name: path for name, path in planner_data.pairs() if type(name) is str and name in names}
    for path in noted.values():
        if _is_path(path):
            budget.charge(_NODE_BYTES * len(path) + _NUM_TEXTS * num_chars(path))
    if not any(_is_path(path) and ".".join(map(str, path)) == name for name, path in noted.items()):
        return {}
    for name, path in noted.items():
        if not _is_path(path):
            raise ManifestError(f"{where}: the keys of {show(name)} are {show(path)}")
    return noted


def _is_path(what: Any) -> bool:
    is_short = type(what) is tuple and 0 < len(what) <= MAX_DEPTH
    return is_short and all(type(key) is str or is_size(key) for key in what)


def _is_a(what: Any, name: str) -> bool:
    return type(what) is PickledCall and what.what.name == name


def _fields(what: Any, names: Sequence[str], where: str) -> dict[str, Any]:
    """Returns the attributes of an object of one of some classes."""
    if type(what) is not PickledCall or what.what.name not in names:
        raise ManifestError(f"{where}: {show(what)} where a {names[0]} is to be")
    if type(what.state) is PickledDict and len(what.state) > 2 * _MAX_FIELDS:
        raise ManifestError(f"{where}: a {names[0]} of {len(what.state) // 2} attributes")
    return _dict(what.state, where)


def _dict(what: Any, where: str) -> dict[str, Any]:
    if type(what) is not PickledDict:
        raise ManifestError(f"{where}: no dict but {show(what)}")
    found: dict[str, Any] = what.by_text(where)
    return found


def _sizes(what: Any, where: str) -> tuple[int, ...]:
    try:
        return sizes_of(what)
    except ValueError as error:
        raise ManifestError(f"{where}: {error}") from None
