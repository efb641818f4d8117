"""Which way a load goes, and the reason it gives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fastload.errors import OptionError
from fastload.transfer.plan import StrategyChoice, choose_strategy


def choose(asked: str = "auto", **facts: Any) -> StrategyChoice:
    facts = {
        "world_size": 4,
        "readers": [0, 1, 2, 3],
        "hosts": ["a", "a", "b", "b"],
        "shared": False,
        "fast_links": False,
    } | facts
    return choose_strategy(asked, **facts)


@pytest.mark.parametrize(
    ("facts", "strategy", "why", "readers"),
    [
        ({"shared": True}, "allgather", "one storage system", (0, 1, 2, 3)),
        ({"shared": True, "hosts": ["a"] * 4}, "allgather", "one storage system", (0, 1, 2, 3)),
        ({"fast_links": True}, "allgather", "links between devices", (0, 1, 2, 3)),
        ({"hosts": ["a"] * 4}, "direct", "page cache", (0, 1, 2, 3)),
        ({}, "direct", "a disk of its own", (0, 1, 2, 3)),
        ({"readers": [1, 3]}, "allgather", "2 of 4 ranks can read", (1, 3)),
        ({"readers": [1, 3], "shared": True}, "allgather", "2 of 4 ranks can read", (1, 3)),
        ({"readers": [2]}, "broadcast", "only rank 2 can read", (2,)),
        ({"world_size": 1, "readers": [0], "hosts": ["a"]}, "direct", "one rank", (0,)),
    ],
)
def test_auto(facts: dict[str, Any], strategy: str, why: str, readers: tuple[int, ...]) -> None:
    decision = choose(**facts)
    assert (decision.strategy, decision.readers) == (strategy, readers)
    assert why in decision.why


@pytest.mark.parametrize(("shared", "fast_links"), list(itertools.product([False, True], repeat=2)))
def test_what_is_asked_for_is_done(shared: bool, fast_links: bool) -> None:
    facts = {"shared": shared, "fast_links": fast_links}
    assert choose("allgather", **facts) == StrategyChoice("allgather", "asked for", (0, 1, 2, 3))
    assert choose("broadcast", **facts) == StrategyChoice("broadcast", "asked for", (0,))
    assert choose("direct", **facts) == StrategyChoice("direct", "asked for", (0, 1, 2, 3))
    assert choose("allgather", readers=[1, 3], **facts).readers == (1, 3)
    assert choose("broadcast", readers=[1, 3], **facts).readers == (1,)


def test_direct_needs_every_rank_to_read() -> None:
    with pytest.raises(OptionError, match="strategy='direct': rank 2 on b cannot read"):
        choose("direct", readers=[0, 1, 3])


@pytest.mark.parametrize("asked", ["auto", "allgather", "broadcast", "direct"])
def test_one_rank_has_nobody_to_exchange_with(asked: str) -> None:
    assert choose(asked, world_size=1, readers=[0], hosts=["a"]).strategy == "direct"
