"""What the ranks answer in a step, with each thing told once, however many ranks say the same.

A table is text, of lines ``ranks <tab> name <tab> value``: the ranks as ``0-7,9``, name and value in JSON. An
answer has a line for each of its values, and what it has as its ``value`` is taken apart once more: of
thousands of ranks most say the same of most things.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from fastload.base.memory import uncollected

__all__ = ["join_answers", "read_answers", "write_answer"]

_VALUE = "value"


def write_answer(rank: int, answer: Mapping[str, Any]) -> str:
    """Returns the table of one rank.

    Args:
        rank: This one.
        answer: Of values that JSON can hold.
    """
    return "".join(f"{rank}\t{json.dumps(name)}\t{json.dumps(value)}\n" for name, value in _apart(answer))


def join_answers(tables: Iterable[str]) -> str:
    """Returns one table with what is in several; of what a rank has said twice the first counts."""
    found: dict[str, list[str]] = {}
    for table in tables:
        for line in table.split("\n"):
            if line:
                ranks, _, said = line.partition("\t")
                found.setdefault(said, []).append(ranks)
    return "".join(f"{_join_ranks(ranks)}\t{said}\n" for said, ranks in found.items())


@uncollected
def read_answers(table: str, size: int) -> list[dict[str, Any] | None]:
    """Returns the answer of each rank; None where there is none. Ranks that say the same share theirs.

    Args:
        table: What `write_answer` and `join_answers` have made.
        size: Number of ranks.
    """
    lines = [line.split("\t") for line in reversed(table.splitlines())]  # so that of two the first one stays
    values = json.loads(f"[{','.join(value for _, _, value in lines)}]")
    places: dict[str, list[int | None]] = {}  # name → for each rank where its value is
    for index, (ranks, name, _) in enumerate(lines):
        if (at := places.get(name)) is None:
            at = places[name] = [None] * size
        if ranks.isdecimal():
            at[int(ranks)] = index
        else:
            for first, last in _ranges(ranks):
                at[first : last + 1] = [index] * (last + 1 - first)
    names = [json.loads(name) for name in reversed(places)]
    answers: list[dict[str, Any] | None] = []
    for indices, run in groupby(zip(*reversed(places.values()), strict=True)):
        found = [(name, values[at]) for name, at in zip(names, indices, strict=True) if at is not None]
        answers += [_together(found) if found else None] * sum(1 for _ in run)
    return answers or [None] * size


def _apart(answer: Mapping[str, Any]) -> Iterator[tuple[str | list[str], Any]]:
    for name, value in answer.items():
        if name == _VALUE and isinstance(value, dict) and value and all(type(key) is str for key in value):
            yield from (([key], each) for key, each in value.items())
        else:
            yield name, value


def _together(found: Iterable[tuple[str | list[str], Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for name, value in found:
        if isinstance(name, str):
            answer[name] = value
        else:
            answer.setdefault(_VALUE, {})[name[0]] = value
    return answer


def _join_ranks(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    joined: list[list[int]] = []
    for first, last in sorted(pair for part in parts for pair in _ranges(part)):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(last, joined[-1][1])
        else:
            joined.append([first, last])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in joined)


def _ranges(ranks: str) -> Iterator[tuple[int, int]]:
    for part in ranks.split(","):
        first, _, last = part.partition("-")
        yield int(first), int(last or first)
