"""Digests of shards, which devices compute while the host goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from hashlib import shake_128
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from fastload.base.devices import copy_async, follow, is_accelerator, poll, record_use
from fastload.base.memory import allocate, allocate_staging, byte_view, copy_run, host_view
from fastload.saving.messages import ShardRange
from fastload.saving.reader import StateReader

_WORD_BYTES, _SUM_BYTES = 4, 8
_ROW_WORDS = 8 << 10
_ROW_BYTES = _ROW_WORDS * _WORD_BYTES
_DEVICE_PIECE_BYTES = 8 << 20  # with the products 24 MiB: few launches, and no more than large caches hold
_HOST_PIECE_BYTES = 1 << 20


class RowSums(NamedTuple):
    """The sums that a device has computed, in host memory.

    Attributes:
        memory: Their bytes.
        lengths: Lengths of the ranges.
    """

    memory: Tensor
    lengths: Sequence[int]

    def digests(self) -> Iterator[int]:
        """Yields the digests of the ranges, once the work that was queued on the device has ended."""
        sums, begin = host_view(self.memory), 0
        for nbytes in self.lengths:
            end = begin + _num_rows(nbytes) * _SUM_BYTES
            yield xxhash.xxh3_64_intdigest(sums[begin:end], seed=nbytes)
            begin = end


class BitDigester:
    """Digests of the bits of ranges of tensors on one device, 64 bits each.

    A digest depends on the bytes of its range alone, in row-major order: not on the device, on strides, or on
    `piece_bytes`. The bytes, padded with zeros, are words of 32 bits in rows of 8,192 words. For each row the
    device computes ``sum(word[i] * weight[i])`` modulo 2⁶⁴. The host hashes the sums of a range, and its
    length, with XXH3.

    Two different rows have the same sum with a probability of at most 2⁻³³, whatever they are, since the
    weights are random (the output of SHAKE-128). Proof: let ``d`` be the differences of their words, and
    ``d[k]`` one that is not 0. It is 2ʲ times an odd number, and j ≤ 31, as words have 32 bits. Whatever the
    other weights, at most 2ʲ of the 2⁶⁴ values of ``weight[k]`` lead to ``sum(d[i] * weight[i]) = 0``. So
    no pattern stays unseen: swapped or permuted words, constants, flipped signs. 64-bit words would not do:
    of the difference 2⁶³, the sign of a double, only the lowest bit of the weight is left in the sum.

    The device reads each byte from its memory once. Products have 8 bytes for each word, and are written and
    read in pieces that its cache can hold; torch cannot multiply and add up integers in one operator. All
    work is queued on the current stream, and the host does not wait for it.

    Args:
        device: The device.
        lengths: Lengths of the ranges that `add` is called with.
        piece_bytes: Most bytes at once; temporary memory has three times as much.

    Raises:
        MemoryError: The device has too little memory.
    """

    def __init__(
        self, device: torch.device, lengths: Iterable[int], *, piece_bytes: int | None = None
    ) -> None:
        on_device = is_accelerator(device)
        piece_bytes = piece_bytes or (_DEVICE_PIECE_BYTES if on_device else _HOST_PIECE_BYTES)
        assert piece_bytes % _ROW_BYTES == 0, piece_bytes
        num_rows = sum(map(_num_rows, lengths))
        num_at_once = min(piece_bytes // _ROW_BYTES, num_rows)
        self._piece_bytes = piece_bytes
        self._weights = allocate((_ROW_WORDS,), torch.int64, device)
        self._products = allocate((num_at_once, _ROW_WORDS), torch.int64, device)
        self._flat_products = self._products.view(-1)
        self._sums = allocate((num_rows,), torch.int64, device)
        self._num_filled = self._num_summed = 0  # rows
        self._is_zero = False  # whether the rows of products that are not filled are
        self._lengths: list[int] = []
        self._host_sums = allocate_staging(num_rows * _SUM_BYTES, pinned=on_device)

    def begin(self) -> None:
        """Continues on the current stream, which has to begin after that of the constructor."""
        for tensor in (self._weights, self._products, self._sums):
            record_use(tensor)
        copy_async(_weights(pinned=self._host_sums.is_pinned()), self._weights)

    def add(self, tensor: Tensor, begin: int, end: int) -> None:
        """Adds a range of the bytes of a tensor of any strides.

        Args:
            tensor: The tensor, without a lazy conjugate or negation.
            begin: First byte in row-major order, a multiple of 16, and so between elements of any dtype.
            end: The byte after the last one, also a multiple or the end of the tensor.
        """
        tensor = tensor.detach()
        words = _words_in_place(tensor)
        for first in range(begin, end, self._piece_bytes):
            last = min(first + self._piece_bytes, end)
            if words is None:
                self._multiply(_copied_words(tensor, first, last))
            elif last - first == tensor.nbytes:
                self._multiply(words)
            else:
                self._multiply(words[first // _WORD_BYTES : last // _WORD_BYTES])
        self._lengths.append(end - begin)

    def finish(self) -> RowSums:
        """Copies the sums to the host, once all ranges are added."""
        self._sum_up()
        copy_async(byte_view(self._sums), self._host_sums)
        return RowSums(self._host_sums, self._lengths)

    def _multiply(self, words: Tensor) -> None:
        """Multiplies the words of a piece, the last one of a range or complete rows."""
        num_rows, num_left = divmod(words.numel(), _ROW_WORDS)
        if self._num_filled + num_rows + bool(num_left) > len(self._products):
            self._sum_up()
        if num_rows:
            first, last = self._num_filled, self._num_filled + num_rows
            rows = words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS)
            torch.mul(rows, self._weights, out=self._products[first:last])
            self._num_filled = last
        if num_left:
            if not self._is_zero:
                self._products[self._num_filled :].zero_()
                self._is_zero = True
            first = self._num_filled * _ROW_WORDS
            out = self._flat_products[first : first + num_left]
            left = words[num_rows * _ROW_WORDS :] if num_rows else words
            torch.mul(left, self._weights[:num_left], out=out)
            self._num_filled += 1

    def _sum_up(self) -> None:
        """Sums up the rows that are filled."""
        num = self._num_filled
        torch.sum(self._products[:num], 1, out=self._sums[self._num_summed : self._num_summed + num])
        self._num_summed += num
        self._num_filled, self._is_zero = 0, False


def _num_rows(nbytes: int) -> int:
    return -(-nbytes // _ROW_BYTES)


@cache
def _weights(*, pinned: bool) -> Tensor:
    weights = allocate((_ROW_WORDS,), torch.int64, torch.device("cpu"), pinned=pinned)
    data = bytearray(shake_128(b"weights of the words of a row").digest(weights.nbytes))
    return weights.copy_(torch.frombuffer(data, dtype=torch.int64))


def _words_in_place(tensor: Tensor) -> Tensor | None:
    """Returns the words of a tensor where they are; None if they have to be copied."""
    offset = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.is_contiguous() or (tensor.data_ptr() | offset | tensor.nbytes) % _WORD_BYTES:
        return None
    return tensor.view(-1).view(torch.int32)


def _copied_words(tensor: Tensor, first: int, last: int) -> Tensor:
    """Returns a copy of the words of a range of bytes, padded with zeros."""
    words = allocate((-(-(last - first) // _WORD_BYTES),), torch.int32, tensor.device)
    words[-1:].zero_()
    elements = words.view(torch.uint8)[: last - first].view(tensor.dtype)
    copy_run(tensor, first // tensor.element_size(), elements)
    return words


class PendingDigests:
    """Digests of the bits of ranges of shards, computed where they are; see `BitDigester`.

    Devices compute them on the streams of `DeviceStreams.for_copies`, which begin after the work that is
    queued on the caller's streams. Tensors in host memory are read at once. References to the tensors are
    not kept.

    Args:
        reader: Reads this rank's tensors.
        ranges: The ranges, at multiples of 16 bytes.
        num_first: What is queued later on the caller's streams waits for so many ranges, the first ones.

    Raises:
        MemoryError: A device has too little memory.
    """

    def __init__(self, reader: StateReader, ranges: Sequence[ShardRange], *, num_first: int = 0) -> None:
        tensors = [reader.part(each.tensor, each.shard.box) for each in ranges]
        self._devices = [tensor.device for tensor in tensors]
        lengths = defaultdict[torch.device, list[int]](list)
        for device, each in zip(self._devices, ranges, strict=True):
            lengths[device].append(each.end - each.begin)
        # In the caller's streams, whose memory is there already.
        digesters = {device: BitDigester(device, of_device) for device, of_device in lengths.items()}

        def add(some: slice) -> None:
            for tensor, (_, _, begin, end) in zip(tensors[some], ranges[some], strict=True):
                record_use(tensor)
                digesters[tensor.device].add(tensor, begin, end)

        self._streams = reader.streams.for_copies()
        with self._streams.current():
            for digester in digesters.values():
                digester.begin()
            add(slice(num_first))
        if num_first:
            self._streams.hold_caller()
        with self._streams.current():
            add(slice(num_first, None))
            self._sums = {device: digester.finish() for device, digester in digesters.items()}
            self._is_over = follow(self._streams.devices)

    def hold_caller(self) -> None:
        """Has this thread's current streams wait until all are computed; the host does not wait."""
        self._streams.hold_caller()

    def get(self, limit_s: float) -> list[int]:
        """Waits for the digests, and returns them in the order of the ranges.

        Raises:
            DeadlineExceeded: They took longer than `limit_s` seconds, or what was queued before them.
        """
        poll(self._is_over, "digests of tensors on devices", limit_s)
        found = {device: sums.digests() for device, sums in self._sums.items()}
        return [next(found[device]) for device in self._devices]
