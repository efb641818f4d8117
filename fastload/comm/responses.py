"""The responses of ranks to a step, as text that stays short if thousands of ranks respond alike.

A table has lines ``ranks <tab> name <tab> value``: the ranks as ``0-7,9``, name and value in JSON. A
response has a line for each of its values, and one for each entry of its ``value`` if that is a dictionary.
Equal lines of several ranks are merged. Values that differ on each rank (`Each`) are in columns: one line has
all columns with the values of all ranks, which are parsed only when they are used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol, TypeVar

from fastload.base.memory import uncollected

_VALUE = "value"
_COLUMNS = "="  # marks columns, which are not JSON
_NEXT, _TIMES = "\x01", "\x02"  # between values, and before the number of repetitions: not in JSON
_NEXT_COLUMN = "\x05"  # `rendezvous` has those in between

_encoder = json.JSONEncoder(separators=(_NEXT, ": "))
_WITH_PARTS = dict, list, tuple

Name = str | list[str]


class _Unpackable(Protocol):
    @classmethod
    def unpack(cls, rank: int, values: Sequence[Any]) -> Any: ...


R = TypeVar("R", bound=_Unpackable)


@dataclass(frozen=True, slots=True)
class Each:
    """JSON values that differ on each rank.

    `read_responses` returns a list of `Column` instead.
    """

    values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One value of each of some ranks, in ascending order of the ranks."""

    ranks: str
    text: str

    def values(self) -> list[Any]:
        """Returns the values."""
        runs = list(_runs(self.text))
        values = json.loads(f"[{','.join(value for value, _ in runs)}]")
        return list(
            chain.from_iterable([value] * count for value, (_, count) in zip(values, runs, strict=True))
        )

    def by_rank(self) -> dict[int, Any]:
        """Returns the value of each rank."""
        ranks = (range(first, last + 1) for first, last in _ranges(self.ranks))
        return dict(zip(chain.from_iterable(ranks), self.values(), strict=True))


def write_response(rank: int, response: Mapping[str, Any]) -> str:
    """Returns the table of one rank.

    Args:
        rank: This rank.
        response: JSON values by name, or `Each`; also in a ``value`` that is a dictionary.
    """
    return "".join(f"{rank}\t{name}\t{text}\n" for name, text in _split(response))


def join_responses(tables: Iterable[str]) -> str:
    """Merges tables; the first of two values of a rank with one name counts."""
    ranks_by_line: dict[str, list[str]] = {}
    columns: dict[str, list[tuple[str, str]]] = {}
    for table in tables:
        for line in table.split("\n"):
            if line:
                ranks, _, said = line.partition("\t")
                name, _, value = said.partition("\t")
                if value.startswith(_COLUMNS):
                    columns.setdefault(name, []).append((ranks, value[1:]))
                else:
                    ranks_by_line.setdefault(said, []).append(ranks)
    join_ranks, order = cache(_join_ranks), cache(_order)  # most lines are of the same ranks
    lines = [f"{join_ranks(tuple(ranks))}\t{said}\n" for said, ranks in ranks_by_line.items()]
    for name, parts in columns.items():
        ranks, text = _join_columns(parts, order(tuple(ranks for ranks, _ in parts)))
        lines.append(f"{ranks}\t{name}\t{_COLUMNS}{text}\n")
    return "".join(lines)


@uncollected
def read_responses(table: str, size: int) -> list[tuple[dict[str, Any] | None, int]]:
    """Returns the responses, each with the number of consecutive ranks that gave it; None for no response.

    Args:
        table: Table of `write_response` or `join_responses`.
        size: Number of ranks.
    """
    lines = [
        line.split("\t") for line in reversed(table.split("\n")) if line
    ]  # so that the first of two values counts
    plain = iter(json.loads(f"[{','.join(text for *_, text in lines if not text.startswith(_COLUMNS))}]"))
    values = [
        [Column(ranks, column) for column in text[1:].split(_NEXT_COLUMN)]
        if text.startswith(_COLUMNS)
        else next(plain)
        for ranks, _, text in lines
    ]
    ranges = {ranks: list(_ranges(ranks)) for ranks in {ranks for ranks, *_ in lines}}
    edges = sorted(
        {0, size, *(edge for each in ranges.values() for first, last in each for edge in (first, last + 1))}
    )
    number = {edge: number for number, edge in enumerate(edges)}  # number of the run that begins there
    places: dict[str, list[int | None]] = {}  # by name, the line with the value of each run
    for index, (ranks, name, _) in enumerate(lines):
        if (at := places.get(name)) is None:
            at = places[name] = [None] * (len(edges) - 1)
        for first, last in ranges[ranks]:
            begin, end = number[first], number[last + 1]
            at[begin:end] = [index] * (end - begin)
    names = json.loads(f"[{','.join(reversed(places))}]")
    made: dict[tuple[int | None, ...], dict[str, Any] | None] = {}
    responses: list[tuple[dict[str, Any] | None, int]] = []
    for run, (begin, end) in enumerate(pairwise(edges)):
        indices = tuple(at[run] for at in reversed(places.values()))
        if indices not in made:
            said = [(name, values[at]) for name, at in zip(names, indices, strict=True) if at is not None]
            made[indices] = _assembled(said) if said else None
        responses.append((made[indices], end - begin))
    return responses


def _split(response: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields names and values of a response as text."""
    names: list[str] = []
    values: list[Any] = []
    for name, value in response.items():
        if name == _VALUE and isinstance(value, dict) and value and all(type(key) is str for key in value):
            for key, part in value.items():
                if isinstance(part, Each):
                    yield f"[{json.dumps(key)}]", _columns(part)
                else:
                    names.append(f"[{json.dumps(key)}]")
                    values.append(part)
        elif isinstance(value, Each):
            yield json.dumps(name), _columns(value)
        else:
            names.append(json.dumps(name))
            values.append(value)
    yield from zip(names, _texts(values), strict=True)


def _columns(each: Each) -> str:
    return _COLUMNS + _NEXT_COLUMN.join(_texts(each.values))


def _texts(values: Sequence[Any]) -> list[str]:
    """Returns the JSON of each value; encodes those without parts at once."""
    texts = _encoder.encode(values)[1:-1].split(_NEXT)
    if len(texts) == len(values):
        return texts
    plain = [value for value in values if not isinstance(value, _WITH_PARTS)]
    encoded = iter(_encoder.encode(plain)[1:-1].split(_NEXT))
    return [json.dumps(value) if isinstance(value, _WITH_PARTS) else next(encoded) for value in values]


def _assembled(said: Iterable[tuple[Name, Any]]) -> dict[str, Any]:
    response: dict[str, Any] = {}
    for name, value in said:
        if isinstance(name, str):
            response[name] = value
        else:
            response.setdefault(_VALUE, {})[name[0]] = value
    return response


def _order(parts: Sequence[str]) -> tuple[str, list[int]] | None:
    """Returns the joined ranks of several parts and the order of the parts; None if some overlap."""
    ranges = [list(_ranges(ranks)) for ranks in parts]
    order = sorted(range(len(parts)), key=ranges.__getitem__)
    if any(ranges[one][-1][1] >= ranges[next_one][0][0] for one, next_one in pairwise(order)):
        return None
    return _join_ranks([parts[place] for place in order]), order


def _join_columns(parts: Sequence[tuple[str, str]], order: tuple[str, list[int]] | None) -> tuple[str, str]:
    """Returns the joined ranks and values of several parts of the same columns."""
    columns = zip(*(text.split(_NEXT_COLUMN) for _, text in parts), strict=True)
    if order is not None:
        ranks, places = order
        joined = [_join_texts([column[place] for place in places]) for column in columns]
    else:
        all_ranks = [ranks for ranks, _ in parts]
        ordered = [_in_order(zip(all_ranks, column, strict=True)) for column in columns]
        ranks = _join_ranks([str(rank) for rank, _ in ordered[0]])
        joined = [_join_texts([text for _, text in column]) for column in ordered]
    return ranks, _NEXT_COLUMN.join(joined)


def _in_order(parts: Iterable[tuple[str, str]]) -> list[tuple[int, str]]:
    """Returns the value of each rank in a column; the first one if there are two."""
    by_rank: dict[int, str] = {}
    for ranks, text in parts:
        numbers = (rank for first, last in _ranges(ranks) for rank in range(first, last + 1))
        said = chain.from_iterable([value] * count for value, count in _runs(text))
        for rank, value in zip(numbers, said, strict=True):
            by_rank.setdefault(rank, value)
    return sorted(by_rank.items())


def _join_texts(texts: Iterable[str]) -> str:
    """Joins parts of a column, merging equal values at their ends."""
    done: list[str] = []
    value, count = "", 0
    for text in texts:
        first, _, rest = text.partition(_NEXT)
        begun, _, times = first.partition(_TIMES)
        if begun == value:
            count += int(times or 1)
        else:
            if count:
                done.append(_run(value, count))
            value, count = begun, int(times or 1)
        if rest:
            middle, _, last = rest.rpartition(_NEXT)
            done += [_run(value, count), middle] if middle else [_run(value, count)]
            ((value, count),) = _runs(last)
    return _NEXT.join([*done, _run(value, count)])


def _run(value: str, count: int) -> str:
    return f"{value}{_TIMES}{count}" if count > 1 else value


def _runs(text: str) -> Iterator[tuple[str, int]]:
    for run in text.split(_NEXT):
        value, _, count = run.partition(_TIMES)
        yield value, int(count or 1)


def _join_ranks(parts: Sequence[str]) -> str:
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


# Bytes


def join_parts(parts: Sequence[bytes]) -> bytes:
    """Joins some bytes, for `split_parts`."""
    return b"".join([json.dumps([len(part) for part in parts]).encode(), b"\n", *parts])


def split_parts(joined: bytes) -> list[bytes]:
    """Returns what `join_parts` has joined."""
    lengths, _, parts = joined.partition(b"\n")
    ends = accumulate(json.loads(lengths), initial=0)
    return [parts[begin:end] for begin, end in pairwise(ends)]


# Reports


class Reports(Sequence[R]):
    """The reports of all ranks, unpacked on first use.

    Args:
        kind: Class of a report.
        columns: The packed reports.
    """

    def __init__(self, kind: type[R], columns: Sequence[Column]) -> None:
        self._kind = kind
        self._columns = columns

    @cached_property
    def _reports(self) -> tuple[R, ...]:
        rows = zip(*(column.values() for column in self._columns), strict=True)
        return tuple(self._kind.unpack(rank, row) for rank, row in enumerate(rows))

    def __getitem__(self, rank: Any) -> Any:
        return self._reports[rank]

    def __len__(self) -> int:
        return len(self._reports)

    def __iter__(self) -> Iterator[R]:
        return iter(self._reports)

    def __eq__(self, other: object) -> bool:
        return self._reports == (tuple(other) if isinstance(other, Reports) else other)

    def __hash__(self) -> int:
        return hash(self._reports)

    def __repr__(self) -> str:
        return repr(self._reports)
