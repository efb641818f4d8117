"""Which hosts keep which shares: whoever is lost, as few as possible can lose a share with them."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from fastload.ext.memory.groups import hosts_with_copies, plan_copies


@given(st.integers(1, 12), st.integers(1, 5))
def test_each_host_keeps_as_much_and_any_few_may_be_lost(num_hosts: int, num_copies: int) -> None:
    hosts_of = hosts_with_copies(num_hosts, num_copies)
    copies = min(num_hosts, num_copies)
    for host, hosts in enumerate(hosts_of):
        assert hosts[0] == host
        assert len(set(hosts)) == copies
    loads = Counter(host for hosts in hosts_of for host in hosts)
    assert set(loads.values()) == {copies}
    for lost in combinations(range(num_hosts), copies - 1):
        assert all(set(hosts) - set(lost) for hosts in hosts_of)


def test_groups_where_copies_divide_the_hosts_and_one_ring_for_the_rest() -> None:
    assert hosts_with_copies(4, 2) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert hosts_with_copies(5, 2) == [(0, 1), (1, 0), (2, 3), (3, 4), (4, 2)]
    assert hosts_with_copies(1, 2) == [(0,)]


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("xy")), min_size=1, max_size=12),
    st.integers(1, 3),
)
def test_what_one_rank_sends_another_expects(places: list[tuple[str, str]], num_copies: int) -> None:
    """Hosts may have different numbers of ranks, which need not follow each other."""
    plans = [plan_copies(places, rank, num_copies) for rank in range(len(places))]
    for rank, plan in enumerate(plans):
        assert all(rank in plans[target].sources for target in plan.targets)
        assert all(rank in plans[source].targets for source in plan.sources)
        assert places[rank] not in {places[target] for target in plan.targets}
        keeping = {places[rank], *(places[target] for target in plan.targets)}
        assert len(keeping) == min(num_copies, len(set(places)))
        assert keeping == {places[other] for other, one in enumerate(plans) if rank in one.held}
    assert sum(plan.leads for plan in plans) == len(set(places)) == plans[0].num_hosts


@given(st.integers(2, 5), st.integers(1, 4), st.integers(2, 3))
def test_copies_are_on_other_machines(num_machines: int, num_containers: int, num_copies: int) -> None:
    places = [(f"{machine}", f"{each}") for machine in range(num_machines) for each in range(num_containers)]
    if num_machines % num_copies:
        return
    for rank, (machine, _) in enumerate(places):
        on = [
            machine,
            *(places[target][0] for target in plan_copies(places, rank, num_copies).targets),
        ]
        assert len(set(on)) == num_copies
