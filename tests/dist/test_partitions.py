"""Checkpoints whose tensors are partitions of ranks: DeepSpeed's ZeRO, and FSDP1 saved by DCP."""

from __future__ import annotations

import os
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor

import fastload
from fastload.errors import ManifestError
from tests.checkpoints import assert_same_bits, load_reference
from tests.dist.harness import ranks

DATA = Path(__file__).parents[1] / "data" / "deepspeed"  # write.py there wrote it
OPTIONS = fastload.LoadOptions(timeout_s=30)
STAGES = ["zero1", "zero2", "zero3", "zero1-bf16", "zero3-bf16"]


def expected(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights that zero_to_fp32 found in a checkpoint, and the states of its optimizer."""
    found = load_reference(DATA / f"{name}.safetensors")
    weights = {
        key.removeprefix("module/"): value for key, value in found.items() if key.startswith("module/")
    }
    # DeepSpeed has the complete states in stage 3 only. The training is the same.
    found = load_reference(DATA / f"zero3{'-bf16' * name.endswith('bf16')}.safetensors")
    return weights, {key: value for key, value in found.items() if key.startswith("exp_")}


@pytest.mark.parametrize("name", STAGES)
def test_partitions_become_the_tensors_that_deepspeed_finds(name: str) -> None:
    weights, states = expected(name)
    state = fastload.load(DATA / name)
    module = state["module"]
    assert state["mine"] == 5
    assert torch.equal(module["tied.weight"], module["b.weight"])
    assert_same_bits({key: module[key].to(weights[key].dtype) for key in weights}, weights)
    # Of stage 1, zero_to_fp32 leaves out what is not trained.
    assert module.keys() == weights.keys() | {"frozen.weight", "frozen.bias", "tied.weight"}
    assert module["frozen.weight"].shape == (5, 3)
    for key, value in states.items():
        kind, _, parameter = key.partition("/")
        found = state["optimizer"]["state"][parameter][kind]
        assert found.shape == weights[parameter].shape
        close = {} if name.startswith("zero3") else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(found.reshape(-1), value, **(close or {"rtol": 0, "atol": 0}))
        assert state["optimizer"]["state"][parameter]["step"] == 2


@ranks(2)
def test_partitions_load_into_shards(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for name in ("zero1", "zero3"):
        weights, _ = expected(name)
        into = {
            key: distribute_tensor(torch.zeros(value.shape), mesh, [Shard(value.dim() - 1)])
            for key, value in weights.items()
            if key != "count"
        }
        fastload.load(DATA / name, into={"module": into}, strict=False, options=OPTIONS)
        for key, value in into.items():
            assert torch.equal(value.full_tensor(), weights[key])


Change = Callable[[dict[str, Any], list[dict[str, Any]]], object]


def write_stage_1(folder: Path, change: Change) -> None:
    """Writes what DeepSpeed writes of two parameters, of 6 and 5 elements, on two ranks."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    flat = torch.arange(12.0)
    weights = {"w": flat[:6].reshape(2, 3).bfloat16(), "b": flat[6:11].bfloat16()}
    shapes = OrderedDict((name, weight.shape) for name, weight in weights.items())
    model: dict[str, Any] = {"module": weights, "param_shapes": [shapes], "shared_params": {}}
    optimizers: list[dict[str, Any]] = [
        {
            "single_partition_of_fp32_groups": [flat[6 * rank : 6 * rank + 6 - rank].clone()],
            "base_optimizer_state": {"state": {0: {"step": torch.tensor(2.0), "exp_avg": torch.ones(6)}}},
            "partition_count": [2],
        }
        for rank in range(2)
    ]
    change(model, optimizers)
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank, state in enumerate(optimizers):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, folder / name)


def with_shapes(**shapes: Any) -> Change:
    return lambda model, _: model["param_shapes"][0].update(
        {name: torch.Size(shape) if type(shape) is tuple else shape for name, shape in shapes.items()}
    )


def to_stage_3(model: dict[str, Any], optimizers: list[dict[str, Any]]) -> None:
    for state in optimizers:
        state["fp32_flat_groups"] = state.pop("single_partition_of_fp32_groups")


def set_first(key: str, value: Any) -> Change:
    return lambda _, optimizers: optimizers[0].update({key: value})


class Attack:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("it-was-run",)


MASTERS = "single_partition_of_fp32_groups"
REFUSED: list[tuple[Change, str]] = [
    (with_shapes(w=(2, 4)), r"'b' ends at 13 of 11 elements"),
    (with_shapes(w=(1 << 40, 1 << 20)), r"'w' ends at \d+ of 11 elements"),
    (with_shapes(w="wide"), "in place of the sizes"),
    (with_shapes(w=Attack()), "in place of the sizes"),
    (lambda model, _: model.update(param_shapes=[]), "of 0"),
    (lambda model, _: model.update(param_shapes=3), "no keys"),
    (lambda model, _: model.update(module=3), "no keys"),
    (set_first(MASTERS, [torch.ones(2, 3)]), "is not flat"),
    (set_first(MASTERS, [torch.ones(12)[::2]]), "is not flat"),
    (set_first(MASTERS, [Attack()]), "is no tensor"),
    (set_first(MASTERS, Attack()), "in place of"),
    (set_first(MASTERS, [torch.ones(6), torch.ones(6)]), "groups on the ranks"),
    (set_first("param_alignment_paddings", [[0]]), "param_alignment_paddings"),
    (set_first("param_alignment_paddings", [[1 << 40, 0]]), r"'b' ends at"),
    (set_first("param_alignment_paddings", [[-1, 0]]), "param_alignment_paddings"),
    (set_first("base_optimizer_state", {"state": {0: {"exp_avg": torch.ones(3)}}}), "has 3 elements"),
    (set_first("base_optimizer_state", {"state": {7: {"exp_avg": torch.ones(6)}}}), ""),
    (to_stage_3, "have different lengths"),
    (set_first("partition_count", [3]), r"\*_optim_states.pt of 2 ranks, and was saved by \[3\]"),
    (set_first("partition_count", 1), r"\*_optim_states.pt of 2 ranks, and was saved by \[1\]"),
    (set_first("partition_count", [2, 1]), r"\*_optim_states.pt of 2 ranks, and was saved by \[2, 1\]"),
    (lambda _, optimizers: optimizers[0].clear(), "no partitions of fp32 weights"),
    (lambda _, optimizers: optimizers[1].clear(), "in place of"),
]


def test_partitions_are_parsed_strictly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "step"
    write_stage_1(folder, lambda *_: None)
    state = fastload.load(folder)
    assert torch.equal(state["module"]["w"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(state["module"]["b"], torch.arange(6.0, 11.0))
    assert torch.equal(state["optimizer"]["state"]["b"]["exp_avg"], torch.ones(5))
    for change, reason in REFUSED:
        write_stage_1(folder, change)
        if not reason:
            assert fastload.load(folder)["optimizer"]["state"]["w"] == {}
            continue
        with pytest.raises(ManifestError, match=reason):
            fastload.load(folder)
    assert not (tmp_path / "it-was-run").exists()

    # Without the metadata of zero_to_fp32.
    write_stage_1(folder, lambda model, _: model.pop("param_shapes"))
    assert fastload.load(folder)["module"]["b"].dtype == torch.bfloat16
    write_stage_1(folder, lambda model, states: (model.pop("param_shapes"), to_stage_3(model, states)))
    with pytest.raises(ManifestError, match="no param_shapes"):
        fastload.load(folder)

    write_stage_1(folder, lambda *_: None)
    first, second = sorted(folder.glob("zero_*"))
    (tmp_path / "latest").write_text("step")
    with pytest.raises(fastload.CheckpointNotFound, match="name the directory of a step"):
        fastload.load(tmp_path)
    shutil.copy(second, folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    with pytest.raises(ManifestError, match="tensor parallelism"):
        fastload.load(folder)
    (folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    for name in ("layer_0_expert_1_mp_rank_00_model", "expp_rank_0_mp_rank_00_optim", "layer_00-model"):
        (folder / f"{name}_states.pt").touch()
        with pytest.raises(ManifestError, match=f"{name}_states.pt': .*expert or pipeline parallelism"):
            fastload.load(folder)
        (folder / f"{name}_states.pt").unlink()
    first.unlink()
    with pytest.raises(ManifestError, match=r"are of the ranks \[1\]"):
        fastload.load(folder)


def test_files_of_a_rank_are_missing_or_of_another_save(tmp_path: Path) -> None:
    shutil.copytree(DATA / "zero3", tmp_path / "more")
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)]
    shutil.copy(tmp_path / "more" / names[0], tmp_path / "more" / names[3])
    with pytest.raises(ManifestError, match=r"of 4 ranks, and was saved by \[3\]"):
        fastload.load(tmp_path / "more")
    (tmp_path / "more" / names[3]).unlink()
    models = [tmp_path / "more" / name.replace("optim", "model") for name in names]
    shutil.copy(models[0], models[3])
    with pytest.raises(ManifestError, match=r"has 4 \*_model_states.pt and 3 \*_optim_states.pt"):
        fastload.load(tmp_path / "more")
    models[3].unlink()
    models[2].unlink()
    with pytest.raises(ManifestError, match=r"has 2 \*_model_states.pt and 3 \*_optim_states.pt"):
        fastload.load(tmp_path / "more")
    shutil.copytree(DATA / "zero3", tmp_path / "none")
    for name in names[:3]:
        (tmp_path / "none" / name).unlink()
    with pytest.raises(ManifestError, match="which have the weights of stage 3"):
        fastload.load(tmp_path / "none")


@ranks(3, deadline_s=100)
def test_what_fsdp_1_saved_with_dcp(rank: int, world: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # of what torch deprecates, such as ShardedTensor
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 3))
    model = FullyShardedDataParallel(layers, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    sharded = ShardedStateDictConfig(offload_to_cpu=False), ShardedOptimStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *sharded):
        weights = model.state_dict()
        assert {type(value).__name__ for value in weights.values()} == {"ShardedTensor"}
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "sharded")
    full = FullStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
        wanted = model.state_dict()
    found = fastload.load(tmp_path / "sharded", options=OPTIONS)
    assert_same_bits(found["model"], wanted)
    mesh = init_device_mesh("cpu", (world,))
    into = {
        name: distribute_tensor(torch.zeros(value.shape), mesh, [Shard(value.dim() - 1)])
        for name, value in wanted.items()
    }
    fastload.load(tmp_path / "sharded", into={"model": into}, strict=False, options=OPTIONS)
    assert_same_bits({name: value.full_tensor() for name, value in into.items()}, wanted)
    moments = found["optim"]["state"]["0.weight"]["exp_avg"]
    assert moments.shape == (13, 7)
    assert moments.count_nonzero()
    dist.barrier()


@pytest.mark.slow(but=["False"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@ranks(2)
def test_modules_of_fsdp_1(rank: int, world: int, tmp_path: Path, use_orig_params: bool) -> None:
    """Their own `load_state_dict` gets complete tensors; it can be called again afterwards."""
    warnings.simplefilter("ignore")  # of what torch deprecates

    def build(seed: int) -> FullyShardedDataParallel:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(7, 13), nn.Sequential(nn.Linear(13, 3), nn.LayerNorm(3)))
        return FullyShardedDataParallel(
            layers,
            use_orig_params=use_orig_params,
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
            device_id=torch.device("cpu"),
        )

    model, other = build(1), build(2)
    wanted = model.state_dict()
    fastload.save({"model": model, "step": 3}, tmp_path / "nested")
    fastload.save(wanted, tmp_path / "named")
    assert_same_bits(fastload.load(tmp_path / "nested", options=OPTIONS)["model"], wanted)
    fastload.load(tmp_path / "nested", into={"model": other, "step": 0}, options=OPTIONS)
    assert_same_bits(other.state_dict(), wanted)
    other = build(3)
    fastload.load(tmp_path / "named", into=other, options=OPTIONS)
    assert_same_bits(other.state_dict(), wanted)
    fastload.save({**wanted, "0.weight": torch.zeros(3)}, tmp_path / "wrong")
    with pytest.raises(fastload.MismatchError, match=r"(?s)into\.load_state_dict: .*0\.weight"):
        fastload.load(tmp_path / "wrong", into=other, options=OPTIONS)
    other = build(4)
    fastload.load(tmp_path / "named", into=other, options=OPTIONS)
    assert_same_bits(other.state_dict(), wanted)
    FullyShardedDataParallel.set_state_dict_type(other, StateDictType.SHARDED_STATE_DICT)
    with pytest.raises(fastload.MismatchError, match=r"FSDP1 .*SHARDED_STATE_DICT.*set_state") as late:
        fastload.load(tmp_path / "nested", into={"model": other, "step": 0}, options=OPTIONS)
    assert not late.value.is_partial
