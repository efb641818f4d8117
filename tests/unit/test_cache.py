"""What a group keeps from one call for the next ones."""

from __future__ import annotations

import gc
import os

import pytest
import torch.distributed as dist

from fastload.comm.cache import ConnectionCache, cache_of


class Thing:
    def __init__(self, token: str) -> None:
        self.token = token
        self.ends: list[str] = []

    def drop(self) -> None:
        self.ends.append("dropped")

    def disown(self) -> None:
        self.ends.append("disowned")


def test_whoever_takes_a_thing_has_it_alone() -> None:
    cache, one, two = ConnectionCache(), Thing("one"), Thing("two")
    cache.put("wire", one, cache.num_clears)
    assert cache.take("wire") is one
    assert cache.take("wire") is None, "another call has it"
    cache.put("wire", two, cache.num_clears)
    cache.put("wire", one, cache.num_clears)
    assert (one.ends, two.ends) == ([], ["dropped"]), "two calls at once leave one to the next"
    assert cache.take("wire") is one


def test_a_failure_drops_what_is_kept_and_what_is_in_use() -> None:
    cache, idle, used = ConnectionCache(), Thing("idle"), Thing("used")
    cache.put("idle", idle, era := cache.num_clears)
    cache.clear()
    cache.put("used", used, era)
    assert (idle.ends, used.ends) == (["dropped"], ["dropped"])
    assert cache.take("idle") is cache.take("used") is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_what_a_group_keeps_goes_with_it_and_is_no_childs() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        cache, thing = cache_of(group), Thing("a")
        assert cache_of(group) is cache
        assert cache_of(dist.group.WORLD) is not cache
        cache.put("wire", thing, cache.num_clears)
        if not (child := os.fork()):
            os._exit(thing.ends != ["disowned"] or cache.take("wire") is not None)
        assert os.waitpid(child, 0)[1] == 0
        assert thing.ends == []
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert thing.ends == ["dropped"]
    finally:
        dist.destroy_process_group()
