"""Finds the data of tensors in the files of ``torch.distributed.checkpoint``.

Each *item*, a box of a tensor, is a complete file of torch.save within its file: a *head* with its
description, the data, and a directory of both. Items of one kind begin with the same bytes, so that one item
of each kind is read to learn its layout. The heads of the others are compared when their data are read,
without extra requests (`Manifest.guards`); or immediately, once one of them differed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from fastload.base.threads import in_threads
from fastload.errors import ManifestError
from fastload.formats.dcp.metadata import Item
from fastload.formats.manifest import TensorEntry
from fastload.formats.reading import read_bytes, read_ends, reads_at_once
from fastload.formats.torch_save.archive import TAIL_BYTES
from fastload.formats.torch_save.state import encode_pickle
from fastload.formats.torch_save.unpickle import unpickle
from fastload.formats.torch_save.zip_file import entries_of, open_archive
from fastload.formats.untrusted import MemoryBudget, show
from fastload.storage.base import Storage

_MAX_HEAD_BYTES = 1 << 20
_MAX_GAP_BYTES = 16 << 10  # faster to read than to make another request
_MAX_READ_BYTES = 4 << 20
_MAX_LAYOUTS = 16  # of one kind, with strides in other orders
_NUMBERS = re.compile("[0-9]+")
_NEAR_BYTES = 4 << 10  # read at first of an item; longer than most heads


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
