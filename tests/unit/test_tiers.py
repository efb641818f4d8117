"""How often to save to memory and how often to storage."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.planning.cadence import (
    Tier,
    ettr,
    loss_probability,
    mtbf_by_tier,
    recommend_tiers,
    recoverable_probability,
    young_s,
)

HOSTS = {"num_hosts": 16, "copies": 2}


@pytest.mark.parametrize(("hosts_lost", "lost"), [(1, 0.0), (2, 1 / 15), (3, 0.2)])
def test_gemini_s_figures_for_16_hosts_with_2_copies(hosts_lost: int, lost: float) -> None:
    """0.933 for two hosts at once, 0.80 for three (SOSP 2023)."""
    found = loss_probability(**HOSTS, mtbf_s=1e5, window_s=0.0, hosts_lost=hosts_lost, beyond_memory=0.0)
    assert found == pytest.approx(lost)


def test_hosts_that_fail_before_the_first_is_replaced() -> None:
    """One of 15 others is the partner; it fails within 600 s with 600 ÷ (16 · 1e5): by hand."""
    found = loss_probability(**HOSTS, mtbf_s=1e5, window_s=600.0, beyond_memory=0.0)
    assert found == pytest.approx(600 / (16 * 1e5), rel=0.02)
    assert loss_probability(**HOSTS, mtbf_s=1e5, window_s=600.0, beyond_memory=0.01) == pytest.approx(
        0.01 + 0.99 * found
    )


@given(
    st.integers(1, 300), st.integers(1, 4), st.integers(1, 6), st.floats(1e3, 1e7), st.floats(0, 1e4),
    st.floats(0, 1),
)  # fmt: skip
def test_more_copies_lose_less_and_more_time_more(
    num_hosts: int, copies: int, hosts_lost: int, mtbf_s: float, window_s: float, beyond: float
) -> None:
    copies, hosts_lost = min(copies, num_hosts), min(hosts_lost, num_hosts)
    given_ = {"num_hosts": num_hosts, "mtbf_s": mtbf_s, "hosts_lost": hosts_lost, "beyond_memory": beyond}
    found = loss_probability(copies=copies, window_s=window_s, **given_)
    assert beyond - 1e-9 <= found <= 1
    assert found <= loss_probability(copies=copies, window_s=2 * window_s, **given_) + 1e-9
    if copies > 1 and num_hosts % copies == 0 and num_hosts % (copies - 1) == 0:
        assert found <= loss_probability(copies=copies - 1, window_s=window_s, **given_) + 1e-9
    at_once = recoverable_probability(num_hosts=num_hosts, copies=copies, failures=hosts_lost)
    assert loss_probability(copies=copies, window_s=0.0, **given_) == pytest.approx(
        1 - (1 - beyond) * at_once, abs=1e-9
    )


def test_each_tier_has_young_s_interval_for_its_own_failures() -> None:
    memory, storage = Tier(0.2, 3.0, 60.0), Tier(5.0, 40.0, 300.0)
    found = recommend_tiers(memory=memory, storage=storage, mtbf_s=1e5, loss_probability=0.01)
    assert mtbf_by_tier(1e5, 0.01) == pytest.approx((1e5 / 0.99, 1e7))
    assert found.memory.interval_s == pytest.approx(young_s(0.2, 1e5 / 0.99), rel=0.01)
    assert found.storage.interval_s == pytest.approx(young_s(5.0, 1e7), rel=0.01)
    assert found.ettr_storage == pytest.approx(
        ettr(young_s(5.0, 1e5), stall_s=5.0, mtbf_s=1e5, restart_s=340.0), abs=1e-4
    )
    assert found.ettr > found.ettr_storage


@given(
    st.floats(0.01, 5), st.floats(0, 60), st.floats(0.1, 60), st.floats(0, 600), st.floats(2e4, 1e6),
    st.floats(0.001, 0.9), st.floats(0.01, 0.2), st.none() | st.floats(0.1, 20),
)  # fmt: skip
def test_the_budget_is_that_of_both_and_no_interval_nearby_is_clearly_better(
    stall: float, background: float, stall_storage: float, written: float, mtbf_s: float, share: float,
    budget: float, step_s: float | None,
) -> None:  # fmt: skip
    memory, storage = Tier(stall, background, 60.0), Tier(stall_storage, written, 300.0)
    given_ = {"memory": memory, "storage": storage, "mtbf_s": mtbf_s, "loss_probability": share}
    found = recommend_tiers(**given_, budget=budget, step_s=step_s)
    assert found.memory.overhead + found.storage.overhead <= budget * (1 + 1e-9)
    assert found.memory.interval_s >= background * (1 - 1e-9), "at most one save to memory is in progress"
    assert 0 <= found.ettr < 1

    def value(of_memory_s: float, of_storage_s: float) -> float:
        lost_s = (1 - share) * (memory.lost_s + of_memory_s / 2) + share * (storage.lost_s + of_storage_s / 2)
        return max(0.0, 1 - lost_s / mtbf_s) / (1 + stall / of_memory_s + stall_storage / of_storage_s)

    best = value(found.memory.interval_s, found.storage.interval_s)
    assert best == pytest.approx(found.ettr)
    if "peak" in found.memory.why and "peak" in found.storage.why and step_s is None:
        for factor in (0.8, 1.25):
            assert value(found.memory.interval_s * factor, found.storage.interval_s) <= best + 1e-3
            assert value(found.memory.interval_s, found.storage.interval_s * factor) <= best + 1e-3


def test_a_tier_that_is_never_used() -> None:
    given_ = {"memory": Tier(0.2, 3.0, 60.0), "storage": Tier(5.0, 40.0, 300.0), "mtbf_s": 1e5}
    for share, words in ((0.0, "from storage"), (1.0, "from memory")):
        with pytest.raises(OptionError, match=words):
            recommend_tiers(**given_, loss_probability=share)
    assert mtbf_by_tier(1e5, 0.0) == (1e5, math.inf)
    assert mtbf_by_tier(1e5, 1.0) == (math.inf, 1e5)
    with pytest.raises(OptionError, match="not 2"):
        loss_probability(num_hosts=2, copies=3, mtbf_s=1e5, window_s=0.0)
    with pytest.raises(OptionError, match="beyond_memory"):
        loss_probability(**HOSTS, mtbf_s=1e5, window_s=0.0, beyond_memory=2.0)
