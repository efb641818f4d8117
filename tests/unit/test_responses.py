"""Tables of answers: what goes in comes out, in whatever order and grouping they are joined."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fastload.comm.responses import Column, Each, join_responses, read_responses, write_response
from fastload.comm.tree import children_of, parent_of

TEXTS = st.text(max_size=4)
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.integers(), TEXTS, st.just({}), st.lists(TEXTS), st.dictionaries(TEXTS, st.integers(0, 2))
)
ANSWERS = st.fixed_dictionaries({"value": VALUES, "error": st.none() | TEXTS}, optional={"host": TEXTS})


def read(table: str, size: int) -> list[Any]:
    return [each for answer, count in read_responses(table, size) for each in [answer] * count]


@given(st.lists(ANSWERS | st.none(), min_size=1, max_size=12), st.data())
def test_what_ranks_answer_is_read_as_it_was_written(answers: list[Any], data: st.DataObject) -> None:
    tables = [write_response(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
    tables = data.draw(st.permutations(tables))
    middle = data.draw(st.integers(0, len(tables)))
    joined = join_responses([join_responses(tables[:middle]), *tables[middle:], *tables[:1]])
    assert read(joined, len(answers)) == answers


@given(st.lists(st.tuples(VALUES, st.integers(0, 1)), min_size=1, max_size=12), st.data())
def test_what_each_says_of_itself_is_read_by_rank(rows: list[tuple[Any, int]], data: st.DataObject) -> None:
    answers = [{"value": {"own": Each(row), "all": 0}, "error": None} for row in rows]
    tables = data.draw(st.permutations([write_response(rank, answer) for rank, answer in enumerate(answers)]))
    middle = data.draw(st.integers(0, len(tables)))
    joined = join_responses([join_responses(tables[:middle]), join_responses(tables[middle:]), *tables[:1]])
    ((answer, count),) = read_responses(joined, len(rows))
    assert answer is not None
    assert (count, answer["value"]["all"]) == (len(rows), 0)
    columns: list[Column] = answer["value"]["own"]
    assert list(zip(*(column.values() for column in columns), strict=True)) == rows


def test_what_each_says_is_told_once_where_it_is_the_same() -> None:
    tables = [
        write_response(rank, {"value": {"own": Each(["x" * 100, rank // 500])}}) for rank in range(1000)
    ]
    assert len(join_responses([join_responses(tables[:300]), join_responses(tables[300:])])) < 200


def test_the_first_answer_of_a_rank_counts() -> None:
    first, second = (
        write_response(1, {"value": 1, "error": None}),
        write_response(1, {"value": 2, "error": None}),
    )
    assert read(join_responses([first, second]), 2) == [None, {"value": 1, "error": None}]


def test_what_all_say_is_told_once() -> None:
    table = join_responses([write_response(rank, {"value": {"plan": "x" * 100}}) for rank in range(1000)])
    assert len(table) < 200


@given(st.integers(1, 5000))
def test_every_rank_has_one_above_it(size: int) -> None:
    below = [child for rank in range(size) for child in children_of(rank, size)]
    assert sorted(below) == list(range(1, size))
    assert all(
        child in children_of(parent, size)
        for child in range(1, size)
        if (parent := parent_of(child)) is not None
    )
