"""One draw of the soak of states with DTensors: meshes of ranks in any order, compared with `full_tensor`.

Each rank makes up its local tensors; what they mean together is what `full_tensor` says. That is what has to
be in the checkpoint, and in whatever mesh it is loaded into next, or it has to be refused by name.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fastload
from fastload.errors import FastloadError
from fastload.integrations.dcp import Reader, Writer
from tests.checkpoints import assert_same_bits, raw
from tests.dist.draws import draw_state

__all__ = ["run_some"]

_TIMEOUT_S = 40.0
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Layout:
    """A mesh, and how each tensor lies on it.

    Attributes:
        shape: Of the mesh.
        ranks: In the order of its coordinates.
        placements: By name; None of a plain tensor.
        coordinates: Whether shards are cut by coordinates, as torch's factories do, and not by groups.
        through_dcp: Whether dcp saves and loads it.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: Mapping[str, Sequence[Any] | None]
    coordinates: bool
    through_dcp: bool

    @property
    def kind(self) -> str:
        """What is counted together."""
        order = "ascending" if list(self.ranks) == sorted(self.ranks) else "permuted"
        return (
            f"{len(self.shape)}-d {order}{', by coordinates' * self.coordinates}{', dcp' * self.through_dcp}"
        )

    def numbers(self) -> list[Tensor]:
        """Returns for each dimension the number in its group of the rank at each coordinate."""
        ranks = torch.tensor(self.ranks).reshape(self.shape)
        return [ranks.argsort(dim).argsort(dim) for dim in range(ranks.dim())]

    def may_be_refused(self, name: str, shape: Sequence[int]) -> bool:
        """Whether it cannot be told what a rank holds of a tensor, or torch's `full_tensor` fails."""
        placements, numbers = self.placements[name], self.numbers()
        if placements is None:
            return False
        cuts = {dim: one.dim for dim, one in enumerate(placements) if hasattr(one, "dim")}
        for one, other in permutations(cuts, 2):  # along one line in another order than along the next
            if (numbers[one] != numbers[one].narrow(other, 0, 1)).any():
                return True
        is_uneven = any(
            shape[cut]
            % prod(size for size, dim in zip(self.shape, placements, strict=True) if dim == Shard(cut))
            for cut in cuts.values()
        )
        is_permuted = self.ranks != tuple(sorted(self.ranks))
        is_cut_twice = len(set(cuts.values())) < len(cuts)
        return is_permuted and is_uneven and (self.coordinates or is_cut_twice)


def _draw_layout(rng: random.Random, state: Mapping[str, Tensor], world: int) -> Layout:
    shapes = [(world,)] + [(one, world // one) for one in range(1, world + 1) if world % one == 0]
    shapes += [(1, 2, world // 2), (2, 1, world // 2)] * (world % 2 == 0)
    shape = rng.choice(shapes)
    ranks = torch.arange(world).reshape(shape)
    order = rng.choice(["ascending", "flipped", "flipped", "any"])
    if order == "flipped":
        ranks = ranks.flip([dim for dim in range(len(shape)) if rng.random() < 0.6])
    elif order == "any":
        ranks = torch.tensor(rng.sample(range(world), world)).reshape(shape)
    return Layout(
        shape,
        tuple(ranks.flatten().tolist()),
        {name: _draw_placements(rng, tensor, shape) for name, tensor in state.items()},
        coordinates=rng.random() < 0.1,
        through_dcp=rng.random() < 0.3,
    )


def _draw_placements(rng: random.Random, tensor: Tensor, shape: Sequence[int]) -> list[Any] | None:
    if rng.random() < 0.1:
        return None
    is_even = tensor.dim() > 0 and tensor.shape[0] % prod(shape) == 0  # else full_tensor fails
    if len(shape) == 2 and is_even and rng.random() < 0.3:
        return [_StridedShard(0, split_factor=shape[1]), Shard(0)]  # FSDP2 of tensor parallelism
    cuts = [Shard(dim) for dim in range(tensor.dim())]
    return [rng.choice([Replicate(), *cuts, *cuts]) for _ in shape]


def _rows(size: int, cuts: Sequence[tuple[int, int, int]]) -> Tensor:
    """Returns which indexes of a dimension a rank holds, cut as torch does it."""
    rows = torch.arange(size)
    for num_ranks, which, factor in cuts:
        pieces = [_chunk(_chunk(rows, factor, number), num_ranks, which) for number in range(factor)]
        rows = torch.cat(pieces)
    return rows


def _chunk(rows: Tensor, num_chunks: int, which: int) -> Tensor:
    chunks = rows.chunk(num_chunks) if len(rows) else ()
    return chunks[which] if which < len(chunks) else rows[:0]


def _place(layout: Layout, mesh: DeviceMesh, name: str, whole: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor."""
    placements, coordinate = layout.placements[name], mesh.get_coordinate()
    if placements is None:
        return whole.clone()
    assert coordinate is not None
    numbers = layout.numbers()
    index = list(coordinate) if layout.coordinates else [int(each[tuple(coordinate)]) for each in numbers]
    local = whole
    for dim, size in enumerate(whole.shape):
        cuts = [
            (num_ranks, which, getattr(one, "split_factor", 1))
            for num_ranks, which, one in zip(layout.shape, index, placements, strict=True)
            if getattr(one, "dim", None) == dim
        ]
        local = local.index_select(dim, _rows(size, cuts))
    return _dtensor(local.clone(), mesh, placements, whole)


def _dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Any], like: Tensor) -> DTensor:
    stride = torch.empty(like.shape, device="meta").stride()
    given = {"run_check": False, "shape": like.shape, "stride": stride}
    return DTensor.from_local(local, mesh, placements, **given)


def _full(tensor: Tensor) -> Tensor | None:
    """Returns what `full_tensor` says; None if it does not say the same on all ranks, or nothing."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    local = tensor.to_local()
    kind = _BITS[local.dtype.itemsize]
    bits = _dtensor(local.view(kind).long(), tensor.device_mesh, tensor.placements, tensor)  # as Gloo can
    try:
        found: Tensor | None = bits.full_tensor().to(kind).view(local.dtype)
    except (RuntimeError, AssertionError):  # local tensors that are not what placements say
        found = None
    is_good = found is not None and found.shape == tensor.shape
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, raw(found) if found is not None and is_good else None)
    return found if is_good and said.count(said[0]) == len(said) else None


def _attempt(call: Callable[[], Any]) -> str:
    """Returns why something was refused; empty if it was not."""
    try:
        call()
    except (FastloadError, CheckpointException) as error:
        return str(error)
    return ""


def _bits_of(state: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items() if tensor is not None}


def _save(rng: random.Random, state: dict[str, Any], path: Path, layout: Layout) -> None:
    options = fastload.SaveOptions(
        timeout_s=_TIMEOUT_S,
        block_bytes=4096,
        max_shard_bytes=rng.choice([100_000, 1 << 30]),
        check_replicas=rng.choice(["small", "full"]),
    )
    nested = {"model": state, "step": 3}
    if layout.through_dcp:
        dcp.save(nested, storage_writer=Writer(path, options=options))
    elif rng.random() < 0.3:
        fastload.async_save(nested, path, options=options).wait()
    else:
        fastload.save(nested, path, options=options)


def _load(into: dict[str, Any], path: Path, layout: Layout) -> None:
    options = fastload.LoadOptions(timeout_s=_TIMEOUT_S)
    nested = {"model": into, "step": 0}
    if layout.through_dcp:
        dcp.load(nested, storage_reader=Reader(path, options=options))
    else:
        fastload.load(path, into=nested, options=options)


def _judge(layout: Layout, state: Mapping[str, Tensor], refusal: str) -> None:
    """Raises if a refusal was wrong: nothing was to be refused, or it does not say what."""
    bad = [name for name, tensor in state.items() if layout.may_be_refused(name, tensor.shape)]
    assert any(name in refusal for name in bad), f"{bad} may be refused: {refusal}"


def run_some(rank: int, world: int, seed: int, first: int, num: int, folder: Path) -> Counter[str]:
    """Saves, loads and compares, on each rank; returns how the draws ended.

    Args:
        rank: This rank.
        world: Number of ranks.
        seed: Of all draws.
        first: Number of the first draw.
        num: Number of draws.
        folder: Where to save.
    """
    tally: Counter[str] = Counter()
    for number in range(first, first + num):
        rng = random.Random(f"{seed}/{number}")
        wholes = draw_state(rng, rng.randint(1, 6))
        saved, loaded = _draw_layout(rng, wholes, world), _draw_layout(rng, wholes, world)
        print(f"draw {number} of {world} ranks: {saved} into {loaded}", flush=True)  # if it hangs
        try:
            tally.update(_run(rng, wholes, saved, loaded, folder / str(number)))
        except Exception as error:
            raise AssertionError(f"draw {number} of {world} ranks: {saved} into {loaded}") from error
    return tally


def _run(rng: random.Random, wholes: Mapping[str, Tensor], saved: Layout, loaded: Layout, path: Path) -> str:
    mesh = DeviceMesh("cpu", torch.tensor(saved.ranks).reshape(saved.shape))
    state = {name: _place(saved, mesh, name, whole) for name, whole in wholes.items()}
    if refusal := _attempt(lambda: _save(rng, dict(state), path, saved)):
        _judge(saved, wholes, refusal)
        assert not path.exists()
        return [f"{saved.kind}: not saved, by name"]
    expected = {name: _full(tensor) for name, tensor in state.items()}
    unclear = [name for name, full in expected.items() if full is None]
    assert not unclear, f"{unclear}: full_tensor is not the same on all ranks, and it was saved"
    found = fastload.load(path)["model"]
    assert_same_bits(found, _bits_of(expected))
    mesh = DeviceMesh("cpu", torch.tensor(loaded.ranks).reshape(loaded.shape))
    into = {name: _place(loaded, mesh, name, torch.zeros_like(whole)) for name, whole in wholes.items()}
    if refusal := _attempt(lambda: _load(into, path, loaded)):
        _judge(loaded, wholes, refusal)
        return [f"{saved.kind}: saved", f"{loaded.kind}: not loaded, by name"]
    assert_same_bits(_bits_of({name: _full(tensor) for name, tensor in into.items()}), _bits_of(expected))
    return [f"{saved.kind}: saved", f"{loaded.kind}: loaded"]
