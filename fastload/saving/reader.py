"""Reads of the bytes of this rank's tensors, of any strides, on any device."""

from __future__ import annotations

import copy
import ctypes
import json
import math
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

import torch
import xxhash
from torch import Tensor

from fastload.base.devices import DeviceStreams, accelerators_of
from fastload.base.memory import byte_view, copy_flat, copy_run, host_view
from fastload.base.stopwatch import Stopwatch
from fastload.geometry.box import Box
from fastload.geometry.dtensors import is_sharded, local_parts, mesh_of, narrowed
from fastload.saving.layout import Layout
from fastload.saving.messages import ShardRange

_SMALL_BYTES = 64 << 10


class StateReader:
    """Reads the bytes of this rank's tensors. Thread-safe.

    Args:
        layout: The files.
        tensors: Name → tensor; any strides, any device.
        uncounted: Names of tensors that may change without torch counting it; see `StateEncoding`.
        shards: Local tensors with version counters of their own; likewise.
        patience_s: How long `wait_copied` may take.

    Attributes:
        watch: Time of copies.
        streams: The streams that copy: the caller's.
        tensors: As given.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Mapping[str, Tensor],
        uncounted: Collection[str] = (),
        shards: Mapping[int, Tensor] = MappingProxyType({}),
        patience_s: float = math.inf,
    ) -> None:
        self.watch = Stopwatch()
        self.streams = DeviceStreams.of_caller(accelerators_of(tensors.values()))
        self._layout = layout
        self.tensors = tensors
        self._uncounted = uncounted
        self._shards = shards
        self._patience_s = patience_s
        self._parts: dict[str, list[tuple[Box, Tensor]]] = {}

    def with_layout(self, layout: Layout) -> StateReader:
        """Returns a reader of the same tensors in another layout."""
        reader = self.replaced(self.tensors, {}, self.streams)
        reader._layout = layout
        return reader

    def replaced(
        self,
        tensors: Mapping[str, Tensor],
        parts: Mapping[str, list[tuple[Box, Tensor]]],
        streams: DeviceStreams,
    ) -> StateReader:
        """Returns a reader of other tensors, with what `parts_of` returns of some of them."""
        reader = copy.copy(self)
        reader.tensors, reader._parts, reader.streams = tensors, dict(parts), streams
        return reader

    def name_of(self, number: int) -> str:
        """Returns the name of a tensor, by its number in `Layout.space`."""
        return self._layout.space.ranges[number].name

    def versions(self, number: int) -> list[tuple[Tensor, int]]:
        """Returns the version counters of a tensor: what has them, and the numbers of changes so far.

        Returns:
            Nothing if torch does not count all changes. It counts none of `BatchNorm` in its statistics,
            which are small.
        """
        name = self.name_of(number)
        tensor = self.tensors[name]
        if name in self._uncounted or tensor.nbytes <= _SMALL_BYTES:
            return []
        parts = self.parts_of(name)
        if sum(part.nbytes for _, part in parts) <= _SMALL_BYTES:
            return []
        local = parts[0][1]  # a view, which shares its counter
        if local.is_inference():
            return []
        counters = [tensor]
        if is_sharded(tensor):
            counters += [*(part for _, part in parts), self._shards.get(local.data_ptr(), local)]
        return [(counter, counter._version) for counter in counters]

    @property
    def on_device(self) -> bool:
        """Whether some tensors are on an accelerator."""
        return bool(self.streams)

    def is_in_host_memory(self, name: str) -> bool:
        """Whether a tensor is in host memory."""
        return self.tensors[name].is_cpu

    def places(self) -> str:
        """Says which tensors are on accelerators: none (empty), all, or a digest of their names."""
        if not self.on_device:
            return ""
        names = [name for name, tensor in self.tensors.items() if not tensor.is_cpu]
        if len(names) == len(self.tensors):
            return "all"
        return xxhash.xxh3_64_hexdigest(json.dumps(names).encode())

    def copy(self, ranges: Iterable[ShardRange], out: Tensor) -> None:
        """Starts to copy ranges of shards to the beginning of a flat uint8 host tensor; see `wait_copied`."""
        position, address = 0, out.data_ptr()
        with self.watch.span(nbytes=out.numel()), self.streams.current():
            for number, shard, begin, end in ranges:
                nbytes = end - begin
                tensor = self.part(number, shard.box)
                if nbytes <= _SMALL_BYTES and tensor.is_cpu and tensor.is_contiguous():
                    # Without views, which take longer to make than a small tensor to copy.
                    ctypes.memmove(address + position, tensor.data_ptr() + begin, nbytes)
                else:
                    _copy_bytes(tensor, begin, end, out[position : position + nbytes])
                position += nbytes

    def view(self, number: int) -> memoryview | None:
        """Returns a complete tensor in place; None if its bytes are not contiguous in host memory."""
        tensor = self.tensors[self.name_of(number)].detach()
        if is_sharded(tensor) or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
            return None
        return host_view(byte_view(tensor))

    def part(self, number: int, box: Box) -> Tensor:
        """Returns a box of a tensor, by its number in `Layout.space`."""
        name = self._layout.space.ranges[number].name
        tensor = self.tensors.get(name)
        if tensor is not None and not is_sharded(tensor) and box.sizes == tensor.shape:
            return tensor
        for held, view in self.parts_of(name):
            if held == box:
                return view
            if held.intersect(box) == box:
                return narrowed(view, box.relative_to(held))
        raise AssertionError(f"this rank does not hold {box}")

    def wait_copied(self) -> None:
        """Waits for all copies that were started.

        Raises:
            DeadlineExceeded: A device took too long.
        """
        with self.watch:
            self.streams.synchronize(self._patience_s)

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Returns the boxes of a tensor that this rank holds."""
        return tuple(box for box, _ in self.parts_of(name))

    def boxes_and_meshes(self) -> dict[str, tuple[tuple[Box, ...], str]]:
        """Returns the boxes that this rank holds of each tensor, and its mesh; see `mesh_of`."""
        return {name: (self.boxes(name), mesh_of(tensor)) for name, tensor in self.tensors.items()}

    def forget(self) -> None:
        """Drops the references to the state."""
        self.tensors, self._shards = {}, {}
        self._parts.clear()

    def parts_of(self, name: str) -> list[tuple[Box, Tensor]]:
        """Returns the local parts of a tensor, detached; cached, since a DTensor takes long to answer."""
        if name not in self._parts:
            self._parts[name] = [(box, view.detach()) for box, view in local_parts(self.tensors[name])]
        return self._parts[name]


def _copy_bytes(tensor: Tensor, begin: int, end: int, out: Tensor) -> None:
    """Starts to copy a range of the bytes of a tensor, of any strides, on any device, in row-major order."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        copy_flat(byte_view(tensor)[begin:end], out)
        return
    size = tensor.element_size()
    first, last = begin // size, -(-end // size)
    dense = torch.empty(last - first, dtype=tensor.dtype, device=tensor.device)
    copy_run(tensor, first, dense)
    copy_flat(byte_view(dense)[begin - first * size : end - first * size], out)
