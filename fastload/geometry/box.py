"""Boxes of tensors, the positions of their elements in row-major order, and tilings. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, product
from math import prod
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

_MOST_STEPS = 1_000_000  # and some for each box; real checkpoints need hardly any


class Box(NamedTuple):
    """A rectangular part of a tensor, in elements.

    Attributes:
        offsets: The first element in each dimension.
        sizes: The number of elements in each dimension; a box with a 0 is empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Returns the box of a complete tensor."""
        return cls((0,) * len(shape), tuple(shape))

    def is_within(self, shape: Sequence[int]) -> bool:
        """Whether the box is within the bounds of a tensor."""
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        ends = zip(self.offsets, self.sizes, shape, strict=True)
        return all(offset >= 0 and size >= 0 and offset + size <= full for offset, size, full in ends)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Returns the intersection with another box of the tensor; None if it is empty."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends, other._ends)
        common = Box(begins, tuple(end - begin for begin, end in zip(begins, ends, strict=True)))
        return common if all(size > 0 for size in common.sizes) else None

    def relative_to(self, other: Box) -> Box:
        """Returns the box with offsets relative to those of another one."""
        offsets = (offset - first for offset, first in zip(self.offsets, other.offsets, strict=True))
        return Box(tuple(offsets), self.sizes)

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides in elements put each element of a tensor into a place of its own, without gaps.

    Strides of dimensions of size 1 do not matter.
    """
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a tensor without gaps whose dimensions have the same order in memory.

    Strides that leave no gaps are returned as they are. A tensor with expanded dimensions has no such order:
    the result is row-major.
    """
    if is_dense(shape, strides):
        return tuple(strides)
    if any(not stride and size > 1 for stride, size in zip(strides, shape, strict=True)):
        return row_major(shape)
    dense, expected = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        dense[dim], expected = expected, expected * max(1, shape[dim])
    return tuple(dense)


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Yields the boxes of a range of elements of a row-major tensor, in their order: few, none of them empty.

    Args:
        shape: Shape of the tensor.
        begin: First element.
        end: The element after the last one.
    """
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row  # complete rows
    if first > last:  # within one row
        for box in boxes_of_range(shape[1:], begin - last * row, end - last * row):
            yield Box((last, *box.offsets), (1, *box.sizes))
        return
    for box in boxes_of_range(shape[1:], begin - (first - 1) * row, row) if begin < first * row else ():
        yield Box((first - 1, *box.offsets), (1, *box.sizes))
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    for box in boxes_of_range(shape[1:], 0, end - last * row):
        yield Box((last, *box.offsets), (1, *box.sizes))


class Runs(NamedTuple):
    """Runs of equal length at regular distances, as nested loops.

    Attributes:
        start: First position of the first run.
        length: Length of each run.
        steps: (count, distance) of each loop, the outermost first.
    """

    start: int
    length: int
    steps: tuple[tuple[int, int], ...]

    @property
    def num_runs(self) -> int:
        """Number of runs."""
        return prod(count for count, _ in self.steps)

    def of(self, flat: Tensor) -> Tensor:
        """Returns these elements of a flat tensor as a view of it, with a dimension for each loop."""
        sizes, strides = zip(*self.steps, (self.length, 1), strict=True)
        return flat.as_strided(sizes, strides, flat.storage_offset() + self.start)

    @property
    def end(self) -> int:
        """The position after the last run."""
        if not self.steps:
            return self.start + self.length
        return self.start + sum((count - 1) * distance for count, distance in self.steps) + self.length

    @property
    def total(self) -> int:
        """Length of all runs together."""
        return self.num_runs * self.length

    @property
    def stride(self) -> int:
        """Distance between the turns of the outermost loop; the length of a single run."""
        return self.steps[0][1] if self.steps else self.length

    def before(self, position: int) -> int:
        """Returns the length of the runs before a position."""
        if not self.steps:
            return min(max(position - self.start, 0), self.length)
        count, rest, total = 0, position - self.start, self.total
        for turns, distance in self.steps:
            if rest <= 0:
                return count
            total //= turns
            past = min(rest // distance, turns)
            count += past * total
            if past == turns:
                return count
            rest -= past * distance
        return count + min(max(rest, 0), self.length)

    def cut(self, begin: int, end: int) -> Iterator[Runs]:
        """Yields the runs from `begin` to `end` of their concatenation, in order, as few nested loops."""
        if begin >= end:
            return
        if not self.steps:
            yield Runs(self.start + begin, end - begin, ())
            return
        (_, distance), *inner = self.steps
        turn = Runs(self.start, self.length, tuple(inner))
        first, within = divmod(begin, turn.total)
        here = turn._replace(start=self.start + first * distance)
        turns = (end - begin) // turn.total
        if within or not turns:
            head = min(turn.total - within, end - begin)
            yield from here.cut(within, within + head)
            yield from self.cut(begin + head, end)
            return
        yield here if turns == 1 else here._replace(steps=((turns, distance), *inner))
        yield from self.cut(begin + turns * turn.total, end)

    def scaled(self, itemsize: int) -> Runs:
        """Returns the runs in bytes, given the length of an element."""
        steps = tuple((count, distance * itemsize) for count, distance in self.steps) if self.steps else ()
        return Runs(self.start * itemsize, self.length * itemsize, steps)

    def starts(self) -> Iterator[int]:
        """Yields the first position of each run, in order."""
        for at in product(*(range(0, count * distance, distance) for count, distance in self.steps)):
            yield self.start + sum(at)


def runs_of(box: Box, shape: Sequence[int]) -> Runs:
    """Returns the positions of the elements of a box in a row-major tensor, in as few runs as possible.

    Args:
        box: A box within the tensor, not empty.
        shape: Shape of the tensor.
    """
    return strided_runs(box, row_major(shape))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a row-major tensor, in elements."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


def strided_runs(box: Box, strides: Sequence[int]) -> Runs:
    """Returns the positions of the elements of a box in a tensor of any strides, in as few runs as possible.

    The outermost loop has the longest stride, whatever its dimension.

    Args:
        box: A box within the tensor, not empty, of size 1 in dimensions of stride 0.
        strides: Strides of the tensor, 0 or more. No two elements of the box may share memory.
    """
    start = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    length = 1
    steps: list[tuple[int, int]] = []
    for stride, size in sorted(zip(strides, box.sizes, strict=True)):
        if size == 1:
            continue
        if not steps and stride == length:
            length *= size  # contiguous with the inner dimensions
        elif steps and steps[-1][0] * steps[-1][1] == stride:
            steps[-1] = steps[-1][0] * size, steps[-1][1]  # continues the inner loop
        else:
            steps.append((size, stride))
    return Runs(start, length, tuple(reversed(steps)))


def overlap_of(boxes: Sequence[Box], num_dims: int) -> str:
    """Returns which two boxes overlap, or that they are too many to tell; empty if none do.

    Boxes are separated along one dimension after the other; those that cannot be are compared in pairs.
    """
    together = [list(boxes)]
    steps_left = _MOST_STEPS + 50 * len(boxes)
    while together:
        group = together.pop()
        if len(group) < 2:
            continue
        parts = next((parts for dim in range(num_dims) if len(parts := _separated(group, dim)) > 1), [])
        steps_left -= num_dims * len(group) if parts else len(group) ** 2
        if steps_left < 0:
            return "it has too many adjacent boxes to tell whether they overlap"
        together += parts
        for one, other in combinations(group, 2) if not parts else ():
            if one.intersect(other) is not None:
                return f"{box_text(one)} and {box_text(other)} overlap"
    return ""


def _separated(boxes: list[Box], dim: int) -> list[list[Box]]:
    """Groups boxes whose intervals in a dimension overlap, directly or through others."""
    boxes.sort(key=lambda box: box.offsets[dim])
    groups: list[list[Box]] = []
    end = -1
    for box in boxes:
        if box.offsets[dim] >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, box.offsets[dim] + box.sizes[dim])
    return groups


def box_text(box: Box) -> str:
    """Returns a box as messages show it."""
    return f"the box at {list(box.offsets)} of {list(box.sizes)}"
