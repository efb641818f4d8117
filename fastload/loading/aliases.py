"""Memory that several tensors of a checkpoint go into: finds it, and compares their values.

The first tensor whose bytes arrive is written. What arrives for another one is compared with the memory, so
neither needs memory of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastload.base.memory import byte_view, runs
from fastload.errors import MismatchError
from fastload.geometry.box import Box, overlap_of

FOUND_LATE = "found after its tensors were loaded: into= is undefined"
_ADVICE = (
    "use memory of its own for each of them (a model: untie its weights before the load), or load only one "
    "of them with names="
)
_COMPARED_ELEMENTS = 1 << 20  # at once, which bounds the memory for the comparison


class AliasedMemory:
    """The byte ranges of some memory that have been written, and for which tensor of the checkpoint.

    Args:
        names: Names of the tensors, by number.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._written: list[tuple[int, int, int]] = []  # begin, end, tensor; sorted, disjoint
        self._differing: set[tuple[int, int]] = set()

    def reset(self) -> None:
        """Begins a load: nothing is written."""
        self._written.clear()
        self._differing.clear()

    @property
    def differing(self) -> list[str]:
        """A line for each two tensors whose values differ."""
        return [
            differing_line(self._names[one], self._names[other]) for one, other in sorted(self._differing)
        ]

    def assign(self, begin: int, end: int, number: int) -> Iterator[tuple[int, int, int | None]]:
        """Notes that bytes are written for a tensor, except where another one has been written.

        Args:
            begin: Address of the first byte.
            end: The address after the last one.
            number: Number of the tensor.

        Yields:
            (begin, end, other): a part of them, and the tensor that is there; None if it has to be written.
        """
        written = self._written
        at = bisect_right(written, begin, key=lambda span: span[1])
        while begin < end:
            if at < len(written) and written[at][0] <= begin:
                last, other = min(end, written[at][1]), written[at][2]
                yield begin, last, None if other == number else other
                at += 1
            else:
                last = min(end, written[at][0]) if at < len(written) else end
                at = self._insert(at, begin, last, number)
                yield begin, last, None
            begin = last

    def note(self, one: int, other: int) -> None:
        """Notes two tensors whose values differ."""
        self._differing.add((min(one, other), max(one, other)))

    def _insert(self, at: int, begin: int, end: int, number: int) -> int:
        """Inserts a range before another one; returns the place of what follows it."""
        written, first, stop = self._written, at, at
        if at and written[at - 1][1:] == (begin, number):
            first, begin = at - 1, written[at - 1][0]
        if at < len(written) and (written[at][0], written[at][2]) == (end, number):
            stop, end = at + 1, written[at][1]
        written[first:stop] = [(begin, end, number)]
        return first + (stop == at)  # the range goes on where it was joined with the next one


class Alias(NamedTuple):
    """The place of a tensor of the checkpoint in memory that it shares with others.

    Attributes:
        memory: The memory.
        number: Number of the tensor.
    """

    memory: AliasedMemory
    number: int

    def write(self, target: Tensor, start: int, values: Tensor) -> None:
        """Writes elements that are consecutive in row-major order, or compares them with what is there.

        Args:
            target: A part of the memory: contiguous, or with the same shape and strides for all tensors.
            start: The first element.
            values: The elements; flat, of any dtype, on any device.
        """
        values = values.to(target.device, target.dtype)
        if target.is_contiguous():
            start, target, values = start * target.itemsize, byte_view(target), byte_view(values)
        size = target.itemsize
        first = target.data_ptr() + start * size
        for begin, end, other in self.memory.assign(first, first + values.nbytes, self.number):
            part = values[(begin - first) // size : (end - first) // size]
            at = start + (begin - first) // size
            if other is None:
                copy_elements(target, at, part)
            elif differ(target, at, part):
                self.memory.note(self.number, other)


def copy_elements(target: Tensor, start: int, elements: Tensor) -> None:
    """Copies elements that are consecutive in row-major order into a tensor; casts them to its dtype."""
    position = 0
    for run in runs(target, start, elements.numel()):
        run.copy_(elements[position : position + run.numel()].view(run.shape))
        position += run.numel()


def differ(tensor: Tensor, start: int, elements: Tensor) -> bool:
    """Whether elements of a tensor, consecutive in row-major order, have other bits than given ones."""
    position = 0
    for run in runs(tensor, start, elements.numel()):
        part = elements[position : position + run.numel()]
        position += run.numel()
        if not torch.equal(byte_view(_dense(run)), byte_view(_dense(part))):
            return True
    return False


def any_differ(target: Tensor, source: Tensor) -> bool:
    """Whether any element of a tensor has other bits than a copy of another one has there."""
    count = target.numel()
    for start in range(0, count, _COMPARED_ELEMENTS):
        parts = runs(source, start, min(_COMPARED_ELEMENTS, count - start))
        values = torch.cat([_dense(part.to(target.device, target.dtype)).view(-1) for part in parts])
        if differ(target, start, values):
            return True
    return False


def _dense(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()


def find_aliases(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns the indexes of strided tensors that share memory, directly or through others.

    Some that only interleave are among them, if their strides do not tell.
    """
    spans = []
    for index, tensor in enumerate(tensors):  # very many
        if (nbytes := tensor.numel() * tensor.itemsize) and not tensor.is_meta:
            if not tensor.is_contiguous():
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                nbytes = tensor.itemsize * (1 + sum((count - 1) * stride for count, stride in steps))
            try:
                begin, device = tensor.data_ptr(), 0 if tensor.is_cpu else 1 + (tensor.device.index or 0)
            except RuntimeError:  # a subclass without memory of its own
                continue
            spans.append((device, begin, begin + nbytes, index))
    spans.sort()
    overlapping: list[list[int]] = []
    together: list[int] = []
    on, last = -1, 0
    for device, begin, end, index in spans:
        if device != on or begin >= last:
            overlapping += [together] if len(together) > 1 else []
            together, on, last = [], device, 0
        together.append(index)
        last = max(last, end)
    overlapping += [together] if len(together) > 1 else []
    return [sorted(group) for group in overlapping if not _are_disjoint([tensors[index] for index in group])]


def _are_disjoint(tensors: Sequence[Tensor]) -> bool:
    """Whether views of one tensor with its strides, such as columns, have no element in common."""
    size, strides = tensors[0].itemsize, tensors[0].stride()
    if any(one.itemsize != size or one.stride() != strides for one in tensors):
        return False
    strides = (*strides, 1)  # columns of one element, too
    base = min(one.data_ptr() for one in tensors)
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    boxes = []
    for one in tensors:
        rest, misaligned = divmod(one.data_ptr() - base, size)
        offsets = [0] * len(strides)
        for dim in order:
            offsets[dim], rest = divmod(rest, strides[dim]) if strides[dim] else (0, rest)
        box = Box(tuple(offsets), (*one.shape, 1))
        reach = 0  # of the inner dimensions, which has to end within a step of the next one
        for dim in reversed(order):
            if misaligned or reach >= strides[dim]:
                return False
            reach += (box.offsets[dim] + box.sizes[dim] - 1) * strides[dim]
        boxes.append(box)
    return not overlap_of(boxes, len(strides))


def differing_line(one: str, other: str) -> str:
    """Returns the line of an error about two tensors."""
    return f"{one} and {other} go into the same memory, but have different values"


def raise_differing(url: str, lines: Sequence[str]) -> None:
    """Raises if there are lines about tensors of a checkpoint whose values differ.

    Raises:
        MismatchError: There are.
    """
    if lines:
        text = "\n  ".join([f"the checkpoint at {url} does not fit:", *lines])
        raise MismatchError(f"{text}\n{_ADVICE}\n{FOUND_LATE}", mismatched=tuple(lines))
