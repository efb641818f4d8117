"""Shards of tensors that the caller has cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from fastload.errors import OptionError
from fastload.geometry.box import Box, box_text, overlap_of
from fastload.geometry.dtensors import BoxedTensor


class Shard(BoxedTensor):
    """The part of a tensor that this rank holds, for tensors that are sharded by hand.

    In a state it stands for the complete tensor: `fastload.save` stores that once, whichever ranks hold its
    boxes, and a load into it fills `tensor`::

        rows = fastload.Shard(weight, (1024, 512), (256 * rank, 0))
        fastload.save({"weight": rows}, path)
        fastload.load(path, into={"weight": rows})

    Ranks may hold the same or overlapping boxes with equal elements. The ranks of a save together have to
    hold every element. It has the shape of the complete tensor, shares memory with `tensor`, and computes
    nothing.

    Args:
        tensor: The elements of the box, on any device, with any strides.
        global_shape: Shape of the complete tensor.
        offset: The first element of the box in each dimension.

    Attributes:
        boxes: The boxes, each with its tensor, as `Checkpoint.read` takes them.

    Raises:
        OptionError: The box is out of bounds, or the tensor is no plain one with memory.
    """

    @staticmethod
    def __new__(cls, tensor: Tensor, global_shape: Sequence[int], offset: Sequence[int]) -> Shard:
        """Makes a shard of one box."""
        return cls.of_boxes([(Box(tuple(map(index, offset)), tuple(tensor.shape)), tensor)], global_shape)

    @classmethod
    def of_boxes(cls, boxes: Sequence[tuple[Box, Tensor]], global_shape: Sequence[int]) -> Shard:
        """Returns a shard of several boxes, such as the layers of a stack that are on this rank.

        Args:
            boxes: The boxes, which do not overlap, and the tensor of each; at least one.
            global_shape: Shape of the complete tensor.

        Raises:
            OptionError: As for the class; or the boxes overlap, or their tensors differ in dtype or device.
        """
        shape = tuple(map(index, global_shape))
        if problem := _problem(boxes, shape):
            raise OptionError(f"fastload.Shard of a tensor of shape {list(shape)}: {problem}")
        first = boxes[0][1]
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        made.boxes = tuple((box, tensor.detach()) for box, tensor in boxes)
        shard: Shard = made
        return shard

    def as_real(self) -> Shard:
        """Views complex numbers as pairs, with a dimension more."""
        pairs = [
            (Box((*box.offsets, 0), (*box.sizes, 2)), torch.view_as_real(tensor))
            for box, tensor in self.boxes
        ]
        return self.of_boxes(pairs, (*self.shape, 2))

    def __repr__(self) -> str:  # type: ignore[override]
        boxes = ", ".join(f"{list(box.sizes)} at {list(box.offsets)}" for box, _ in self.boxes)
        return f"fastload.Shard({boxes} of {list(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls.of_boxes(args[0].boxes, args[0].shape)
        raise OptionError(f"{func} of a fastload.Shard: it computes nothing; use the tensors of its boxes")


def _problem(boxes: Sequence[tuple[Box, Tensor]], shape: tuple[int, ...]) -> str:
    """Returns why boxes and tensors make no shard; empty if they do."""
    if not boxes:
        return "it has no box"
    for box, tensor in boxes:
        where = box_text(box)
        if not box.is_within(shape):
            return f"{where} is out of bounds"
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return f"{where} has a {type(tensor).__name__} of layout {tensor.layout}: only plain tensors"
        if tensor.is_meta or tensor.is_conj() or tensor.is_neg():
            return f"{where} has a tensor without memory of its own: on the meta device, or lazily negated"
        if tuple(tensor.shape) != box.sizes:
            return f"{where} has a tensor of shape {list(tensor.shape)}"
    kinds = {(tensor.dtype, tensor.device) for _, tensor in boxes}
    if len(kinds) > 1:
        return f"its tensors differ: {', '.join(sorted(f'{dtype} on {device}' for dtype, device in kinds))}"
    return overlap_of([box for box, _ in boxes if box.numel], len(shape)) if len(boxes) > 1 else ""
