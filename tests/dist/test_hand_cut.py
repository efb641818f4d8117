"""Tensors that the caller has cut into boxes, in saves and loads: any boxes on any ranks, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor, placement_types

import fastload
from fastload import Box, CheckpointManager, Shard
from fastload.errors import OptionError, PeerError, PlanMismatch, ReplicaMismatch, StateChanged
from fastload.geometry.dtensors import narrowed
from tests.accelerator import accelerator
from tests.checkpoints import assert_same_bits
from tests.dist.draws import draw_state
from tests.dist.harness import ranks
from tests.dist.test_overlapped_saves import PATIENCE_S, Gate
from tests.dist.test_sharded import MESHES, locals_of, placed
from tests.dist.test_sharded_saves import files, options, save_plain

DRAWS = 4
LOAD = fastload.LoadOptions(timeout_s=20)


def draw_boxes(rng: random.Random, shape: Sequence[int], num: int) -> list[Box]:
    """Cuts a tensor into about so many boxes, in no grid."""
    boxes = [Box.whole(shape)]
    while len(boxes) < num:
        at = rng.randrange(len(boxes))
        box = boxes[at]
        dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not dims:
            return boxes
        dim = rng.choice(dims)
        cut = rng.randrange(1, box.sizes[dim])
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += cut
        sizes[dim] -= cut
        first = (*box.sizes[:dim], cut, *box.sizes[dim + 1 :])
        boxes[at : at + 1] = [box._replace(sizes=first), Box(tuple(offsets), tuple(sizes))]
    return boxes


def shard_of(tensor: Tensor, boxes: Sequence[Box]) -> Shard:
    return Shard.of_boxes([(box, narrowed(tensor, box)) for box in boxes], tensor.shape)


def cut_state(rng: random.Random, state: Mapping[str, Tensor], world: int, rank: int) -> dict[str, Shard]:
    """This rank's part of a drawn sharding.

    Some boxes are on several ranks. One rank may have boxes of another cut, which overlap those of others.
    """
    parts: dict[str, Shard] = {}
    for name, tensor in state.items():
        boxes = draw_boxes(rng, tensor.shape, rng.randint(1, 2 * world))
        odd = rng.randrange(world) if world > 1 and rng.random() < 0.5 else None
        others = [one for one in range(world) if one != odd]
        holders = [set(rng.sample(others, rng.randint(1, min(2, len(others))))) for _ in boxes]
        own = [box for box, ranks_of in zip(boxes, holders, strict=True) if rank in ranks_of]
        of_odd = draw_boxes(rng, tensor.shape, rng.randint(2, 4))
        if rank == odd:
            own = of_odd[1:]
        if own:
            parts[name] = shard_of(tensor, own)
    return parts


def emptied(shard: Shard) -> Shard:
    """Returns a shard of the same boxes in new memory; every other one with other strides."""
    made = []
    for number, (box, tensor) in enumerate(shard.boxes):
        memory = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        made.append((box, memory.mT.contiguous().mT if number % 2 and memory.dim() > 1 else memory))
    return Shard.of_boxes(made, shard.shape)


@pytest.mark.slow(but=["4-ranks"])
@ranks(1, 3, 4)
def test_any_boxes_on_any_ranks(rank: int, world: int, tmp_path: Path) -> None:
    """Saved by some ranks, loaded by others: into boxes of another cut, DTensors and complete tensors."""
    for number in range(DRAWS):
        rng = random.Random(f"{world}/{number}/hand")
        state = draw_state(rng, rng.randint(1, 8))
        size, path = rng.randint(1, world), tmp_path / str(number)
        group = [dist.new_group(list(range(size))), dist.new_group(list(range(world - size, world)))]
        how = {
            "max_shard_bytes": rng.choice([2000, 1 << 30]),
            "check_replicas": rng.choice(["small", "full"]),
        }
        save_plain(dict(sorted(state.items())), tmp_path / f"plain{number}", rank, **how)
        cuts = [cut_state(random.Random(f"{number}/cut"), state, world=size, rank=at) for at in range(size)]
        if rank < size:
            own = {name: emptied(shard) for name, shard in cuts[rank].items()}
            for name, shard in own.items():
                for (_, to), (_, source) in zip(shard.boxes, cuts[rank][name].boxes, strict=True):
                    to.copy_(source)
            if number % 2:
                handle = fastload.async_save(own, path, process_group=group[0], options=options(**how))
                for shard in own.values():
                    for _, tensor in shard.boxes:
                        tensor.zero_()  # what was copied is saved
                report = handle.wait()
            else:
                report = fastload.save(own, path, process_group=group[0], options=options(**how))
            assert report.nbytes == sum(each.bytes_written for each in report.ranks)
        dist.barrier()
        loaded = fastload.load(path, options=LOAD)
        assert_same_bits(dict(sorted(loaded.items())), dict(sorted(state.items())))
        if rank >= world - size:
            at = rank - (world - size)
            wanted = cut_state(random.Random(f"{number}/other"), state, world=size, rank=at)
            into = {name: emptied(shard) for name, shard in wanted.items()}
            atomic = replace(LOAD, atomic=number % 2 == 0)
            fastload.load(path, into=into, process_group=group[1], options=atomic)
            for name, shard in into.items():
                for number_of, ((_, found), (_, expected)) in enumerate(
                    zip(shard.boxes, wanted[name].boxes, strict=True)
                ):
                    assert_same_bits({f"{name} {number_of}": found}, {f"{name} {number_of}": expected})
        if world == 4:
            shape, placements = rng.choice(list(MESHES.values()))
            mesh = init_device_mesh("cpu", shape)
            expected = {name: placed(tensor.clone(), mesh, placements) for name, tensor in state.items()}
            into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
            fastload.load(path, into=into, options=LOAD)
            assert_same_bits(locals_of(into), locals_of(expected))
        dist.barrier()


@ranks(4)
def test_the_ranks_that_hold_a_box_share_its_writing(rank: int, world: int, tmp_path: Path) -> None:
    """As with DTensors on the same mesh: the same files, the same shares."""
    weight = torch.randn(2048, 1024)
    rows = Box((1024 * (rank % 2), 0), (1024, 1024))
    by_hand = fastload.save({"w": shard_of(weight, [rows])}, tmp_path / "hand", options=options())
    mesh = init_device_mesh("cpu", (2, 2))
    placed_there = distribute_tensor(weight, mesh, [Replicate(), placement_types.Shard(0)])
    by_mesh = fastload.save({"w": placed_there}, tmp_path / "mesh", options=options())
    assert files(tmp_path / "hand") == files(tmp_path / "mesh")
    shares = [each.bytes_written for each in by_hand.ranks]
    assert shares == [each.bytes_written for each in by_mesh.ranks]
    assert max(shares) < 1.1 * weight.nbytes / 4


@ranks(3)
def test_flat_boxes_with_padding(rank: int, world: int, tmp_path: Path) -> None:
    """A flat buffer, cut evenly over the ranks: parameters and what is between them, the end not stored."""
    buffer = torch.arange(1000.0)
    local = 336  # 3 × 336 = 1008: the last rank has 8 that nobody stores
    own = torch.full((local,), -1.0)
    begin, end = rank * local, min((rank + 1) * local, 1000)
    own[: end - begin] = buffer[begin:end]
    cuts = [0, 100 + rank, 100 + rank, 250, end - begin]
    pieces = [
        (Box((begin + first,), (last - first,)), own[first:last]) for first, last in itertools.pairwise(cuts)
    ]
    state = {"buffer": Shard.of_boxes(pieces, (1000,)), "step": 7}
    fastload.save(state, tmp_path / "saved", options=options())
    assert torch.equal(fastload.load(tmp_path / "saved", options=LOAD)["buffer"], buffer)
    again = torch.zeros(500 if rank < 2 else 0)
    into = {"buffer": Shard(again, (1000,), (min(rank, 2) * 500,)), "step": 0}
    fastload.load(tmp_path / "saved", into=into, options=LOAD)
    assert torch.equal(again, buffer[rank * 500 : rank * 500 + 500])
    assert into["step"] == 7


def different_values(rank: int) -> dict[str, Any]:
    """Boxes of two ranks that overlap; rank 1's rows 4 and 5 are not rank 0's."""
    tensor = torch.arange(80.0).view(8, 10) + (100 if rank == 1 else 0)
    own = {0: Box((0, 0), (6, 10)), 1: Box((4, 0), (4, 10)), 2: Box((0, 0), (1, 10))}[rank]
    return {"w": shard_of(tensor, [own])}


def large_different_values(rank: int) -> dict[str, Any]:
    """One element of many differs, in boxes that are not the same."""
    tensor = torch.zeros(1000, 1000)
    tensor[777, 555] = 1.0 if rank == 1 else 0.0
    return {"w": shard_of(tensor, [Box((0, 0), (900, 1000)) if rank != 1 else Box((500, 0), (500, 1000))])}


def hole(rank: int) -> dict[str, Any]:
    own = [Box((0, 0), (4, 10)), Box((4, 0), (4, 3)), Box((4, 5), (4, 5))][rank]
    return {"w": shard_of(torch.arange(80.0).view(8, 10), [own])}


def two_shapes(rank: int) -> dict[str, Any]:
    return {"w": Shard(torch.zeros(4, 10), (8, 10) if rank != 2 else (8, 11), (4 * (rank % 2), 0))}


def two_dtypes(rank: int) -> dict[str, Any]:
    dtype = torch.float32 if rank != 1 else torch.bfloat16
    return {"w": Shard(torch.zeros(4, 10, dtype=dtype), (8, 10), (4 * (rank % 2), 0))}


def within_per_rank(rank: int) -> dict[str, Any]:
    return {"w": fastload.PerRank(Shard(torch.zeros(2), (2,), (0,)))}


REFUSED = {
    different_values: (ReplicaMismatch, "w: rank 1 not as rank 0, in rows 4-5"),
    large_different_values: (ReplicaMismatch, "w: rank 1 not as the 2 others, in rows 500-899"),
    hole: (PlanMismatch, r"elements \[4:8, 3:5\] of w are on no rank"),
    two_shapes: (PlanMismatch, r"w: rank 0 F32 \[8, 10\], rank 2 F32 \[8, 11\]"),
    two_dtypes: (PlanMismatch, r"w: rank 0 F32 \[8, 10\], rank 1 BF16 \[8, 10\]"),
    within_per_rank: (OptionError, r"state\['w'\] is a Shard: it is inside of a fastload.PerRank"),
}


@pytest.mark.parametrize("case", REFUSED, ids=[case.__name__ for case in REFUSED])
@ranks(3)
def test_what_does_not_fit_together(rank: int, world: int, case: Any, tmp_path: Path) -> None:
    kind, text = REFUSED[case]
    for call in (fastload.save, fastload.async_save):
        with pytest.raises(kind, match=text):
            call(case(rank), tmp_path / "saved", options=options())
        assert not (tmp_path / "saved").exists()


def test_a_shard_is_checked_when_it_is_made() -> None:
    data = torch.zeros(2, 3)
    for arguments, text in {
        ((4, 3), (3, 0)): "the box at [3, 0] of [2, 3] is out of bounds",
        ((4,), (0,)): "the box at [0] of [2, 3] is out of bounds",
    }.items():
        with pytest.raises(OptionError) as raised:
            Shard(data, *arguments)
        assert text in str(raised.value)
    boxes = [(Box((0, 0), (2, 3)), data), (Box((1, 0), (2, 3)), data)]
    with pytest.raises(OptionError, match="overlap"):
        Shard.of_boxes(boxes, (4, 3))
    with pytest.raises(OptionError, match="differ"):
        Shard.of_boxes([boxes[0], (Box((2, 0), (2, 3)), data.int())], (4, 3))
    with pytest.raises(OptionError, match="it has no box"):
        Shard.of_boxes([], (4, 3))
    with pytest.raises(OptionError, match="only plain tensors"):
        Shard(data.to_sparse(), (4, 3), (0, 0))
    with pytest.raises(OptionError, match="meta device"):
        Shard(data.to("meta"), (4, 3), (0, 0))
    shard = Shard(data, (4, 3), (2, 0))
    assert shard.shape == (4, 3)
    assert str(shard) == "fastload.Shard([2, 3] at [2, 0] of [4, 3], torch.float32)"
    with pytest.raises(OptionError, match="it computes nothing"):
        shard + 1


@ranks(2)
def test_deltas_of_shards(rank: int, world: int, tmp_path: Path) -> None:
    weight = torch.randn(400, 500)
    rows = Box((200 * rank, 0), (200, 500))
    fastload.save({"w": shard_of(weight, [rows])}, tmp_path / "0", options=options())
    changed = weight.clone()
    changed[:, 7] += 1
    based = options(base=tmp_path / "0")
    report = fastload.save({"w": shard_of(changed, [rows])}, tmp_path / "1", options=based)
    assert report.base
    assert report.nbytes < weight.nbytes / 2
    into = torch.zeros(400, 250)
    fastload.load(
        tmp_path / "1", into={"w": Shard(into, (400, 500), (0, 250 * rank))}, options=LOAD
    )  # from the base and the changes
    assert torch.equal(into, changed[:, 250 * rank : 250 * rank + 250])


@ranks(2, ranks_per_host=1)
def test_memory_tier_of_shards(rank: int, world: int, tmp_path: Path) -> None:
    def state(step: int) -> dict[str, Any]:
        columns = Box((0, 300 * rank), (500, 300))
        return {"w": shard_of(torch.arange(300_000.0).view(500, 600) + step, [columns]), "step": step}

    arguments = {"memory": tmp_path / f"memory{rank}", "memory_every_steps": 1, "options": options()}
    (tmp_path / f"memory{rank}").mkdir()
    with CheckpointManager(tmp_path / "root", every_steps=4, **arguments) as manager:
        for step in (1, 2, 3):
            assert manager.should_save(step)
            manager.save(step, state(step))
            assert manager.latest() == step, "it is complete"
        into = {"w": emptied(state(0)["w"]), "step": 0}
        manager.restore(into)
        assert manager.restored_step == into["step"] == 3
        assert manager.restored_from == "memory"
        assert torch.equal(into["w"].boxes[0][1], state(3)["w"].boxes[0][1])


@ranks(2)
def test_redistribute_shards(rank: int, world: int, tmp_path: Path) -> None:
    weight = torch.arange(60.0).view(6, 10)
    target = torch.zeros(6, 5)
    state = {"w": shard_of(weight, [Box((3 * rank, 0), (3, 10))])}
    for _ in range(2):
        target.zero_()
        fastload.redistribute(state, into={"w": Shard(target, (6, 10), (0, 5 * rank))})
        assert torch.equal(target, weight[:, 5 * rank : 5 * rank + 5])


@ranks(2)
def test_a_shard_does_not_come_one_by_one(rank: int, world: int, tmp_path: Path) -> None:
    tensors = iter([("w", Shard(torch.zeros(2), (4,), (2 * rank,)))])
    with pytest.raises(fastload.PeerError, match=r"'w' is a fastload\.Shard.*DTensors only"):
        fastload.save_stream(tensors, tmp_path / "saved", spool=tmp_path, options=options())


@ranks(2, accelerator=True)
def test_shards_on_devices(rank: int, world: int, tmp_path: Path) -> None:
    """Replicas on devices are compared there, and what arrives goes into the boxes on devices."""
    device = f"emu:{rank}"
    weight = torch.arange(600.0).view(20, 30)
    tops = [Box((0, 0), (10, 30)), Box((10, 10 * rank), (10, 20))]  # the second ones overlap in part
    on_device = [(box, narrowed(weight, box).to(device)) for box in tops]
    state = {"w": Shard.of_boxes(on_device, weight.shape)}
    for snapshot in ("block", "overlap"):
        handle = fastload.async_save(state, tmp_path / snapshot, options=options(snapshot=snapshot))
        handle.wait_snapshot()
        handle.wait()
        columns = torch.zeros(20, 15, device=device)
        into = {"w": Shard(columns, (20, 30), (0, 15 * rank))}
        fastload.load(tmp_path / snapshot, into=into, options=LOAD)
        assert torch.equal(columns.cpu(), weight[:, 15 * rank : 15 * rank + 15])
    if rank == 1:
        on_device[1][1][3, 4] += 1  # element 13, 14, which is on rank 0, too
    with pytest.raises(ReplicaMismatch, match=r"w: rank 1 not as .*, in elements \[10:20, 10:20\]"):
        fastload.save(state, tmp_path / "different", options=options())
    assert accelerator().faults() == []


@ranks(2)
def test_a_change_of_a_shard_under_the_next_step_is_seen(rank: int, world: int, tmp_path: Path) -> None:
    weight = torch.ones(300, 200)
    state = {"w": Shard(weight, (600, 200), (300 * rank, 0))}
    with Gate().in_place() as gate:
        handle = gate.save(state, tmp_path / "saved")
        if rank == 1:
            weight += 1
        gate.opened.set()
        with pytest.raises(PeerError) as raised:
            handle.wait(PATIENCE_S)
    [error] = raised.value.failures.values()
    assert isinstance(error, StateChanged)
    assert error.tensors == ("w",)
