"""Lists of shards and positions for another number of ranks, by `LoadOptions.per_rank_mismatch`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from fastload.formats.values import show_key


def merge(values: Sequence[Any], rank: int, size: int) -> Any:
    """Gives each rank the values of all ranks.

    Lists are joined, in the order of the ranks. A `range` that goes on where the one before ends is joined
    with it, so that positions stay short. Dicts are merged by key. Anything else has to be the same on all
    ranks, such as the number of an epoch or a tensor.

    Args:
        values: The values of the ranks that saved, in their order.
        rank: This rank; every rank gets the same.
        size: Number of ranks.

    Raises:
        ValueError: The values differ in something else.
    """
    first = values[0]
    if all(isinstance(value, list) for value in values):
        return _joined(list(chain.from_iterable(values)))
    if all(isinstance(value, dict) for value in values):
        if any(value.keys() != first.keys() for value in values):
            raise ValueError("the dicts of the ranks have different keys")
        return {key: merge([value[key] for value in values], rank, size) for key in first}
    if not all(_is_same(value, first) for value in values):
        raise ValueError(f"only lists may differ between ranks, not {show_key(first)}")
    return first


def split(values: Sequence[Any], rank: int, size: int) -> Any:
    """Gives each rank an even, contiguous part of the lists that `merge` returns, and all else complete.

    A `range` counts as its elements, and is cut where a part ends. So a list of ranges holds positions, such
    as those of the samples that a rank has not seen.

    Args:
        values: The values of the ranks that saved, in their order.
        rank: This rank.
        size: Number of ranks.

    Raises:
        ValueError: As for `merge`.
    """
    return _part(merge(values, rank, size), rank, size)


def _is_same(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if hasattr(value, "shape"):  # a tensor or an array
        has_same_spec = value.dtype == other.dtype and value.shape == other.shape
        return has_same_spec and bool((value == other).all())
    return bool(value == other)


def _joined(elements: list[Any]) -> list[Any]:
    joined: list[Any] = []
    for element in elements:
        if joined and _goes_on(joined[-1], element):
            before = joined[-1]
            end = (
                before.start + (len(before) + len(element)) * before.step
            )  # not `stop`: that may be anywhere
            joined[-1] = range(before.start, end, before.step)
        else:
            joined.append(element)
    return joined


def _goes_on(before: Any, element: Any) -> bool:
    if not type(before) is type(element) is range or before.step != element.step:
        return False
    return bool(before.start + len(before) * before.step == element.start)


def _part(value: Any, rank: int, size: int) -> Any:
    if isinstance(value, dict):
        return {key: _part(each, rank, size) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    total = sum(map(_num_elements, value))
    begin, end = total * rank // size, total * (rank + 1) // size
    part: list[Any] = []
    for element in value:
        num = _num_elements(element)
        if begin < num and end > 0:
            part.append(element[max(begin, 0) : end] if type(element) is range else element)
        begin, end = begin - num, end - num
    return part


def _num_elements(element: Any) -> int:
    return len(element) if type(element) is range else 1
