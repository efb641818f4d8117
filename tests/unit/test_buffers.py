"""Rounds through buffers, without threads and connections: each byte that is read is placed."""

from __future__ import annotations

from collections import deque

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastload.base.memory import allocate_staging, round_up
from fastload.formats.manifest import TensorEntry
from fastload.geometry.ranges import ByteRange
from fastload.loading.targets import Destination, TensorWriter
from fastload.transfer.buffers import Buffers, Plan
from fastload.transfer.messages import Message, Route, Routing, sharing_domains
from fastload.transfer.transport import BufferMemory, OwnChunk, Round
from tests.drawn import draws
from tests.unit.plans import plan_for_all
from tests.unit.test_routes import Want, jobs, plan_of

_LENGTHS = (30_000, 5, 0, 17_001, 4096, 9_001)


class InProcess(BufferMemory):
    """Of ranks in one process, some of which share memory; the test carries the messages."""

    def __init__(self, rank: int, routing: Routing, shared: dict[int, Tensor], device: str) -> None:
        super().__init__(device, pinned=False)
        self.is_shared = device == "cpu" and len(routing.neighbours) > 1
        self._rank = rank
        self._routing = routing
        self._shared = shared
        self._num_buffers = self._buffer_bytes = 0

    def route(self, message: Message) -> Route:
        if self.device.type != "cpu":
            return Route(self._rank)
        return self._routing.route(message.reader, message.ranks)

    def allocate(self, count: int, nbytes: int) -> None:
        self._num_buffers, self._buffer_bytes = count, round_up(nbytes, 8)

    def allocate_chunks(self, count: int, most: int, nbytes: int) -> None:
        super().allocate_chunks(count, most, nbytes)
        length = self._num_buffers * self._buffer_bytes + (most * nbytes if self.is_shared else 0)
        self._shared[self._rank] = allocate_staging(length, pinned=False)

    def buffer(self, number: int, rank: int) -> Tensor:
        return self.of(rank)[number * self._buffer_bytes :][: self._buffer_bytes]

    def of(self, rank: int) -> Tensor:
        return self._shared[rank]

    def chunk(self, number: int) -> Tensor:
        if not self.is_shared:
            return super().chunk(number)
        begin = self._num_buffers * self._buffer_bytes + number * self._chunk_bytes
        return self.of(self._rank)[begin : begin + self._chunk_bytes]


class OneRank:
    """A rank that reads from memory."""

    def __init__(
        self, rank: int, plan: Plan, file: Tensor, memory: InProcess, destinations: list[Destination]
    ) -> None:
        self.rank, self._plan, self._file = rank, plan, file
        self._writer = TensorWriter(destinations)
        self._buffers = Buffers(plan, rank, memory, memory.route, self._writer)
        self._ahead: deque[tuple[int, OwnChunk]] = deque()
        self._next = 0

    def begin(self, index: int) -> Round:
        """Reads ahead as far as is allowed, and what the round has of this rank."""
        self._buffers.release(index - 1)
        end = index + (self._plan.ahead or self._plan.num_rounds)
        for later in self._plan.rounds_of(self.rank, self._next, end):
            chunk = self._buffers.prepare_chunk(self._plan, later, later)
            if chunk is None:
                break
            if chunk.byte_ranges:
                self._read(chunk)
                self._ahead.append((later, chunk))
            self._next = later + 1
        assert self._next > index or index not in self._plan.rounds_of(self.rank, index, index + 1)
        mine = self._ahead.popleft()[1] if self._ahead and self._ahead[0][0] == index else None
        work = self._buffers.prepare(self._plan, index, index, mine)
        if work.slots is not None and work.chunk is not None:
            (memory,) = work.chunk.memory
            work.slots.by_reader[self.rank][: len(memory)].copy_(memory)
        self._buffers.pack(work)
        return work

    def end(self, work: Round) -> int:
        """Places what has come; returns how much that was."""
        arrivals = list(self._buffers.arrivals(work))
        for arrival in arrivals:
            for start, data in arrival.pieces:
                self._writer.place(start, data)
        return sum(arrival.nbytes for arrival in arrivals)

    def free(self) -> None:
        """Frees the buffers; what was used of them is reported afterwards."""
        used = self._buffers.nbytes
        self._buffers.free()
        assert self._buffers.nbytes == used

    def _read(self, chunk: OwnChunk) -> None:
        data = torch.cat([self._file[part.offset : part.offset + part.nbytes] for part in chunk.byte_ranges])
        for buffer, part in zip(
            chunk.memory, data.split([len(piece) for piece in chunk.memory]), strict=True
        ):
            buffer.copy_(part)


def run(
    plan: Plan, machines: str, file: Tensor, destinations: list[list[Destination]], device: str
) -> list[int]:
    """Moves all rounds; returns how many bytes were placed on each rank."""
    everyone = range(len(machines))
    domains = sharing_domains(machines, plan.recipient_sets)
    shared: dict[object, dict[int, Tensor]] = {domain: {} for domain in domains}
    members = []
    for rank in everyone:
        memory = InProcess(rank, Routing(rank, everyone, domains), shared[domains[rank]], device)
        members.append(OneRank(rank, plan, file, memory, destinations[rank]))
    placed = [0] * len(members)
    for index in range(plan.num_rounds):
        begun = [member.begin(index) for member in members]
        messages = {
            (each.message.reader, each.message.ranks): each.data for work in begun for each in work.packed
        }
        for rank, work in enumerate(begun):
            for each in work.incoming:
                if each.route.holder == rank:
                    each.data.copy_(messages[each.message.reader, each.message.ranks])
        for rank, (member, work) in enumerate(zip(members, begun, strict=True)):
            placed[rank] += member.end(work)
    for member in members:
        member.free()
    return placed


def entries() -> list[TensorEntry]:
    made, offset = [], 0
    for number, nbytes in enumerate(_LENGTHS):
        made.append(TensorEntry(f"t{number}", "U8", (nbytes,), 0, offset, nbytes))
        offset += nbytes
    return made


@draws(30)
@given(
    machines=st.sampled_from(["abcdefg", "aabbccd", "aaaaaaa"]),
    device=st.sampled_from(["cpu", "cuda"]),
    staging_bytes=st.sampled_from([36 << 10, 1 << 16, 1 << 22]),
    chunk_bytes=st.sampled_from([4096, 8192, 5000]),
    cast=st.booleans(),
    contiguous=st.booleans(),
    block_bytes=st.sampled_from([0, 0, 1000]),
)
def test_what_is_read_comes_to_every_rank(
    machines: str,
    device: str,
    staging_bytes: int,
    chunk_bytes: int,
    cast: bool,
    contiguous: bool,
    block_bytes: int,
) -> None:
    file = torch.randint(256, (sum(_LENGTHS),), dtype=torch.uint8)
    plan = plan_for_all(
        entries(), world_size=7, readers=range(6), staging_bytes=staging_bytes, chunk_bytes=chunk_bytes,
        even_slots=device != "cpu", contiguous=contiguous, block_bytes=block_bytes, hosts=list(machines),
    )  # fmt: skip
    assert plan.num_windows > 1 or staging_bytes > 36 << 10
    assert plan.num_windows == 1 or staging_bytes < 1 << 22
    dtype = torch.float32 if cast else torch.uint8
    tensors = [[torch.zeros(nbytes, dtype=dtype) for nbytes in _LENGTHS] for _ in machines]
    destinations = [
        [Destination(entry, torch.uint8, to) for entry, to in zip(entries(), own, strict=True)]
        for own in tensors
    ]
    assert run(plan, machines, file, destinations, device) == [plan.total_bytes] * len(machines)
    for own in tensors:
        assert torch.equal(torch.cat(own).to(torch.uint8), file)


@draws(60)
@given(jobs(), st.integers(1, 40), st.data())
def test_each_rank_gets_just_the_bytes_that_it_wants(
    job: tuple[list[ByteRange], list[Want], int], chunk_bytes: int, data: st.DataObject
) -> None:
    extents, wants, block_bytes = job
    lengths = [extent.nbytes for extent in extents]
    # In one file.
    tensors = [ByteRange(0, sum(lengths[:number]), nbytes) for number, nbytes in enumerate(lengths)]
    size = len(wants)
    readers = data.draw(st.sets(st.sampled_from(range(size)), min_size=1).map(sorted))
    machines = "".join(data.draw(st.sampled_from("ab")) for _ in range(size))
    plan = plan_of((tensors, wants, block_bytes), readers, max(chunk_bytes, block_bytes), contiguous=False)
    file = torch.randint(256, (sum(lengths),), dtype=torch.uint8)
    outputs, destinations = [], []
    for want in wants:
        own = []
        for index, part in want:
            entry = TensorEntry(
                f"t{index}", "U8", (lengths[index],), 0, tensors[index].offset, lengths[index]
            )
            for runs in part:
                own.append(Destination(entry, torch.uint8, torch.zeros(runs.total, dtype=torch.uint8), runs))
        destinations.append(own)
        outputs.append([one.tensor for one in own])
    run(plan, machines, file, destinations, data.draw(st.sampled_from(["cpu", "cuda"])))
    for want, own in zip(wants, outputs, strict=True):
        expected = [
            torch.cat([file[tensors[index].offset + at :][: runs.length] for at in runs.starts()])
            for index, part in want
            for runs in part
        ]
        assert all(torch.equal(got, one) for got, one in zip(own, expected, strict=True))
