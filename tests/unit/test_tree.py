"""The way of chunks between hosts: every byte once into each host, in few hops."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.transfer.tree import Trees, choose_base, most_hops


def make_trees(sizes: list[int], base: int | None) -> Trees:
    hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
    trees = Trees.between(range(len(hosts)), hosts)
    return trees if base is None else Trees(trees.hosts, base)


@settings(max_examples=80)
@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_every_chunk_enters_every_host_once_and_is_passed_on_by_who_has_it(
    data: st.DataObject, sizes: list[int]
) -> None:
    base = data.draw(st.none() | st.integers(2, max(2, len(sizes))))
    trees = make_trees(sizes, base)
    ranks = range(sum(sizes))
    owner = data.draw(st.sampled_from(ranks))
    entered: Counter[int] = Counter()
    has, ways = {owner}, {owner: 0}
    while has:
        sender = has.pop()
        for receiver in trees.targets(owner, sender):
            assert trees.source(owner, receiver) == sender
            assert receiver == trees.taker(owner, receiver)
            entered[trees.neighbours(receiver)[0]] += 1
            has.add(receiver)
            ways[receiver] = ways[sender] + 1
    others = {ranks[0] for ranks in trees.hosts} - {trees.neighbours(owner)[0]}
    assert entered == Counter(others)
    assert trees.taker(owner, owner) == owner
    assert trees.source(owner, owner) is None
    assert all(trees.hops(owner, rank) == hops for rank, hops in ways.items())
    assert max(ways.values()) <= most_hops(len(sizes), trees.base)
    takers = {trees.taker(owner, rank) for rank in ranks}
    assert {rank for rank in ranks if trees.source(owner, rank) is not None} == takers - {owner}


@pytest.mark.parametrize(("num_hosts", "base"), [(8, 8), (8, 2), (9, 3), (16, 4), (13, 2)])
def test_all_hosts_send_alike(num_hosts: int, base: int) -> None:
    trees = make_trees([1] * num_hosts, base)
    sent = [sum(len(trees.targets(owner, rank)) for owner in range(num_hosts)) for rank in range(num_hosts)]
    assert sent == [num_hosts - 1] * num_hosts


def test_few_hosts_are_a_ring_and_many_are_near_each_other() -> None:
    assert [choose_base(num_hosts) for num_hosts in (1, 2, 8, 16)] == [2, 2, 8, 16]
    ring = make_trees([1] * 8, None)
    assert [ring.targets(3, rank) for rank in range(8)] == [[1], [2], [], [4], [5], [6], [7], [0]]
    for num_hosts in (64, 512, 2048, 16384):
        base = choose_base(num_hosts)
        assert most_hops(num_hosts, base) <= 16
        trees = make_trees([1] * num_hosts, None)
        partners = {rank for owner in range(0, num_hosts, 7) for rank in trees.targets(owner, 5)}
        assert len(partners) <= math.ceil(math.log(num_hosts, base))


def test_rails_spread_what_comes_in_over_the_ranks_of_a_host() -> None:
    trees = make_trees([4, 4, 2], None)
    taken = [Counter(trees.taker(owner, rank) for owner in range(4)) for rank in (4, 8)]
    assert taken == [Counter({4: 1, 5: 1, 6: 1, 7: 1}), Counter({8: 2, 9: 2})]
