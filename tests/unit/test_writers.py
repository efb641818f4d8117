"""What every `Writer` does: each byte of a range is read into the targets that it names, or placed by it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fastload.ext.streams.tensors import StreamBuffer, StreamedTensor
from fastload.formats.manifest import FileEntry, Manifest, TensorEntry
from fastload.loading.targets import Destination, TensorWriter
from fastload.transfer.buffers import Writer

SIZES = (40, 8, 0, 120, 4, 96, 33, 52)  # in elements of float32


class Case:
    """A writer, and what it has written by the end; the bytes come in the order of the tensors."""

    writer: Writer

    def end_round(self, in_place: list[tuple[int, int]]) -> None:
        """Ends a round, with the ranges that were read into their targets."""

    def tensors(self) -> dict[str, Tensor]:
        raise NotImplementedError


class IntoTensors(Case):
    """Tensors of the caller: pairs of plain ones, strided ones and casts in turn."""

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = {}
        for number, entry in enumerate(manifest.tensors):
            memory = torch.zeros(2 * entry.shape[0])
            kinds = memory[: entry.shape[0]], memory[::2], memory[::2].double()
            self._tensors[entry.name] = kinds[number // 2 % 3]
        entries = zip(manifest.tensors, self._tensors.values(), strict=True)
        self.writer = TensorWriter([Destination(entry, torch.float32, tensor) for entry, tensor in entries])

    def tensors(self) -> dict[str, Tensor]:
        return self._tensors


class IntoStream(Case):
    """Tensors that are handed out, with room for few of them at once."""

    room_bytes = 400

    def __init__(self, manifest: Manifest) -> None:
        tensors = [StreamedTensor(entry, (entry.name,), False) for entry in manifest.tensors]
        self.writer = self._buffer = StreamBuffer(manifest, tensors, torch.device("cpu"), self.room_bytes)
        self._tensors: dict[str, Tensor] = {}

    def end_round(self, in_place: list[tuple[int, int]]) -> None:
        self._tensors.update(self._buffer.hand_out(in_place, 1.0, lambda: False))

    def tensors(self) -> dict[str, Tensor]:
        return self._tensors


def manifest() -> Manifest:
    entries, offset = [], 0
    for number, size in enumerate(SIZES):
        entries.append(TensorEntry(f"t{number}", "F32", (size,), 0, offset, 4 * size))
        offset += 4 * size
    return Manifest("here", (FileEntry("f", offset, "", "", b""),), tuple(entries))


def rounds(nbytes: int, chance: random.Random) -> Iterator[list[tuple[int, int]]]:
    """Yields the ranges of each round: those of a round in any order, cut anywhere."""
    edges = sorted({0, nbytes, *(chance.randrange(nbytes) for _ in range(24))})
    ranges = [(begin, end - begin) for begin, end in pairwise(edges)]
    while ranges:
        count = chance.randint(1, 5)
        now, ranges = ranges[:count], ranges[count:]
        yield chance.sample(now, len(now))


@pytest.mark.parametrize("kind", [IntoTensors, IntoStream])
@pytest.mark.parametrize("seed", range(12))
def test_all_bytes_reach_their_tensors(kind: type[Case], seed: int) -> None:
    chance, stored = random.Random(seed), manifest()
    values = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(seed))
    data = values.view(torch.uint8)
    case = kind(stored)
    for ranges in rounds(data.numel(), chance):
        in_place, lent = [], []
        for start, nbytes in ranges:
            part, at_most = data[start : start + nbytes].clone(), chance.choice([1, 2, 9])
            targets = case.writer.targets(start, nbytes, at_most)
            if targets is None:
                case.writer.place(start, part)
                lent.append(part)
                continue
            assert len(targets) <= at_most
            for target, piece in zip(targets, part.split(list(map(len, targets))), strict=True):
                target.copy_(piece)
            in_place.append((start, nbytes))
        case.end_round(in_place)
        assert case.writer.follow()()
        for part in lent:  # from now on its buffer may be used for other bytes
            part.fill_(255)
    written = case.tensors()
    for entry, expected in zip(stored.tensors, values.split(list(SIZES)), strict=True):
        assert torch.equal(written[entry.name].float(), expected), entry.name
