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
from fastload.ext.formats.joined import tiling_problem
from fastload.ext.formats.torch_save.unpickle import Global, PickledCall, PickledDict, PickleParser, unpickle
from fastload.formats.untrusted import MemoryBudget, is_size, is_unicode, show
from fastload.formats.values import MAX_DEPTH, num_chars
from fastload.geometry.box import Box

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


Items = dict[tuple[str, Offsets | None], Item]
"""By flattened name, and the offsets of a chunk of a tensor."""


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
def parse_dcp_metadata(texts: Mapping[str, bytes], where: str, budget: MemoryBudget) -> DcpMetadata:
    """Reads and joins ``.metadata`` files, of all ranks or of each; the first with an entry wins.

    Args:
        texts: Their contents by URL.
        where: The checkpoint, for messages.
        budget: Charged with the memory of their values.

    Raises:
        ManifestError: They are malformed, contradict each other, do not tile a tensor, or take too much
            memory.
    """
    values: dict[str, Item] = {}
    paths: dict[str, Path] = {}
    boxes: dict[str, dict[Box, Item]] = {}
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    for url, text in texts.items():
        part = _MetadataParser(url, budget).parse(text)
        values = part.values | values
        paths = part.paths | paths
        for name, tensor in part.tensors.items():
            spec = tensor.dtype, tensor.shape
            if specs.setdefault(name, spec) != spec:
                raise ManifestError(f"{where}: {show(name)} is {show(specs[name])} and {show(spec)}")
            own = dict(tensor.chunks)
            if len(own) < len(tensor.chunks):
                raise ManifestError(f"{url}: {show(name)}: a chunk of it is listed twice")
            known = boxes.setdefault(name, {})
            for box, item in own.items():
                known.setdefault(box, item)
    tensors = {name: ChunkedTensor(*specs[name], tuple(known.items())) for name, known in boxes.items()}
    for name, tensor in tensors.items():
        if problem := tiling_problem([box for box, _ in tensor.chunks], tensor.shape):
            raise ManifestError(f"{where}: {show(name)}: {problem}")
        if name in values:
            raise ManifestError(f"{where}: {show(name)} is a tensor, and something else")
    return DcpMetadata(tensors, values, paths)


class _MetadataParser(PickleParser):
    """Parses one ``.metadata`` file."""

    def parse(self, data: bytes) -> DcpMetadata:
        """Returns its tensors, whose chunks need not tile them, and values."""
        self.budget.add_input(len(data))
        fields = self._object(unpickle(data, self.where), _METADATA)
        items = self._items(fields.get("storage_data"))
        tensors: dict[str, ChunkedTensor] = {}
        values: dict[str, Item] = {}
        found = self.fields_of(fields.get("state_dict_metadata"), "state_dict_metadata")
        for name, what in found.items():
            if not is_unicode(name):
                raise self.error(f"{show(name)} is not valid Unicode")
            self.budget.charge(_NODE_BYTES + _NUM_TEXTS * num_chars(name))
            if _is_a(what, _BYTES):
                values[name] = self._item(items, name, None)
            else:
                tensors[name] = self._tensor(name, what, items)
        return DcpMetadata(tensors, values, self._paths(fields.get("planner_data"), {*tensors, *values}))

    def _tensor(self, name: str, value: Any, items: Items) -> ChunkedTensor:
        what = show(name)
        fields = self._object(value, (_TENSOR,), what)
        shape = self.sizes(fields.get("size"), what)
        chunks = fields.get("chunks")
        if type(chunks) is not list:
            raise self.error(f"its chunks are no list but {show(chunks)}", what)
        self.budget.charge(_CHUNK_BYTES * len(chunks))
        found = []
        for chunk in chunks:
            of_chunk = self._object(chunk, ("ChunkStorageMetadata",), what)
            box = Box(self.sizes(of_chunk.get("offsets"), what), self.sizes(of_chunk.get("sizes"), what))
            found.append((box, self._item(items, name, box.offsets)))
        return ChunkedTensor(self._dtype(fields.get("properties"), what), shape, tuple(found))

    def _dtype(self, properties: Any, what: str) -> str:
        state = getattr(properties, "state", None)
        if not _is_a(properties, "TensorProperties") or type(state) is not tuple or not state:
            raise self.error(f"its properties are {show(properties)}", what)
        dtype, layout = state[0], state[1] if len(state) > 1 else None
        if type(dtype) is not Global or dtype.module != "torch":
            raise self.error(f"its dtype is {show(dtype)}", what)
        if type(layout) is PickledCall and layout.args != ("torch.strided",):
            raise self.error(f"a tensor of layout {show(layout.args)} cannot be read by bytes", what)
        return dtype.name

    def _items(self, storage_data: Any) -> Items:
        """Returns the byte ranges of items, by name and offsets."""
        items: Items = {}
        if type(storage_data) is not PickledDict:
            raise self.error(f"storage_data is no dict but {show(storage_data)}")
        self.budget.charge(_ITEM_BYTES * (len(storage_data) // 2))
        for index, info in storage_data.pairs():
            of_index = self._object(index, ("MetadataIndex",))
            name, offset = of_index.get("fqn"), of_index.get("offset")
            if type(name) is not str:
                raise self.error(f"the name of an item is {show(name)}")
            key = name, None if offset is None else self.sizes(offset)
            fields = self._object(info, ("_StorageInfo",))
            if transforms := fields.get("transform_descriptors"):
                raise self.error(f"{show(name)} is compressed or the like: {show(transforms)}")
            file, begin, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
            if type(file) is not str or not is_size(begin) or not is_size(length):
                raise self.error(f"{show(name)} is said to lie at {show((file, begin, length))}")
            item = Item(file, begin, length)
            if items.setdefault(key, item) != item:
                raise self.error(f"{show(name)} is said to lie in two places")
        return items

    def _item(self, items: Items, name: str, offsets: Offsets | None) -> Item:
        item = items.get((name, offsets))
        if item is None:
            at = "" if offsets is None else f" at {list(offsets)}"
            raise self.error(f"it does not say in which file {show(name)}{at} lies")
        return item

    def _paths(self, planner_data: Any, names: Set[str]) -> dict[str, Path]:
        """Returns the keys of names; none if a planner has stored something else there."""
        if type(planner_data) is not PickledDict:
            return {}
        noted = {name: path for name, path in planner_data.pairs() if type(name) is str and name in names}
        for path in noted.values():
            if _is_path(path):
                self.budget.charge(_NODE_BYTES * len(path) + _NUM_TEXTS * num_chars(path))
        if not any(_is_path(path) and ".".join(map(str, path)) == name for name, path in noted.items()):
            return {}
        for name, path in noted.items():
            if not _is_path(path):
                raise self.error(f"the keys of {show(name)} are {show(path)}")
        return noted

    def _object(self, value: Any, names: Sequence[str], what: str = "") -> dict[str, Any]:
        """Returns the attributes of an object of one of some classes."""
        if type(value) is not PickledCall or value.what.name not in names:
            raise self.error(f"{show(value)} where a {names[0]} is to be", what)
        if type(value.state) is PickledDict and len(value.state) > 2 * _MAX_FIELDS:
            raise self.error(f"a {names[0]} of {len(value.state) // 2} attributes", what)
        return self.fields_of(value.state, what)


def _is_path(value: Any) -> bool:
    is_short = type(value) is tuple and 0 < len(value) <= MAX_DEPTH
    return is_short and all(type(key) is str or is_size(key) for key in value)


def _is_a(value: Any, name: str) -> bool:
    return type(value) is PickledCall and value.what.name == name
