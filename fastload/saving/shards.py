"""The bytes of cells, taken from what this rank holds of the tensors of the state."""

from __future__ import annotations

from torch import Tensor

from fastload.formats.dtensors import narrowed
from fastload.geometry.box import Box
from fastload.saving.layout import Layout
from fastload.saving.packets import Packet
from fastload.saving.snapshot import Source, copy_bytes

__all__ = ["Shards"]


class Shards:
    """What this rank contributes, packet by packet. May be used by several threads.

    Args:
        layout: The files.
        source: The tensors of this rank's state.
    """

    def __init__(self, layout: Layout, source: Source) -> None:
        self._layout = layout
        self._source = source

    @property
    def on_device(self) -> bool:
        """Whether some of the state is on a accelerator."""
        return self._source.on_device

    def is_in_host_memory(self, name: str) -> bool:
        """Whether a tensor is there, by its name."""
        return self._source.tensor(name).is_cpu

    def copy(self, wanted: Packet, slab: Tensor) -> None:
        """Starts to copy a packet into the beginning of a flat uint8 host tensor; see `settle`."""
        position = 0
        with self._source.copying(wanted.nbytes):
            for number, cell, begin, end in wanted.stretches:
                out = slab[position : position + end - begin]
                copy_bytes(self._view(number, cell.box), begin, end, out)
                position += end - begin

    def settle(self) -> None:
        """Returns once all copies that were started are done."""
        self._source.settle()

    def _view(self, number: int, box: Box) -> Tensor:
        """Returns a box of a tensor that this rank holds."""
        for held, view in self._source.parts(self._layout.space.extents[number].name):
            if held == box:
                return view
            if held.intersect(box) == box:
                return narrowed(view, box.relative_to(held))
        raise AssertionError(f"this rank does not hold {box}")
