"""Tables of answers: what goes in comes out, in whatever order and grouping they are joined."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fastload.ranks.answers import join_answers, read_answers, write_answer
from fastload.ranks.bonds import children_of, parent_of

TEXTS = st.text(max_size=4)
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.integers(), TEXTS, st.just({}), st.lists(TEXTS), st.dictionaries(TEXTS, st.integers(0, 2))
)
ANSWERS = st.fixed_dictionaries({"value": VALUES, "error": st.none() | TEXTS}, optional={"host": TEXTS})


@given(st.lists(ANSWERS | st.none(), min_size=1, max_size=12), st.data())
def test_what_ranks_answer_is_read_as_it_was_written(answers: list[Any], data: st.DataObject) -> None:
    tables = [write_answer(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
    tables = data.draw(st.permutations(tables))
    middle = data.draw(st.integers(0, len(tables)))
    joined = join_answers([join_answers(tables[:middle]), *tables[middle:], *tables[:1]])
    assert read_answers(joined, len(answers)) == answers


def test_the_first_answer_of_a_rank_counts() -> None:
    first, second = write_answer(1, {"value": 1, "error": None}), write_answer(1, {"value": 2, "error": None})
    assert read_answers(join_answers([first, second]), 2) == [None, {"value": 1, "error": None}]


def test_what_all_say_is_told_once() -> None:
    table = join_answers([write_answer(rank, {"value": {"plan": "x" * 100}}) for rank in range(1000)])
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
