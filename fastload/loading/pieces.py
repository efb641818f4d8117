"""Where what is wanted of a tensor lies in the checkpoint: after this there are byte ranges only."""

from __future__ import annotations

import torch
from torch import Tensor

from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, Piece, TensorEntry
from fastload.geometry.box import Box, Runs, row_major, runs_of, strided_runs
from fastload.geometry.dtensors import narrowed
from fastload.loading.place import Destination

__all__ = ["Sources"]


class Sources:
    """Takes what is wanted of tensors apart into what is wanted of each of their pieces.

    Args:
        manifest: The checkpoint.

    Attributes:
        copies: Pairs of a tensor and the one to copy it from, once that is there, in this order.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        self._manifest = manifest
        self._destinations: list[Destination] = []

    def add(self, entry: TensorEntry, stored: torch.dtype, tensor: Tensor, box: Box | None) -> None:
        """Wants a tensor of the checkpoint, or a box of it.

        Args:
            entry: The tensor.
            stored: Its dtype there, as torch has it.
            tensor: What receives it, of the shape of the box.
            box: What of it, not empty; None is all of it.
        """
        if not entry.pieces:
            runs = None
            if box is not None:
                runs = runs_of(box, torch_spec(entry)[1]).scaled(stored.itemsize)
            self._destinations.append(Destination(entry, stored, tensor, runs))
            return
        wanted = Box.whole(tensor.shape) if box is None else box
        for piece in entry.pieces:
            common = wanted.intersect(piece.box)
            if common is not None:
                view = narrowed(tensor.detach(), common.relative_to(wanted))
                self._add_piece(entry, stored, view, common.relative_to(piece.box), piece)

    def _add_piece(
        self, entry: TensorEntry, stored: torch.dtype, view: Tensor, within: Box, piece: Piece
    ) -> None:
        strides = piece.strides or row_major(piece.box.sizes)
        for dim, stride in enumerate(strides):
            if not stride and view.shape[dim] > 1:
                first = view.narrow(dim, 0, 1)
                self.copies.insert(0, (view.narrow(dim, 1, view.shape[dim] - 1), first))  # inner ones first
                view, within = first, Box(within.offsets, (*within.sizes[:dim], 1, *within.sizes[dim + 1 :]))
        # In the order of the file, the elements are those of the view that has its longest stride first.
        view = view.permute(sorted(range(view.dim()), key=lambda dim: -strides[dim]))
        runs = strided_runs(within, strides).scaled(stored.itemsize)
        is_all = runs == Runs(0, piece.nbytes, ())
        self._destinations.append(Destination(entry, stored, view, None if is_all else runs, piece))

    def destinations(self) -> list[Destination]:
        """Returns all that is wanted, in the order of `Manifest.extents`."""
        extents = self._manifest.extents
        if extents is not self._manifest.tensors:
            places = {id(extent): place for place, extent in enumerate(extents)}
            self._destinations.sort(key=lambda destination: places[id(destination.extent)])
        return self._destinations

    def copy(self) -> None:
        """Copies what was read once, and is there more than once."""
        for target, source in self.copies:
            target.copy_(source)
