"""Collective saves: the same files whoever writes, loaded by any number of ranks, bit for bit."""

from __future__ import annotations

import filecmp
import json
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import fastload
from fastload import SaveOptions
from fastload.integrations.directory_save import save_all_in_background
from fastload.saving import compare
from fastload.storage.local_target import LocalTarget
from tests.dist.harness import ranks, run_ranks
from tests.dist.hosts import can_mount, mount_disk

needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs mounts of its own")
SMALL = SaveOptions(max_shard_bytes=300_000, block_bytes=4096, writers="all", timeout_s=20)


def make_state(seed: int = 0) -> dict[str, Any]:
    """Everything a training keeps; the same on every rank."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 256), nn.BatchNorm1d(256), nn.Linear(256, 128), nn.Linear(128, 3))
    model[3].weight = nn.Parameter(torch.randn(3, 128).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model[:3].parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    model[:3](torch.randn(8, 128)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "strided": torch.randn(300, 200).t()[::2],
        "bytes": torch.arange(7, dtype=torch.uint8),
        "empty": torch.empty(0, 5),
        "step": 17,
        "loss": [0.25, float("inf")],
    }


def assert_equal(found: Any, wanted: Any, path: str = "state") -> None:
    assert type(found) is type(wanted), path
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype, path
        one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (found, wanted))
        assert torch.equal(one, other), path
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), path
        for key in wanted:
            assert_equal(found[key], wanted[key], f"{path}[{key!r}]")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), path
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_equal(one, other, f"{path}[{index}]")
    else:
        assert found == wanted, path


SIZES = (1, 2, 3, 4, 8)


def save_and_load_in_groups(rank: int, world: int, root: Path) -> None:
    """Saves in the first one, two, … of all ranks, and loads each of it in all of these groups."""
    groups = {size: dist.new_group(range(size)) for size in SIZES}
    wanted = make_state()
    for writers in (size for size in SIZES if rank < size):
        report = fastload.save(
            make_state(), root / str(writers), process_group=groups[writers], options=SMALL
        )
        assert len(report.ranks) == writers
        assert report.bytes_written == report.nbytes
    dist.barrier()
    for readers in (size for size in SIZES if rank < size):
        strategy = "allgather" if readers > 1 else "auto"
        options = fastload.LoadOptions(strategy=strategy, chunk_bytes=100_000, timeout_s=20)
        for writers in SIZES:
            found = fastload.load(root / str(writers), process_group=groups[readers], options=options)
            assert_equal(found, wanted)


def test_saved_by_n_is_loaded_by_m_and_does_not_show_who_wrote_it(tmp_path: Path) -> None:
    run_ranks(save_and_load_in_groups, max(SIZES), root=tmp_path)
    names = sorted(os.listdir(tmp_path / "1"))
    assert len([name for name in names if name.endswith(".safetensors")]) > 3
    for other in map(str, SIZES[1:]):
        assert sorted(os.listdir(tmp_path / other)) == names
        same, different, odd = filecmp.cmpfiles(tmp_path / "1", tmp_path / other, names, shallow=False)
        assert (sorted(same), different, odd) == (names, [], [])
    index = json.loads((tmp_path / "1" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in safetensors.torch.load_file(tmp_path / "1" / file)


@ranks(3)
def test_asynchronous_save_keeps_what_was(rank: int, world: int, tmp_path: Path) -> None:
    state = make_state()
    handle = fastload.async_save(state, tmp_path / "step", options=SMALL)
    for tensor in state["model"].values():
        tensor.zero_()  # training goes on
    report = handle.wait(20)
    assert handle.done()
    assert handle.report is report
    assert report.bytes_written == report.nbytes
    dist.barrier()
    assert_equal(fastload.load(tmp_path / "step"), make_state())
    assert not [thread.name for thread in threading.enumerate() if "fastload-write" in thread.name]


@ranks(2)
def test_saves_that_succeed_are_reported(rank: int, world: int, tmp_path: Path) -> None:
    reports: list[fastload.SaveReport] = []
    options = replace(SMALL, on_report=reports.append)
    first = fastload.save(make_state(), tmp_path / "1", options=options)
    second = fastload.async_save(make_state(), tmp_path / "2", options=options).wait(20)
    with pytest.raises(fastload.CheckpointExists):
        fastload.save(make_state(), tmp_path / "2", options=options)
    assert reports == [first, second]
    assert [Path(report.url).name for report in reports] == ["1", "2"]


@ranks(2)
def test_a_checkpoint_exists_even_if_its_report_cannot_be_told(rank: int, world: int, tmp_path: Path) -> None:
    def refuse(report: fastload.SaveReport) -> None:
        raise RuntimeError("no room for reports")

    handle = fastload.async_save(make_state(), tmp_path / "step", options=replace(SMALL, on_report=refuse))
    with pytest.raises(fastload.PeerError, match=r"on_report failed on 2 of 2 ranks .*no room"):
        handle.wait(20)
    assert handle.report is not None
    assert not handle.failed()
    assert_equal(fastload.load(tmp_path / "step"), make_state())


@ranks(2)
def test_ranks_with_different_states_are_told_in_what(rank: int, world: int, tmp_path: Path) -> None:
    state = make_state()
    state["step"] = 17 + rank
    with pytest.raises(fastload.PlanMismatch, match=r"state\['step'\]"):
        fastload.save(state, tmp_path / "step", options=SMALL)
    handle = fastload.async_save(state, tmp_path / "step", options=SMALL)
    with pytest.raises(fastload.PlanMismatch, match=r"state\['step'\]"):
        handle.wait(20)
    state["step"], state["extra"] = 17, torch.zeros(1 + rank)
    with pytest.raises(fastload.PlanMismatch, match=r"state\['extra'\]: rank 0 F32 \[1\].*rank 1 F32 \[2\]"):
        fastload.save(state, tmp_path / "step", options=SMALL)
    dist.barrier()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("in_background", [False, True])
def test_what_cannot_be_kept_is_named_before_anything_is_written(in_background: bool, tmp_path: Path) -> None:
    run_ranks(refuse, 2, path=tmp_path / "step", in_background=in_background)
    assert os.listdir(tmp_path) == []


def refuse(rank: int, world: int, path: Path, in_background: bool) -> None:
    state = {"model": torch.zeros(3), "hook": print if rank == 1 else None}
    save = fastload.async_save if in_background else fastload.save
    expected: Any = fastload.FastloadError if rank == 1 or not in_background else None
    if expected is None:
        with pytest.raises(fastload.PeerError, match=r"rank 1.*state\['hook'\]"):
            fastload.async_save(state, path, options=SMALL).wait(20)
    else:
        with pytest.raises(expected, match=r"state\['hook'\]"):
            save(state, path, options=SMALL)


@ranks(2)
def test_failure_in_the_background_is_raised_by_the_next_save(rank: int, world: int, tmp_path: Path) -> None:
    (tmp_path / "step").mkdir(exist_ok=True)
    (tmp_path / "step" / "mine").write_text("not a checkpoint")
    dist.barrier()
    handle = fastload.async_save(make_state(), tmp_path / "step", options=SMALL)
    while not handle.done():
        pass
    with pytest.raises(
        fastload.FastloadError,
        match=r"^the earlier save to .*/step .*exists: pass options=fastload.SaveOptions\(overwrite=True\)",
    ):
        fastload.save(make_state(), tmp_path / "other", options=SMALL)
    fastload.save(make_state(), tmp_path / "other", options=SMALL)
    assert (tmp_path / "step" / "mine").read_text() == "not a checkpoint"


@ranks(3)
def test_overwriting_needs_to_be_asked_for(rank: int, world: int, tmp_path: Path) -> None:
    fastload.save(make_state(0), tmp_path / "step", options=SMALL)
    with pytest.raises(
        fastload.FastloadError, match=r"exists: pass options=fastload.SaveOptions\(overwrite=True\)"
    ):
        fastload.save(make_state(1), tmp_path / "step", options=SMALL)
    assert_equal(fastload.load(tmp_path / "step"), make_state(0))
    options = SaveOptions(**{**SMALL.shared_values(), "overwrite": True})
    fastload.save(make_state(1), tmp_path / "step", options=options)
    assert_equal(fastload.load(tmp_path / "step"), make_state(1))
    dist.barrier()
    assert os.listdir(tmp_path) == ["step"]


@ranks(4)
def test_fewer_writers_than_ranks(rank: int, world: int, tmp_path: Path) -> None:
    for writers, count in ((2, 2), ("host", 1), ("auto", 1), (9, 4)):
        options = SaveOptions(**{**SMALL.shared_values(), "writers": writers})
        report = fastload.save(make_state(), tmp_path / str(writers), options=options)
        assert report.num_writers == count
        # There may be less than that many MiB.
        assert sum(own.bytes_written > 0 for own in report.ranks) <= count
        assert_equal(fastload.load(tmp_path / str(writers)), make_state())


def test_resumed_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    run_ranks(train, 2, path=tmp_path / "step")


def train(rank: int, world: int, path: Path) -> None:
    torch.manual_seed(3)
    whole = Training()
    whole.run(6)
    torch.manual_seed(3)
    first = Training()
    first.run(3)
    fastload.save(first.state(), path, metadata={"step": "3"}, options=SMALL)
    torch.manual_seed(99)
    second = Training()
    second.resume(fastload.load(path))
    second.run(3)
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


@ranks(2)
def test_a_rank_that_cannot_compare_its_replica_says_why(rank: int, world: int, tmp_path: Path) -> None:
    if rank == 1:
        compare.allocate_staging = fail  # type: ignore[assignment]
    options = replace(SMALL, check_replicas="full")
    for save in (fastload.save, fastload.async_save):
        began = time.monotonic()
        with pytest.raises(fastload.PeerError, match=r"rank 1 .*: MemoryError: no room") as raised:
            save(make_state(), tmp_path / "step", options=options)
        assert list(raised.value.failures) == [1]
        assert time.monotonic() - began < 10, "told, not waited for"


def fail(*arguments: Any, **options: Any) -> NoReturn:
    raise MemoryError("no room")


@ranks(3)
def test_replicas_that_differ_are_named(rank: int, world: int, tmp_path: Path) -> None:
    options = SaveOptions(**{**SMALL.shared_values(), "check_replicas": "full"})
    fastload.save(make_state(), tmp_path / "full", options=options)
    state = make_state()
    if rank == 1:
        state["model"]["0.weight"][0, 0] += 1
    for save in (fastload.save, fastload.async_save):
        with pytest.raises(fastload.ReplicaMismatch, match=r"model\.0\.weight: rank 1 not as the 2 others"):
            save(state, tmp_path / "other", options=options)
    if rank == 2:
        state["model"]["2.weight"][77, 77] += 1
    assert state["model"]["2.weight"].nbytes > 1 << 16
    with pytest.raises(fastload.ReplicaMismatch, match=r"2\.weight: rank 2"):
        fastload.save(state, tmp_path / "other", options=options)
    # Rank 1 has all of these in another way, rank 2 the even ones in yet another.
    many = {f"t{n:02}": torch.full((5,), rank if rank == 1 or n % 2 == 0 else 0) for n in range(30)}
    with pytest.raises(fastload.ReplicaMismatch) as raised:
        fastload.save(many, tmp_path / "other", options=options)
    odd = ["1, 2 not as the 1 other", "1 not as the 2 others"]
    lines = [f"  t{number:02}: rank {odd[number % 2]}" for number in range(20)]
    *told, hint = str(raised.value).split("\n")[1:]
    assert told == [*lines, "  and at least 10 more"]
    assert "dist.broadcast(buffer, 0)" in hint
    dist.barrier()
    assert os.listdir(tmp_path) == ["full"]


@ranks(2)
def test_into_takes_back_optimizers_and_counters(rank: int, world: int, tmp_path: Path) -> None:
    torch.manual_seed(5)
    saved = Training()
    saved.run(2)
    state = {**saved.state(), "step": 2, "best": {"loss": 0.5, "at": [1, 2]}}
    fastload.save(state, tmp_path / "step", options=SMALL)
    other = Training()
    place = {
        "model": other.model,
        "optimizer": other.optimizer,
        "scheduler": other.scheduler,
        "rng": torch.get_rng_state(),
        "step": 0,
        "best": {"loss": None, "at": [0, 0]},
    }
    weight = other.model[0].weight
    fastload.load(tmp_path / "step", into=place)
    assert other.model[0].weight is weight
    assert (place["step"], place["best"]) == (2, {"loss": 0.5, "at": [1, 2]})
    assert_equal(other.optimizer.state_dict(), saved.optimizer.state_dict())
    assert_equal(other.scheduler.state_dict(), saved.scheduler.state_dict())
    torch.set_rng_state(place["rng"])
    other.run(1)
    torch.set_rng_state(state["rng"])
    saved.run(1)
    assert torch.equal(weight, saved.model[0].weight)
    with pytest.raises(fastload.MismatchError, match=r"into\['more'\] is missing"):
        fastload.load(tmp_path / "step", into={**place, "more": 1})
    plain = tmp_path / f"plain{rank}"
    plain.mkdir()
    safetensors.torch.save_file({"model.a": torch.zeros(1)}, plain / "model.safetensors")
    with pytest.raises(fastload.FastloadError, match="into= has optimizer"):
        fastload.load(tmp_path / "plain0", into={"model": {"a": torch.ones(1)}, "optimizer": other.optimizer})


class Training:
    """A model with dropout, so that the random state counts, trained on data that all ranks share."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 6)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 16)).square().sum().backward()
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
            self.optimizer.step()
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**{name: part.state_dict() for name, part in parts.items()}, "rng": torch.get_rng_state()}

    def resume(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])


@ranks(2)
def test_several_states_are_copied_at_once_and_without_a_meeting(
    rank: int, world: int, tmp_path: Path
) -> None:
    states = {
        str(tmp_path / name): {"tensor": torch.full((9,), value)} for name, value in (("a", 1), ("b", 2))
    }
    while rank == 1 and not (tmp_path / "copied").exists():
        time.sleep(0.01)
    handles = save_all_in_background(states, stems={}, process_group=None, options=SMALL)
    (tmp_path / "copied").touch()
    for state in states.values():
        state["tensor"].zero_()
    reports = [handle.wait(20) for handle in handles]
    assert [report.url for report in reports] == list(states)
    assert [fastload.load(path)["tensor"].tolist() for path in states] == [[1] * 9, [2] * 9]


@needs_mounts
@ranks(2)
def test_a_host_that_cannot_publish_waits_for_one_that_takes_long(
    rank: int, world: int, tmp_path: Path
) -> None:
    """Whose copy exists, and who is not blamed."""
    disk = tmp_path / "disk"
    disk.mkdir(exist_ok=True)
    mount_disk(disk, tmp_path / "disks", rank)
    publish = LocalTarget.publish

    def slow_or_full(self: LocalTarget, *given: Any, **how: Any) -> Any:
        if rank == 1:
            raise fastload.StorageError("the disk is full")
        time.sleep(4)  # longer than a rank waits for those that a failure ends at once
        return publish(self, *given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTarget, "publish", slow_or_full)
        with pytest.raises(fastload.FastloadError) as raised:
            fastload.save(make_state(), disk / "a", options=replace(SMALL, shared=False, timeout_s=12))
    assert re.search(r"failed on 1 of 2 ranks .*rank 1 .*the disk is full", str(raised.value))
    assert (disk / "a").exists() == (rank == 0)
