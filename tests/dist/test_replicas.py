"""Ranks whose replicas differ: whatever is saved loads again, and the difference is noticed."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fastload
from fastload import SaveOptions
from fastload.errors import PeerError
from fastload.ext.remote import s3
from tests.checkpoints import flip
from tests.dist.harness import ranks, run_ranks
from tests.dist.hosts import can_mount, mount_disk
from tests.dist.test_manager import warned
from tests.dist.test_memory_flush import steps_in
from tests.dist.test_memory_tier import ROOT, crash, keep, manage
from tests.dist.test_sharded import placed
from tests.storage.s3_server import BUCKET, s3_server

RANKS_IMPORT = ("fastload.ext.memory.tier", "torch.distributed.tensor")
OPTIONS = SaveOptions(timeout_s=20, writers="all", check_replicas="off")
needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs mounts of its own")
SHAPES = {"w0": (411, 511), "w1": (3, 5), "w2": (1023, 257), "w3": (511, 129)}  # 2.2 MB in all


def replica(rank: int, seed: int = 0) -> dict[str, Tensor]:
    """Large tensors that are others on each rank, and a small one that is not."""
    return {name: tensor.clone() for name, tensor in drawn(rank, seed).items()}


@functools.cache
def drawn(rank: int, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed * 100 + rank)
    return {
        name: torch.randn(shape, generator=random) if name != "w1" else torch.ones(shape)
        for name, shape in SHAPES.items()
    }


def check(path: Path | str, world: int, *seeds: int, **storage: Any) -> None:
    """Loads and verifies a checkpoint, of which each element has to be that of some rank."""
    dist.barrier()
    check_state(fastload.load(path, **storage), world, *seeds)
    fastload.verify(path, **storage)
    dist.barrier()


def check_state(loaded: Mapping[str, Tensor], world: int, *seeds: int) -> None:
    known = [drawn(rank, seed) for rank in range(world) for seed in seeds or (0,)]
    for name in SHAPES:
        from_some = functools.reduce(torch.logical_or, (loaded[name] == one[name] for one in known))
        assert from_some.all(), f"{name}: {int((~from_some).sum())} elements are from no rank"


def save(state: Any, path: Path | str, how: str, options: SaveOptions = OPTIONS) -> None:
    if how == "now":
        fastload.save(state, path, options=options)
    else:
        fastload.async_save(state, path, options=replace(options, snapshot=how)).wait(20)


HOW = ("now", "block", "overlap")


@pytest.mark.slow(but=["2-ranks"])
@ranks(2, 3)
def test_what_they_hold_completely_loads(rank: int, world: int, tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "as it is": {},
        "compared": {"check_replicas": "small"},
        "short blocks": {"block_bytes": 4096},
        "blocks of several shares": {"block_bytes": 1 << 20},
        "several files": {"max_shard_bytes": 1 << 20},
        "fewer writers": {"writers": 2},
        "parts": {"parts": True},
        "little memory": {"staging_bytes": 1 << 18},
    }
    for (name, changes), how in zip(cases.items(), itertools.cycle(HOW[world % 3 :] + HOW[: world % 3])):
        save(replica(rank), tmp_path / name, how, replace(OPTIONS, **changes))
        check(tmp_path / name, world)


@ranks(4, ranks_per_host=2)
def test_what_the_first_ranks_of_hosts_write_loads(rank: int, world: int, tmp_path: Path) -> None:
    for how in HOW:
        save(replica(rank), tmp_path / how, how, replace(OPTIONS, writers="host"))
        check(tmp_path / how, world)


def shards(rank: int, placements: list[Any], seed: int = 0) -> dict[str, Any]:
    """Shards of this rank's own replica, next to tensors that it holds completely."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = replica(rank, seed)
    return {name: placed(whole[name], mesh, placements) if name != "w3" else whole[name] for name in whole}


@pytest.mark.slow
@ranks(4)
def test_what_they_hold_as_shards_loads(rank: int, world: int, tmp_path: Path) -> None:
    all_placements: list[list[Any]] = [
        [Replicate(), Shard(0)],
        [Replicate(), Shard(1)],
        [Shard(0), Replicate()],
        [Replicate(), Replicate()],
    ]
    cases = itertools.product(all_placements, ("all", 3))
    for number, ((placements, writers), how) in enumerate(zip(cases, itertools.cycle(HOW))):
        path = tmp_path / str(number)
        save(shards(rank, placements), path, how, replace(OPTIONS, writers=writers))
        check(path, world)


@ranks(3)
def test_what_comes_one_by_one_loads(rank: int, world: int, tmp_path: Path) -> None:
    fastload.save_stream(replica(rank).items(), tmp_path / "a", spool=tmp_path, options=OPTIONS)
    check(tmp_path / "a", world)


def changed(rank: int) -> dict[str, Tensor]:
    """A state of which a part differs from `replica`, on each rank in another way."""
    state = replica(rank)
    new = replica(rank, seed=1)
    for name in ("w0", "w2"):
        state[name][::17] = new[name][::17]
    return state


@pytest.mark.slow
@ranks(3)
def test_deltas_load(rank: int, world: int, tmp_path: Path) -> None:
    save(replica(rank), tmp_path / "base", "now")
    for how in HOW:
        options = replace(OPTIONS, base=tmp_path / "base")
        save(changed(rank), tmp_path / how, how, options)
        check(tmp_path / how, world, 0, 1)
        odd = {name: tensor.t() if rank == 1 else tensor for name, tensor in changed(rank).items()}
        odd = {name: tensor.contiguous().t() if rank == 1 else tensor for name, tensor in odd.items()}
        save(odd, tmp_path / f"{how} with strides", how, options)  # not read in place on one rank
        check(tmp_path / f"{how} with strides", world, 0, 1)
        into = replica(rank)
        fastload.load(tmp_path / how, into=into)
        check_state(into, world, 0, 1)


@pytest.mark.slow  # deltas, and shards, have tests above
@ranks(4)
def test_deltas_of_shards_load(rank: int, world: int, tmp_path: Path) -> None:
    placements = [Replicate(), Shard(0)]
    save(shards(rank, placements), tmp_path / "base", "now")
    for how in HOW:
        save(shards(rank, placements, seed=1), tmp_path / how, how, replace(OPTIONS, base=tmp_path / "base"))
        check(tmp_path / how, world, 0, 1)


@ranks(3, ranks_per_host=1, deadline_s=90)
def test_what_is_kept_in_memory_loads(rank: int, world: int, tmp_path: Path) -> None:
    """From all hosts, with one of them lost, and after it was written to storage."""
    memory = tmp_path / "memory"
    state: Callable[[int], dict[str, Any]] = lambda step: {**replica(rank, step), "step": step}  # noqa: E731
    given = {"options": OPTIONS, "memory_copies": 2}
    with manage(tmp_path, memory, **given) as manager:
        keep(manager, 1, state=state)
        crash(manager)
    with manage(tmp_path, memory, **given) as manager:
        found = manager.restore()
        assert manager.restored_from == "memory"
        check_state(found, world, 1)
        keep(manager, 2, state=state)
    assert steps_in(tmp_path) == [2]
    check(tmp_path / ROOT / "step_00000002", world, 2)


@pytest.mark.slow
@needs_mounts
@ranks(4)
def test_copies_of_hosts_load(rank: int, world: int, tmp_path: Path) -> None:
    """Also deltas of them, and shards of which each host has a replica."""
    (tmp_path / "disk").mkdir(exist_ok=True)
    disk = mount_disk(tmp_path / "disk", tmp_path / "disks", rank // 2)
    options = replace(OPTIONS, shared=False)
    for how in HOW:
        save(replica(rank), disk / how, how, options)
        check(disk / how, world)
        with pytest.raises(PeerError, match="not the same checkpoint as on rank 0"):
            save(replica(rank, 1), disk / "never", how, replace(options, base=disk / how))
        save(replica(0), disk / f"{how} base", how, options)
        reports: list[fastload.SaveReport] = []
        chosen = replace(options, base=disk / f"{how} base", on_report=reports.append)
        save(changed(rank), disk / f"{how} delta", how, chosen)
        assert "the replicas of the hosts differ" in reports[0].why_complete
        check(disk / f"{how} delta", world, 0, 1)
        save(shards(rank, [Replicate(), Shard(0)]), disk / f"{how} shards", how, options)
        check(disk / f"{how} shards", world)


def save_to(rank: int, world: int, url: str, folder: Path, storage: Any) -> None:
    s3._PART_BYTES = 1 << 20  # which this server takes
    for how, save in (("now", fastload.save), ("later", save_later)):
        report = save(replica(rank), f"{url}/{how}", storage_options=storage, options=OPTIONS)
        assert sum(one.bytes_written > 0 for one in report.ranks) > 1
        check(folder / how, world)  # the server does not answer requests for ranges as S3 does


def save_later(*given: Any, **more: Any) -> fastload.SaveReport:
    return fastload.async_save(*given, **more).wait(20)


@pytest.mark.slow  # files and object stores get the same parts
def test_what_goes_to_an_object_store_loads(tmp_path: Path) -> None:
    with s3_server(tmp_path / "server") as storage:
        folder = tmp_path / "server" / BUCKET / "replicas"
        run_ranks(save_to, 3, url=f"s3://{BUCKET}/replicas", folder=folder, storage=storage)


# The difference is noticed


def same(odd: float = 0.0) -> dict[str, Tensor]:
    """Replicas that do not differ, but for what is added to a large one."""
    state = replica(0)
    state["w2"] += odd
    return state


@ranks(3)
def test_a_difference_is_a_warning_that_names_tensor_and_ranks(rank: int, world: int, tmp_path: Path) -> None:
    default = replace(OPTIONS, check_replicas="small")
    with warned("fastload.saving.agree") as lines:
        for how in HOW:
            folder = tmp_path / how
            folder.mkdir(exist_ok=True)
            for step in range(3):
                save({**same(rank == 1), "step": step}, folder / str(step), how, default)
                check_first(folder / str(step), [same(), same(1.0)])
            save({**same(rank == 1), "step": 9}, tmp_path / f"{how} off", how, OPTIONS)
    assert len(lines) == (len(HOW) if rank == 0 else 0), lines
    for line in lines:
        assert "w2: rank 1 not as the 2 others" in line
        assert line.count("rank ") == 1
        assert "check_replicas='full'" in line
    for how in HOW:
        with pytest.raises(fastload.ReplicaMismatch, match="w2: rank 1 not as the 2 others"):
            save(same(rank == 1), tmp_path / "never", how, replace(OPTIONS, check_replicas="full"))
    assert not (tmp_path / "never").exists()


def check_first(path: Path, known: list[dict[str, Tensor]]) -> None:
    loaded = fastload.load(path)
    assert all(torch.stack([loaded[name] == one[name] for one in known]).any(0).all() for name in SHAPES)


@ranks(2)
def test_the_manager_warns_once_for_each_tensor(rank: int, world: int, tmp_path: Path) -> None:
    options = replace(OPTIONS, check_replicas="small")
    state: dict[str, Any] = {"a": torch.zeros(300, 300), "b": torch.zeros(300, 300), "step": 0}
    with (
        warned("fastload.saving.agree") as lines,
        manage(tmp_path, tmp_path / "memory", options=options, every_steps=1, keep_last=9) as manager,
    ):
        for step in range(1, 7):
            state["step"] = step
            state["a"].fill_(step if rank and step > 1 else 0)
            state["b"].fill_(step if rank and step > 3 else 0)
            manager.save(step, state)
            manager.wait()
            assert len(lines) == (0 if rank else (step > 1) + (step > 3)), (step, lines)
    if rank == 0:
        assert "step_00000002" in lines[0]
        assert "a: rank 1" in lines[0]
        assert "b: rank 1" in lines[1]
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]


@ranks(2)
def test_samples_move_from_save_to_save(rank: int, world: int, tmp_path: Path) -> None:
    """So a difference in a part of a tensor is found, in time."""
    options = replace(OPTIONS, check_replicas="small")
    state: dict[str, Any] = {"w": torch.zeros(1 << 16), "step": 0}
    state["w"][: 1 << 13] = rank
    with warned("fastload.saving.agree") as lines:
        for step in range(100):
            num_lines = torch.tensor(len(lines))
            dist.all_reduce(num_lines)
            if num_lines:
                break
            state["step"] = step
            fastload.save(state, tmp_path / "same", options=replace(options, overwrite=True))
    assert step < 99


@ranks(3)
def test_equal_values_are_no_difference(rank: int, world: int, tmp_path: Path) -> None:
    """Whatever the strides, and whatever else the ranks hold."""
    options = replace(OPTIONS, check_replicas="small")
    values = torch.arange(300 * 400, dtype=torch.float32).view(300, 400)
    with warned("fastload.saving.agree") as lines:
        for how in HOW:
            for step in range(5):
                state = {
                    "strides": [values, values.t().contiguous().t(), values.repeat(1, 2)[:, :400]][rank],
                    "odd": torch.ones(70001, dtype=torch.uint8)[: 70001 - 4],
                    "bytes": torch.arange(100_003).to(torch.uint8),
                    "lazy": torch.complex(values, values).conj() if rank else torch.complex(values, -values),
                    "own": fastload.PerRank(torch.full((99_999,), float(rank))),
                }
                save(state, tmp_path / f"{how} {step}", how, options)
    assert lines == []


@pytest.mark.slow
@ranks(4)
def test_replicas_of_shards_that_differ_are_noticed(rank: int, world: int, tmp_path: Path) -> None:
    default = replace(OPTIONS, check_replicas="small")
    cases: list[tuple[list[Any], dict[str, Any]]] = [
        ([Replicate(), Shard(0)], {}),
        ([Replicate(), Shard(1)], {}),
        ([Replicate(), Shard(0)], {"parts": True}),
    ]
    mesh = init_device_mesh("cpu", (2, 2))
    for number, (placements, changes) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        with warned("fastload.saving.agree") as lines:
            for how in HOW:
                parts = {name: placed(tensor, mesh, placements) for name, tensor in same(rank == 3).items()}
                save(parts, folder / how, how, replace(default, **changes))
                check_first(folder / how, [same(), same(1.0)])
        assert len(lines) == (rank == 0), lines
        assert all("w2: rank 3 not as rank 1" in line for line in lines)


# One name for different tensors


def own_experts(shape: tuple[int, int]) -> dict[str, Any]:
    """As ranks number their experts that each begin with 0, on meshes that have no rank in common."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    random = torch.Generator().manual_seed(mesh["ep"].get_local_rank())
    return {"experts.0": placed(torch.randn(shape, generator=random), mesh["dp"], [Shard(0)])}


@ranks(4, same=True)
def test_experts_of_one_name_are_an_error(rank: int, world: int, tmp_path: Path) -> list[str]:
    default = replace(OPTIONS, check_replicas="small")
    told = []
    for shape in ((4, 2), (512, 512)):
        for how in HOW:
            with pytest.raises(fastload.ReplicaMismatch, match=r"experts\.0: rank 1 not as rank 0") as raised:
                save(own_experts(shape), tmp_path / "never", how, default)
            told.append(str(raised.value))
            plain = {"experts.0": torch.full(shape, float(rank)), "router": torch.ones(3)}
            with pytest.raises(fastload.ReplicaMismatch, match=r"experts\.0: rank 1, 2, 3 not as") as raised:
                save(plain, tmp_path / "never", how, replace(default, parts=True))
            told.append(str(raised.value))
    assert all("need different names" in text for text in told)
    dist.barrier()
    assert not any(tmp_path.iterdir())
    return told


@pytest.mark.slow
@ranks(4)
def test_replicas_on_several_meshes_are_compared_completely(rank: int, world: int, tmp_path: Path) -> None:
    """As FSDP next to tensor parallelism leaves parameters that are not in its plan."""
    default = replace(OPTIONS, check_replicas="small")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def state(odd: bool) -> dict[str, Any]:
        whole = same()
        if odd:
            whole["w2"][1000, 200] += 1  # one element of 263,000
        return {name: placed(tensor, mesh["dp"], [Shard(0)]) for name, tensor in whole.items()}

    drifted = {f"a{number}": torch.full((200, 200), float(rank)) for number in range(30)}  # a warning each
    with pytest.raises(fastload.ReplicaMismatch, match="w2: rank 3 not as rank 2"):
        save({**drifted, **state(rank == 3)}, tmp_path / "never", "now", default)
    for how in HOW:
        save(state(False), tmp_path / how, how, default)
        check_first(tmp_path / how, [same()])
        with pytest.raises(fastload.ReplicaMismatch, match="w2: rank 3 not as rank 2"):
            save(state(rank == 3), tmp_path / "never", how, default)
        save(state(rank == 3), tmp_path / f"{how} off", how, OPTIONS)
        fastload.verify(tmp_path / f"{how} off")


# Checkpoints of older versions

DOUBT = r"If fastload 0\.2\.0 or older saved it, replicas that differed may be the reason"


@ranks(2)
def test_a_damaged_block_that_two_ranks_may_have_written_says_so(
    rank: int, world: int, tmp_path: Path
) -> None:
    """None that one rank must have written, no file of another program, and no delta."""
    state = {"large": torch.zeros(1 << 18), "small": torch.zeros(100)}
    deltas = replace(OPTIONS, base=tmp_path / "large")
    for name, more in (("large", 0), ("small", 0), ("delta", 1)):
        state["large"] += more
        fastload.save(state, tmp_path / name, options=deltas if more else OPTIONS)
    if rank == 0:
        (tmp_path / "other").mkdir()
        save_file(state, tmp_path / "other" / "model.safetensors")
    dist.barrier()
    fastload.seal(tmp_path / "other")
    if rank == 0:
        for name, at in (("large", 1 << 19), ("small", -10), ("other", 1 << 19)):
            flip(tmp_path / name / "model.safetensors", at)
        flip(tmp_path / "delta" / "delta.safetensors", 1 << 18)
    dist.barrier()
    for name in ("large", "small", "delta", "other"):
        for call in (fastload.load, fastload.verify):
            with pytest.raises(fastload.ChecksumError) as raised:
                call(tmp_path / name)
            assert bool(re.search(DOUBT, str(raised.value))) == (name == "large"), raised.value
            assert not any(re.search(DOUBT, line) for line in raised.value.blocks)
