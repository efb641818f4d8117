"""What tells a chunk from the notice of a rank that could not read it."""

from __future__ import annotations

import torch

from fastload.transfer.plan import DISTRESS_BYTES, NOTICE_BYTES
from fastload.transfer.rounds import FAILED, UNREADABLE, Round, Slots

_DISTRESS = bytes(range(100, 100 + DISTRESS_BYTES))


def make_round() -> Round:
    slots = Slots.cut(torch.zeros(3 * 64, dtype=torch.uint8), [64, 0, 64, 64])
    parts = [slots.each[0][:NOTICE_BYTES], slots.each[1], torch.zeros(1000, dtype=torch.uint8), slots.each[3]]
    return Round(7, _DISTRESS, slots, parts, parts[0])


def test_chunks_are_no_notices_whatever_is_in_them() -> None:
    work = make_round()
    almost = bytearray(_DISTRESS)
    almost[-1] ^= 1
    work.parts[2][:DISTRESS_BYTES] = torch.frombuffer(almost, dtype=torch.uint8)
    work.parts[3][1 : 1 + DISTRESS_BYTES] = torch.frombuffer(bytearray(_DISTRESS), dtype=torch.uint8)
    assert work.notices() == {}


def test_notices_are_found_in_slots_and_where_chunks_belong() -> None:
    work = make_round()
    work.mark(work.own, UNREADABLE)
    work.mark(work.parts[2], FAILED)
    assert work.notices() == {0: UNREADABLE, 2: FAILED}
