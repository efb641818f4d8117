"""Reads in flight: many where storage is far away, few where a link or the cores are the limit."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable

import pytest

from fastload.transfer.pace import Pace

_CHUNK_BYTES = 8 << 20


def read_all(
    pace: Pace, num_reads: int, answer: Callable[[int, float], tuple[float, float, bool]]
) -> tuple[float, int]:
    """Reads with as many reads in flight as the pace says, in time of its own.

    Args:
        pace: The pace.
        num_reads: Reads, without those that are refused.
        answer: Given the reads in flight and the time, returns the seconds to the first byte, those of the
            read, and whether the storage refuses it first, which takes a second more.

    Returns:
        The duration in seconds, and the refusals.
    """
    now_s, left, num_refused, number, in_flight = 0.0, num_reads, 0, 0, 0
    under_way: list[tuple[float, int, bool, float, bool]] = []  # end, number, is the end, begin, refused
    while left or under_way:
        while left and in_flight < pace.width:
            in_flight += 1
            first_s, all_s, refuses = answer(in_flight, now_s)
            pause_s = 1.0 if refuses else 0.0
            heapq.heappush(under_way, (now_s + pause_s + first_s, number, False, now_s, refuses))
            heapq.heappush(under_way, (now_s + pause_s + all_s, number, True, now_s, refuses))
            left, number, num_refused = left - 1, number + 1, num_refused + refuses
        now_s, _, ends, began_s, refused = heapq.heappop(under_way)
        if ends:
            in_flight -= 1
            is_full = left > 0
            pace.note_end(_CHUNK_BYTES, began_s, now_s, refused=refused, is_full=is_full)
        else:
            pace.note_first_byte(now_s - began_s)
    return now_s, num_refused


def far(in_flight: int, now_s: float) -> tuple[float, float, bool]:
    latency_s = random.Random(f"{in_flight} {now_s}").uniform(0.03, 0.06)
    return latency_s, latency_s + 0.14, False


@pytest.mark.parametrize("first_byte", [True, False])
def test_storage_that_is_far_away_gets_as_many_as_are_allowed(first_byte: bool) -> None:
    def answer(in_flight: int, now_s: float) -> tuple[float, float, bool]:
        latency_s, all_s, _ = far(in_flight, now_s)
        return latency_s if first_byte else 0.0, all_s, False

    pace = Pace(4, 64, 16)
    duration_s, _ = read_all(pace, 512, answer)
    assert pace.width == 64
    assert duration_s < (1.9 if first_byte else 2.4)  # 64 at once from the beginning take 1.5 s
    assert pace.times.num_reads == 512


def test_storage_whose_headers_came_late_gets_many_reads_at_once() -> None:
    assert Pace(4, 64, 16, first_byte_s=0.04).width == 16
    assert Pace(4, 8, 16, first_byte_s=0.04).width == 8
    assert Pace(4, 64, 16, first_byte_s=0.001).width == 4


@pytest.mark.parametrize("least", [2, 4])
def test_storage_whose_headers_came_soon_is_not_far_because_reads_wait_for_each_other(least: int) -> None:
    pace = Pace(least, 64, 16, first_byte_s=0.001)
    duration_s, _ = read_all(pace, 64, lambda in_flight, now_s: (0.04, 0.1 * in_flight, False))
    assert pace.times.reading_s / duration_s <= 2.5 * least


@pytest.mark.parametrize("least", [2, 4])
def test_a_link_that_is_full_gets_no_more(least: int) -> None:
    pace = Pace(least, 64, 16)
    duration_s, _ = read_all(pace, 512, lambda in_flight, now_s: (0.001, 0.02 * in_flight, False))
    assert pace.width <= 2 * least
    assert pace.times.reading_s / duration_s <= 2.5 * least


@pytest.mark.parametrize("least", [2, 4])
def test_a_link_with_a_queue_is_not_taken_for_storage_that_is_far_away(least: int) -> None:
    pace = Pace(least, 64, 16)
    read_all(pace, 512, lambda in_flight, now_s: (0.04, 0.1 * in_flight, False))
    assert pace.width <= 8


def test_a_link_that_holds_as_many_as_there_are_at_first_keeps_them() -> None:
    """Fewer, which are tried, would be slower."""
    pace = Pace(4, 64, 16)
    duration_s, _ = read_all(
        pace, 512, lambda in_flight, now_s: (0.04, 0.04 + 0.01 * max(16, in_flight), False)
    )
    assert duration_s < 1.15 * 512 * 0.2 / 16


def test_what_is_known_of_another_time_is_forgotten() -> None:
    """Once the other ranks have read their parts, the link has room for more reads of this one."""
    pace = Pace(2, 64, 16)
    read_all(pace, 2000, lambda in_flight, now_s: (0.001, 0.02 * in_flight if now_s < 4.0 else 0.1, False))
    assert pace.width > 8


def test_a_store_that_refuses_gets_fewer() -> None:
    """Above 200 requests a second it answers 503; afterwards hardly any."""
    asked_s: deque[float] = deque()  # within a second
    refused_s: list[float] = []

    def answer(in_flight: int, now_s: float) -> tuple[float, float, bool]:
        latency_s, all_s, _ = far(in_flight, now_s)
        while asked_s and asked_s[0] <= now_s - 1.0:
            asked_s.popleft()
        refuses = len(asked_s) >= 200
        asked_s.append(now_s)
        refused_s.extend([now_s] * refuses)
        return latency_s, all_s, refuses

    pace = Pace(4, 64, 16)
    duration_s, _ = read_all(pace, 4000, answer)
    assert duration_s < 4000 / 200 * 1.5
    assert sum(at_s > 3.0 for at_s in refused_s) < 80


def test_a_number_that_is_given_stays() -> None:
    pace = Pace(32, 32)
    read_all(pace, 256, lambda in_flight, now_s: (0.05, 0.02 * in_flight, False))
    assert pace.width == 32
