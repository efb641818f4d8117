"""Reads directories of ``torch_checkpointing``: ``metadata.pkl``, and a file for each item and rank.

The metadata say how the tensors of an item (a model, an optimizer) are sharded, and which ranks have them. A
file is one of torch.save, in which the local tensor stands for a DTensor, or safetensors. Of ranks with equal
shards the first is read. Other values are those of the first rank that is read.

Items that are not sharded are not in the metadata, since each rank loads its own. They are read from the
files with the library's default names, if those of all ranks are equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

import torch
import xxhash

from fastload.base.memory import uncollected
from fastload.base.threads import in_threads
from fastload.errors import ManifestError
from fastload.ext.formats.joined import (
    TensorPart,
    dict_node,
    join_manifests,
    join_parts,
    nested,
    numbered,
    refused_node,
)
from fastload.ext.formats.torch_save import zip_file
from fastload.ext.formats.torch_save.unpickle import PickledDict, PickleParser, unpickle
from fastload.ext.formats.torch_save.zip_file import require_few_repeated
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.names import SHARDING_NAME, SUFFIX
from fastload.formats.reading import digest_of_file, read_limited, reads_at_once, stat_all
from fastload.formats.safetensors import reader as safetensors
from fastload.formats.state import children
from fastload.formats.untrusted import MemoryBudget, is_plain_path, is_size, parse_value, show
from fastload.formats.values import MAX_DEPTH, num_chars
from fastload.geometry.box import Box
from fastload.geometry.shards import local_shape, shard_boxes, shard_intervals
from fastload.storage.base import Storage

record = SHARDING_NAME

_MAX_METADATA_BYTES = 1 << 28
_MAX_RANKS = 1 << 20
_MAX_MESH_DIMS = 16
_NODE_BYTES, _PART_BYTES = 300, 1000  # of a path with its names, of a box with all that is made of it
_SAVED_BY_RANK = re.compile(r"(?P<item>.+)_(?P<rank>\d{1,7})\.pt", re.DOTALL)
_FORMATS = {"TorchSerialization": ".pt", "SafetensorsSerialization": SUFFIX}


class PlacementSpec(NamedTuple):
    """The placement of a DTensor along a dimension of its mesh, as `shard_intervals` takes it.

    Attributes:
        dim: The dimension of the tensor that is sharded; None if it is replicated.
        split_factor: See `geometry.shards.MeshCut`.
    """

    dim: int | None = None
    split_factor: int = 1


@dataclass(frozen=True)
class TensorSharding:
    """The shards of a tensor on some ranks.

    Attributes:
        shape: Shape of the complete tensor.
        boxes: For each rank whose shard no rank before it has: its boxes, each with the same box of its local
            tensor, for each possible shape of the local tensor.
    """

    shape: tuple[int, ...]
    boxes: dict[int, dict[tuple[int, ...] | None, list[tuple[Box, Box]]]]


@dataclass(frozen=True)
class ShardedItem:
    """An item of the metadata.

    Attributes:
        paths: The keys of each tensor, by its name within the item.
        shardings: Its shards, by name.
        files: The file of each rank, if it is not the default.
    """

    paths: dict[str, tuple[str | int, ...]]
    shardings: dict[str, list[TensorSharding]]
    files: dict[int, str]

    def ranks(self) -> list[int]:
        """Returns the ranks whose files are read, ascending."""
        found = {rank for parts in self.shardings.values() for part in parts for rank in part.boxes}
        return sorted(found)


def recognises(files: Sequence[str] | None, head: bytes) -> bool:
    """Whether a path is a directory with metadata; see `Format`."""
    return SHARDING_NAME in (files or ())


@uncollected
def read(storage: Storage, files: Sequence[str] | None, *, exact: bool) -> Manifest:
    """Reads a directory; see `Format`.

    Raises:
        ManifestError: The metadata or a file are malformed, or they contradict each other.
        StorageError: Storage failed.
    """
    assert files is not None, "recognised"
    where = storage.label(SHARDING_NAME)
    text = read_limited(storage, SHARDING_NAME, "metadata", _MAX_METADATA_BYTES)
    budget = MemoryBudget(storage.url)
    budget.add_input(len(text))
    metadata = _ShardingParser(where, budget).parse(text)
    unsharded = _unsharded(files, metadata)
    places = _places(metadata, unsharded, where)
    stats = stat_all(storage, sorted(places))

    def read_one(name: str) -> Manifest:
        key, _ = places[name]
        if name.endswith(SUFFIX):
            return _renamed(safetensors.read_file(storage, name, stats[name]), key)
        return zip_file.read_file(
            storage, name, stats[name], exact=exact, budget=budget, state_name=key, local_shards=True
        )

    found = dict(
        zip(
            map(places.__getitem__, stats),
            in_threads(read_one, [*stats], reads_at_once(storage)),
            strict=True,
        )
    )
    equal = {
        key
        for key, num_ranks in unsharded.items()
        if len({found[key, rank].files[0].header_digest for rank in range(num_ranks)}) == 1
    }
    kept = {
        (key, rank): manifest
        for (key, rank), manifest in found.items()
        if key in metadata or (key in equal and rank == 0)
    }
    parts = {place: numbered(manifest, number) for number, (place, manifest) in enumerate(kept.items())}
    tensors: list[TensorEntry] = []
    nodes: dict[str, Any] = {}
    for key, item in metadata.items():
        of_item = {rank: parts[key, rank] for rank in item.ranks()}
        tensors += _tensors(key, item, of_item, where)
        nodes[key] = _structure(item, [*of_item.values()], where)
    for key in unsharded:
        why = f"{key!r}, which differs between the ranks: load the file of one rank, such as"
        nodes[key] = refused_node(f"{why} {_default_name(key, 0)}")
        if key in equal:
            tensors += parts[key, 0].tensors
            nodes[key] = parts[key, 0].structure
    require_few_repeated(tensors, sum(stat.nbytes for stat in stats.values()), where)
    return join_manifests(
        storage.url,
        [*kept.values()],
        tensors,
        dict_node(nodes),
        record_digest=xxhash.xxh3_128_hexdigest(text),
        format="torch_checkpointing",
    )


def _default_name(key: str, rank: int) -> str:
    return f"{key}_{rank}.pt"


def _places(
    metadata: Mapping[str, ShardedItem], unsharded: Mapping[str, int], where: str
) -> dict[str, tuple[str, int]]:
    """Returns the item and the rank of each file to read.

    Raises:
        ManifestError: Two have the same file.
    """
    sharded = [(key, rank, item) for key, item in metadata.items() for rank in item.ranks()]
    found = {item.files.get(rank, _default_name(key, rank)): (key, rank) for key, rank, item in sharded}
    if len(found) < len(sharded):
        raise ManifestError(f"{where}: several items or ranks have one file")
    for key, num_ranks in unsharded.items():
        found |= {_default_name(key, rank): (key, rank) for rank in range(num_ranks)}
    return found


def digest(storage: Storage, name: str) -> str:
    """Returns what ranks compare of the metadata; see `Format`."""
    return digest_of_file(storage, SHARDING_NAME, _MAX_METADATA_BYTES)


def _unsharded(listing: Sequence[str], metadata: Mapping[str, ShardedItem]) -> dict[str, int]:
    """Returns the items with default names that the metadata lack, each with its number of ranks."""
    ranks: dict[str, set[int]] = {}
    for match in filter(None, map(_SAVED_BY_RANK.fullmatch, listing)):
        if match["item"] not in metadata and match["rank"] == str(int(match["rank"])):
            ranks.setdefault(match["item"], set()).add(int(match["rank"]))
    named = {name for item in metadata.values() for name in item.files.values()}
    return {
        key: len(found)
        for key, found in sorted(ranks.items())
        if found == set(range(len(found)))
        and named.isdisjoint(_default_name(key, rank) for rank in range(len(found)))
    }


def _renamed(manifest: Manifest, key: str) -> Manifest:
    tensors = (replace(entry, name=f"{key}.{entry.name}") for entry in manifest.tensors)
    return replace(manifest, tensors=tuple(tensors))


def _tensors(key: str, item: ShardedItem, files: Mapping[int, Manifest], where: str) -> Iterator[TensorEntry]:
    """Yields the tensors of an item, joined from the files of its ranks."""
    shardings = {f"{key}.{name}" if name else key: found for name, found in item.shardings.items()}
    for rank, manifest in files.items():
        if unknown := manifest.by_name.keys() - shardings.keys():
            raise ManifestError(
                f"{where}: it does not say how {show(min(unknown))} of rank {rank} is sharded"
            )
    for name, found in shardings.items():
        parts = [
            part
            for sharding in found
            for rank, boxes in sharding.boxes.items()
            if (entry := files[rank].by_name.get(name)) is not None
            for part in _parts(entry, sharding, boxes, f"{where}: {show(name)} of rank {rank}")
        ]
        if parts:  # else it is tied to another one, whose name the structure has
            yield join_parts(name, found[0].shape, parts, where)


def _parts(
    entry: TensorEntry,
    sharding: TensorSharding,
    boxes: Mapping[tuple[int, ...] | None, Sequence[tuple[Box, Box]]],
    where: str,
) -> Iterator[TensorPart]:
    shape = entry.shape[: len(sharding.shape)]
    if shape not in boxes and None not in boxes:
        raise ManifestError(f"{where}: shape {list(shape)}, where its placements make {show([*boxes])}")
    for box, within in boxes[shape if shape in boxes else None]:
        yield TensorPart(box, entry, within)


def _structure(item: ShardedItem, files: Sequence[Manifest], where: str) -> Any:
    """Returns the structure of an item, joined from the files of its ranks."""
    structures = [manifest.structure for manifest in files if manifest.structure is not None]
    if structures:
        return reduce(_merged, structures)
    nodes: dict[str, Any] = {name: {} for name in item.paths}
    return {} if "" in item.paths else nested(nodes, item.paths, where)


def _merged(one: Any, other: Any) -> Any:
    """Adds the keys that a part of a structure lacks, from that of another rank."""
    if not (type(one) is type(other) is dict and one.keys() == other.keys() and len(one) == 1):
        return one
    (tag,) = one
    if tag not in ("dict", "OrderedDict"):
        return one
    own, more = children(one), children(other)
    assert own is not None
    assert more is not None
    items: list[Any] = []
    for at, (name, (_, node)) in zip(range(0, len(one[tag]), 2), own.items(), strict=True):
        items += (one[tag][at], _merged(node, more[name][1]) if name in more else node)
    for at, name in zip(range(0, len(other[tag]), 2), more, strict=True):
        if name not in own:
            items += other[tag][at : at + 2]
    return {tag: items}


class _ShardingParser(PickleParser):
    """Parses ``metadata.pkl``: dicts, lists, tuples and plain values, nothing else.

    Args:
        where: Its URL, for messages.
        budget: Charged with the memory of its values.
    """

    def __init__(self, where: str, budget: MemoryBudget) -> None:
        super().__init__(where, budget)
        self._seen: dict[Any, TensorSharding] = {}

    def parse(self, text: bytes) -> dict[str, ShardedItem]:
        """Returns the items by key.

        Raises:
            ManifestError: It is malformed, or of another version.
        """
        fields = self._fields(unpickle(text, self.where), "metadata", "version", "world_size")
        if fields["version"] != "2.0":
            raise self.error(f"version {show(fields['version'])}: only 2.0 is read")
        items = {}
        for key, value in self.fields_of(fields["metadata"]).items():
            if not is_plain_path(key) or "/" in key:
                raise self.error(f"{show(key)} is no name of an item")
            items[key] = self._item(value)
        return items

    def _item(self, value: Any) -> ShardedItem:
        fields = self._fields(value, "nested_path_to_metadata", "rank_to_layout_info")
        item = ShardedItem({}, {}, {})
        for text, groups in self.fields_of(fields["nested_path_to_metadata"]).items():
            self.budget.charge(_NODE_BYTES + 8 * num_chars(text))
            path = self._path(text)
            name = ".".join(map(str, path))
            if name in item.paths:
                raise self.error(f"two tensors are called {show(name)}")
            item.paths[name] = path
            item.shardings[name] = [self._group(group) for group in self._list(groups)]
            if not item.shardings[name]:
                raise self.error(f"{show(name)} is on no rank")
        layouts = fields["rank_to_layout_info"]
        for rank, layout in layouts.pairs() if type(layouts) is PickledDict else ():
            if layout is not None and self._is_rank(rank):
                item.files[rank] = self._file(layout)
        return item

    def _path(self, text: str) -> tuple[str | int, ...]:
        try:
            path = parse_value(text.encode())
        except (ValueError, RecursionError):
            path = None
        if type(path) is not list or len(path) > MAX_DEPTH or {*map(type, path)} - {str, int}:
            raise self.error(f"{show(text)} is no path of keys")
        return tuple(path)

    def _file(self, layout: Any) -> str:
        fields = self._fields(layout, "file_path", "serialization_format")
        name = fields["file_path"]
        kind = self.fields_of(fields["serialization_format"]).get("type")
        if type(name) is not str or not is_plain_path(name) or "/" in name:
            raise self.error(f"not a plain name of a file in its directory: {show(name)}")
        if kind not in _FORMATS or name.endswith(SUFFIX) != (_FORMATS[kind] == SUFFIX):
            raise self.error(f"{show(name)} is of format {show(kind)}, which is not read")
        return name

    def _group(self, group: Any) -> TensorSharding:
        fields = self._fields(group, "ranks", "sharding_metadata")
        ranks = self._ranks(fields["ranks"])
        self.budget.charge(_NODE_BYTES + len(ranks))
        packed = self._fields(fields["sharding_metadata"], "data", "type")
        if packed["type"] == "DTensorShardingMetadata":
            return self._dtensor(self.fields_of(packed["data"]), ranks)
        if packed["type"] == "DefaultShardingMetadata" and len(ranks) == 1:
            return self._boxes(self.fields_of(packed["data"]), ranks[0])
        raise self.error(f"shards of type {show(packed['type'])} are not read")

    def _dtensor(self, data: dict[str, Any], ranks: tuple[int, ...]) -> TensorSharding:
        """Computes the boxes of a DTensor, once for all tensors of one shape and placements."""
        shape = self.sizes(data.get("global_shape"))
        mesh = self.fields_of(data.get("mesh_spec"))
        mesh_shape, mesh_ranks = self.sizes(mesh.get("mesh_shape")), self._ranks(mesh.get("mesh_data"))
        placements = tuple(map(partial(self._placement, len(shape)), self._list(data.get("placements"))))
        if len(placements) != len(mesh_shape) or len(mesh_shape) > _MAX_MESH_DIMS:
            raise self.error(f"{len(placements)} placements on a mesh of {show(mesh_shape)}")
        if prod(mesh_shape) != len(mesh_ranks) or len({*mesh_ranks}) < len(mesh_ranks):
            raise self.error(f"a mesh of {show(mesh_shape)} with the ranks {show(mesh_ranks)}")
        if any(one.split_factor > len(mesh_ranks) for one in placements):
            raise self.error(f"placements {show(placements)} on a mesh of {show(mesh_shape)}")
        key = shape, mesh_shape, mesh_ranks, placements, ranks
        if key not in self._seen:
            self._seen[key] = self._place(shape, mesh_shape, mesh_ranks, placements, ranks)
        return self._seen[key]

    def _place(
        self,
        shape: tuple[int, ...],
        mesh_shape: tuple[int, ...],
        mesh_ranks: tuple[int, ...],
        placements: tuple[PlacementSpec, ...],
        ranks: tuple[int, ...],
    ) -> TensorSharding:
        mesh = torch.tensor(mesh_ranks, dtype=torch.int64).reshape(mesh_shape)
        # torch sorts the ranks of each process group.
        numbers = [mesh.argsort(dim).argsort(dim).flatten().tolist() for dim in range(mesh.dim())]
        index_of = dict(zip(mesh_ranks, zip(*numbers, strict=True), strict=True))
        cuts = [dim for dim, placement in enumerate(placements) if placement.dim is not None]
        boxes: dict[int, Any] = {}
        seen = set()
        for rank in sorted(ranks):
            index = index_of.get(rank)
            if index is None:
                raise self.error(f"rank {rank} is not in its mesh")
            if (own := tuple(index[dim] for dim in cuts)) in seen:
                continue
            seen.add(own)
            found = shard_intervals(shape, mesh_shape, index, placements)
            boxes[rank] = {}
            for shard in reversed(found):  # torch's is the first
                within = shard_boxes(shard)
                self.budget.charge(_PART_BYTES * (1 + len(within)))
                boxes[rank][local_shape(shard)] = within or [_nothing(len(shape))]
        return TensorSharding(shape, boxes)

    def _boxes(self, data: dict[str, Any], rank: int) -> TensorSharding:
        """Reads the boxes of a rank that its own tensor class has given."""
        shape = self.sizes(data.get("global_shape"))
        rows = [self._list(data.get(name)) for name in ("global_offsets", "local_offsets", "local_sizes")]
        if len({*map(len, rows)}) != 1:
            raise self.error(f"{show([*map(len, rows)])} offsets and sizes of shards")
        self.budget.charge(_PART_BYTES * (1 + len(rows[0])))
        found = []
        for begin, local, sizes in zip(*rows, strict=True):
            size = self.sizes(sizes)
            found.append((Box(self.sizes(begin), size), Box(self.sizes(local), size)))
        if any(len(box.offsets) != len(shape) or len(own.offsets) != len(shape) for box, own in found):
            raise self.error(f"shards {show(found)} of a tensor of shape {show(shape)}")
        return TensorSharding(shape, {rank: {None: found or [_nothing(len(shape))]}})

    def _placement(self, num_dims: int, value: Any) -> PlacementSpec:
        fields = self.fields_of(value)
        kind, dim, factor = fields.get("type"), fields.get("dim"), fields.get("split_factor", 1)
        if kind == "Replicate":
            return PlacementSpec()
        if (
            kind in ("Shard", "StridedShard")
            and is_size(dim)
            and dim < num_dims
            and is_size(factor)
            and factor
        ):
            return PlacementSpec(dim, factor)
        raise self.error(f"{show(kind)} of dimension {show(dim)} is no placement that is read")

    def _ranks(self, value: Any) -> tuple[int, ...]:
        ranks = tuple(self._list(value))
        if not ranks or not all(map(self._is_rank, ranks)):
            raise self.error(f"{show(value)} in place of ranks")
        return ranks

    def _is_rank(self, value: Any) -> bool:
        return type(value) is int and 0 <= value < _MAX_RANKS

    def _list(self, value: Any) -> Sequence[Any]:
        if type(value) not in (list, tuple):
            raise self.error(f"{show(value)} in place of a list")
        return value  # type: ignore[no-any-return]

    def _fields(self, value: Any, *names: str) -> dict[str, Any]:
        fields = self.fields_of(value)
        if missing := [name for name in names if name not in fields]:
            raise self.error(f"{show(sorted(fields))} without {missing}")
        return fields


def _nothing(num_dims: int) -> tuple[Box, Box]:
    empty = Box((0,) * num_dims, (0,) * num_dims)
    return empty, empty
