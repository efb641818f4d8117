"""The number of writers that is found by saving."""

from __future__ import annotations

import pytest

from fastload.saving.writers import WriterTuner

GIB = 1 << 30


def settle(best: int, *, ranks: int, nbytes: int) -> list[int]:
    """What is chosen, one save after the other, where so many writers are as fast as it gets."""
    tuner, chosen = WriterTuner(), []
    for _ in range(8):
        count = tuner.choose("root", ranks, nbytes)
        rate = min(count, best) / max(1.0, count / best) ** 0.5
        tuner.learn("root", ranks, nbytes, count, nbytes / rate)
        chosen.append(count)
    return chosen


@pytest.mark.parametrize(
    ("best", "ranks", "chosen"),
    [(64, 64, [64, 32, 64]), (16, 64, [64, 32, 16, 8, 16]), (1, 8, [8, 4, 2, 1, 1]), (1, 1, [1, 1])],
)
def test_as_many_as_pay(best: int, ranks: int, chosen: list[int]) -> None:
    found = settle(best, ranks=ranks, nbytes=100 * GIB)
    assert found[: len(chosen)] == chosen
    assert set(found[len(chosen) :]) == {chosen[-1]}


def test_small_states_have_few_writers_and_teach_nothing() -> None:
    assert settle(1, ranks=64, nbytes=100 << 20) == [3] * 8
    assert settle(1, ranks=64, nbytes=1) == [1] * 8


def test_places_and_groups_are_told_apart() -> None:
    tuner = WriterTuner()
    tuner.learn("root", 8, GIB, 8, 1.0)
    assert tuner.choose("root", 8, GIB) == 4
    assert tuner.choose("other", 8, GIB) == 8
    assert tuner.choose("root", 4, GIB) == 4


def test_who_holds_bytes_of_its_own_writes_them() -> None:
    tuner = WriterTuner()
    tuner.learn("root", 8, GIB, 8, 1.0)
    assert tuner.choose("root", 8, GIB, is_sharded=True) == 8
