"""Checkpoints of torch_checkpointing, written by itself, and fastload in the place of its manager."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import fastload
from fastload.errors import IncompleteCheckpoint, ManifestError
from fastload.integrations.torch_checkpointing import CheckpointManager
from tests.dist.harness import ranks
from tests.dist.test_sharded_states import assert_equal, whole

library = pytest.importorskip("torch_checkpointing")
OPTIONS = fastload.LoadOptions(timeout_s=30)


def trained(mesh: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}


def gather(_: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """The library's own exchange of metadata is for CUDA only."""
    found = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


def save_with_library(path: str, state: dict[str, Any]) -> None:
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultMetadataManager, "_all_gather_pickled_data", gather)
        config = library.CheckpointManager.Config.with_sync_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        config.items = {name: ItemSpec(resharder=DefaultResharder()) for name in ("model", "optimizer")}
        layout = LayoutInfo("more-{rank}.safetensors", SafetensorsSerialization())
        config.items["more"] = ItemSpec(resharder=DefaultResharder(), layout=layout)
        manager = config.build()
        manager.save(path, state)
        manager.close()
    dist.barrier()


def emptied(state: Any) -> Any:
    """The same state with nothing in it, sharded by other dimensions of other meshes."""
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        dim = state.dim() - 1
        return distribute_tensor(torch.zeros(state.shape), mesh, [Shard(dim)])
    if isinstance(state, list):
        return [emptied(value) for value in state]
    return torch.zeros_like(state) if isinstance(state, Tensor) else 0


@pytest.mark.slow
@ranks(4, deadline_s=110)
def test_what_the_library_saved_and_its_calls(rank: int, world: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # of the library, about plain tensors
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    state = trained(mesh)
    state["same"] = {"a": torch.arange(3), "text": "été"}
    grid = torch.arange(35.0).reshape(5, 7)
    strided = [Replicate(), _StridedShard(0, split_factor=2)]  # several boxes on each rank
    state["more"] = {
        "both": distribute_tensor(grid, mesh, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(grid, mesh, [Shard(0), Shard(0)]),
        "strided": distribute_tensor(torch.arange(33.0).reshape(11, 3), mesh, strided, src_data_rank=None),
        "plain": torch.ones(2, 2),
    }
    expected = whole(state)
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    save_with_library(theirs, {**state, "own": torch.full((3,), rank)})

    with pytest.raises(ManifestError, match=r"'own', which differs between the ranks.*own_0\.pt"):
        fastload.load(theirs, options=OPTIONS)
    found = fastload.load(theirs, strict=False, options=OPTIONS)
    assert found["own"] is None
    assert_equal({name: found[name] for name in expected}, expected)
    with fastload.open(theirs, options=OPTIONS) as checkpoint:
        checkpoint.load(into={"model": emptied(state["model"])}, strict=False)
    assert checkpoint.report is not None
    model_bytes = sum(tensor.nbytes for tensor in expected["model"].values())
    assert model_bytes <= checkpoint.report.bytes_read < model_bytes + 4 * 8000  # and what precedes the data

    manager = CheckpointManager(load_options=OPTIONS)
    assert_equal(whole(dict(manager.load(theirs, into=emptied(state)))), expected)
    future = manager.save(ours, state)
    with manager.lock():
        for tensor in state["model"].values():
            tensor.zero_()
    assert future is not None
    assert future.result().url == ours
    assert future.done()
    target = emptied(state)
    result = manager.load(ours, into={**target, "not there": 3})
    assert_equal(whole({name: result[name] for name in expected}), expected)
    assert result["not there"] == 3
    manager.close()
    assert CheckpointManager(sync=True).save(str(tmp_path / "again"), {"step": 6}) is None
    assert manager.load(tmp_path / "again") == {"step": 6}


def dtensor(**changes: Any) -> dict[str, Any]:
    mesh = {"device_type": "cpu", "mesh_shape": (2,), "mesh_data": (0, 1), "mesh_dim_names": None}
    data = {
        "global_shape": [4, 3],
        "dtype": "torch.float32",
        "stride": [3, 1],
        "mesh_spec": mesh | changes.pop("mesh", {}),
        "placements": [{"type": "Shard", "dim": 0}],
    }
    return {"type": "DTensorShardingMetadata", "data": data | changes}


def metadata(sharding: Any, **changes: Any) -> dict[str, Any]:
    groups = changes.pop("groups", [{"sharding_metadata": sharding, "ranks": changes.pop("ranks", (0, 1))}])
    item = {
        "nested_path_to_metadata": {changes.pop("path", '["w"]'): groups},
        "rank_to_layout_info": changes.pop("layouts", {0: None, 1: None}),
    }
    return {"metadata": {changes.pop("key", "model"): item}, "world_size": 2, "version": "2.0"} | changes


class Attack:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("it-was-run",)


def layout(name: str, kind: str = "TorchSerialization") -> dict[str, Any]:
    return {"file_path": name, "serialization_format": {"type": kind}}


def boxes(**changes: Any) -> dict[str, Any]:
    data = {"global_offsets": [[0, 0]], "local_offsets": [[0, 0]], "local_sizes": [[2, 3]], **changes}
    return {
        "type": "DefaultShardingMetadata",
        "data": {"global_shape": [4, 3], "dtype": "torch.float32", **data},
    }


LOWER = {"sharding_metadata": boxes(global_offsets=[[2, 0]]), "ranks": (1,)}
MANY = 50_000
MANY_TIMES = boxes(
    global_shape=[2 * MANY, 3],
    global_offsets=[[2 * number, 0] for number in range(MANY)],
    local_offsets=[[0, 0]] * MANY,
    local_sizes=[[2, 3]] * MANY,
)
STRIDED = {"type": "StridedShard", "dim": 0, "split_factor": 1 << 60}
REFUSED: list[tuple[Any, str]] = [
    (Attack(), "in place of a dict"),
    (metadata(Attack()), "in place of a dict"),
    (metadata(dtensor(), version="3.0"), "only 2.0 is read"),
    (metadata(dtensor(global_shape=[5, 3])), r"shape \[2, 3\], where its placements make \[\(3, 3\)"),
    (metadata(dtensor(global_shape=[1 << 62, 1 << 62])), "where its placements make"),
    (metadata(dtensor(global_shape=[-4, 3])), "in place of sizes"),
    (metadata(dtensor(placements=[{"type": "Partial"}])), "no placement that is read"),
    (metadata(dtensor(placements=[{"type": "Shard", "dim": 2}])), "no placement that is read"),
    (
        metadata(dtensor(placements=[{"type": "StridedShard", "dim": 0, "split_factor": 1 << 60}])),
        "placements",
    ),
    (metadata(dtensor(placements=[])), "0 placements on a mesh"),
    (metadata(dtensor(mesh={"mesh_shape": (1 << 40,)})), "a mesh of"),
    (metadata(dtensor(mesh={"mesh_data": (0, 0)})), "a mesh of"),
    (metadata(dtensor(mesh={"mesh_shape": (1,) * 40, "mesh_data": (0,)})), "placements on a mesh"),
    (metadata(dtensor(), ranks=(0,)), r"its boxes have 6 of 12 elements"),
    (metadata(dtensor(), ranks=(0, 7)), "rank 7 is not in its mesh"),
    (metadata(dtensor(), ranks=(0, 1 << 40)), "in place of ranks"),
    (metadata(dtensor(), groups=[]), "is on no rank"),
    (metadata(dtensor(), path="[[1]]"), "no path of keys"),
    (metadata(dtensor(), path='["v"]'), "does not say how 'model.w'"),
    (metadata(dtensor(), key="../model"), "no name of an item"),
    (metadata(dtensor(), layouts={0: layout("../../x.pt")}), "not a plain name"),
    (metadata(dtensor(), layouts={0: layout("model_1.pt")}), "have one file"),
    (metadata(dtensor(), layouts={0: layout("gone.pt")}), "1 of 2 files missing"),
    (metadata(dtensor(), layouts={0: layout("x.json", "JsonSerialization")}), "which is not read"),
    (metadata({"type": "Mine", "data": {}}), "shards of type 'Mine'"),
    (metadata(boxes(), ranks=(0,)), "its boxes have 6 of 12"),
    (metadata(MANY_TIMES, ranks=(0,)), "they repeat each other"),
    (metadata(boxes(local_offsets=[[1, 0]]), ranks=(0,)), "its boxes have 6"),
    (metadata(boxes(local_sizes=[[2, 3], [2, 3]]), ranks=(0,)), "offsets and sizes"),
    (metadata(boxes(global_offsets=[[0]]), ranks=(0,)), "shards"),
]


def test_metadata_are_parsed_strictly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in range(2):
        torch.save({"w": torch.arange(6.0).reshape(2, 3) + 6 * rank}, tmp_path / f"model_{rank}.pt")
    full = torch.arange(12.0).reshape(4, 3)
    groups = [{"sharding_metadata": boxes(), "ranks": (0,)}, LOWER]
    for fine in (metadata(dtensor()), metadata(None, groups=groups)):
        (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(fine))
        assert torch.equal(fastload.load(tmp_path)["model"]["w"], full)
    for wrong, reason in REFUSED:
        (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(wrong))
        kind = IncompleteCheckpoint if "missing" in reason else ManifestError
        with pytest.raises(kind, match=reason):
            fastload.load(tmp_path)
    assert not (tmp_path / "it-was-run").exists()
    # A tuple of ranks that is repeated costs few bytes of the pickle.
    many = tuple(range(100_000))
    groups = [{"sharding_metadata": dtensor(), "ranks": many}] * 3000
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(metadata(None, groups=groups)))
    with pytest.raises(ManifestError, match=r"not in its mesh|take more than"):
        fastload.load(tmp_path)


def test_a_file_of_an_item_with_the_name_of_another_item(tmp_path: Path) -> None:
    for rank, name in ((0, "model_0.pt"), (0, "x_0.pt"), (1, "x_1.pt")):
        torch.save({"w": torch.arange(6.0).reshape(2, 3) + 6 * rank}, tmp_path / name)
    about = metadata(dtensor(), layouts={0: None, 1: layout("x_1.pt")})
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(about))
    state = fastload.load(tmp_path)
    assert state.keys() == {"model"}
    assert torch.equal(state["model"]["w"], torch.arange(12.0).reshape(4, 3))
