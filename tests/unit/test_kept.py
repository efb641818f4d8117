"""What a group keeps from one call for the next ones."""

from __future__ import annotations

import gc
import os

import pytest
import torch.distributed as dist

from fastload.comm.kept import Kept, kept_of


class Thing:
    def __init__(self, token: str) -> None:
        self.token = token
        self.ends: list[str] = []

    def drop(self) -> None:
        self.ends.append("dropped")

    def disown(self) -> None:
        self.ends.append("disowned")


def test_whoever_takes_a_thing_has_it_alone() -> None:
    kept, one, two = Kept(), Thing("one"), Thing("two")
    kept.put("wire", one, kept.era)
    assert kept.take("wire") is one
    assert kept.take("wire") is None, "another call has it"
    kept.put("wire", two, kept.era)
    kept.put("wire", one, kept.era)
    assert (one.ends, two.ends) == ([], ["dropped"]), "two calls at once leave one to the next"
    assert kept.take("wire") is one


def test_a_failure_drops_what_is_kept_and_what_is_in_use() -> None:
    kept, idle, used = Kept(), Thing("idle"), Thing("used")
    kept.put("idle", idle, era := kept.era)
    kept.drop()
    kept.put("used", used, era)
    assert (idle.ends, used.ends) == (["dropped"], ["dropped"])
    assert kept.take("idle") is kept.take("used") is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_what_a_group_keeps_goes_with_it_and_is_no_childs() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        kept, thing = kept_of(group), Thing("a")
        assert kept_of(group) is kept
        assert kept_of(dist.group.WORLD) is not kept
        kept.put("wire", thing, kept.era)
        if not (child := os.fork()):
            os._exit(thing.ends != ["disowned"] or kept.take("wire") is not None)
        assert os.waitpid(child, 0)[1] == 0
        assert thing.ends == []
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert thing.ends == ["dropped"]
    finally:
        dist.destroy_process_group()
