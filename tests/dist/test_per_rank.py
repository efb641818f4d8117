"""What each rank has of its own comes back to the rank that saved it, and to nobody else."""

from __future__ import annotations

import filecmp
import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fastload
from fastload import CheckpointManager, LoadOptions, PerRank, SaveOptions
from fastload.errors import MismatchError, OptionError, PlanMismatch
from fastload.ext.load_verify import load
from tests.dist.harness import ranks, run_ranks
from tests.dist.hosts import mount_disk
from tests.dist.test_manager import warned
from tests.dist.test_readers import pytestmark as needs_mounts
from tests.e2e.forked import forking_python
from tests.unit.test_state import assert_same

OPTIONS = SaveOptions(max_shard_bytes=32_500, block_bytes=4096, writers="all", timeout_s=20)
SKIP = LoadOptions(per_rank_mismatch="skip")
LOADS = [LoadOptions(strategy=how, timeout_s=20) for how in ("direct", "allgather", "broadcast")]


def own_of(rank: int) -> dict[str, Any]:
    """Of another shape, and with other tensors, on each rank."""
    torch.manual_seed(rank)
    return {
        "rng": torch.get_rng_state(),
        "python": random.Random(rank).getstate(),
        "left over": torch.arange(rank * 7),
        "mixed": {"steps": [rank] * rank, "t": torch.full((rank + 1,), rank), "who": f"rank {rank}"},
        "odd": None if rank == 1 else torch.ones(2),
    }


def state_of(rank: int) -> dict[str, Any]:
    own = own_of(rank)
    torch.manual_seed(0)
    return {
        "model": nn.Linear(90, 90).state_dict(),
        "rng": PerRank(own["rng"]),
        "data": {"python": PerRank(own["python"]), "left over": [PerRank(own["left over"]), 3]},
        "mixed": PerRank(own["mixed"]),
        "odd": PerRank(own["odd"]),
        "step": 4,
    }


def assert_own(found: Any, rank: int) -> None:
    own = own_of(rank)
    assert_same(found["rng"], own["rng"])
    assert_same(found["data"], {"python": own["python"], "left over": [own["left over"], 3]})
    assert_same(found["mixed"], own["mixed"])
    assert_same(found["odd"], own["odd"])
    assert found["step"] == 4
    assert_same(found["model"], state_of(0)["model"])


@pytest.mark.slow(but=["3-ranks"])
@ranks(1, 2, 3)
def test_each_rank_gets_its_own_back(rank: int, world: int, tmp_path: Path) -> None:
    report = fastload.save(state_of(rank), tmp_path / "a", options=OPTIONS)
    assert report.bytes_written == report.nbytes
    manifest = fastload.inspect(tmp_path / "a")
    assert (len(manifest.files), len(manifest.tensors)) == (report.num_files, report.num_tensors)
    assert sum(file.nbytes for file in manifest.files) == report.nbytes
    for options in LOADS if world > 1 else LOADS[:1]:
        with fastload.open(tmp_path / "a", options=options) as checkpoint:
            assert_own(checkpoint.load(), rank)
            assert_own(checkpoint.load(dtype=torch.float32), rank)
            loaded = checkpoint.report
            assert loaded is not None
            assert loaded.left_out == ()
            if options.strategy != "direct":
                assert loaded.bytes_read == loaded.bytes_wanted == manifest.nbytes, "each byte once"
    fastload.verify(tmp_path / "a")
    dist.barrier() if world > 1 else None


@ranks(3)
def test_the_files_are_plain_and_do_not_show_who_wrote(rank: int, world: int, tmp_path: Path) -> None:
    for name, writers in (("a", "all"), ("b", 1), ("c", "host")):
        fastload.save(state_of(rank), tmp_path / name, options=replace(OPTIONS, writers=writers))
    fastload.async_save(state_of(rank), tmp_path / "d", options=OPTIONS).wait(20)
    names = sorted(os.listdir(tmp_path / "a"))
    assert "ranks.safetensors" in names
    assert "model.safetensors.index.json" in names
    for other in "bcd":
        assert sorted(os.listdir(tmp_path / other)) == names
        same, different, odd = filecmp.cmpfiles(tmp_path / "a", tmp_path / other, names, shallow=False)
        assert (sorted(same), different, odd) == (names, [], [])
    stored = safetensors.torch.load_file(tmp_path / "a" / "ranks.safetensors")
    for other_rank in range(world):
        assert_same(stored[f"@rank{other_rank}.rng"], own_of(other_rank)["rng"])
    dist.barrier()


@ranks(2)
def test_what_is_saved_is_what_was_there_when_it_was_asked_for(rank: int, world: int, tmp_path: Path) -> None:
    state = state_of(rank)
    handle = fastload.async_save(state, tmp_path / "a", options=OPTIONS)
    state["rng"].value.zero_()
    state["mixed"].value["t"].zero_()
    state["mixed"].value["steps"].append(5)
    handle.wait(20)
    assert_own(fastload.load(tmp_path / "a"), rank)


@ranks(3)
def test_into_fills_what_is_there(rank: int, world: int, tmp_path: Path) -> None:
    fastload.save(state_of(rank), tmp_path / "a", options=OPTIONS)
    for options in LOADS:
        rng = torch.zeros_like(own_of(rank)["rng"])
        into = {
            "model": nn.Linear(90, 90),
            "rng": PerRank(rng),
            "data": {"python": PerRank(None), "left over": None},
            "mixed": PerRank({"steps": [], "t": torch.zeros(rank + 1, dtype=torch.int64), "who": ""}),
            "odd": PerRank(0),
            "step": 0,
        }
        fastload.load(tmp_path / "a", into=into, options=options)
        assert into["rng"].value is rng
        data = into["data"]
        values = {name: into[name].value for name in ("rng", "mixed", "odd")}
        values |= {"data": {**data, "python": data["python"].value}, "step": into["step"]}
        assert_own({**values, "model": into["model"].state_dict()}, rank)
    # Only what is wanted is read, by all ranks alike, whatever the ranks have there.
    for wanted in ({"odd": None}, {"rng": torch.zeros_like(rng)}):
        state = {"model": nn.Linear(90, 90), **wanted}
        with fastload.open(tmp_path / "a", options=LOADS[1]) as checkpoint:
            checkpoint.load(into=state, strict=False)
            (name,) = wanted
            assert_same(state[name], own_of(rank)[name])
            manifest, report = checkpoint.manifest, checkpoint.report
        assert report is not None
        kept = [f"@rank{r}.{name}" for r in range(world)] + ["model.weight", "model.bias"]
        assert report.bytes_read == sum(manifest.by_name[each].nbytes for each in kept)
    assert_same(fastload.load(tmp_path / "a", names="rng"), {"rng": own_of(rank)["rng"]})
    dist.barrier()


@ranks(2)
def test_what_is_tied_on_some_ranks_only(rank: int, world: int, tmp_path: Path) -> None:
    """All ranks want the same of the checkpoint, whatever each of them has at how many places."""
    shared, other = torch.full((2,), float(rank)), torch.full((2,), 10.0 + rank)
    values = {"a": shared, "b": other if rank else shared}
    fastload.save({name: PerRank(value) for name, value in values.items()}, tmp_path / "a")
    assert_same(fastload.load(tmp_path / "a"), values)
    for options in LOADS:
        with fastload.open(tmp_path / "a", options=options) as checkpoint:
            cast = checkpoint.load(dtype=torch.float64)
            assert_same(cast, {name: value.double() for name, value in values.items()})
            into = {"a": torch.zeros(2), "b": PerRank(torch.zeros(2))}
            checkpoint.load(into=into)
            assert_same({**into, "b": into["b"].value}, values)
            for name, value in values.items():
                part = {name: PerRank(torch.zeros(2))}
                checkpoint.load(into=part, strict=False)
                assert_same(part[name].value, value)
                assert_same(checkpoint.load(names=name), {name: value})
    dist.barrier()


def test_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(save_them, 3, path=tmp_path / "a")
    run_ranks(load_elsewhere, 2, path=tmp_path / "a")
    load_elsewhere(0, 1, tmp_path / "a")


def save_them(rank: int, world: int, path: Path) -> None:
    fastload.save(state_of(rank), path, options=OPTIONS)


def load_elsewhere(rank: int, world: int, path: Path) -> None:
    with warned("fastload") as logged:
        load_with_warnings(rank, world, path, logged)


def load_with_warnings(rank: int, world: int, path: Path, logged: list[str]) -> None:
    here = "2 ranks" if world == 2 else "one rank"
    into = {
        "model": nn.Linear(90, 90),
        "rng": (rng := torch.full((5056,), 7, dtype=torch.uint8)),
        "data": {"python": PerRank(8), "left over": [9, 0]},
        "mixed": PerRank({"t": torch.zeros(3)}),
        "odd": 10,
        "step": 0,
    }
    for target in (into, None):
        with pytest.raises(MismatchError) as raised:
            fastload.load(path, into=target)
        lines = [line.strip() for line in str(raised.value).split("\n")[1:]]
        places = ["rng", "data.python", "data.left over.0", "mixed", "odd"]
        assert lines == [
            f"{place}: saved for each of 3 ranks (fastload.PerRank), to be loaded by {here}: "
            'LoadOptions(per_rank_mismatch="skip") leaves it out'
            for place in places
        ]
        assert into["step"] == 0
        assert not logged
    with pytest.raises(MismatchError, match="odd: saved for each of 3 ranks"):
        fastload.load(path, into={"odd": 0}, strict=False)
    with fastload.open(path, options=SKIP) as checkpoint:
        checkpoint.load(into=into)
        assert checkpoint.report is not None
        left_out = checkpoint.report.left_out
    assert left_out == ("rng", "data.python", "data.left over", "mixed", "odd")
    line = f"{path}: left out: {', '.join(left_out)}"
    assert logged == [line] * (rank == 0)
    assert rng.unique().tolist() == [7]
    assert into["rng"] is rng
    assert into["data"]["python"].value == 8
    assert into["data"]["left over"] == [9, 0]
    assert into["mixed"].value["t"].tolist() == [0, 0, 0]
    assert (into["odd"], into["step"]) == (10, 4)
    assert_same(into["model"].state_dict(), state_of(0)["model"])
    state = fastload.load(path, options=SKIP)
    assert_same(state["model"], state_of(0)["model"])
    del state["model"]
    assert state == {
        "rng": None, "data": {"python": None, "left over": [None, 3]}, "mixed": None, "odd": None, "step": 4
    }  # fmt: skip
    logged.clear()
    fastload.load(path, into={"model": nn.Linear(90, 90)}, strict=False)
    assert not logged, "nobody asked for them"
    assert fastload.load(path, names="@rank2.rng").keys() == {"@rank2.rng"}
    with pytest.raises(MismatchError, match="missing in the checkpoint: rng"):
        fastload.load(path, names="rng")
    fastload.verify(path)


def test_a_function_makes_the_values_of_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(save_them, 3, path=tmp_path / "a")
    run_ranks(load_converted, 2, path=tmp_path / "a")
    load_converted(0, 1, tmp_path / "a")
    run_ranks(load_with_failures, 2, path=tmp_path / "a")


def everything(values: list[Any], rank: int, size: int) -> Any:
    return {"values": values, "here": (rank, size)}


def load_converted(rank: int, world: int, path: Path) -> None:
    saved = [own_of(number) for number in range(3)]

    def expected(name: str) -> Any:
        return {"values": [own[name] for own in saved], "here": (rank, world)}

    def all_of_it(rng: Any, python: Any, left_over: Any, mixed: Any, odd: Any) -> dict[str, Any]:
        data = {"python": python, "left over": [left_over, 3]}
        return {"rng": rng, "data": data, "mixed": mixed, "odd": odd, "step": 4}

    found = all_of_it(*map(expected, ("rng", "python", "left over", "mixed", "odd")))
    for options in LOADS if world > 1 else LOADS[:1]:
        with fastload.open(path, options=replace(options, per_rank_mismatch=everything)) as checkpoint:
            state = checkpoint.load()
            assert_same(state.pop("model"), state_of(0)["model"])
            assert_same(state, found)
            assert checkpoint.report is not None
            assert checkpoint.report.left_out == ()
            if options.strategy != "direct":
                assert checkpoint.report.bytes_read == checkpoint.report.bytes_wanted, "each byte once"
            into = {
                "model": nn.Linear(90, 90),
                "rng": torch.zeros(3),
                "data": {"python": PerRank(None), "left over": [torch.zeros(1), 3]},
                "mixed": PerRank({"steps": [], "t": torch.zeros(rank + 1), "who": ""}),
                "odd": Holder(),
                "step": 0,
            }
            checkpoint.load(into=into)
            data = into["data"]
            left_over, _ = data["left over"]
            values = all_of_it(
                into["rng"], data["python"].value, left_over, into["mixed"].value, into["odd"].value
            )
            assert_same(values, found)
            assert "rng" not in checkpoint.load(names="model.*")


class Holder:
    value: Any = None

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def load_with_failures(rank: int, world: int, path: Path) -> None:
    def fails(values: list[Any], rank: int, size: int) -> Any:
        if rank == 1:
            raise KeyError("no such sample")

    fit = {"model": nn.Linear(90, 90), "step": 0}
    for into in (None, {**fit, "rng": 0, "data": {"python": 0, "left over": [0, 0]}, "mixed": 0, "odd": 0}):
        with pytest.raises(
            fastload.FastloadError, match="per_rank_mismatch= fails: KeyError: 'no such sample'"
        ):
            fastload.load(path, into=into, options=LoadOptions(per_rank_mismatch=fails, timeout_s=20))
    by_name = LoadOptions(per_rank_mismatch={"rng": everything, "mixed": "skip", "odd": "error"})
    with pytest.raises(MismatchError) as raised:
        fastload.load(path, options=by_name)
    lines = [line.strip().partition(":")[0] for line in str(raised.value).split("\n")[1:]]
    assert lines == ["data.python", "data.left over.0", "odd"]
    into, options = {"mixed": nn.Linear(2, 2)}, LoadOptions(per_rank_mismatch=everything)
    with pytest.raises(MismatchError, match="into= has a module, the checkpoint values of other ranks"):
        fastload.load(path, into=into, strict=False, options=options)
    other = everything if rank else fails
    with pytest.raises(PlanMismatch, match="per_rank_mismatch"):
        fastload.load(path, options=LoadOptions(per_rank_mismatch=other))


@ranks(2)
def test_too_much_is_told_to_all(rank: int, world: int, tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "big": PerRank(torch.zeros(1 + rank * 300_000))}
    for save in (fastload.save, lambda *given, **more: fastload.async_save(*given, **more).wait(20)):
        with pytest.raises(
            fastload.FastloadError, match=r"rank 1 has of its own .*1,200,004 of them '@rank1.big'"
        ):
            save(state, tmp_path / "a", options=OPTIONS)
    dist.barrier()
    assert os.listdir(tmp_path) == []


@ranks(2)
def test_all_ranks_have_something_of_their_own_or_none_has(rank: int, world: int, tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "rng": PerRank(3) if rank else 3}
    with pytest.raises(PlanMismatch, match=r"state\['rng'\]"):
        fastload.save(state, tmp_path / "a", options=OPTIONS)


@needs_mounts
@ranks(4)
def test_each_host_has_a_copy_with_what_all_ranks_have(rank: int, world: int, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(exist_ok=True)
    disk = mount_disk(tmp_path / "disk", tmp_path / "disks", rank // 2)
    report = fastload.save(state_of(rank), disk / "a", options=replace(OPTIONS, shared=False))
    assert report.num_copies == 2
    assert report.bytes_written == 2 * report.nbytes
    assert_own(fastload.load(disk / "a"), rank)
    dist.barrier()
    copies = [tmp_path / "disks" / f"host{host}" / "a" for host in range(2)]
    names = sorted(os.listdir(copies[0]))
    assert "ranks.safetensors" in names
    same, _, _ = filecmp.cmpfiles(*copies, names, shallow=False)
    assert sorted(same) == names
    dist.barrier()


@ranks(2, store="rank0")
def test_nothing_is_left_in_the_store(rank: int, world: int, tmp_path: Path) -> None:
    store = dist.distributed_c10d._get_default_store()
    fastload.save(state_of(rank), tmp_path / "a", options=OPTIONS)
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for number in range(3):
        fastload.save(state_of(rank), tmp_path / f"b{number}", options=OPTIONS)
    dist.barrier()
    assert store.num_keys() <= before
    dist.barrier()


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        return index


class Stream:
    """What a training reads: its rank's part of the data, in an order of its own, from a position on."""

    def __init__(self, rank: int, world: int) -> None:
        self.order = torch.Generator().manual_seed(rank)
        self.sampler = DistributedSampler(Numbers(), num_replicas=world, rank=rank, shuffle=False)
        self.position = 0
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[int]:
        loader = DataLoader(Numbers(), sampler=self.sampler, batch_size=1)
        for number, batch in enumerate(loader):
            if number >= self.position:
                self.position = number + 1
                self.seen.append(int(batch) * 1000 + int(torch.randint(1000, (), generator=self.order)))
                yield self.seen[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order.get_state(), "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.seen = state["position"], state["seen"]
        self.order.set_state(state["order"])


@ranks(3)
def test_a_training_goes_on_with_its_own_data_and_random_numbers(
    rank: int, world: int, tmp_path: Path
) -> None:
    whole = list(Stream(rank, world))
    stream, torch_rng = Stream(rank, world), torch.get_rng_state()
    for number, _ in enumerate(stream):
        if number == 5 + rank:  # ranks are not equally far
            break
    torch.manual_seed(50 + rank)
    expected = torch.Generator().manual_seed(50 + rank).get_state()
    with CheckpointManager(tmp_path / "run", every_steps=1, options=OPTIONS) as manager:
        state = {"stream": PerRank(stream.state_dict()), "rng": PerRank(torch.get_rng_state()), "step": 5}
        manager.save(5, state)
    torch.set_rng_state(torch_rng)
    parts = {"stream": Stream(rank, world), "rng": torch.get_rng_state(), "step": 0}
    with CheckpointManager(tmp_path / "run", every_steps=1, options=OPTIONS) as manager:
        manager.restore(into=parts)
        restored = manager.restore()
    assert list(parts["stream"]) == whole[6 + rank :]
    assert parts["stream"].seen == whole
    assert torch.equal(parts["rng"], expected)
    assert torch.equal(restored["rng"], expected)
    assert restored["stream"]["position"] == 6 + rank


def test_a_manager_with_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(save_with_manager, 2, root=tmp_path)
    with CheckpointManager(tmp_path, every_steps=1) as manager:
        with pytest.raises(MismatchError, match="rng: saved for each of 2 ranks"):
            manager.restore(into={"rng": 0, "w": torch.zeros(2)})
        parts = {"rng": 0, "w": torch.zeros(2)}
        manager.restore(into=parts, options=SKIP)
        assert manager.restored_step == 1
        assert parts["rng"] == 0
        assert parts["w"].tolist() == [1, 1]


def save_with_manager(rank: int, world: int, root: Path) -> None:
    with CheckpointManager(root, every_steps=1, options=OPTIONS) as manager:
        manager.save(1, {"rng": PerRank(rank), "w": torch.ones(2)})


class Drawing(nn.Module):
    """Has an extra state of which each rank has a part of its own."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 7.0))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_an_extra_state_of_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(save_extra_state, 2, path=tmp_path / "a")
    drawing, whole = nn.Sequential(Drawing("before")), nn.Sequential(Drawing("before"))
    with pytest.raises(MismatchError, match=r"drawing\.0\._extra_state\.rng: saved for each of 2 ranks"):
        fastload.load(tmp_path / "a", into={"drawing": drawing, "whole": whole})
    with fastload.open(tmp_path / "a", options=SKIP) as checkpoint:
        checkpoint.load(into={"drawing": drawing.apply(zero), "whole": whole.apply(zero)})
        assert checkpoint.report is not None
        assert checkpoint.report.left_out == ("drawing.0._extra_state",)
    assert (drawing[0].extra, drawing[0].weight.tolist()) == ("before", [7, 7])
    assert (whole[0].extra, whole[0].weight.tolist()) == ({"n": 3}, [7, 7])


def zero(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)


def save_extra_state(rank: int, world: int, path: Path) -> None:
    drawing = nn.Sequential(Drawing({"rng": PerRank([rank, 2]), "n": 3}))
    whole = nn.Sequential(Drawing({"n": 3}))
    fastload.save({"drawing": drawing.state_dict(), "whole": whole.state_dict()}, path, options=OPTIONS)


def test_the_command_line_lives_with_it(tmp_path: Path) -> None:
    run_ranks(save_them, 3, path=tmp_path / "step_00000004")
    path = str(tmp_path / "step_00000004")

    def fastload_command(*words: str) -> str:
        done = subprocess.run(
            [forking_python(), "-m", "fastload", *words], capture_output=True, text=True, timeout=50
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert "@rank2.rng" in fastload_command("inspect", path)
    assert "intact" in fastload_command("verify", path)
    assert "complete" in fastload_command("ls", str(tmp_path))
    assert "digest of rank 0" in fastload_command("load", path, "--digest")
    told = fastload_command("convert", path, str(tmp_path / "new"))
    assert "left out: rng, data.python" in told
    assert fastload.load(tmp_path / "new")["rng"] is None


@ranks(3)
def test_the_digest_of_the_command_line_is_of_what_all_have(rank: int, world: int, tmp_path: Path) -> None:
    fastload.save(state_of(rank), tmp_path / "a", options=OPTIONS)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # which the ranks have joined already
    result = CliRunner().invoke(load, [str(tmp_path / "a"), "--digest"], env=job)
    assert result.exit_code == 0, result.output


def test_the_limit_falls_with_the_number_of_ranks() -> None:
    with pytest.raises(OptionError):
        fastload.save(PerRank(torch.zeros(1 << 18)), "/never")
