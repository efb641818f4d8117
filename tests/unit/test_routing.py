"""Routes: each byte once into each host of the group, in few hops, and from there to its ranks."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.transfer.messages import Routing, choose_base, hop_distances, most_hops, sharing_domains
from tests.drawn import draws


def routings(sizes: list[int]) -> list[Routing]:
    """Those of all ranks of hosts with so many."""
    hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
    return [Routing(rank, range(len(hosts)), hosts) for rank in range(len(hosts))]


@draws(80)
@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_a_message_enters_every_host_of_its_group_once_and_is_passed_on_by_who_has_it(
    data: st.DataObject, sizes: list[int]
) -> None:
    world = routings(sizes)
    everyone = range(len(world))
    host_of = [host for host, size in enumerate(sizes) for _ in range(size)]
    reader = data.draw(st.sampled_from(everyone))
    group = tuple(sorted(data.draw(st.sets(st.sampled_from(everyone), min_size=1)), key=int))
    routes = {rank: world[rank].route(reader, group) for rank in sorted({reader, *group})}
    hosts = {host_of[rank] for rank in group}
    entered: Counter[int] = Counter()
    has, hops = {reader}, {reader: 0}
    while has:
        sender = has.pop()
        for receiver in routes[sender].targets:
            assert routes[receiver].source == sender
            assert routes[receiver].holder == receiver
            entered[host_of[receiver]] += 1
            has.add(receiver)
            hops[receiver] = hops[sender] + 1
    assert entered == Counter(hosts - {host_of[reader]})
    assert all(routes[rank].num_hops == num for rank, num in hops.items())
    num_hosts = len(hosts | {host_of[reader]})
    assert max(hops.values()) <= most_hops(num_hosts, choose_base(num_hosts))
    for rank in group:
        route = routes[rank]
        assert host_of[route.holder] == host_of[rank]
        assert route.holder in hops  # it has the bytes
        others = [other for other in group if host_of[other] == host_of[rank] and other != route.holder]
        assert route.is_shared == bool(others)
        assert rank == route.holder or (route.source, route.targets) == (None, ())
    assert len({route.group for route in routes.values()}) == 1


@pytest.mark.parametrize(("num_hosts", "base"), [(8, 8), (8, 2), (9, 3), (16, 4), (13, 2)])
def test_all_hosts_send_alike(num_hosts: int, base: int) -> None:
    # A host is at each distance from some other one.
    assert sum(len(list(hop_distances(at, num_hosts, base))) for at in range(num_hosts)) == num_hosts - 1


def test_few_hosts_are_a_ring_and_many_are_near_each_other() -> None:
    assert [choose_base(num_hosts) for num_hosts in (1, 2, 8, 16)] == [2, 2, 8, 16]
    ring, everyone = routings([1] * 8), tuple(range(8))
    targets = [routing.route(3, everyone).targets for routing in ring]
    assert targets == [(1,), (2,), (), (4,), (5,), (6,), (7,), (0,)]
    for num_hosts in (64, 512, 2048, 16384):
        base = choose_base(num_hosts)
        assert most_hops(num_hosts, base) <= 16
        everyone = tuple(range(num_hosts))
        routing = Routing(5, everyone, everyone)
        partners = {
            rank for reader in range(0, num_hosts, 7) for rank in routing.route(reader, everyone).targets
        }
        assert len(partners) <= math.ceil(math.log(num_hosts, base))


def test_what_comes_in_is_spread_over_the_ranks_of_a_host() -> None:
    world, everyone = routings([4, 4, 2]), tuple(range(10))
    taken = [Counter(world[rank].route(reader, everyone).holder for reader in range(4)) for rank in (4, 8)]
    assert taken == [Counter({4: 1, 5: 1, 6: 1, 7: 1}), Counter({8: 2, 9: 2})]


def test_ranks_share_memory_where_some_group_has_several_of_them() -> None:
    machines = ["a", "a", "b", "b", "c"]
    assert sharing_domains(machines, [(0, 2, 4), (1, 3)]) == [0, 1, 2, 3, 4]
    assert sharing_domains(machines, [(0, 2, 4), (2, 3)]) == [0, 1, ("b",), ("b",), 4]
