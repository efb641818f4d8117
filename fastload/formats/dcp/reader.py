"""Reads directories of ``torch.distributed.checkpoint`` (DCP): ``.metadata`` and ``*.distcp``.

Tensors are in the pieces that ranks saved. Other values are pickled, item by item, and read through the same
closed list as files of torch.save. Megatron's directories (``torch_dist``) also have one file of torch.save
with the values that are the same on all ranks. Its keys come before those of the items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import xxhash

from fastload.base.memory import uncollected
from fastload.base.threads import in_threads
from fastload.errors import ManifestError
from fastload.formats.dcp.items import ItemLayout, TensorItem, find_layouts, infer_layouts, read_items
from fastload.formats.dcp.metadata import ChunkedTensor, DcpMetadata, parse_dcp_metadata
from fastload.formats.encoder import leaf_node
from fastload.formats.manifest import FileEntry, Guard, Manifest, Piece, TensorEntry, in_order
from fastload.formats.names import METADATA_NAME, metadata_names
from fastload.formats.parts import join_pieces, nested, numbered
from fastload.formats.reading import read_bytes, read_limited, stat_all, url_of
from fastload.formats.torch_save import zip_file
from fastload.formats.torch_save.state import encode_pickle
from fastload.formats.torch_save.unpickle import unpickle
from fastload.formats.torch_save.zip_file import entries_of, open_archive
from fastload.formats.untrusted import MemoryBudget, is_plain_path, show
from fastload.geometry.box import Box
from fastload.storage.base import FileStat, Storage

_MAX_METADATA_BYTES = 1 << 30
_MAX_VALUE_BYTES = 64 << 10  # read in one piece
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
    budget = MemoryBudget(storage.url)
    urls = [url_of(storage, name) for name in names]
    where = urls[0] if len(urls) == 1 else storage.url
    metadata = parse_dcp_metadata(dict(zip(urls, texts, strict=True)), where, budget)
    stats = _stat_files(storage, metadata, where)
    is_megatron = _MEGATRON_NAMES.issubset(listing)
    if is_megatron:
        stats = dict(sorted((stats | stat_all(storage, [_COMMON_NAME])).items()))
    numbers = {name: number for number, name in enumerate(stats)}
    nodes: dict[str, Any] = {}
    wanted = [
        TensorItem(name, item, tensor.dtype, box.sizes)
        for name, tensor in metadata.tensors.items()
        for box, item in tensor.chunks
    ]
    layouts = (find_layouts if exact else infer_layouts)(storage, wanted)
    tensors = _tensors(metadata, layouts, numbers, nodes)
    digests: dict[str, str] = {}
    tensors += _values(storage, metadata, numbers, nodes, budget, digests)
    values: dict[str, list[bytes]] = {name: [] for name in stats}  # what a file holds besides tensors
    for name, item in sorted(metadata.values.items()):
        values[item.file].append(digests[name].encode())
    heads = {} if exact else {layout.head: None for layout in layouts if layout.entry is not None}
    common: list[Any] = []
    if is_megatron:
        part = zip_file.read_file(storage, _COMMON_NAME, stats[_COMMON_NAME], exact=True, budget=budget)
        tensors += numbered(part, numbers[_COMMON_NAME]).tensors
        common = _keys_of(part.structure, url_of(storage, _COMMON_NAME))
    stored = [entry.name for entry in tensors]
    if len(set(stored)) < len(stored):
        twice = next(name for name, after in pairwise(sorted(stored)) if name == after)
        raise ManifestError(f"{where}: two tensors are called {show(twice)}")
    ordered = {name: nodes[name] for part in (metadata.paths, nodes) for name in part if name in nodes}
    structure = {"dict": [*common, *nested(ordered, metadata.paths, where)["dict"]]}
    return Manifest(
        storage.url,
        tuple(
            FileEntry(name, stat.nbytes, stat.version, _digest(values[name])) for name, stat in stats.items()
        ),
        tuple(in_order(tensors)),
        structure=structure,
        record_digest=_digest(texts),
        format="dcp",
        guards=tuple(_guards(wanted, layouts, numbers, tuple(heads))) if heads else (),
        heads=tuple(heads),
    )


def _keys_of(structure: Any, where: str) -> list[Any]:
    """Returns the keys and values of a dict, alternating."""
    parts = structure.get("dict") if type(structure) is dict else None
    if type(parts) is not list:
        raise ManifestError(f"{where}: no dict but {show(structure)}")
    return parts


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
            where = f"{url_of(storage, item.file)}: cut off"
            raise ManifestError(f"{where}: it has {nbytes} bytes, {METADATA_NAME} has an item up to {end}")
    for item, after in pairwise(items):
        if item.file == after.file and item.offset + item.nbytes > after.offset:
            raise ManifestError(f"{url_of(storage, item.file)}: items overlap at byte {after.offset}")
    return stats


def _guards(
    wanted: Sequence[TensorItem],
    layouts: Sequence[ItemLayout],
    numbers: Mapping[str, int],
    heads: Sequence[bytes],
) -> list[Guard]:
    """Returns the bytes expected before the data of items."""
    places = {head: place for place, head in enumerate(heads)}
    return sorted(
        Guard(numbers[one.item.file], one.item.offset + len(layout.head), places[layout.head])
        for one, layout in zip(wanted, layouts, strict=True)
        if layout.entry is not None and layout.entry.nbytes
    )


def _tensors(
    metadata: DcpMetadata, layouts: Sequence[ItemLayout], numbers: Mapping[str, int], nodes: dict[str, Any]
) -> list[TensorEntry]:
    """Finds the pieces of all tensors; adds their nodes to the structure."""
    next_layout = iter(layouts)
    found = []
    for name, tensor in metadata.tensors.items():
        of_tensor = [next(next_layout) for _ in tensor.chunks]
        refused = next((layout.refused for layout in of_tensor if layout.entry is None), None)
        if refused is None and of_tensor:
            found.append(_entry(name, tensor, of_tensor, numbers))
            refused = _leaf(name, metadata, tensor.dtype)
        nodes[name] = refused
    return found


def _leaf(name: str, metadata: DcpMetadata, dtype: str) -> Any:
    natural = ".".join(map(str, metadata.paths.get(name, (name,))))
    return leaf_node(name, natural or None, None, "complex128" if dtype == "complex128" else None)


def _entry(
    name: str, tensor: ChunkedTensor, layouts: Sequence[ItemLayout], numbers: Mapping[str, int]
) -> TensorEntry:
    is_complex128 = tensor.dtype == "complex128"  # which is stored as pairs
    pieces, dtype = [], ""
    for (box, item), (_, entry, _) in zip(tensor.chunks, layouts, strict=True):
        assert entry is not None
        dtype = entry.dtype
        if is_complex128:
            box = Box((*box.offsets, 0), (*box.sizes, 2))
        within = entry.pieces[0] if entry.pieces else Piece(box, 0, entry.offset, entry.nbytes)
        offset = item.offset + entry.offset
        pieces.append(Piece(box, numbers[item.file], offset, within.nbytes, within.strides))
    shape = (*tensor.shape, 2) if is_complex128 else tensor.shape
    if dtype == "F4":
        shape = (*shape[:-1], 2 * shape[-1])
    return join_pieces(name, dtype, shape, pieces)


def _values(
    storage: Storage,
    metadata: DcpMetadata,
    numbers: Mapping[str, int],
    nodes: dict[str, Any],
    budget: MemoryBudget,
    digests: dict[str, str],
) -> list[TensorEntry]:
    """Reads the values that are not tensors into the structure; returns the tensors within them."""
    names, items = list(metadata.values), list(metadata.values.values())
    found: list[TensorEntry] = []

    def read(index: int, data: bytes) -> None:
        name, item = names[index], items[index]
        where = f"{url_of(storage, item.file)}: {show(name)}"
        archive = open_archive(
            lambda offset, nbytes: (
                data[offset : offset + nbytes]
                if data
                else read_bytes(storage, item.file, item.offset + offset, nbytes)
            ),
            item.nbytes,
            where,
        )
        state = encode_pickle(
            unpickle(archive.pickle, where), len(archive.pickle), where, name, budget=budget
        )
        nodes[name], digests[name] = state.structure, archive.digest
        found.extend(
            entries_of(state.tensors, archive.storages, where, item.nbytes, numbers[item.file], item.offset)
        )

    small = [index for index, item in enumerate(items) if item.nbytes <= _MAX_VALUE_BYTES]
    large = [index for index, item in enumerate(items) if item.nbytes > _MAX_VALUE_BYTES]
    read_items(storage, [items[index] for index in small], lambda at, data: read(small[at], data))
    for index in large:
        read(index, b"")
    return found
