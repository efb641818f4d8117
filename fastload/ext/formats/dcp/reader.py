"""Reads directories of ``torch.distributed.checkpoint`` (DCP): ``.metadata`` and ``*.distcp``.

Tensors are in the pieces that ranks saved. Each *item*, a box of a tensor, is a complete file of torch.save
within its file: a *head* with its description, the data, and a directory of both. Items of one kind begin
with the same bytes, so that one item of each kind is read to learn its layout. The heads of the others are
compared when their data are read, without extra requests (`Manifest.guards`); or immediately, once one of
them differed.

Other values are pickled, item by item, and read through the same closed list as files of torch.save.
Megatron's directories (``torch_dist``) also have one file of torch.save with the values that are the same on
all ranks. Its keys come before those of the items.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar

import xxhash

from fastload.base.memory import uncollected
from fastload.base.threads import in_threads
from fastload.errors import ManifestError
from fastload.ext.formats.dcp.metadata import ChunkedTensor, DcpMetadata, Item, parse_dcp_metadata
from fastload.ext.formats.joined import join_pieces, nested, numbered
from fastload.ext.formats.torch_save import zip_file
from fastload.ext.formats.torch_save.archive import TAIL_BYTES, read_ends
from fastload.ext.formats.torch_save.state import encode_pickle
from fastload.ext.formats.torch_save.unpickle import Global, PickledCall, unpickle
from fastload.ext.formats.torch_save.zip_file import entries_of, open_archive
from fastload.formats.encoder import leaf_node
from fastload.formats.manifest import FileEntry, Guard, Manifest, Piece, TensorEntry, in_order
from fastload.formats.names import METADATA_NAME, metadata_names
from fastload.formats.reading import (
    ReadRange,
    do_at_once,
    read_bytes,
    read_limited,
    reads_at_once,
    stat_all,
)
from fastload.formats.untrusted import MemoryBudget, is_plain_path, show
from fastload.formats.values import BYTES_IO
from fastload.geometry.box import Box
from fastload.storage.base import FileStat, Storage

_MAX_HEAD_BYTES = 1 << 20
_MAX_GAP_BYTES = 16 << 10  # faster to read than to make another request
_MAX_READ_BYTES = 4 << 20
_MAX_LAYOUTS = 16  # of one kind, with strides in other orders
_NUMBERS = re.compile("[0-9]+")
_NEAR_BYTES = 4 << 10  # read at first of an item; longer than most heads
_MAX_METADATA_BYTES = 1 << 30
_MAX_VALUE_BYTES = 64 << 10  # read in one piece
_MAX_REMOTE_VALUE_BYTES = 1 << 20  # the same where each request takes a round trip
_BYTES_IO = Global("_io", "BytesIO")
_COMMON_NAME = "common.pt"
_MEGATRON_NAMES = {_COMMON_NAME, "metadata.json"}


@uncollected
def read_folder(storage: Storage, listing: Sequence[str], *, exact: bool = False) -> Manifest:
    """Reads a directory that DCP saved.

    Args:
        storage: The storage.
        listing: The names of the files.
        exact: Whether to read each layout; else most are inferred, with guards.

    Raises:
        ManifestError: The metadata are malformed, or they and the files contradict each other.
        StorageError: Storage failed.
    """
    names = metadata_names(listing)
    texts = _read_metadata(storage, names)
    urls = [storage.label(name) for name in names]
    where = urls[0] if len(urls) == 1 else storage.url
    budget = MemoryBudget(storage.url)
    metadata = parse_dcp_metadata(dict(zip(urls, texts, strict=True)), where, budget)
    common = [_COMMON_NAME] if _MEGATRON_NAMES.issubset(listing) else []
    stats = _stat_files(storage, metadata, where) | stat_all(storage, common)
    stats = dict(sorted(stats.items()))
    reader = _ItemReader(storage, metadata, [*stats], budget)
    tasks: list[Callable[[], Any]] = [partial(reader.read_tensors, exact=exact), reader.read_values]
    tasks += [partial(reader.read_common, stats[name]) for name in common]
    (guards, heads), digests, *keys = do_at_once(storage, tasks)
    stored = [entry.name for entry in reader.tensors]
    if len(set(stored)) < len(stored):
        twice = next(name for name, after in pairwise(sorted(stored)) if name == after)
        raise ManifestError(f"{where}: two tensors are called {show(twice)}")
    nodes = reader.nodes
    ordered = {name: nodes[name] for part in (metadata.paths, nodes) for name in part if name in nodes}
    return Manifest(
        storage.url,
        tuple(FileEntry(name, stat.nbytes, stat.version, digests[name]) for name, stat in stats.items()),
        tuple(in_order(reader.tensors)),
        structure={"dict": [*chain(*keys), *nested(ordered, metadata.paths, where)["dict"]]},
        record_digest=_digest(texts),
        format="dcp",
        guards=guards,
        heads=heads,
    )


def record_digest(storage: Storage) -> str:
    """Returns the `Manifest.record_digest` of a directory on this rank; empty if it is not DCP's."""
    names = metadata_names(storage.list() or ())
    return _digest(_read_metadata(storage, names)) if names else ""


def _read_metadata(storage: Storage, names: Sequence[str]) -> list[bytes]:
    return in_threads(lambda name: read_limited(storage, name, "metadata", _MAX_METADATA_BYTES), names)


def _digest(texts: Sequence[bytes]) -> str:
    digest = xxhash.xxh3_128()
    for text in texts:
        digest.update(text)
    return digest.hexdigest()


def _stat_files(storage: Storage, metadata: DcpMetadata, where: str) -> dict[str, FileStat]:
    """Returns size and version of the files that the metadata name, in name order.

    Raises:
        ManifestError: A name is not that of a file in this directory, or items are not within their file or
            overlap.
    """
    items = [item for tensor in metadata.tensors.values() for _, item in tensor.chunks]
    items = sorted([*items, *metadata.values.values()])
    names = sorted({item.file for item in items})
    for name in names:
        if not is_plain_path(name) or "/" in name:
            raise ManifestError(f"{where}: not a plain name of a file in its directory: {show(name)}")
    stats = stat_all(storage, names)
    for item in items:
        end, nbytes = item.offset + item.nbytes, stats[item.file].nbytes
        if end > nbytes:
            where = f"{storage.label(item.file)}: cut off"
            raise ManifestError(f"{where}: it has {nbytes} bytes, {METADATA_NAME} has an item up to {end}")
    for item, after in pairwise(items):
        if item.file == after.file and item.offset + item.nbytes > after.offset:
            raise ManifestError(f"{storage.label(item.file)}: items overlap at byte {after.offset}")
    return stats


def _without_class(value: Any) -> Any:
    """Returns the bytes of a `BytesIO`, also in a list, as Megatron has them, marked; others as they are."""
    if type(value) is list:
        return list(map(_without_class, value))
    is_file = type(value) is PickledCall and value.what == _BYTES_IO and not value.args
    if not is_file or type(value.state) is not tuple or not value.state:
        return value
    return BYTES_IO, value.state[0]


class _ItemReader:
    """Finds the tensors and values of a checkpoint in its files.

    Args:
        storage: The storage.
        metadata: The metadata.
        files: Names of the files, in the order of the manifest.
        budget: Charged with the memory of values.

    Attributes:
        tensors: The tensors found so far.
        nodes: The nodes of tensors and values, by flattened name; None before it is found.
    """

    def __init__(
        self, storage: Storage, metadata: DcpMetadata, files: Sequence[str], budget: MemoryBudget
    ) -> None:
        self.tensors: list[TensorEntry] = []
        self.nodes: dict[str, Any] = dict.fromkeys((*metadata.tensors, *metadata.values))
        self._storage = storage
        self._metadata = metadata
        self._numbers = {name: number for number, name in enumerate(files)}
        self._budget = budget

    def read_tensors(self, *, exact: bool) -> tuple[tuple[Guard, ...], tuple[bytes, ...]]:
        """Finds the pieces of all tensors; returns the guards, and the bytes that they expect."""
        tensors = self._metadata.tensors
        wanted = [
            TensorItem(name, item, tensor.dtype, box.sizes)
            for name, tensor in tensors.items()
            for box, item in tensor.chunks
        ]
        layouts = (find_layouts if exact else infer_layouts)(self._storage, wanted)
        next_layout = iter(layouts)
        for name, tensor in tensors.items():
            of_tensor = [next(next_layout) for _ in tensor.chunks]
            node = next((layout.refused for layout in of_tensor if layout.entry is None), None)
            if node is None and of_tensor:
                self.tensors.append(self._entry(name, tensor, of_tensor))
                node = self._leaf(name, tensor.dtype)
            self.nodes[name] = node
        guards: list[Guard] = []
        heads: dict[bytes, int] = {}
        for one, layout in zip(wanted, () if exact else layouts, strict=False):
            if layout.entry is not None:
                head = heads.setdefault(layout.head, len(heads))
                if layout.entry.nbytes:
                    begin = one.item.offset + len(layout.head)
                    guards.append(Guard(self._numbers[one.item.file], begin, head))
        return tuple(sorted(guards)), tuple(heads)

    def _leaf(self, name: str, dtype: str) -> Any:
        natural = ".".join(map(str, self._metadata.paths.get(name, (name,))))
        return leaf_node(name, natural or None, None, "complex128" if dtype == "complex128" else None)

    def _entry(self, name: str, tensor: ChunkedTensor, layouts: Sequence[ItemLayout]) -> TensorEntry:
        is_complex128 = tensor.dtype == "complex128"  # which is stored as pairs
        pieces, dtype = [], ""
        for (box, item), (_, entry, _) in zip(tensor.chunks, layouts, strict=True):
            assert entry is not None
            dtype = entry.dtype
            if is_complex128:
                box = Box((*box.offsets, 0), (*box.sizes, 2))
            within = entry.pieces[0] if entry.pieces else Piece(box, 0, entry.offset, entry.nbytes)
            offset = item.offset + entry.offset
            pieces.append(Piece(box, self._numbers[item.file], offset, within.nbytes, within.strides))
        shape = (*tensor.shape, 2) if is_complex128 else tensor.shape
        if dtype == "F4":
            shape = (*shape[:-1], 2 * shape[-1])
        return join_pieces(name, dtype, shape, pieces)

    def read_values(self) -> dict[str, str]:
        """Reads the values that are not tensors; returns a digest of those in each file, by its name."""
        names, items = list(self._metadata.values), list(self._metadata.values.values())
        digests: dict[str, str] = {}

        def read(index: int, data: bytes) -> None:
            digests[names[index]] = self._read_value(names[index], items[index], data)

        most = _MAX_VALUE_BYTES if self._storage.probes else _MAX_REMOTE_VALUE_BYTES
        small = [index for index, item in enumerate(items) if item.nbytes <= most]
        large = [index for index, item in enumerate(items) if item.nbytes > most]

        def read_small() -> None:
            read_items(
                self._storage, [items[index] for index in small], lambda at, data: read(small[at], data)
            )

        def read_large() -> None:
            in_threads(lambda index: read(index, b""), large)  # a few, for their memory

        do_at_once(self._storage, [read_small, read_large])
        of_files: dict[str, list[bytes]] = {name: [] for name in self._numbers}
        for name, item in sorted(self._metadata.values.items()):
            of_files[item.file].append(digests[name].encode())
        return {name: _digest(found) for name, found in of_files.items()}

    def _read_value(self, name: str, item: Item, data: bytes) -> str:
        """Adds a value, given its bytes, if they have been read; returns its digest."""
        where = f"{self._storage.label(item.file)}: {show(name)}"

        def read_data(offset: int, nbytes: int) -> bytes:
            return data[offset : offset + nbytes]

        read: ReadRange = read_data
        if not data:
            read = read_ends(self._storage, item.file, item.offset, item.nbytes, TAIL_BYTES, TAIL_BYTES)
        archive = open_archive(
            read, item.nbytes, where, num_reads=1 if data else reads_at_once(self._storage)
        )
        value = _without_class(unpickle(archive.pickle, where))
        state = encode_pickle(value, len(archive.pickle), where, name, budget=self._budget)
        self.nodes[name] = state.structure
        number = self._numbers[item.file]
        self.tensors += entries_of(state.tensors, archive.storages, where, item.nbytes, number, item.offset)
        return archive.digest

    def read_common(self, stat: FileStat) -> list[Any]:
        """Reads Megatron's file of torch.save; returns its keys and nodes, alternating."""
        part = zip_file.read_file(self._storage, _COMMON_NAME, stat, exact=True, budget=self._budget)
        self.tensors += numbered(part, self._numbers[_COMMON_NAME]).tensors
        parts = part.structure.get("dict") if type(part.structure) is dict else None
        if type(parts) is not list:
            where = self._storage.label(_COMMON_NAME)
            raise ManifestError(f"{where}: no dict but {show(part.structure)}")
        return parts


class TensorItem(NamedTuple):
    """A chunk of a tensor in DCP's metadata.

    Attributes:
        name: Name of the tensor.
        item: Its byte range.
        dtype: Name of the dtype in torch, without ``torch.``.
        sizes: Shape in elements.
    """

    name: str
    item: Item
    dtype: str
    sizes: tuple[int, ...]

    @property
    def kind(self) -> tuple[str, tuple[int, ...], int]:
        """A key that items with identical heads share."""
        return self.dtype, self.sizes, self.item.nbytes


class ItemLayout(NamedTuple):
    """The layout of an item.

    Attributes:
        head: The bytes before the data.
        entry: The tensor, with offsets in the item; None if it cannot be loaded.
        refused: The node with the reason.
    """

    head: bytes
    entry: TensorEntry | None
    refused: Any = None


def find_layouts(storage: Storage, wanted: Sequence[TensorItem]) -> list[ItemLayout]:
    """Returns the layouts of items, from the head of each.

    Args:
        storage: The storage.
        wanted: The items, within their files.

    Returns:
        The layout of each.

    Raises:
        ManifestError: An item is malformed, or contradicts the metadata.
        StorageError: Storage failed.
    """
    kind_of = [one.kind for one in wanted]
    kinds = {kind: [layout] for kind, layout in _one_of_each(storage, wanted, kind_of).items()}
    result: list[ItemLayout | None] = [None] * len(wanted)

    def compare(index: int, head: bytes) -> None:
        result[index] = next((one for one in kinds[kind_of[index]] if head.startswith(one.head)), None)

    most = {kind: max(len(layout.head) for layout in known) for kind, known in kinds.items()}
    heads = [
        Item(one.item.file, one.item.offset, min(one.item.nbytes, most[kind]))
        for one, kind in zip(wanted, kind_of, strict=True)
    ]
    read_items(storage, heads, compare)
    others = [index for index, layout in enumerate(result) if layout is None]
    for index, layout in zip(
        others, _read_layouts(storage, [wanted[index] for index in others]), strict=True
    ):
        known = kinds[kind_of[index]]
        result[index] = next((other for other in known if other == layout), layout)
        if len(known) < _MAX_LAYOUTS:
            known.append(layout)
    return [layout for layout in result if layout is not None]


def infer_layouts(storage: Storage, wanted: Sequence[TensorItem]) -> list[ItemLayout]:
    """Infers the layouts of items from one item of each kind and name, ignoring numbers in the name.

    The layers of a model have tensors of the same kinds, and so have the shards of one tensor. Items that
    cannot be loaded are all read.

    Args:
        storage: The storage.
        wanted: The items, within their files.

    Returns:
        The layout of each, the same object for equal layouts.

    Raises:
        ManifestError: An item that was read is malformed, or contradicts the metadata.
        StorageError: Storage failed.
    """
    roles = {one.name: _NUMBERS.sub("0", one.name) for one in wanted}
    kinds = [(roles[one.name], one.kind) for one in wanted]
    found = _one_of_each(storage, wanted, kinds)
    same: dict[Any, ItemLayout] = {}
    layouts = {
        kind: same.setdefault((layout.head, layout.entry), layout) if layout.entry else layout
        for kind, layout in found.items()
    }
    if all(layout.entry for layout in layouts.values()):
        return [layouts[kind] for kind in kinds]
    refused = [one for one, kind in zip(wanted, kinds, strict=True) if layouts[kind].entry is None]
    looked_at = dict(zip(refused, _read_layouts(storage, refused), strict=True))
    return [looked_at.get(one) or layouts[kind] for one, kind in zip(wanted, kinds, strict=True)]


_Kind = TypeVar("_Kind")


def _one_of_each(
    storage: Storage, wanted: Sequence[TensorItem], kinds: Sequence[_Kind]
) -> dict[_Kind, ItemLayout]:
    """Reads the layout of the first item of each kind."""
    firsts = dict(zip(reversed(kinds), reversed(wanted), strict=True))
    found = _read_layouts(storage, list(firsts.values()))
    return dict(zip(firsts, found, strict=True))


def read_items(storage: Storage, items: Sequence[Item], take: Callable[[int, bytes], None]) -> None:
    """Reads items in threads; adjacent ones with one request.

    Args:
        storage: The storage.
        items: The items.
        take: Called with the index of an item and its bytes, in any order.

    Raises:
        StorageError: Storage failed.
    """

    def read(group: list[int]) -> None:
        first = items[group[0]]
        data = read_bytes(storage, first.file, first.offset, _end(items[group[-1]]) - first.offset)
        for index in group:
            begin = items[index].offset - first.offset
            take(index, data[begin : begin + items[index].nbytes])

    in_threads(read, list(_groups(items)), reads_at_once(storage))


def _groups(items: Sequence[Item]) -> Iterator[list[int]]:
    group: list[int] = []
    for index in sorted(range(len(items)), key=items.__getitem__):
        item = items[index]
        if group:
            first, last = items[group[0]], items[group[-1]]
            is_near = item.file == last.file and item.offset - _end(last) <= _MAX_GAP_BYTES
            if not is_near or _end(item) < _end(last) or _end(item) - first.offset > _MAX_READ_BYTES:
                yield group
                group = []
        group.append(index)
    if group:
        yield group


def _end(item: Item) -> int:
    return item.offset + item.nbytes


def _read_layouts(storage: Storage, wanted: Sequence[TensorItem]) -> list[ItemLayout]:
    """Reads the layouts of items in threads."""
    return in_threads(lambda one: _read_layout(storage, one), wanted, reads_at_once(storage))


def _read_layout(storage: Storage, wanted: TensorItem) -> ItemLayout:
    """Reads everything but the data of an item.

    Raises:
        ManifestError: It is malformed, or contradicts the metadata.
    """
    item, where = wanted.item, f"{storage.label(wanted.item.file)} at byte {wanted.item.offset}"
    read = read_ends(storage, item.file, item.offset, item.nbytes, _NEAR_BYTES, TAIL_BYTES)
    archive = open_archive(read, item.nbytes, where)
    state = encode_pickle(
        unpickle(archive.pickle, where),
        len(archive.pickle),
        where,
        budget=MemoryBudget(where, _MAX_HEAD_BYTES),
    )
    entries = entries_of(state.tensors, archive.storages, where, item.nbytes, 0)
    if type(state.structure) is dict and state.structure.keys() == {"refused"}:
        return ItemLayout(b"", None, state.structure)
    tensor = next(iter(state.tensors.values()), None)
    if len(entries) != 1 or tensor is None or type(state.structure) is not dict:
        raise ManifestError(f"{where}: no tensor, but {show(state.structure)}")
    found = str(tensor.dtype).removeprefix("torch."), tensor.shape
    if found != (wanted.dtype, wanted.sizes):
        raise ManifestError(f"{where}: {show(found)}, where a tensor of {show(wanted[2:])} is to be")
    if entries[0].offset > _MAX_HEAD_BYTES:
        raise ManifestError(f"{where}: its data begin only after {entries[0].offset} bytes")
    return ItemLayout(read(0, entries[0].offset), entries[0])
