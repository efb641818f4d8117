"""Reads directories of older transformers: ``pytorch_model.bin``, or several files and an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastload.base.threads import in_threads
from fastload.errors import ManifestError
from fastload.ext.formats.joined import dict_node, join_manifests, numbered
from fastload.ext.formats.torch_save import legacy_file, zip_file
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.names import BIN_INDEX_NAME, BIN_NAME, LEGACY_STARTS, START_BYTES, ZIP_STARTS
from fastload.formats.reading import read_bytes, reads_at_once, stat_all, what_instead
from fastload.formats.safetensors.reader import choose_single, find_single, read_index, require_numbered
from fastload.formats.state import children, leaves
from fastload.formats.untrusted import MemoryBudget, show
from fastload.storage.base import FileStat, Storage


def read_folder(storage: Storage, listing: Sequence[str], *, exact: bool = False) -> Manifest:
    """Reads the files that the index names, or else the one file.

    Args:
        storage: The storage.
        listing: The names of the files.
        exact: As for `zip_file.read_file`.

    Raises:
        IncompleteCheckpoint: A file is missing.
        ManifestError: A file or the index is malformed, or they contradict each other.
        StorageError: Storage failed.
    """
    budget = MemoryBudget(storage.url)

    def read(names: Sequence[str]) -> list[Manifest]:
        stats = stat_all(storage, names)
        return in_threads(
            lambda name: _read(storage, name, stats[name], budget, exact=exact), names, reads_at_once(storage)
        )

    if BIN_INDEX_NAME not in listing:
        if BIN_NAME not in listing:
            require_numbered(storage.url, listing, also=BIN_INDEX_NAME)
        return read([BIN_NAME])[0]
    weight_map, digest = read_index(storage, BIN_INDEX_NAME)
    single = find_single(storage, listing, BIN_INDEX_NAME, weight_map, BIN_NAME)
    if single is not None:
        (manifest,) = read([single])
        choose_single(storage, BIN_INDEX_NAME, weight_map, single, children(manifest.structure) or ())
        return manifest
    parts = read(sorted({*weight_map.values()}))
    return replace(_join(storage.url, parts, weight_map), index_digest=digest)


def _read(storage: Storage, name: str, stat: FileStat, budget: MemoryBudget, *, exact: bool) -> Manifest:
    head = read_bytes(storage, name, 0, min(stat.nbytes, START_BYTES))
    if head.startswith(ZIP_STARTS):
        return zip_file.read_file(storage, name, stat, exact=exact, budget=budget)
    if head.startswith(LEGACY_STARTS):
        return legacy_file.read_file(storage, name, stat, exact=exact, budget=budget)
    instead = (
        what_instead(storage, name, stat.nbytes) or f"no file of torch.save: it starts with {head[:8]!r}"
    )
    raise ManifestError(f"{storage.label(name)}: {instead}")


def _join(url: str, parts: Sequence[Manifest], weight_map: Mapping[str, str]) -> Manifest:
    """Joins the states of several files, which hold entries of one dict."""
    entries: dict[Any, tuple[int, Any]] = {}
    for number, part in enumerate(parts):
        where = f"{url}: {show(part.files[0].name)}"
        below = children(part.structure)
        if below is None or type(part.structure) is not dict or not all(type(key) is str for key in below):
            raise ManifestError(f"{where}: its state is no dict of names")
        for key, (_, node) in below.items():
            meant = weight_map.get(key)
            if key in entries and meant not in (part.files[0].name, parts[entries[key][0]].files[0].name):
                raise ManifestError(f"{where}: {show(key)} is in another file, too, and not in the index")
            if key not in entries or meant == part.files[0].name:
                entries[key] = number, node
    for key, name in weight_map.items():
        if key not in entries or parts[entries[key][0]].files[0].name != name:
            raise ManifestError(f"{url}: {show(key)} is not in {show(name)}, whatever the index says")
    structure = dict_node({key: node for key, (_, node) in entries.items()})
    return join_manifests(url, parts, _tensors(url, parts, entries), structure, format="torch")


def _tensors(
    url: str, parts: Sequence[Manifest], entries: Mapping[Any, tuple[int, Any]]
) -> Iterator[TensorEntry]:
    """Yields the tensors of the chosen entries, file by file."""
    kept: list[set[str]] = [set() for _ in parts]
    for key, (number, node) in entries.items():
        kept[number].update(saved.stored for saved in leaves(node, key))
    if sum(map(len, kept)) > len(set().union(*kept)):
        raise ManifestError(f"{url}: two files hold tensors of one name")
    for number, (part, names) in enumerate(zip(parts, kept, strict=True)):
        yield from (entry for entry in numbered(part, number).tensors if entry.name in names)
