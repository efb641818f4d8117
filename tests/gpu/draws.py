"""Random loads and saves on devices: one draw is a few operations, with streams that are late at random."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fastload
from fastload.geometry.dtensors import narrowed
from tests.checkpoints import assert_same_bits
from tests.dist.test_sharded import emptied, locals_of
from tests.dist.test_sharded_failures import break_reads
from tests.gpu.devices import Devices

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8]


class Draw:
    """One draw, the same on all ranks.

    Args:
        devices: This rank's.
        rank: This rank.
        world: Number of ranks.
        seed: Of everything in it.
        folder: Shared by the ranks.
    """

    def __init__(self, devices: Devices, rank: int, world: int, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.devices, self.rank, self.world = devices, rank, world
        self.folder = folder / str(seed)
        self.host = self._tensors()
        shapes = [(world,)] + ([(2, world // 2)] if world > 2 else [])
        self.mesh: DeviceMesh = init_device_mesh(devices.device.type, self.rng.choice(shapes))
        self.log: list[str] = []

    def run(self) -> None:
        """Saves what was drawn, and does a few things with it."""
        kinds: list[Callable[[], None]] = [
            self.load,
            self.load_shards,
            self.stream,
            self.boxes,
            self.save,
            self.save_shards,
            self.broken,
            self.group,
        ]
        fastload.save(self.host, self.folder / "host")
        for number in range(4):
            self.number = number
            self.devices.slow(
                self.rng.randrange(1 << 30) + self.rank, longest_s=self.rng.choice([0.0005, 0.003])
            )
            aside, kind = self.rng.random() < 0.5, self.rng.choice(kinds)
            self.log.append(f"{kind.__name__}{' aside' if aside else ''}")
            if aside:
                with self.devices.aside():
                    kind()
            else:
                kind()
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder)

    def _tensors(self) -> dict[str, Tensor]:
        found = {}
        for number in range(self.rng.randint(1, 9)):
            shape = [self.rng.choice([1, 3, 8, 40, 101]) for _ in range(self.rng.randint(0, 3))]
            dtype = self.rng.choice(DTYPES)
            count = torch.Size(shape).numel() * dtype.itemsize
            raw = torch.frombuffer(bytearray(self.rng.randbytes(count)), dtype=torch.uint8)
            found[f"t{number}"] = raw.view(dtype).view(shape)
        return found

    def _options(self) -> fastload.LoadOptions:
        return fastload.LoadOptions(
            strategy=self.rng.choice(["auto", "allgather", "broadcast", "direct"]),
            chunk_bytes=self.rng.choice([None, 1021, 4096, 30_000]),
            timeout_s=60,
        )

    def _shards(self) -> dict[str, Tensor]:
        layouts: list[list[Any]] = [[Shard(0)], [Shard(1)], [Replicate()]]
        if self.mesh.ndim == 2:
            layouts = [[one, other] for [one] in layouts for [other] in layouts]
        return {
            name: self.devices.cut(t, self.mesh, self.rng.choice(layouts)) for name, t in self.host.items()
        }

    def load(self) -> None:
        loaded = fastload.load(self.folder / "host", device=self.devices.device, options=self._options())
        assert_same_bits({name: tensor.cpu() for name, tensor in loaded.items()}, self.host)

    def load_shards(self) -> None:
        state = self._shards()
        before = {name: tensor.cpu() for name, tensor in locals_of(state).items()}
        fastload.load(self.folder / "host", into=emptied(state), options=self._options())
        assert_same_bits({name: tensor.cpu() for name, tensor in locals_of(state).items()}, before)

    def broken(self) -> None:
        """Loads while one rank's storage breaks; the others read for it, or all of them raise."""
        state, options = self._shards(), self._options()
        before = {name: tensor.cpu() for name, tensor in locals_of(state).items()}
        after = self.rng.randrange(4)
        with pytest.MonkeyPatch.context() as patch:
            break_reads(patch, after if self.rank == self.world - 1 else None)
            try:
                fastload.load(self.folder / "host", into=emptied(state), options=options)
            except fastload.FastloadError:
                self.devices.check_group()
                return
        assert_same_bits({name: tensor.cpu() for name, tensor in locals_of(state).items()}, before)

    def stream(self) -> None:
        copies, last = {}, self.rng.choice([None, 1, 2])
        with fastload.open(self.folder / "host", options=self._options()) as opened:
            for number, (name, tensor) in enumerate(opened.tensors(device=self.devices.device)):
                copies[name] = tensor.clone()
                del tensor
                if number == last:
                    break
        self.devices.check_group()
        assert_same_bits(
            {name: tensor.cpu() for name, tensor in copies.items()},
            {name: self.host[name] for name in copies},
        )

    def boxes(self) -> None:
        wanted = {}
        for name, tensor in self.host.items():
            offsets = [self.rng.randrange(size) for size in tensor.shape]
            sizes = [self.rng.randint(1, size - at) for size, at in zip(tensor.shape, offsets, strict=True)]
            if (self.rng.randrange(3) + self.rank) % 3 and tensor.dim():
                wanted[name] = fastload.Box(tuple(offsets), tuple(sizes))
        copies = {}
        options = self._options()
        with fastload.open(self.folder / "host", options=options) as opened:
            for name, tensor in opened.tensors(boxes=wanted, device=self.devices.device):
                copies[name] = tensor.clone()
                del tensor
        assert_same_bits(
            {name: tensor.cpu() for name, tensor in copies.items()},
            {name: narrowed(self.host[name], box) for name, box in wanted.items()},
        )

    def save(self) -> None:
        state = {name: tensor.to(self.devices.device) for name, tensor in self.host.items()}
        self._save_and_change(state, list(state.values()))

    def save_shards(self) -> None:
        state = self._shards()
        self._save_and_change(state, [tensor.to_local() for tensor in state.values()])  # type: ignore[attr-defined]

    def _save_and_change(self, state: dict[str, Tensor], parts: list[Tensor]) -> None:
        """Saves what a late kernel computes, and changes it at once."""
        bits = [part.view(torch.uint8) if part.dim() else part.reshape(1).view(torch.uint8) for part in parts]
        for part in bits:
            part.bitwise_xor_(1)
        self.devices.busy(0.01)
        for part in bits:
            part.bitwise_xor_(1)
        path = self.folder / f"device{self.number}"
        snapshot: Any = self.rng.choice([None, "block", "overlap"])
        if snapshot is None:
            fastload.save(state, path)
        else:
            saving = fastload.async_save(state, path, options=fastload.SaveOptions(snapshot=snapshot))
            saving.wait_snapshot()
        for part in bits:
            part.zero_()
        if snapshot is not None:
            saving.wait(60)
        assert_same_bits(fastload.load(path), self.host)

    def group(self) -> None:
        self.devices.check_group()
