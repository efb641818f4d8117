"""Boxes of tensors that a rank requests, each with the tensor to fill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import ClassVar, TypeGuard

import torch
from torch import Tensor

from fastload.errors import OptionError
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.geometry.box import Box
from fastload.loading.match import Match
from fastload.loading.mismatch import overlaps, raise_mismatch
from fastload.loading.targets import DestinationBuilder, device_of

BoxesByName = Mapping[str, Sequence[tuple[Box, Tensor]]]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class BoxRequest:
    """The arguments of `Checkpoint.read`.

    Attributes:
        boxes: By name of the tensor, boxes of it, each with the tensor to fill.
        cast: Whether these tensors may have other dtypes.
    """

    boxes: BoxesByName
    cast: bool = False
    dtype: ClassVar[None] = None
    is_same: ClassVar[bool] = False

    def match(
        self, manifest: Manifest, rank: int = 0, size: int = 1, group: Sequence[int] | None = None
    ) -> Match:
        """Finds the destinations; see `LoadRequest.match`.

        Raises:
            MismatchError: Something does not fit; lists everything.
            OptionError: `boxes` is of another type.
        """
        pairs = [
            (name, _plain(name, box), tensor)
            for name, of_name in _items(self.boxes)
            for box, tensor in of_name
        ]
        known = manifest.by_name
        raise_mismatch(
            manifest.url,
            missing=[name for name in self.boxes if name not in known],
            mismatched=[
                f"{name}: {problem}"
                for name, box, tensor in pairs
                if name in known and (problem := next(_problems(known[name], box, tensor, self.cast), ""))
            ],
        )
        wanted: dict[str, list[tuple[Box, Tensor]]] = {name: [] for name in self.boxes}
        for name, box, tensor in sorted(pairs, key=lambda pair: pair[1].offsets):
            if box.numel:
                wanted[name].append((box, tensor))
        builder = DestinationBuilder(manifest)
        for entry in manifest.tensors:
            of_entry = wanted.get(entry.name, ())
            for box, tensor in of_entry:
                stored, shape = torch_spec(entry)
                # A complete tensor is one range. If all ranks want complete ones, the load is a common one.
                is_all = len(of_entry) == 1 and box == Box.whole(shape)
                builder.add(entry, stored, tensor, None if is_all else box)
        destinations = builder.build()
        return Match(destinations, device_of(destinations, _CPU), builder.copy)


def checked_boxes(manifest: Manifest, boxes: Mapping[str, Sequence[Box]]) -> dict[str, list[Box]]:
    """Returns boxes in the order of the checkpoint, of Python integers.

    Args:
        manifest: The checkpoint.
        boxes: By name of the tensor.

    Raises:
        MismatchError: Something does not fit; lists everything.
        OptionError: `boxes` is of another type.
    """
    if stray := [name for name, of_name in boxes.items() if not all(isinstance(box, Box) for box in of_name)]:
        raise OptionError(f"boxes= has something else than fastload.Box for {stray[0]}")
    plain = {name: [_plain(name, box) for box in of_name] for name, of_name in boxes.items()}
    known = manifest.by_name
    raise_mismatch(
        manifest.url,
        missing=[name for name in plain if name not in known],
        mismatched=[
            f"{name}: {_text(box)} is out of bounds for a tensor of shape {list(shape)}"
            for name, of_name in plain.items()
            if name in known
            for box, shape in [(box, torch_spec(known[name])[1]) for box in of_name]
            if not box.is_within(shape)
        ],
    )
    return {name: plain[name] for name in known if name in plain}


def _items(boxes: BoxesByName) -> Iterator[tuple[str, Sequence[tuple[Box, Tensor]]]]:
    for name, of_name in boxes.items() if isinstance(boxes, Mapping) else [("", None)]:
        if not (isinstance(of_name, list | tuple) and all(map(_is_pair, of_name))):
            raise OptionError("boxes= has to be a dict of lists of (Box, tensor), by name of the tensor")
        yield name, of_name


def _plain(name: str, box: Box) -> Box:
    """Returns a box of Python integers."""
    try:
        return Box(tuple(map(index, box.offsets)), tuple(map(index, box.sizes)))
    except TypeError:
        raise OptionError(f"boxes= has a box of {name} that is not made of integers: {box}") from None


def _is_pair(pair: object) -> TypeGuard[tuple[Box, Tensor]]:
    if not (isinstance(pair, tuple) and len(pair) == 2):
        return False
    return isinstance(pair[0], Box) and isinstance(pair[1], Tensor)


def _problems(entry: TensorEntry, box: Box, tensor: Tensor, cast: bool) -> Iterator[str]:
    stored, shape = torch_spec(entry)
    if not box.is_within(shape):
        yield f"{_text(box)} is out of bounds for a tensor of shape {list(shape)}"
    elif tuple(tensor.shape) != tuple(box.sizes):
        yield f"{_text(box)} is to go into a tensor of shape {list(tensor.shape)}"
    if hasattr(tensor, "to_local") or tensor.layout != torch.strided or tensor.is_meta:
        yield f"{_text(box)} is to go into a tensor that has no strided memory of its own"
    elif tensor.dtype != stored and not cast:
        yield f"dtype {stored} in the checkpoint, {tensor.dtype} in boxes="
    elif overlaps(tensor):
        yield "boxes= has a tensor whose elements share memory (expand, as_strided, unfold)"


def _text(box: Box) -> str:
    return f"the box at {list(box.offsets)} of {list(box.sizes)}"
