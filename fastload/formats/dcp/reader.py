"""Reads directories of ``torch.distributed.checkpoint`` (DCP): ``.metadata`` and ``*.distcp``.

Tensors are in the pieces that ranks saved. Other values are pickled, item by item, and read through the same
closed list as files of torch.save. Megatron's directories (``torch_dist``) also have one file of torch.save
with the values that are the same on all ranks. Its keys come before those of the items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

import xxhash

from fastload.base.memory import uncollected
from fastload.base.threads import in_threads
from fastload.errors import ManifestError
from fastload.formats.dcp.items import ItemLayout, TensorItem, find_layouts, infer_layouts, read_items
from fastload.formats.dcp.metadata import ChunkedTensor, DcpMetadata, Item, parse_dcp_metadata
from fastload.formats.encoder import leaf_node
from fastload.formats.manifest import FileEntry, Guard, Manifest, Piece, TensorEntry, in_order
from fastload.formats.names import METADATA_NAME, metadata_names
from fastload.formats.parts import join_pieces, nested, numbered
from fastload.formats.reading import ReadRange, do_at_once, read_ends, read_limited, reads_at_once, stat_all
from fastload.formats.torch_save import zip_file
from fastload.formats.torch_save.archive import TAIL_BYTES
from fastload.formats.torch_save.state import encode_pickle
from fastload.formats.torch_save.unpickle import Global, PickledCall, unpickle
from fastload.formats.torch_save.zip_file import entries_of, open_archive
from fastload.formats.untrusted import MemoryBudget, is_plain_path, show
from fastload.formats.values import BYTES_IO
from fastload.geometry.box import Box
from fastload.storage.base import FileStat, Storage

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
    """Returns the bytes of a `BytesIO`, marked; any other value as it is."""
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
