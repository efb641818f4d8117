"""Digests of shards, which devices compute while the host goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from fastload.base.bit_digests import BitDigester
from fastload.base.devices import follow, poll, record_use
from fastload.saving.messages import ShardRange
from fastload.saving.reader import StateReader


class PendingDigests:
    """Digests of the bits of ranges of shards, computed where they are; see `BitDigester`.

    Devices compute them on the streams of `DeviceStreams.for_copies`, which begin after the work that is
    queued on the caller's streams. Tensors in host memory are read at once. References to the tensors are
    not kept.

    Args:
        reader: Reads this rank's tensors.
        ranges: The ranges, at multiples of `bit_digests.ALIGN_BYTES`.
        num_held: What is queued later on the caller's streams waits for so many ranges, the first ones.

    Raises:
        MemoryError: A device has too little memory.
    """

    def __init__(self, reader: StateReader, ranges: Sequence[ShardRange], *, num_held: int = 0) -> None:
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
            add(slice(num_held))
        if num_held:
            self._streams.hold_caller()
        with self._streams.current():
            add(slice(num_held, None))
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
