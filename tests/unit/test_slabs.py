"""Rounds through slabs, without threads and connections: what is read here is placed there, byte by byte."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastload.formats.manifest import TensorEntry
from fastload.geometry.extents import Span
from fastload.loading.place import Destination, Placer
from fastload.transfer.plan import TransferPlan
from fastload.transfer.rounds import FlatSlab, LocalExchange, Round
from fastload.transfer.slabs import OwnChunk, Slabs
from tests.unit.plans import plan_for_all

_LENGTHS = (30_000, 5, 0, 17_001, 4096, 9_001)


class DeviceExchange(LocalExchange):
    """Has its slots elsewhere than in host memory, as far as slabs can tell."""

    def __init__(self) -> None:
        super().__init__(pinned=False)
        self.device = torch.device("cuda")

    def allocate(self, slab_bytes: int, own_bytes: int) -> tuple[FlatSlab, Tensor | None]:
        slab, _ = super().allocate(slab_bytes, own_bytes)
        return slab, torch.empty(own_bytes, dtype=torch.uint8)


class OneRank:
    """A rank that reads from memory."""

    def __init__(self, rank: int, plan: TransferPlan, file: Tensor, on_device: bool, cast: bool) -> None:
        self.rank, self._plan, self._file = rank, plan, file
        dtype = torch.float32 if cast else torch.uint8
        self.tensors = [torch.zeros(nbytes, dtype=dtype) for nbytes in _LENGTHS]
        places = [
            Destination(entry, torch.uint8, to) for entry, to in zip(entries(), self.tensors, strict=True)
        ]
        self._placer = Placer(places)
        exchange = DeviceExchange() if on_device else LocalExchange(pinned=False)
        self._slabs = Slabs(plan, rank, exchange, self._placer)
        self._ahead: deque[tuple[int, OwnChunk]] = deque()
        self._next = 0

    def begin(self, index: int) -> tuple[Round, Tensor | None]:
        """Reads ahead as far as is allowed, and what the round has of this rank."""
        end = index + self._plan.ahead
        for later in self._plan.rounds_of(self.rank, self._next, end) if self._plan.ahead else ():
            own = self._slabs.lay_own(self._plan, later)
            self._read(own.spans, own.data)
            self._ahead.append((later, own))
        self._next = end
        read_ahead = self._ahead.popleft()[1] if self._ahead and self._ahead[0][0] == index else None
        work = self._slabs.lay_out(self._plan, index, index, read_ahead)
        if read_ahead is None and work.spans:
            self._read(work.spans, work.buffers[0])
        if work.own is not None:
            work.parts[self.rank].copy_(work.own)
        return work, work.parts.get(self.rank) if work.spans else None

    def end(self, index: int, work: Round) -> int:
        """Places what has come; returns how much that was."""
        arrivals = list(self._slabs.arrivals(self._plan, index, work))
        for arrival in arrivals:
            for start, data in arrival.pieces:
                self._placer.place(start, data)
        return sum(arrival.nbytes for arrival in arrivals)

    def _read(self, spans: list[Span], into: Tensor) -> None:
        position = 0
        for span in spans:
            into[position : position + span.nbytes] = self._file[span.offset : span.offset + span.nbytes]
            position += span.nbytes


def entries() -> list[TensorEntry]:
    made, offset = [], 0
    for number, nbytes in enumerate(_LENGTHS):
        made.append(TensorEntry(f"t{number}", "U8", (nbytes,), 0, offset, nbytes))
        offset += nbytes
    return made


@settings(deadline=None, max_examples=20)
@pytest.mark.parametrize("on_device", [False, True])
@given(
    staging_bytes=st.sampled_from([36 << 10, 1 << 16, 1 << 22]),
    chunk_bytes=st.sampled_from([4096, 8192, 5000]),
    cast=st.booleans(),
    contiguous=st.booleans(),
    block_bytes=st.sampled_from([0, 0, 1000]),
)
def test_what_is_read_comes_to_every_rank(
    on_device: bool, staging_bytes: int, chunk_bytes: int, cast: bool, contiguous: bool, block_bytes: int
) -> None:
    file = torch.randint(256, (sum(_LENGTHS),), dtype=torch.uint8)
    plan = plan_for_all(
        entries(), world_size=7, readers=range(6), staging_bytes=staging_bytes, chunk_bytes=chunk_bytes,
        even_slots=on_device, contiguous=contiguous, block_bytes=block_bytes, hosts=list("aabbccd"),
    )  # fmt: skip
    assert plan.num_turns > 1 or staging_bytes > 36 << 10
    assert plan.num_turns == 1 or staging_bytes < 1 << 22
    members = [OneRank(rank, plan, file, on_device, cast) for rank in range(7)]
    placed = [0] * len(members)
    for index in range(plan.num_rounds):
        begun = [member.begin(index) for member in members]
        for work, _ in begun:
            for rank, (_, chunk) in enumerate(begun):
                if chunk is not None and rank in work.parts:
                    work.parts[rank][: len(chunk)] = chunk
        for number, (member, (work, _)) in enumerate(zip(members, begun, strict=True)):
            placed[number] += member.end(index, work)
    for member in members:
        assert torch.equal(torch.cat(member.tensors).to(torch.uint8), file)
    assert placed == [plan.total_bytes] * len(members)
