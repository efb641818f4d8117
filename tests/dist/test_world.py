"""What integrations ask of the ranks."""

from __future__ import annotations

import json
import os

import pytest
import torch.distributed as dist

from fastload import world
from fastload.errors import PeerError
from tests.dist.harness import ranks


@ranks(1, 4, ranks_per_host=2)
def test_ranks_and_hosts(rank: int, world: int) -> None:
    from fastload.world import get_hosts, get_rank

    assert get_rank() == rank
    hosts = get_hosts(timeout_s=20)
    assert len(hosts) == world
    assert [hosts.index(host) for host in hosts] == [2 * (number // 2) for number in range(world)]
    if world > 1:
        group = dist.new_group([1, 3])
        if rank in (1, 3):
            assert get_rank(group) == rank // 2
            assert get_hosts(group, timeout_s=20) == [hosts[1], hosts[3]]


@ranks(2)
def test_initialize_with_a_process_group_that_no_launcher_describes(rank: int, world: int) -> None:
    from fastload.world import initialize

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    assert initialize() == (rank, "cpu")


def test_without_a_process_group() -> None:
    assert world.get_rank() == 0
    [host] = world.get_hosts()
    assert "/" in host
    assert world.agree("counting", lambda: 1, lambda: 2) == [2]
    with pytest.raises(KeyError, match="mine"):
        world.agree("failing", lambda: {}["mine"])


@ranks(3)
def test_agree_returns_on_all_ranks_or_raises_on_all(rank: int, world: int) -> None:
    from fastload.world import agree

    assert agree("counting", lambda: rank, timeout_s=20) == [0, 1, 2]
    with pytest.raises(PeerError, match=r"(?s)rank 1 on .*: ZeroDivisionError"):
        agree("dividing", lambda: 1 // (rank - 1), timeout_s=20)
    with pytest.raises(PeerError, match=r"(?s)rank 2 on .*: JSONDecodeError: Expecting value"):
        agree("parsing", lambda: json.loads(""), timeout_s=20)
    assert agree("going on", lambda: None, lambda: {"rank": rank}, timeout_s=20)[2] == {"rank": 2}
