"""What becomes of a chunk that could not be read, where nothing is exchanged."""

from __future__ import annotations

import torch

from fastload.transfer.rounds import UNREADABLE, FlatSlab, LocalExchange, Round


def make_round() -> Round:
    slots = FlatSlab(torch.zeros(64, dtype=torch.uint8)).cut({3: 64})
    return Round(7, slots, {3: slots.each[3][:10]})


def test_a_slab_is_cut_into_a_slot_for_each_reader() -> None:
    slots = FlatSlab(torch.arange(200, dtype=torch.uint8)).cut({0: 64, 2: 32, 5: 64})
    assert {rank: slot.tolist() for rank, slot in slots.each.items()} == {
        0: list(range(64)),
        2: list(range(64, 96)),
        5: list(range(96, 160)),
    }
    assert slots.whole.numel() == 160


def test_the_status_of_a_chunk_is_told_beside_it() -> None:
    exchange = LocalExchange(pinned=False)
    good, bad = make_round(), make_round()
    bad.status = UNREADABLE
    for work in (good, bad):
        exchange.start(work)
        assert work.done.is_set()
    assert (good.statuses, bad.statuses) == ({}, {3: UNREADABLE})
