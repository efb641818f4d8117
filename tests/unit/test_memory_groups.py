"""Which hosts keep which shares: whoever is lost, as few as possible can lose a share with them."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from fastload.tier.groups import keepers, plan_copies


@given(st.integers(1, 12), st.integers(1, 5))
def test_each_host_keeps_as_much_and_any_few_may_be_lost(num_hosts: int, num_copies: int) -> None:
    kept_by = keepers(num_hosts, num_copies)
    copies = min(num_hosts, num_copies)
    for host, hosts in enumerate(kept_by):
        assert hosts[0] == host
        assert len(set(hosts)) == copies
    loads = Counter(keeper for hosts in kept_by for keeper in hosts)
    assert set(loads.values()) == {copies}
    for lost in combinations(range(num_hosts), copies - 1):
        assert all(set(hosts) - set(lost) for hosts in kept_by)


def test_groups_where_copies_divide_the_hosts_and_one_ring_for_the_rest() -> None:
    assert keepers(4, 2) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert keepers(5, 2) == [(0, 1), (1, 0), (2, 3), (3, 4), (4, 2)]
    assert keepers(1, 2) == [(0,)]


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=12), st.integers(1, 3))
def test_what_one_rank_sends_another_expects(hosts: list[str], num_copies: int) -> None:
    """Hosts may have different numbers of ranks, which need not follow each other."""
    plans = [plan_copies(hosts, rank, num_copies) for rank in range(len(hosts))]
    for rank, plan in enumerate(plans):
        assert all(rank in plans[target].sources for target in plan.targets)
        assert all(rank in plans[source].targets for source in plan.sources)
        assert hosts[rank] not in {hosts[target] for target in plan.targets}
        keeping = {hosts[rank], *(hosts[target] for target in plan.targets)}
        assert len(keeping) == min(num_copies, len(set(hosts)))
        assert keeping == {hosts[other] for other, one in enumerate(plans) if rank in one.held}
    assert sum(plan.leads for plan in plans) == len(set(hosts))
