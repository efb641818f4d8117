"""Saves of DTensors: the files that one rank with the whole state would write, whatever the mesh."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import shutil
import signal
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fastload
from fastload.cli import main
from fastload.errors import FastloadError, OptionError, PeerError, PlanMismatch, ReplicaMismatch
from fastload.storage.local_target import LocalFiles
from fastload.transfer import demand
from tests.checkpoints import assert_same_bits, flip
from tests.dist.draws import draw_state, draw_target
from tests.dist.harness import ranks, run_ranks
from tests.dist.hosts import can_mount, mount_disk
from tests.dist.test_sharded import MESHES, make, placed
from tests.dist.test_sharded_states import Model, assert_equal, reference, sharded, train, whole

DRAWS = 6
HSDP = ("replicate", "shard")
needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs mounts of its own")


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def options(**changes: Any) -> fastload.SaveOptions:
    return fastload.SaveOptions(**{"timeout_s": 20, "block_bytes": 4096, "writers": "all", **changes})


def save_plain(state: Any, path: Path, rank: int, **changes: Any) -> dict[str, bytes]:
    """Saves the whole state by rank 0 alone; returns the files."""
    alone, *_ = [dist.new_group([each]) for each in range(dist.get_world_size())]
    if rank == 0:
        fastload.save(state, path, process_group=alone, options=options(**changes))
    dist.barrier()
    return files(path)


def save(state: Any, path: Path, *, background: bool = False, **changes: Any) -> fastload.SaveReport:
    if background:
        handle = fastload.async_save(state, path, options=options(**changes))
        for tensor in (tensor for tensor in state.values() if isinstance(tensor, Tensor)):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()  # what was copied is saved
        return handle.wait()
    return fastload.save(state, path, options=options(**changes))


@ranks(4)
def test_each_mesh_writes_the_files_of_one_rank(rank: int, world: int, tmp_path: Path) -> None:
    tensors = make(tmp_path)
    tensors["large"] = torch.randn(1031, 1021)
    state = {**tensors, "step": 3, "names": ["a", ("b", 1.5)]}
    expected = save_plain(state, tmp_path / "plain", rank, max_shard_bytes=3 << 20)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    for number, (shape, placements) in enumerate(MESHES.values()):
        mesh = init_device_mesh("cpu", shape)
        parts = {name: placed(tensor.clone(), mesh, placements) for name, tensor in tensors.items()}
        path = tmp_path / str(number)
        how = {"max_shard_bytes": 3 << 20, "staging_bytes": 12 << 20}
        report = save({**state, **parts}, path, background=number % 2 == 1, **how)
        dist.barrier()
        assert files(path) == expected, placements
        assert report.nbytes == sum(one.bytes_written for one in report.ranks) > nbytes
        own = report.ranks[rank]
        held = sum(part.to_local().nbytes for part in parts.values())
        assert own.bytes_sent <= 1.1 * held
        assert own.peak_staging_bytes <= held + (13 << 20)  # and pages


@pytest.mark.slow(but=["3-ranks"])
@ranks(1, 2, 3, 4)
def test_any_state_on_any_mesh(rank: int, world: int, tmp_path: Path) -> None:
    alone = [dist.new_group([each]) for each in range(world)][rank]
    for number in range(DRAWS):
        rng = random.Random(f"{world}/{number}/save")
        state = draw_state(rng, rng.randint(1, 8))
        target = draw_target(rng, state, world)
        how = {
            "max_shard_bytes": rng.choice([2000, 100_000, 1 << 30]),
            "block_bytes": rng.choice([4096, 8192, None]),
            "writers": rng.choice(["all", "auto", "host", 1, 2]),
            "staging_bytes": rng.choice([1 << 18, 1 << 20, 1 << 28]),
            "check_replicas": rng.choice(["small", "off", "full"]),
        }
        background = rng.random() < 0.5
        expected = save_plain(state, tmp_path / "plain", rank, **how)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(demand, "_SLACK_BYTES", rng.choice([0, 1 << 20]))
                save(
                    target.of(state, rank),
                    tmp_path / "sharded",
                    background=background,
                    parts=target.kind == "pp of fsdp" or target.whole >= 0,
                    **how,
                )
            dist.barrier()
            if target.kind != "pp of fsdp":
                assert files(tmp_path / "sharded") == expected
            loaded = fastload.load(tmp_path / "sharded", process_group=alone)
            assert_same_bits(dict(sorted(loaded.items())), dict(sorted(state.items())))
        except Exception as error:
            raise AssertionError(f"draw {number}: {how} {target}") from error
        dist.barrier()
        if rank == 0:
            shutil.rmtree(tmp_path / "plain")
            shutil.rmtree(tmp_path / "sharded")
        dist.barrier()


def new_training(mesh: DeviceMesh | None) -> tuple[Any, Any, Any]:
    model = reference()
    if mesh is not None:
        model = hsdp(model, mesh) if mesh.mesh_dim_names == HSDP else sharded(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train_on(training: tuple[Any, Any, Any], steps: int) -> None:
    model, optimizer, scheduler = training
    for _ in range(steps):
        train(model, optimizer, 1)
        scheduler.step()


def state_of(training: tuple[Any, Any, Any], *, step: int) -> dict[str, Any]:
    names = ("model", "optimizer", "scheduler")
    return {**dict(zip(names, (each.state_dict() for each in training), strict=True)), "step": step}


def restored(path: Path, mesh: DeviceMesh | None) -> tuple[Any, Any, Any]:
    model, optimizer, scheduler = training = new_training(mesh)
    into = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    fastload.load(path, into=into, options=fastload.LoadOptions(timeout_s=20))
    assert into["step"] == 3
    return training


def save_and_go_on(rank: int, world: int, path: Path) -> None:
    """Saves a training on FSDP2, and goes on from there, on the same mesh and on another one."""
    mesh = init_device_mesh("cpu", (world,))
    training = new_training(mesh)
    train_on(training, 3)
    state = state_of(training, step=3)
    saved = copy.deepcopy(whole(state))
    fastload.async_save(state, path / "c", options=options()).wait()
    model_state, optimizer_state = get_state_dict(training[0], training[1])
    save({"model": model_state, "optimizer": optimizer_state}, path / "by_name")
    by_name = fastload.load(path / "by_name")
    assert_equal(by_name["model"], whole(model_state))
    assert_equal(by_name["optimizer"], whole(get_optimizer_state_dict(training[0], training[1])))
    assert_equal(whole(state_of(restored(path / "c", mesh), step=3)), saved)
    train_on(training, 2)
    again = restored(path / "c", mesh)
    train_on(again, 2)
    assert_equal(whole(state_of(again, step=5)), whole(state_of(training, step=5)))
    assert_equal(state_of(restored(path / "c", None), step=3), saved)
    hybrid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=HSDP)
    other = restored(path / "c", hybrid)
    assert_equal(whole(state_of(other, step=3)), saved)
    save(state_of(other, step=3), path / "hybrid")
    train_on(other, 2)
    again = restored(path / "hybrid", hybrid)
    train_on(again, 2)
    assert_equal(whole(state_of(again, step=5)), whole(state_of(other, step=5)))
    # Uneven, and in parts on meshes of some ranks: what is parallel over tp, and what is not.
    parallel = sharded(reference(), init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp")))
    for background in (False, True):
        name = f"tp{background}"
        save(parallel.state_dict(), path / name, background=background)
        assert_equal(dict(fastload.load(path / name)), dict(reference().state_dict()))
    if rank == 0:
        torch.save(saved, path / "saved.pt")


def hsdp(model: Model, mesh: DeviceMesh) -> Model:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def go_on_elsewhere(rank: int, world: int, path: Path) -> None:
    saved = torch.load(path / "saved.pt")
    mesh = init_device_mesh("cpu", (world,))
    for name in ("c", "hybrid"):
        assert_equal(whole(state_of(restored(path / name, mesh), step=3)), saved)


@pytest.mark.slow  # tests/dist/test_sharded_states.py resumes one
def test_a_training_on_fsdp2_goes_on_anywhere(tmp_path: Path) -> None:
    run_ranks(save_and_go_on, 4, path=tmp_path)
    run_ranks(go_on_elsewhere, 2, path=tmp_path)


def stage(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """What a rank of two stages of a pipeline, of two ranks each, has."""
    layers = {f"layers.{layer}": whole_layer(layer) for layer in (0, 1, 2, 3) if layer // 2 == rank // 2}
    parts = {name: placed(tensor, mesh, [Shard(0)]) for name, tensor in layers.items()}
    return {"step": 7, "model": {**parts, "scale": torch.ones(2)}, "lr": 0.5}


def whole_layer(layer: int) -> Tensor:
    return torch.arange(35.0).reshape(7, 5) + 100 * layer


@ranks(4)
def test_stages_of_a_pipeline_are_merged(rank: int, world: int, tmp_path: Path) -> None:
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    layers = {f"layers.{layer}": whole_layer(layer) for layer in range(4)}
    expected = save_plain(
        {"step": 7, "model": {**layers, "scale": torch.ones(2)}, "lr": 0.5}, tmp_path / "plain", rank
    )
    state = stage(rank, meshes[rank // 2])
    save(state, tmp_path / "a")
    fastload.async_save(state, tmp_path / "b", options=options()).wait()
    plain = {f"layers.{rank}": whole_layer(rank)}
    save({"step": 7, "model": {**plain, "scale": torch.ones(2)}, "lr": 0.5}, tmp_path / "c", parts=True)
    dist.barrier()
    assert files(tmp_path / "a") == files(tmp_path / "b") == files(tmp_path / "c") == expected
    with pytest.raises(PlanMismatch, match=r"(?s)different states.*PerRank.*SaveOptions\(parts=True\)"):
        save(plain, tmp_path / "d")


@ranks(2)
def test_parts_of_modules_and_of_containers_are_merged(rank: int, world: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = {"a": nn.Linear(3, 4), "b": nn.BatchNorm1d(4), "c": nn.Linear(4, 2)}
    own = {name: layer for name, layer in layers.items() if (name == "c") == bool(rank)}
    state = {
        "model": nn.Sequential(OrderedDict(own)).state_dict(),
        "pair": (1, {f"of {rank}": rank}),
        "list": [{f"of {rank}": rank}, 2],
        "counts": defaultdict(int, {f"of {rank}": rank}),
    }
    save(state, tmp_path / "a", parts=True)
    found = fastload.load(tmp_path / "a")
    expected = nn.Sequential(OrderedDict(layers)).state_dict()
    assert found["model"]._metadata == expected._metadata
    assert_equal(found.pop("model"), expected)
    both = {"of 0": 0, "of 1": 1}
    assert found == {"pair": (1, both), "list": [both, 2], "counts": both}
    assert found["counts"].default_factory is int
    for name, value in (("pair", (1,) * (rank + 1)), ("list", [1] * (rank + 1))):
        with pytest.raises(PlanMismatch, match=rf"state\['{name}'\]: rank 0 a .*, rank 1 a "):
            save({name: value}, tmp_path / "b", parts=True)


def replicas(rank: int, mesh: DeviceMesh, odd: str) -> dict[str, Any]:
    """Two replicas of two shards, and plain tensors; rank 3 has one of them otherwise."""
    state = {"w": torch.ones(6, 4), "large": torch.ones(300, 300), "plain": torch.ones(3)}
    parts: dict[str, Any] = {
        name: placed(tensor.clone(), mesh, [Replicate(), Shard(0)])
        for name, tensor in state.items()
        if name != "plain"
    }
    parts["plain"] = state["plain"].clone()
    if rank == 3:
        (parts[odd].to_local() if odd != "plain" else parts[odd]).view(-1)[0] = 2.0
    return parts


@ranks(4, same=True)
def test_replicas_that_differ_are_named(rank: int, world: int, tmp_path: Path) -> list[str]:
    """Within the ranks that hold the same, as far as it is asked for."""
    mesh = init_device_mesh("cpu", (2, 2))
    cases: list[tuple[str, dict[str, Any]]] = [
        ("w", {}), ("plain", {}), ("w", {"parts": True}), ("plain", {"parts": True}),
        ("large", {"check_replicas": "full"}), ("large", {"check_replicas": "full", "parts": True}),
    ]  # fmt: skip
    texts = []
    for odd, how in cases:
        for background in (False, True):
            with pytest.raises(ReplicaMismatch, match=rf"{odd}\W.*rank 3") as raised:
                save(replicas(rank, mesh, odd), tmp_path / "c", background=background, **how)
            texts.append(str(raised.value))
    for odd, how in (("large", {}), ("w", {"check_replicas": "off"})):
        save(replicas(rank, mesh, odd), tmp_path / f"{odd} is not compared", **how)
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2
    return texts


Make = Callable[[int, DeviceMesh], Any]


def no_part(rank: int, mesh: DeviceMesh) -> Any:
    return {
        "w": DTensor.from_local(torch.ones(8, 2), mesh, [Partial() if rank else Replicate()], run_check=False)
    }


def another_size(rank: int, mesh: DeviceMesh) -> Any:
    local = torch.ones(3 if rank == 1 else 2, 2)
    shape = {"shape": torch.Size((8, 2)), "stride": (2, 1)}
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **shape)}


def two_shapes(rank: int, mesh: DeviceMesh) -> Any:
    return {"w": distribute_tensor(torch.ones(8 if rank else 9, 2), mesh, [Shard(0)], src_data_rank=None)}


def two_dtypes(rank: int, mesh: DeviceMesh) -> Any:
    dtype = torch.float32 if rank < 3 else torch.float64
    return {"w": distribute_tensor(torch.ones(8, 2, dtype=dtype), mesh, [Shard(0)], src_data_rank=None)}


def a_hole(rank: int, mesh: DeviceMesh) -> Any:
    tensor = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)], src_data_rank=None)
    return {"w": tensor, "b": 1} if rank not in (1, 2) else {"b": 1}


def another_structure(rank: int, mesh: DeviceMesh) -> Any:
    tensor = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)], src_data_rank=None)
    return {"a": tensor, "b": [1, 2] if rank != 2 else {"x": 1}}


def another_value(rank: int, mesh: DeviceMesh) -> Any:
    tensor = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)], src_data_rank=None)
    return {"a": tensor, "b": {"lr": 0.5 if rank != 3 else 0.25}}


def one_name_twice(rank: int, mesh: DeviceMesh) -> Any:
    tensor = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)], src_data_rank=None)
    return {"a.b": tensor} if rank else {"a": {"b": tensor}}


def no_value_of_its_own(rank: int, mesh: DeviceMesh) -> Any:
    tensor = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)], src_data_rank=None)
    return {"a": tensor, **({"own": fastload.PerRank(rank)} if rank else {})}


BAD: dict[Make, tuple[type[FastloadError], str]] = {
    no_part: (PeerError, r"w: the state has a DTensor with placement P\(sum\)"),
    another_size: (PeerError, r"w: the state has a DTensor with a local tensor of shape \[3, 2\]"),
    two_shapes: (PlanMismatch, r"w: rank 0 F32 \[9, 2\], rank 1 F32 \[8, 2\]"),
    two_dtypes: (PlanMismatch, r"w: rank 0 F32 \[8, 2\], rank 3 F64 \[8, 2\]"),
    a_hole: (PlanMismatch, "rows 2-5 of w are on no rank"),
    another_structure: (PlanMismatch, r"state\['b'\]: rank 0, 1, 3 a list of 2, rank 2 a dict"),
    another_value: (PlanMismatch, r"state\['b'\]\['lr'\]: rank 0, 1, 2 0.5, rank 3 0.25"),
    no_value_of_its_own: (PlanMismatch, "fastload.PerRank: rank 0 has 0, rank 1 has 1"),
    one_name_twice: (PlanMismatch, "a.b: two keys of different ranks spell this name"),
}


@ranks(4, same=True)
def test_what_does_not_go_together_is_one_error_on_all_ranks(
    rank: int, world: int, tmp_path: Path
) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    texts = []
    for make_bad, (kind, text) in BAD.items():
        for background in (False, True):
            with pytest.raises(FastloadError, match=text) as raised:  # noqa: PT012  (with what it takes)
                saved = make_bad(rank, mesh)
                if background:
                    fastload.async_save(
                        saved, tmp_path / "c", options=options(parts=kind is PlanMismatch)
                    ).wait()
                else:
                    save(saved, tmp_path / "c")
            if not background:
                assert type(raised.value) is kind
                texts.append(str(raised.value) if kind is PlanMismatch else "")
            dist.barrier()
    # What one rank has not foreseen, others have to say; the next save is as any.
    lacking = {"b": 1} if rank == 2 else a_hole(0, mesh)
    with pytest.raises(PlanMismatch, match="could not foresee"):
        fastload.async_save(lacking, tmp_path / "c", options=options()).wait()
    assert not list(tmp_path.iterdir())
    dist.barrier()
    group = dist.new_group([0, 1])
    if rank < 2:
        with pytest.raises(
            (PeerError, OptionError),
            match="w: the state has a DTensor on a mesh with ranks 2, 3, which take no",
        ):
            fastload.save(a_hole(0, mesh), tmp_path / "c", process_group=group, options=options())
    with pytest.raises(FastloadError, match="needs at least 262144: 4 buffers of 65536 bytes"):
        save(a_hole(0, mesh), tmp_path / "c", staging_bytes=1 << 16)
    save(a_hole(0, mesh), tmp_path / "c", staging_bytes=1 << 18)
    return texts


def manage(rank: int, world: int, path: Path) -> None:
    """Keeps the last steps, restores the newest that is whole, and saves when it is told to stop."""
    mesh = init_device_mesh("cpu", (world,))
    run, training = path / "run", new_training(mesh)
    with fastload.CheckpointManager(run, every_steps=1, keep_last=2, options=options()) as manager:
        for step in range(1, 4):
            train_on(training, 1)
            own = fastload.PerRank(torch.full((3,), rank))
            manager.save(step, {**state_of(training, step=step), "own": own})
        manager.wait()
        assert manager.all_steps() == [2, 3]
        assert_equal(whole(state_of(resumed(manager, mesh, 3), step=3)), whole(state_of(training, step=3)))
        fastload.verify(run / "step_00000003")
        fastload.stage(run / "step_00000003", path / "staged")
        assert files(path / "staged").items() >= files(run / "step_00000003").items()
        dist.barrier()
        if rank == 0:
            flip(run / "step_00000003/model.safetensors", -1)
        dist.barrier()
        again = resumed(manager, mesh, 2)
        train_on(again, 1)
        assert_equal(whole(state_of(again, step=3)), whole(state_of(training, step=3)))
    with fastload.CheckpointManager(run, every_steps=100, keep_last=9, options=options()) as manager:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGUSR1)  # one rank is told, all of them save
        asked = itertools.count(4)
        while not manager.should_save(next(asked)):
            time.sleep(0.01)
        assert manager.stop_requested
        manager.save(4, {**state_of(again, step=4), "own": fastload.PerRank(rank)})


def resumed(manager: fastload.CheckpointManager, mesh: DeviceMesh, step: int) -> tuple[Any, Any, Any]:
    model, optimizer, scheduler = training = new_training(mesh)
    into = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "own": None}
    manager.restore(into=into)
    assert into["step"] == step
    assert into["own"].tolist() == [dist.get_rank()] * 3
    return training


@pytest.mark.slow
def test_steps_with_shards_are_steps_as_any(tmp_path: Path) -> None:
    run_ranks(manage, 4, path=tmp_path)
    listed = CliRunner().invoke(main, ["ls", str(tmp_path / "run"), "--json"])
    assert [row["step"] for row in json.loads(listed.stdout)["checkpoints"]] == [2, 3, 4]
    for step, status in ((2, 0), (3, 1), (4, 0)):
        verified = CliRunner().invoke(main, ["verify", str(tmp_path / "run" / f"step_{step:08d}")])
        assert verified.exit_code == status, verified.stderr
    assert CliRunner().invoke(main, ["prune", str(tmp_path / "run"), "--keep-last", "1"]).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "run").glob("step_*")) == ["step_00000004"]
    done = CliRunner().invoke(
        main, ["convert", str(tmp_path / "run/step_00000004"), str(tmp_path / "one.pt"), "--to", "torch"]
    )
    assert done.exit_code == 0, done.stderr
    assert torch.load(tmp_path / "one.pt", weights_only=True)["step"] == 4


@needs_mounts
@ranks(4)
def test_each_host_has_a_copy_of_what_all_ranks_hold(rank: int, world: int, tmp_path: Path) -> None:
    tensors = make(tmp_path)
    expected = save_plain(tensors, tmp_path / "plain", rank)
    (tmp_path / "disk").mkdir(exist_ok=True)
    disk = mount_disk(tmp_path / "disk", tmp_path / "disks", rank // 2)
    mesh = init_device_mesh("cpu", (world,))
    for number, placement in enumerate([Shard(0), Shard(1)]):
        parts = {name: placed(tensor.clone(), mesh, [placement]) for name, tensor in tensors.items()}
        report = save(parts, disk / str(number), background=number == 0, shared=False)
        assert report.num_copies == 2
        assert files(disk / str(number)) == expected
    dist.barrier()


@ranks(2)
def test_who_waits_for_a_slow_writer_waits_as_long_as_it_gets_on(
    rank: int, world: int, tmp_path: Path
) -> None:
    mesh = init_device_mesh("cpu", (world,))
    state = {"w": distribute_tensor(torch.ones(10 << 8, 1 << 10), mesh, [Shard(1)], src_data_rank=None)}
    with pytest.MonkeyPatch.context() as patch:
        write = LocalFiles.write
        slow = (lambda *given: (time.sleep(0.55), write(*given))) if rank == 0 else write
        patch.setattr(LocalFiles, "write", slow)
        report = save(state, tmp_path / "c", writers=1, write_threads=1, staging_bytes=11 << 20, timeout_s=4)
    assert report.num_writers == 1
    assert report.ranks[1].total_s > 4
    assert [one.bytes_sent for one in report.ranks] == [0, state["w"].nbytes // 2]  # each byte once
