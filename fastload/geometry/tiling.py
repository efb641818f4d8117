"""Checks that boxes tile a tensor. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod

from fastload.geometry.box import Box

_MOST_STEPS = 1_000_000  # and some for each box; real checkpoints need hardly any


def tiling_problem(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    """Returns why boxes do not contain each element of a tensor once; empty if they do.

    Args:
        boxes: The boxes in any order; empty ones do not count.
        shape: Shape of the tensor.
    """
    outside = next((box for box in boxes if not box.is_within(shape)), None)
    if outside is not None:
        return f"{_text(outside)} is out of bounds for a tensor of shape {list(shape)}"
    filled = [box for box in boxes if box.numel]
    problem = _overlap(filled, len(shape))
    numel, wanted = sum(box.numel for box in filled), prod(shape)
    if not problem and numel != wanted:
        problem = f"its boxes have {numel} of {wanted} elements"
    return problem


def _overlap(boxes: Sequence[Box], num_dims: int) -> str:
    """Names two boxes that overlap; empty if there are none.

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
                return f"{_text(one)} and {_text(other)} overlap"
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


def _text(box: Box) -> str:
    return f"the box at {list(box.offsets)} of {list(box.sizes)}"
