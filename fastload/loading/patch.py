"""Loads of deltas into tensors that hold a base: only the changes are read, and replaced in place.

Each rank hashes the checksum blocks that it has completely, with the changes in place, in memory of its own.
Where the checksum is that of the result, the tensor held the base. Everything else is loaded like any
checkpoint, the partial blocks at the ends of shards included. No tensor changes before all ranks have read
and verified everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait as wait_for
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastload.base.memory import byte_view, host_view
from fastload.base.threads import Workers
from fastload.errors import FastloadError
from fastload.formats.delta import Changes, SegmentTable, bits_of, find_changes, is_own_file
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.record import CHECKSUM_BYTES, checksum
from fastload.geometry.blocks import num_blocks
from fastload.geometry.box import Box, Runs
from fastload.loading.match import BoxRequest, Match
from fastload.loading.targets import Destination

if TYPE_CHECKING:
    from fastload.loading.load import Opened, Request, Session

_NUM_SAMPLES = 16
_APPLIED_ELEMENTS = 1 << 21  # at once, which bounds the memory for their positions
_COMPARED_BYTES = 2 << 20  # likewise
_NUM_THREADS = 2
_MOST_READ = 1 / 2  # of the bytes of a complete load


@dataclass(frozen=True)
class PatchedRequest:
    """A request of which some tensors are patched.

    Attributes:
        request: The request.
        matched: What is left to load; its `finish` patches the tensors.
    """

    request: Request
    matched: Match

    @property
    def dtype(self) -> torch.dtype | str | None:
        """See `Request`."""
        return self.request.dtype

    @property
    def is_same(self) -> bool:
        """See `Request`."""
        return self.request.is_same

    def match(self, manifest: Manifest, rank: int, size: int, group: Sequence[int] | None) -> Match:
        """Returns what is left to load."""
        return self.matched


def patched(
    opened: Opened, request: Request, match: Callable[[], Match], sessions: Callable[[int], Session]
) -> Request:
    """Reads the changes for tensors that hold a base, on all ranks, and returns what is left of a request.

    Args:
        opened: The delta.
        request: The request of this rank; not one for new tensors on all ranks.
        match: Finds its destinations.
        sessions: Returns the open files of a delta, by its number in `Access.deltas`.

    Raises:
        FastloadError: A rank cannot load, or a delta is damaged; nothing has changed.
    """
    world, access = opened.world, opened.access
    found: list[tuple[Match, _Candidates]] = []

    def look() -> dict[str, list[int]]:
        matched = match()
        found.append((matched, candidates := _Candidates(access.manifest, matched.destinations)))
        levels = [access.manifest, *access.ancestors]
        num_deltas = _num_affordable(opened)
        held = [number for number, level in enumerate(levels[: num_deltas + 1]) if candidates.may_hold(level)]
        return {"held": held, "has": [len(candidates.regions)]}

    what = f"comparing tensors with {access.manifest.url} and its bases"
    responses = world.agree(what, look)
    matched, candidates = found[0]
    known = set.intersection(*(set(each["held"]) for each in responses))
    if not known or not any(each["has"][0] for each in responses):
        return PatchedRequest(request, matched)
    patches = [
        _read(opened, sessions(number), access.ancestors[number], candidates)
        for number in reversed(range(min(known)))
    ]
    regions: list[_Region] = []

    def verify() -> None:
        regions.extend(candidates.verified(patches, access.manifest))

    world.settle(f"verifying the result of {access.manifest.url}", verify)
    return PatchedRequest(request, _without(matched, regions, patches))


def _num_affordable(opened: Opened) -> int:
    """Returns the most deltas that are read instead of the complete checkpoint."""
    left = opened.access.manifest.nbytes * _MOST_READ
    for number, delta in enumerate(opened.access.deltas):
        left -= delta.manifest.nbytes
        if left < 0:
            return number
    return len(opened.access.deltas)


class _Region(NamedTuple):
    """Complete checksum blocks of a tensor in a destination.

    Attributes:
        destination: The destination.
        begin: First byte in the tensor of the checkpoint.
        end: The byte after the last one.
        skipped: Bytes of the destination before the first one.
    """

    destination: Destination
    begin: int
    end: int
    skipped: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.begin

    @property
    def entry(self) -> TensorEntry:
        """The tensor in the checkpoint."""
        return self.destination.entry

    def bytes(self, begin: int, end: int) -> Tensor:
        """Returns a byte range of the tensor of the checkpoint as flat uint8, in place."""
        first = self.skipped + begin - self.begin
        return byte_view(self.destination.tensor.detach())[first : first + end - begin]


class _Checksums:
    """The checksums of the blocks of each tensor.

    Args:
        manifest: A manifest with checksums.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._files = manifest.files
        self._firsts: dict[str, tuple[int, int]] = {}
        counts = [0] * len(manifest.files)
        for entry in manifest.tensors:
            self._firsts[entry.name] = entry.file, counts[entry.file]
            counts[entry.file] += num_blocks(entry.nbytes, manifest.block_bytes)

    def get(self, name: str, number: int) -> bytes:
        """Returns the checksum of a block of a tensor."""
        file, first = self._firsts[name]
        begin = (first + number) * CHECKSUM_BYTES
        return self._files[file].checksums[begin : begin + CHECKSUM_BYTES]


class _Candidates:
    """What a rank has of a delta's result in complete checksum blocks.

    Args:
        manifest: The result.
        destinations: What the rank wants.

    Attributes:
        regions: The blocks.
    """

    def __init__(self, manifest: Manifest, destinations: Sequence[Destination]) -> None:
        self._block_bytes = length = manifest.block_bytes
        self.regions: list[_Region] = []
        for one in destinations:
            runs = one.runs or Runs(0, one.entry.nbytes, ())
            is_own = is_own_file(manifest.files[one.entry.file].name)
            if is_own or one.piece or one.dequantizer or runs.steps or not one.is_plain:
                continue
            begin, end = num_blocks(runs.start, length) * length, runs.end
            if end < one.entry.nbytes:
                end -= end % length
            if begin < end:
                self.regions.append(_Region(one, begin, end, begin - runs.start))

    def may_hold(self, manifest: Manifest) -> bool:
        """Whether some blocks, spread over all, are those of a checkpoint."""
        if manifest.block_bytes != self._block_bytes:
            return False
        sums, step = _Checksums(manifest), max(1, len(self.regions) // _NUM_SAMPLES)
        for region in self.regions[::step]:
            end = min(region.begin + self._block_bytes, region.end)
            found = checksum(host_view(region.bytes(region.begin, end).cpu()))
            if found != sums.get(region.entry.name, region.begin // self._block_bytes):
                return False
        return True

    def verified(self, patches: Sequence[_Patch], manifest: Manifest) -> list[_Region]:
        """Returns the regions that will be those of the result once they are patched."""
        sums, wrong = _Checksums(manifest), set[int]()
        step = max(1, _COMPARED_BYTES // self._block_bytes) * self._block_bytes

        def compare(number: int, begin: int, end: int) -> None:
            region = self.regions[number]
            data, name = region.bytes(begin, end), region.entry.name
            touching = [patch for patch in patches if patch.touches(name, begin, end)]
            if touching or not data.is_cpu:
                data = data.clone() if data.is_cpu else data.cpu()
            for patch in touching:
                patch.apply(name, begin, end, data)
            view = host_view(data)
            for at in range(0, end - begin, self._block_bytes):
                block = view[at : at + self._block_bytes]
                if checksum(block) != sums.get(name, (begin + at) // self._block_bytes):
                    wrong.add(number)
                    return

        workers = Workers(_NUM_THREADS, "fastload-patch")
        try:
            begun = [
                workers.submit(partial(compare, number, begin, min(begin + step, region.end)))
                for number, region in enumerate(self.regions)
                for begin in range(region.begin, region.end, step)
            ]
            wait_for(begun)
            for each in begun:
                each.result()
        finally:
            workers.close(wait_s=0.0)
        return [region for number, region in enumerate(self.regions) if number not in wrong]


class _Part(NamedTuple):
    """The changes of one tensor in some segments.

    Attributes:
        changes: The changed tensor.
        table: Its segments.
        segments: Those whose changes are here.
        indices: Their indices; int16 with the bits of U16.
        values: Their values; integers of the length of an element.
    """

    changes: Changes
    table: SegmentTable
    segments: range
    indices: Tensor
    values: Tensor


class _Patch:
    """The changes of one delta for the tensors of this rank.

    Args:
        url: The delta.
        parts: By name of the tensor, the changes, each in a part of it.
    """

    def __init__(self, url: str, parts: Mapping[str, Sequence[_Part]]) -> None:
        self._url = url
        self._parts = parts

    def touches(self, name: str, begin: int, end: int) -> bool:
        """Whether elements in a byte range of a tensor change."""
        return any(
            first < last for first, last in (_values(*each) for each in self._within(name, begin, end))
        )

    def _within(self, name: str, begin: int, end: int) -> Iterator[tuple[_Part, range]]:
        for part in self._parts.get(name, ()):
            size = part.changes.itemsize
            wanted = part.table.within(begin // size, end // size)
            first = max(wanted.start, part.segments.start)
            last = min(wanted.stop, part.segments.stop)
            if first < last:
                yield part, range(first, last)

    def apply(self, name: str, begin: int, end: int, data: Tensor) -> None:
        """Replaces the elements that change in a byte range of a tensor, which begins with a segment.

        Args:
            name: The tensor.
            begin: First byte.
            end: The byte after the last one.
            data: The bytes; flat uint8, on any device.
        """
        for part, within in self._within(name, begin, end):
            size, table = part.changes.itemsize, part.table
            step = max(1, _APPLIED_ELEMENTS // table.segment)
            elements = data.view(bits_of(size))
            for at in range(within.start, within.stop, step):
                segments = range(at, min(at + step, within.stop))
                first, last = _values(part, segments)
                if first == last:
                    continue
                start = int(table.index_starts[part.segments.start])
                indices = part.indices[
                    int(table.index_starts[segments.start]) - start : int(table.index_starts[segments.stop])
                    - start
                ]
                positions = table.positions(segments, indices, self._url) - begin // size
                values = part.values[first:last]
                elements.scatter_(0, positions.to(data.device), values.to(data.device))


def _values(part: _Part, segments: range) -> tuple[int, int]:
    """Returns the first value of some segments in a part, and the one after the last."""
    starts, first = part.table.value_starts, int(part.table.value_starts[part.segments.start])
    return int(starts[segments.start]) - first, int(starts[segments.stop]) - first


def _read(opened: Opened, session: Session, base: Manifest, candidates: _Candidates) -> _Patch:
    """Reads the changes of a delta for the tensors of this rank.

    Raises:
        FastloadError: A rank failed, or the delta is damaged.
    """
    stored = session.manifest
    try:
        changes = find_changes(base, stored)
        wanted: dict[str, list[_Region]] = {}
        for region in candidates.regions:
            if region.entry.name in changes:
                wanted.setdefault(region.entry.name, []).append(region)
        with session.usable():
            counts = {name: _new(changes[name].counts, 0, changes[name].counts.shape[0]) for name in wanted}
            session.load(
                BoxRequest({changes[name].counts.name: [box] for name, box in counts.items() if box[0].numel})
            )
            tables = {
                name: SegmentTable.of(changes[name], stored.block_bytes, box[1], stored.url)
                for name, box in counts.items()
            }
            parts = {
                name: [_new_part(changes[name], tables[name], region) for region in regions]
                for name, regions in wanted.items()
            }
            boxes: dict[str, list[tuple[Box, Tensor]]] = {}
            for of_tensor in parts.values():
                for part, *of_part in of_tensor:
                    for entry, box in zip((part.changes.indices, part.changes.values), of_part, strict=True):
                        if box[0].numel:
                            boxes.setdefault(entry.name, []).append(box)
            session.load(BoxRequest(boxes))
    except FastloadError as error:
        error.is_partial = False
        raise
    return _Patch(stored.url, {name: [part for part, *_ in found] for name, found in parts.items()})


def _new(entry: TensorEntry, first: int, last: int) -> tuple[Box, Tensor]:
    dtype, _ = torch_spec(entry)
    return Box((first,), (last - first,)), torch.empty(last - first, dtype=dtype)


def _new_part(
    changes: Changes, table: SegmentTable, region: _Region
) -> tuple[_Part, tuple[Box, Tensor], tuple[Box, Tensor]]:
    """Returns the changes in a region, and what to read for them."""
    segments = table.within(region.begin // changes.itemsize, region.end // changes.itemsize)
    bounds = slice(segments.start, segments.stop + 1, max(1, len(segments)))
    indices = _new(changes.indices, *table.index_starts[bounds].tolist())
    values = _new(changes.values, *table.value_starts[bounds].tolist())
    bits = values[1].view(bits_of(changes.itemsize))
    return _Part(changes, table, segments, indices[1].view(torch.int16), bits), indices, values


def _without(matched: Match, regions: Sequence[_Region], patches: Sequence[_Patch]) -> Match:
    """Returns what is left to load, with the patches of regions in `finish`."""
    held = {id(region.destination): region for region in regions}
    left: list[Destination] = []
    for one in matched.destinations:
        region = held.get(id(one))
        left += [one] if region is None else _ends(region)

    @torch.no_grad()
    def finish() -> object:
        for region in regions:
            tensor = region.destination.tensor
            with torch.inference_mode() if tensor.is_inference() else nullcontext():
                for patch in patches:
                    data = region.bytes(region.begin, region.end)
                    patch.apply(region.entry.name, region.begin, region.end, data)
        return matched.finish()

    nbytes = sum(region.nbytes for region in regions)
    return replace(
        matched, destinations=left, finish=finish, calls=True, is_in_place=False, bytes_patched=nbytes
    )


def _ends(region: _Region) -> Iterator[Destination]:
    """Yields what is left of the destination of a region: before and after it."""
    one, size = region.destination, region.destination.stored.itemsize
    start = region.begin - region.skipped
    end = start + one.nbytes
    flat = one.tensor.detach().view(-1)
    for begin, stop in ((start, region.begin), (region.end, end)):
        if begin < stop:
            view = flat[(begin - start) // size : (stop - start) // size]
            yield replace(one, tensor=view, runs=Runs(begin, stop - begin, ()))
