"""torch.distributed.checkpoint with fastload as its storage: what its own do, read once, in safetensors."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    _EmptyStateDictLoadPlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import fastload
from fastload.integrations.dcp import Reader, Writer
from tests.dist.harness import ranks
from tests.pages import run_program

OVERWRITE = fastload.SaveOptions(overwrite=True)

pytestmark = pytest.mark.filterwarnings(
    "ignore:TypedStorage is deprecated",
    "ignore:.*FSDP.state_dict_type",
    "ignore:Please use DTensor instead",
)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def nested(seed: int) -> dict[str, Any]:
    """Whatever dcp takes apart: dicts, lists with tensors, tensors of many kinds, plain values."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(40, 30, generator=generator)
    return {
        "model": OrderedDict(weight=tensor, half=tensor.half(), strided=tensor.t()[::2], tied=tensor),
        "optim": {"state": {0: {"step": torch.tensor(float(seed)), "exp_avg": tensor * 2}}, "lr": 0.1 * seed},
        "list": [torch.arange(5) + seed, {"deep": torch.ones(3, dtype=torch.bool)}],
        "values": [1, "two", None, (3, 4.5)],
        "tuples": (
            tensor[:2] + 1,
            [{"x": (nn.Parameter(tensor[:, 0] * 3), tensor.to(torch.complex128))}, "y"],
        ),
        "losses": io.BytesIO(bytes([seed]) * 10),
        "complex": torch.randn(7, dtype=torch.complex128, generator=generator),
        "array": np.arange(6).reshape(2, 3) + seed,
        "empty": {},
        "none": torch.zeros(0, 4),
        "step": seed,
    }


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted) or isinstance(wanted, OrderedDict)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted)
    elif isinstance(wanted, io.BytesIO):
        assert found.getvalue() == wanted.getvalue()
    else:
        assert found == wanted


@ranks(3, ranks_per_host=2)
def test_replicated_states(rank: int, world: int, tmp_path: Path) -> None:
    state, path = nested(7), tmp_path / "new"
    writer = Writer(path, options=fastload.SaveOptions(block_bytes=4096))
    dcp.save(state, storage_writer=writer)
    assert writer.report is not None
    assert writer.report.bytes_written == writer.report.nbytes
    plain_state = {key: value for key, value in state.items() if key != "losses"}
    fastload.save(plain_state, tmp_path / "direct", options=fastload.SaveOptions(block_bytes=4096))
    by_dcp, direct = files(path), files(tmp_path / "direct")
    assert {name: data for name, data in by_dcp.items() if name != "fastload.json"} == {
        name: data for name, data in direct.items() if name != "fastload.json"
    }
    losses = ("io.BytesIO", state["losses"].getvalue())
    wanted = {**state, "model": dict(state["model"]), "losses": losses}
    del wanted["empty"]  # of which dcp does not tell, nor that keys were numbers
    wanted["optim"] = {**state["optim"], "state": {"0": state["optim"]["state"][0]}}
    assert_same(fastload.load(path), wanted)

    for source, wanted in (("new", state), ("direct", plain_state)):
        own = {key: value for key, value in nested(1).items() if key in wanted}
        reader = Reader(tmp_path / source, options=fastload.LoadOptions(strategy="allgather"))
        weight = own["model"]["weight"]
        dcp.load(own, storage_reader=reader)
        assert_same(own, wanted)
        assert own["model"]["weight"] is weight
        assert reader.report is not None
        assert reader.report.read_amplification <= 1.01

    # Again, to the same path, as dcp does; the path as its checkpoint_id.
    state = nested(8)
    dcp.save(state, checkpoint_id=path, storage_writer=Writer())
    own = nested(1)
    dcp.load(own, checkpoint_id=path, storage_reader=Reader())
    assert_same(own, state)
    # Of another dtype, and a part only; what is not asked for is not read.
    part: dict[str, Any] = {"model": {"weight": torch.zeros(40, 30, dtype=torch.float64)}, "step": 0}
    reader = Reader(path)
    dcp.load(part, storage_reader=reader)
    assert torch.equal(part["model"]["weight"], state["model"]["weight"].double())
    assert part["step"] == 8
    assert reader.report is not None
    assert reader.report.bytes_wanted == 40 * 30 * 4
    everything: dict[str, Any] = {}
    _EmptyStateDictLoadPlanner()
    dcp.state_dict_loader._load_state_dict(everything, Reader(path), planner=_EmptyStateDictLoadPlanner())
    assert torch.equal(everything["list"][0], state["list"][0])


@ranks(2)
def test_what_cannot_be_is_said_on_all_ranks(rank: int, world: int, tmp_path: Path) -> None:
    path, good = tmp_path / "c", {"a": torch.ones(4), "b": 1}
    dcp.save(good, storage_writer=Writer(path))
    before = files(path)

    def refused(text: str, call: Any) -> None:
        with pytest.raises((CheckpointException, fastload.FastloadError), match=text):
            call()
        assert files(path) == before

    refused(
        "Missing key in checkpoint state_dict: c",
        lambda: dcp.load({"c": torch.ones(1)}, storage_reader=Reader(path)),
    )
    refused("Size mismatch", lambda: dcp.load({"a": torch.ones(5)}, storage_reader=Reader(path)))
    own = {"a": torch.zeros(4), "c": torch.zeros(1)}
    dcp.load(own, storage_reader=Reader(path), planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert own["a"].sum() == 4
    refused("no such checkpoint", lambda: dcp.load({}, storage_reader=Reader(tmp_path / "nowhere")))
    refused("there is no path", lambda: dcp.save(good, storage_writer=Writer()))
    refused(
        r"state\['a'\]\['x'\] is an object",
        lambda: dcp.save({"a": {"x": object()}}, storage_writer=Writer(path)),
    )
    refused(r"\['b'\]", lambda: dcp.save({**good, "b": rank}, storage_writer=Writer(path)))
    refused(
        "ReplicaMismatch: .*a",
        lambda: dcp.save({**good, "a": torch.ones(4) * rank}, storage_writer=Writer(path)),
    )
    apart = dist.new_group([0])
    if rank == 0:
        refused(
            "made by 1 ranks, its Reader by 2", lambda: Reader(path).prepare_global_plan([dcp.LoadPlan([])])
        )
        refused(
            "made by 1 ranks, its Writer by 2", lambda: Writer(path).prepare_global_plan([dcp.SavePlan([])])
        )
        dcp.save(
            {"a": torch.zeros(3)},
            storage_writer=Writer(tmp_path / "sub", process_group=apart),
            process_group=apart,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = tmp_path / f"alone-{rank}"
        dcp.save({"a": torch.ones(3) * rank}, storage_writer=Writer(alone, no_dist=True), no_dist=True)
        own = {"a": torch.zeros(3)}
        dcp.load(own, storage_reader=Reader(alone, no_dist=True), no_dist=True)
    assert own["a"].tolist() == [rank] * 3

    class Broken(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Tensor:
            if rank == 1:
                raise ValueError("no memory for it")
            return super().resolve_tensor(read_item)

    refused(
        "no memory for it",
        lambda: dcp.load({"a": torch.ones(4)}, storage_reader=Reader(path), planner=Broken()),
    )


class Half(dcp.DefaultSavePlanner):
    """As in the documentation of dcp: tensors are saved in another dtype."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        object = super().transform_object(write_item, object)
        return object if write_item.type == WriteItemType.BYTE_IO else object.half()


class Renamed(dcp.DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        renamed = {f"foo_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class Doubled(dcp.DefaultLoadPlanner):
    """Reads into memory of its own, and makes something of it."""

    def resolve_tensor(self, read_item: Any) -> Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        super().resolve_tensor(read_item).copy_(2 * tensor)


@ranks(2)
def test_planners_of_ones_own(rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(12.0).reshape(6, 2)
    state = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "plain": whole + 1, "step": 3}
    dcp.save(state, storage_writer=Writer(tmp_path / "half"), planner=Half())
    found = fastload.load(tmp_path / "half")
    assert_same(found, {"sharded": whole.half(), "plain": (whole + 1).half(), "step": 3})
    dcp.save(state, storage_writer=Writer(tmp_path / "renamed"), planner=Renamed())
    assert sorted(fastload.load(tmp_path / "renamed")) == ["foo_plain", "foo_sharded", "foo_step"]
    dcp.save({**state, "step": 4}, storage_writer=Writer(tmp_path / "plain"))
    own = {"sharded": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)]), "plain": torch.zeros(6, 2)}
    dcp.load(own, storage_reader=Reader(tmp_path / "plain"), planner=Doubled())
    assert torch.equal(own["sharded"].full_tensor(), 2 * whole)
    assert torch.equal(own["plain"], 2 * (whole + 1))
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for step in (1, 2):  # the second plan is that of the first
        dcp.save(
            {**state, "step": step, "plain": whole + step},
            storage_writer=Writer(tmp_path / "kept"),
            planner=planner,
        )
        found = fastload.load(tmp_path / "kept")
        assert (found["step"], found["plain"][0, 0]) == (step, step)
    flat = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"a.b": whole, "values": {"x": 1}}, storage_writer=Writer(tmp_path / "flat"), planner=flat)
    assert_same(fastload.load(tmp_path / "flat"), {"a.b": whole, "values": {"x": 1}})


class Without(dcp.DefaultSavePlanner):
    """Leaves keys out: `local` ones of each rank's plan, `central` ones of the plan of all."""

    def create_local_plan(self) -> dcp.SavePlan:
        return without(without(super().create_local_plan(), "local"), "list.0")

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return [without(plan, "central") for plan in plans], metadata


def without(plan: dcp.SavePlan, name: str) -> dcp.SavePlan:
    return replace(plan, items=[item for item in plan.items if name not in item.index.fqn])


class Summed(dcp.DefaultSavePlanner):
    """Saves one key more, which the state does not have."""

    def create_local_plan(self) -> dcp.SavePlan:
        plan = super().create_local_plan()
        more = create_default_local_save_plan({"sum": torch.zeros(())}, False)
        return replace(plan, items=[*plan.items, *more.items])

    def lookup_object(self, index: Any) -> Any:
        return self.state_dict["plain"].sum() if index.fqn == "sum" else super().lookup_object(index)


class Cut(dcp.DefaultSavePlanner):
    """Cuts a plain tensor, of which each rank writes its rows; dcp itself does so."""

    def create_local_plan(self) -> dcp.SavePlan:
        plan, rank = super().create_local_plan(), dist.get_rank()
        items = []
        for item in plan.items:
            if item.index.fqn == "plain":
                data = item.tensor_data
                assert data is not None
                rows = ChunkStorageMetadata(torch.Size((3 * rank, 0)), torch.Size((3, 2)))
                index = replace(item.index, offset=rows.offsets)
                data = replace(data, chunk=rows)
                item = replace(item, index=index, tensor_data=data, type=WriteItemType.SHARD)
            items.append(item)
        return replace(plan, items=items)

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn != "plain":
            return super().resolve_data(write_item)
        return self.state_dict["plain"][3 * dist.get_rank() :][:3]


class Telling(dcp.DefaultLoadPlanner):
    """Notes what it is told to commit, once the data are there."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, Tensor] = {}

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        self.told[read_item.dest_index.fqn] = tensor.clone()


class Exchanged(dcp.DefaultLoadPlanner):
    """Reads the first row of what it wants from the last row of the checkpoint, into its own last one."""

    def create_local_plan(self) -> dcp.LoadPlan:
        plan = super().create_local_plan()
        if not plan.items:
            return plan
        (item,) = plan.items
        offsets, lengths = torch.Size((5, 0)), torch.Size((1, 2))
        return dcp.LoadPlan([replace(item, storage_offsets=offsets, dest_offsets=(2, 0), lengths=lengths)])


@ranks(2)
def test_what_planners_change_is_saved_and_loaded(rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(12.0).reshape(6, 2)
    shards = distribute_tensor(whole, mesh, [Shard(0)])
    state = {"sharded": shards, "plain": whole + 1, "step": 3}

    for step in (1, 2, 3):  # the plans of the second and the third are those of the first
        path = tmp_path / f"half-{step}"
        dcp.save({**state, "step": step}, storage_writer=Writer(path), planner=Half(enable_plan_caching=True))
        assert_same(fastload.load(path), {"sharded": whole.half(), "plain": (whole + 1).half(), "step": step})

    more = {f"{place}.{kind}": value for place in ("local", "central") for kind, value in state.items()}
    dcp.save({**state, **more}, storage_writer=Writer(tmp_path / "left"), planner=Without())
    assert_same(fastload.load(tmp_path / "left"), {**state, "sharded": whole})
    rows = {"list": [whole, whole + 1]}
    dcp.save(rows, storage_writer=Writer(tmp_path / "list"), planner=Without())
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: list\.0"):
        dcp.load(rows, storage_reader=Reader(tmp_path / "list"))
    assert_same(fastload.load(tmp_path / "list"), {"list.1": whole + 1})
    planner = dcp.DefaultSavePlanner()
    planner.transform_object = lambda _, value: value + 1  # type: ignore[method-assign]
    dcp.save({"w": whole}, storage_writer=Writer(tmp_path / "more"), planner=planner)
    assert torch.equal(fastload.load(tmp_path / "more")["w"], whole + 1)
    dcp.save(state, storage_writer=Writer(tmp_path / "sum"), planner=Summed())
    assert fastload.load(tmp_path / "sum")["sum"] == (whole + 1).sum()
    dcp.save(state, storage_writer=Writer(tmp_path / "cut"), planner=Cut())
    assert_same(fastload.load(tmp_path / "cut"), {**state, "sharded": whole})

    own: dict[str, Any] = {"sharded": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])}
    telling = Telling()
    dcp.load({**own, "plain": torch.zeros(6, 2)}, storage_reader=Reader(tmp_path / "left"), planner=telling)
    assert_same(
        dict(sorted(telling.told.items(), reverse=True)), {"sharded": shards.to_local(), "plain": whole + 1}
    )
    own["sharded"].to_local().zero_()
    dcp.load(own, storage_reader=Reader(tmp_path / "left"), planner=Exchanged())
    assert own["sharded"].to_local().tolist() == [[0, 0], [0, 0], [10, 11]]


@ranks(4)
def test_shards_that_dcp_does_not_know_and_planners_that_change_something(
    rank: int, world: int, tmp_path: Path
) -> None:
    whole = torch.arange(48.0).reshape(8, 6)
    fastload.save({"a": whole}, tmp_path / "one")
    turned = DeviceMesh("cpu", [3, 2, 1, 0])
    for make in (strided, lambda tensor: distribute_tensor(tensor, turned, [Shard(0)])):
        own = {"a": make(torch.zeros(8, 6))}
        dcp.load(own, storage_reader=Reader(tmp_path / "one"))
        assert torch.equal(own["a"].to_local(), make(whole).to_local())
        with pytest.raises(CheckpointException, match=r"a: planner=Telling .* dcp knows other rows"):
            dcp.load(own, storage_reader=Reader(tmp_path / "one"), planner=Telling())
    dcp.save(own, storage_writer=Writer(tmp_path / "again"))
    assert torch.equal(fastload.load(tmp_path / "again")["a"], whole)
    # Three rows of a model on FSDP2: by its coordinate, which dcp goes by, rank 0 has none.
    model = nn.Linear(2, 3, bias=False)
    fully_shard(model, mesh=turned)
    fastload.save({"weight": whole[:3, :2]}, tmp_path / "few")
    state = model.state_dict()
    dcp.load(state, storage_reader=Reader(tmp_path / "few"))
    assert torch.equal(state["weight"].full_tensor(), whole[:3, :2])
    with pytest.raises(CheckpointException, match=r"weight: planner=Exchanged .* dcp knows other rows"):
        dcp.load(state, storage_reader=Reader(tmp_path / "few"), planner=Exchanged())
    mixed = DeviceMesh("cpu", [[0, 1], [3, 2]])
    bad = {"a": distribute_tensor(whole, mixed, [Shard(0), Shard(0)])}
    with pytest.raises(CheckpointException, match=r"a: .* sorted ranks"):
        dcp.load(bad, storage_reader=Reader(tmp_path / "one"))


@ranks(2)
def test_values_in_tuples(rank: int, world: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    whole, size = torch.arange(12.0).reshape(6, 2), torch.Size([2, 3])
    shards = distribute_tensor(whole, mesh, [Shard(0)])
    values = {"first": (np.arange(3), 1), "size": size, "deep": (size, whole, [size]), "text": ("io", b"x")}
    dcp.save({**values, "of shards": (shards, [shards, 5])}, storage_writer=Writer(tmp_path / "c"))
    own: dict[str, Any] = dict.fromkeys(values)
    zeros = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(1)])
    own["of shards"] = (zeros, [torch.zeros(6, 2), 0])
    dcp.load(own, storage_reader=Reader(tmp_path / "c"))
    (found, [plain, five]) = own.pop("of shards")
    assert_same(own, values)
    assert found.placements == (Shard(1),)
    assert torch.equal(found.full_tensor(), whole)
    assert torch.equal(plain, whole)
    assert five == 5
    wrong = {"of shards": (distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]), [0, 0])}
    with pytest.raises(CheckpointException, match=r"of shards: a DTensor of \[5, 2\] .* \[6, 2\]"):
        dcp.load(wrong, storage_reader=Reader(tmp_path / "c"))


class OfItsOwn(dcp.DefaultSavePlanner):
    """Notes something of its own in the metadata."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.note = note

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        self.metadata = replace(metadata, planner_data=self.note(metadata.planner_data))
        return plans, self.metadata


@ranks(1)
def test_what_planners_note_for_themselves(rank: int, world: int, tmp_path: Path) -> None:
    state = {"a": {"w": torch.ones(3), "n": 4}}
    for number, note in enumerate((
        lambda paths: ["anything"], lambda paths: {1: "one"}, lambda paths: {"version": 3},
        lambda paths: dict.fromkeys(paths, "sharded"), lambda paths: dict.fromkeys(paths, ("all",)),
        lambda paths: {**paths, "version": 3},
    )):  # fmt: skip
        path = tmp_path / str(number)
        dcp.save(state, checkpoint_id=path, planner=OfItsOwn(note))
        own = {"a": {"w": torch.zeros(3), "n": 0}}
        dcp.load(own, storage_reader=Reader(path))
        assert_same(own, state)
        is_nested = number == 5  # else nobody knows how
        assert_same(fastload.load(path), state if is_nested else {"a.w": torch.ones(3), "a.n": 4})


@ranks(2)
def test_what_is_there_is_replaced_as_dcp_does(rank: int, world: int, tmp_path: Path) -> None:
    def save(step: int, path: Path, options: fastload.SaveOptions | None) -> None:
        dcp.save({"step": step, "w": torch.ones(3) * step}, storage_writer=Writer(path, options=options))

    path, patient = tmp_path / "c", fastload.SaveOptions(retries=8)
    for step in (1, 2):
        save(step, path, patient)
    assert fastload.load(path)["step"] == 2
    strict = fastload.SaveOptions(overwrite=False)
    with pytest.raises(CheckpointException, match=r"exists: pass .*SaveOptions\(overwrite=True\)"):
        save(3, path, strict)

    there = tmp_path / "torch"
    dcp.save({"old": torch.ones(4), "step": 1}, checkpoint_id=there)
    if rank == 0:
        (there / "config.json").write_text("{}")
    dist.barrier()
    before = files(there)
    for refuse in (lambda: save(2, there, strict), lambda: fastload.save({}, there, options=OVERWRITE)):
        with pytest.raises((CheckpointException, fastload.FastloadError)):
            refuse()
    assert files(there) == before
    save(2, there, None)
    assert sorted(files(there)) == ["config.json", "fastload.json", "model.safetensors"]
    assert_same(fastload.load(there), {"step": 2, "w": torch.ones(3) * 2})


PLACEMENTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "S": ((4,), [Shard(0)]),
    "R": ((4,), [Replicate()]),
    "S1": ((4,), [Shard(1)]),
    "RR": ((2, 2), [Replicate(), Replicate()]),
    "RS": ((2, 2), [Replicate(), Shard(0)]),
    "SR": ((2, 2), [Shard(0), Replicate()]),
    "SS": ((2, 2), [Shard(0), Shard(0)]),
    "SS1": ((2, 2), [Shard(0), Shard(1)]),
}


def placed(tensor: Tensor, kind: str) -> DTensor:
    shape, placements = PLACEMENTS[kind]
    return distribute_tensor(tensor, init_device_mesh("cpu", shape), placements)


def strided(tensor: Tensor) -> DTensor:
    """Of each half of the rows, each of two ranks has a half."""
    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.cat([part.chunk(2)[mesh.get_coordinate()[0]] for part in tensor.chunk(2)])  # type: ignore[index]
    placements = [_StridedShard(0, split_factor=2), Replicate()]
    given = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(local, mesh, placements, **given)


@ranks(4, deadline_s=90)
def test_shards_are_read_into_any_others(rank: int, world: int, tmp_path: Path) -> None:
    whole, uneven = torch.arange(8 * 6.0).reshape(8, 6), torch.arange(5 * 3.0).reshape(5, 3)
    fastload.save({"a": whole, "b": uneven}, tmp_path / "one")
    for saved in PLACEMENTS:
        state = {"a": placed(whole, saved), "b": placed(uneven, "S")}
        dcp.save(state, storage_writer=Writer(tmp_path / saved))
        assert files(tmp_path / saved) == files(tmp_path / "one")
    for loaded in PLACEMENTS:
        own: dict[str, Any] = {"a": placed(torch.zeros(8, 6), loaded), "b": placed(torch.zeros(5, 3), "RS")}
        dcp.load(own, storage_reader=Reader(tmp_path / loaded))
        assert torch.equal(own["a"].full_tensor(), whole)
        assert torch.equal(own["b"].full_tensor(), uneven)
    own = {"a": strided(torch.zeros(8, 6))}
    dcp.load(own, storage_reader=Reader(tmp_path / "one"))
    assert torch.equal(own["a"].to_local(), strided(whole).to_local())
    # Directories that dcp has written, and keys that each rank has for itself, or in an order of its own.
    dcp.save({"a": placed(whole, "RS"), "n": 5}, checkpoint_id=tmp_path / "torch")
    own = {"a": placed(torch.zeros(8, 6), "S"), "n": 0}
    dcp.load(own, storage_reader=Reader(tmp_path / "torch"))
    assert torch.equal(own["a"].full_tensor(), whole)
    assert own["n"] == 5
    dcp.save({f"stage{rank}": {"w": whole + rank, "step": 1}}, storage_writer=Writer(tmp_path / "stages"))
    assert sorted(fastload.load(tmp_path / "stages")) == [f"stage{n}" for n in range(4)]
    dcp.save({"a": placed(whole, "S")}, storage_writer=Writer(tmp_path / "apart"), use_collectives=False)
    assert torch.equal(fastload.load(tmp_path / "apart")["a"], whole)
    keys = ["x", "y", "z"][:: 1 if rank % 2 else -1]
    dcp.save({key: whole + ord(key) for key in keys}, storage_writer=Writer(tmp_path / "keys"))
    own = {key: torch.zeros(8, 6) for key in reversed(keys)}
    dcp.load(own, storage_reader=Reader(tmp_path / "keys"))
    assert all(torch.equal(own[key], whole + ord(key)) for key in keys)


@ranks(2)
def test_shards_of_fsdp1_are_loaded_and_saved(rank: int, world: int, tmp_path: Path) -> None:
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{n}/cpu" for n in range(world)])
    shards = sharded_tensor.zeros(spec, 6, 5)
    whole = torch.arange(30.0).reshape(6, 5)
    fastload.save({"a": whole}, tmp_path / "whole")
    dcp.load({"a": shards}, storage_reader=Reader(tmp_path / "whole"))
    for shard in shards.local_shards():
        begin, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        assert torch.equal(shard.tensor, whole[begin : begin + rows])
    dcp.save({"a": shards, "n": 3}, storage_writer=Writer(tmp_path / "shards"))
    assert_same(fastload.load(tmp_path / "shards"), {"a": whole, "n": 3})


def make(seed: int, shard: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 5), nn.Tanh())
    if shard == "fsdp+tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif shard:
        shape, names = ((4,), ("dp",)) if shard == "fsdp" else ((2, 2), ("rep", "dp"))
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for step in range(2):
        model(torch.full((3, 10), 1.0 + seed + step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class AppState:
    """A `Stateful`, as in the recipe of torch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


@pytest.mark.slow
@ranks(4, deadline_s=90)
def test_trainings_go_on(rank: int, world: int, tmp_path: Path) -> None:
    """Models and optimizers as `Stateful` objects, into other meshes; saves in the background."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("fastload").addHandler(handler)
    group = dist.new_group(backend="gloo")
    writer = Writer(tmp_path / "own", process_group=group)
    dcp.async_save({"step": 9}, storage_writer=writer, process_group=group).result()  # type: ignore[union-attr]
    assert records == []
    for saved, loaded in (("fsdp", "hsdp"), ("hsdp", "fsdp+tp"), ("fsdp+tp", ""), ("", "fsdp")):
        model, optimizer = make(0, saved)
        path = tmp_path / f"{saved}-{loaded}"
        future = dcp.async_save({"app": AppState(model, optimizer), "step": 9}, storage_writer=Writer(path))
        future.result()  # type: ignore[union-attr]
        (warning,) = records
        assert "If training communicates in this group meanwhile, the job hangs" in warning.getMessage()
        other, its_optimizer = make(1, loaded)
        state = {"app": AppState(other, its_optimizer), "step": 0}
        dcp.load(state, storage_reader=Reader(path))
        assert state["step"] == 9
        full = StateDictOptions(full_state_dict=True)
        for one, wanted in zip(
            get_state_dict(other, its_optimizer, options=full),
            get_state_dict(model, optimizer, options=full),
            strict=True,
        ):
            assert_same(plain(one), plain(wanted))
        assert its_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: plain(state[key]) for key in sorted(state, key=str)}
    return state.full_tensor() if isinstance(state, DTensor) else state


def test_without_torch_distributed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Foo:
        state: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"seen": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no torch.distributed
        dcp.save({}, checkpoint_id=tmp_path, storage_writer=Writer())  # a directory that is there, and empty
        dcp.load({}, checkpoint_id=tmp_path, storage_reader=Reader())
        foo = Foo()
        dcp.save({"foo": foo, "bytes": [1, 2]}, storage_writer=Writer(tmp_path))
        state = {"foo": foo, "bytes": [3]}
        dcp.load(state, storage_reader=Reader(tmp_path))
        # What is not read without running it is left out, not given back as something else.
        pickled = tmp_path / "pickled"
        dcp.save({"array": np.ones(3), "list": [np.float64(2), 1], "t": torch.ones(2)}, checkpoint_id=pickled)
        own = {"array": None, "t": torch.zeros(2)}
        with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: array"):
            dcp.load(own, storage_reader=Reader(pickled))
        own["list"] = [3]
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(own, storage_reader=Reader(pickled), planner=planner)
    assert (own["array"], own["list"], own["t"].tolist()) == (None, [3], [1, 1])
    assert "left out: array, list (" in caplog.text
    assert (state["bytes"], foo.state, state["foo"]) == ([1, 2], {"seen": 1}, foo)


@ranks(2)
def test_the_program_on_the_page(rank: int, world: int, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    run_program("docs/integrations/dcp.md")
