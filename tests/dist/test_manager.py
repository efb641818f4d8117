"""CheckpointManager on several ranks: one answer, one history, whatever happens to one of them."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload import CheckpointManager, SaveOptions
from fastload.comm.rendezvous import StoreRendezvous
from fastload.errors import (
    CheckpointNotFound,
    FastloadError,
    OptionError,
    PlanMismatch,
    StorageError,
    WorldError,
)
from fastload.policies import Measured
from fastload.storage.local_target import LocalTarget
from fastload.training import schedule
from tests.checkpoints import flip
from tests.dist.harness import ranks
from tests.dist.patience import patient
from tests.dist.test_readers import own_disk
from tests.dist.test_readers import pytestmark as needs_mounts

OPTIONS = SaveOptions(timeout_s=20, writers="all", block_bytes=4096)


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((1000, 7), float(step)), "step": step}


def manage(root: Path, **arguments: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"options": OPTIONS, **arguments})


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in root.glob("step_*"))


# When


@ranks(3, same=True)
def test_every_steps(rank: int, world: int, tmp_path: Path) -> list[int]:
    with manage(tmp_path, every_steps=3) as manager:
        answers = [step for step in range(10) if manager.should_save(step)]
        assert not manager.stop_requested
    assert answers == [3, 6, 9]
    return answers


@ranks(3, same=True)
def test_every_seconds_is_the_same_step_on_all_ranks(rank: int, world: int, tmp_path: Path) -> list[int]:
    """The ranks do not keep step, so that each would decide in another one by its own clock."""
    answers: list[int] = []
    began = time.monotonic()
    with manage(tmp_path, every_seconds=0.3) as manager:
        for step in itertools.count():
            time.sleep(0.002 * (1 + (rank + step) % 3))
            if manager.should_save(step):
                answers.append(step)
            assert manager.should_save(step) == (answers[-1:] == [step]), "asking twice changes nothing"
            if len(answers) == 3:
                break
    assert time.monotonic() - began > 0.6
    return answers


class AtSteps:
    """A policy that a rank asks about each step; it fails from one step on."""

    def __init__(self, *steps: int, until: int = 1000) -> None:
        self.steps, self.until = steps, until
        self.asked: list[int] = []

    def due(self, step: int, now_s: float, measured: Measured) -> list[str]:
        self.asked.append(step)
        if step >= self.until:
            raise ValueError("no idea")
        return ["storage"] if step in self.steps else []


@ranks(3, same=True)
def test_rank_0_asks_a_policy_of_the_caller_for_all(rank: int, world: int, tmp_path: Path) -> list[int]:
    policy = AtSteps(2, 100)
    with manage(tmp_path, save_policy=policy) as manager:
        first, second = [step for step in range(1, 200) if manager.should_save(step)]
    assert 2 <= first < 100 <= second
    assert policy.asked == (list(range(1, 200)) if rank == 0 else [])
    return [first, second]


@ranks(2, same=True)
def test_a_policy_of_the_caller_that_fails_raises_on_all_ranks(
    rank: int, world: int, tmp_path: Path
) -> list[int]:
    steps = iter(range(200))
    with (
        manage(tmp_path, save_policy=AtSteps(until=50)) as manager,
        pytest.raises(OptionError, match=r"save_policy= cannot decide about step \d+: ValueError: no idea"),
    ):
        any(map(manager.should_save, steps))
    step = next(steps) - 1
    assert step >= 50
    return [step]


@ranks(2)
def test_policies_of_different_classes_are_refused(rank: int, world: int, tmp_path: Path) -> None:
    with pytest.raises(PlanMismatch, match="save_policy"):
        manage(tmp_path, save_policy=AtSteps() if rank else type("Other", (AtSteps,), {})())


@pytest.mark.slow(but=["15"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@ranks(3, same=True)
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    rank: int, world: int, tmp_path: Path, number: signal.Signals
) -> tuple[int, list[int]]:
    seen: list[int] = []
    signal.signal(number, lambda signum, frame: seen.append(signum))
    before = signal.getsignal(number)
    answers = []
    with manage(tmp_path, every_steps=1000) as manager:
        for step in range(1, 5000):
            time.sleep(0.001 * (1 + (rank + step) % 3))
            if rank == 1 and step == 100:
                os.kill(os.getpid(), number)
            if manager.should_save(step):
                answers.append(step)
            if manager.stop_requested:
                manager.save(step, state_of(step))
                break
    assert signal.getsignal(number) is before, "close puts back what was there"
    assert seen == ([number] if rank == 1 else []), "who was there before hears of it as well"
    assert answers == [step]
    assert 100 < step < 2500
    assert steps_in(tmp_path) == [step]
    return step, answers


@ranks(3, same=True)
def test_a_signal_is_told_soon_to_ranks_that_ask_all_the_time(rank: int, world: int, tmp_path: Path) -> int:
    """Rank 0 does not get ahead of those that take longer to read a decision than it takes to make one."""
    patch = pytest.MonkeyPatch()
    if rank != 0:
        read = StoreRendezvous.await_text
        slowly = lambda *args, **how: time.sleep(0.005) or read(*args, **how)  # noqa: E731
        patch.setattr(StoreRendezvous, "await_text", slowly)
    with manage(tmp_path) as manager:
        for step in itertools.count():
            if rank == 2 and step == 2000:
                os.kill(os.getpid(), signal.SIGUSR1)
            manager.should_save(step)
            if manager.stop_requested:
                break
    patch.undo()
    assert 2000 <= step < 3500, "each rank calls thousands of times a second"
    return step


@ranks(3, same=True)
def test_slow_steps_learn_of_a_signal_in_the_next_ones(rank: int, world: int, tmp_path: Path) -> int:
    with manage(tmp_path) as manager:
        for step in range(12):
            if rank == 2 and step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(4.0 if step == 3 else 0.4)  # in which rank 0 hears of it, also on a busy machine
            dist.barrier()  # as a training does when it sums gradients
            manager.should_save(step)
            if manager.stop_requested:
                break
    assert 3 <= step <= 5
    return step


@ranks(3, deadline_s=90)
def test_asking_is_cheap_and_leaves_nothing_behind(rank: int, world: int, tmp_path: Path) -> None:
    pytest.MonkeyPatch().setattr(schedule, "_SHORTEST_S", 0.0)  # as many decisions as there can be
    pytest.MonkeyPatch().setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.distributed_c10d._get_default_store()
    with manage(tmp_path):
        dist.barrier()
    dist.barrier()
    keys_before = store.num_keys()
    dist.barrier()
    with manage(tmp_path, every_seconds=1000) as manager:
        for step in range(200):
            manager.should_save(step)
        dist.barrier()
        keys = store.num_keys()
        began, spent = time.thread_time(), time.perf_counter()
        for step in range(200, 8200):
            if step % 200 == 0:
                dist.barrier()  # what nobody has read yet cannot be forgotten
            manager.should_save(step)
        cpu_s, wall_s = time.thread_time() - began, time.perf_counter() - spent
        dist.barrier()
        print(
            f"rank {rank}: {store.num_keys() - keys} keys, {cpu_s / 8000 * 1e6:.1f} us of CPU, "
            f"{wall_s / 8000 * 1e6:.1f} us a call"
        )
        assert cpu_s / 8000 < 200e-6
        assert store.num_keys() - keys < 200, "8000 calls are 250 decisions or more"
    dist.barrier()
    assert store.num_keys() <= keys_before + 8


def test_alone_it_needs_no_process_group(tmp_path: Path) -> None:
    with manage(tmp_path, every_seconds=0.6) as manager:
        assert not manager.should_save(0)
        time.sleep(0.6)
        assert manager.should_save(1)
        assert not manager.should_save(2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_save(3)
        assert manager.stop_requested
        assert not manager.should_save(4)
        assert manager.stop_requested, "for good"
    with pytest.raises(WorldError, match="closed"):
        manager.latest()


@pytest.mark.parametrize("async_", [True, False])
def test_a_root_that_nobody_can_write_is_an_error_of_the_first_save(async_: bool) -> None:
    with manage(Path("/proc/no-run"), async_=async_) as manager:
        assert manager.latest() is None, "which needs no write access"
        with pytest.raises(StorageError, match=r"^/proc/no-run"):
            manager.save(1, state_of(1))


@pytest.mark.parametrize("async_", [True, False])
@ranks(2)
def test_a_root_that_rank_0_cannot_write_is_an_error_on_all_ranks(
    rank: int, world: int, tmp_path: Path, async_: bool
) -> None:
    """At once on rank 0, and of a save in the background at the latest in the next call on the others."""
    (tmp_path / "run").write_text("no directory")
    with manage(tmp_path / "run", async_=async_) as manager:
        in_background = async_ and rank > 0
        if in_background:
            manager.save(1, state_of(1))
        with pytest.raises(FastloadError, match=r"Not a directory|File exists"):
            manager.wait() if in_background else manager.save(1, state_of(1))
        dist.barrier()
        if rank == 0:
            (tmp_path / "run").unlink()
        dist.barrier()
        manager.save(2, state_of(2))
        manager.wait()
        assert manager.all_steps() == [2]


# Save and restore


@pytest.mark.slow(but=["3-ranks-True", "1-ranks-False"])
@pytest.mark.parametrize("async_", [True, False])
@ranks(1, 3, same=True)
def test_save_and_restore(rank: int, world: int, tmp_path: Path, async_: bool) -> list[Any]:
    with manage(tmp_path, async_=async_) as manager:
        assert (manager.latest(), manager.all_steps()) == (None, [])
        with pytest.raises(CheckpointNotFound):
            manager.restore()
        for step in (1, 2, 10):
            manager.save(step, state_of(step), metrics={"loss": torch.tensor(1 / 4), "step": step})
        assert manager.all_steps() == [1, 2, 10]
        manager.save(10, {"again": 3})
        assert manager.latest() == 10
        assert manager.restore() == {"again": 3}
        assert manager.restored_step == 10
        assert torch.equal(manager.restore(step=2)["weight"], state_of(2)["weight"])
        assert manager.restored_step == 2
        into = {"weight": torch.zeros(1000, 7)}
        manager.restore(into, step=1, strict=False)
        assert torch.equal(into["weight"], state_of(1)["weight"])
        with fastload.open(manager.path(1)) as checkpoint:
            assert checkpoint.metadata == {"step": "1", "metrics": '{"loss": 0.25, "step": 1.0}'}
        return manager.all_steps()


@ranks(3, same=True)
def test_restore_falls_back_past_what_is_damaged_and_what_is_incomplete(
    rank: int, world: int, tmp_path: Path
) -> list[Any]:
    with manage(tmp_path, keep_last=2, keep_every=1) as manager:
        for step in range(1, 6):
            manager.save(step, state_of(step))
        manager.wait()
        dist.barrier()
        if rank == 0:
            flip(tmp_path / "step_00000005/model.safetensors", -1)  # a tensor
            flip(tmp_path / "step_00000004/fastload.json", 30)  # the record itself
            (tmp_path / "step_00000003/model.safetensors").unlink()
            (tmp_path / "step_00000009").mkdir()
        dist.barrier()
        with warned("fastload.training.restore") as lines:
            assert manager.restore()["step"] == 2
        assert len(lines) == (3 if rank == 0 else 0)
        assert all("falling back" in line for line in lines)
        assert manager.restored_step == 2
        with pytest.raises(FastloadError, match="damaged"):
            manager.restore(step=5)
        manager.save(5, state_of(55))
        assert manager.restore()["weight"][0, 0] == 55
        return manager.all_steps()


@ranks(3, same=True)
def test_what_is_damaged_does_not_count_as_one_of_the_last(
    rank: int, world: int, tmp_path: Path
) -> list[int]:
    with manage(tmp_path, keep_last=1) as manager:
        manager.save(8, state_of(8))
        manager.wait()
        with manage(tmp_path) as other:
            other.save(9, state_of(9))
        if rank == 0:
            flip(tmp_path / "step_00000009/model.safetensors", -1)
        dist.barrier()
        assert manager.restore()["step"] == 8
        manager.save(10, state_of(10))
        manager.wait()
        dist.barrier()
        assert steps_in(tmp_path) == [9, 10]
        return manager.all_steps()


# What ranks do not have in common


@ranks(2)
def test_the_metrics_of_rank_0_are_kept(rank: int, world: int, tmp_path: Path) -> None:
    with manage(tmp_path, best=("loss", "min"), keep_last=1) as manager:
        for step in (1, 2, 3):
            # Each rank has a loss of its own, as a training has that does not take the mean of them.
            manager.save(step, state_of(step), metrics={"loss": torch.tensor(step + 10.0 * rank)})
        manager.wait()
        with fastload.open(manager.path(3)) as checkpoint:
            assert checkpoint.metadata["metrics"] == '{"loss": 3.0}'
    dist.barrier()
    assert steps_in(tmp_path) == [1, 3]


@ranks(2)
def test_a_manager_saves_by_time_unless_told_otherwise(rank: int, world: int, tmp_path: Path) -> None:
    pytest.MonkeyPatch().setattr("fastload.training.interval._DEFAULT_S", 0.3)
    given: list[dict[str, Any]] = [{}, {"every_steps": 1000}, {"every_seconds": math.inf}]
    saves = []
    for number, arguments in enumerate(given):
        with manage(tmp_path / str(number), **arguments) as manager:
            for step in range(1, 61):
                time.sleep(0.03)
                if manager.should_save(step):
                    break
            assert not manager.stop_requested
            saves.append(step < 60)
    assert saves == [True, False, False]


# What is deleted


@ranks(3, same=True)
def test_retention(rank: int, world: int, tmp_path: Path) -> list[int]:
    losses = {1: 5.0, 2: 0.5, 3: 4.0, 4: 3.0, 5: 2.0, 6: 2.0, 7: 2.0}
    with manage(tmp_path, keep_last=2, keep_every=4, best=("loss", "min")) as manager:
        for step, loss in losses.items():
            manager.save(step, state_of(step), metrics={"loss": loss})
    with manage(tmp_path) as again:
        assert again.all_steps() == [2, 4, 6, 7]
    dist.barrier()
    assert steps_in(tmp_path) == [2, 4, 6, 7]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    return steps_in(tmp_path)


@ranks(3)
def test_nothing_is_deleted_before_a_newer_one_is_there(rank: int, world: int, tmp_path: Path) -> None:
    with manage(tmp_path, keep_last=1) as manager:
        manager.save(1, state_of(1))
        manager.wait()
        with broken_publish() if rank == 0 else nothing():
            manager.save(2, state_of(2))
            with pytest.raises(FastloadError, match="no more room"):
                manager.wait()
        assert manager.all_steps() == [1]
        manager.save(3, state_of(3))
        manager.wait()
        assert manager.all_steps() == [3]


@ranks(3)
def test_what_this_process_has_open_stays(rank: int, world: int, tmp_path: Path) -> None:
    with manage(tmp_path, keep_last=1) as manager:
        manager.save(1, state_of(1))
        manager.wait()
        with fastload.open(os.path.relpath(tmp_path / "step_00000001")) as checkpoint:
            for step in (2, 3):
                manager.save(step, state_of(step))
            manager.wait()
            assert manager.all_steps() == [1, 3]
            assert checkpoint.load()["step"] == 1
        manager.save(4, state_of(4))
        manager.wait()
        assert manager.all_steps() == [4]


@ranks(1)
def test_what_cannot_be_deleted_does_not_end_a_training(rank: int, world: int, tmp_path: Path) -> None:
    def remove(self: LocalTarget) -> None:
        raise fastload.StorageError("not today", self.url)

    real, LocalTarget.remove = LocalTarget.remove, remove  # type: ignore[method-assign]
    try:
        with manage(tmp_path, keep_last=1) as manager, warned("fastload.training.catalog") as lines:
            for step in (1, 2):
                manager.save(step, state_of(step))
            manager.wait()
            assert manager.all_steps() == [1, 2]
        assert any("not today" in line for line in lines)
    finally:
        LocalTarget.remove = real  # type: ignore[method-assign]


@needs_mounts
@ranks(3)
def test_each_host_keeps_its_own_copies_in_order(rank: int, world: int, tmp_path: Path) -> None:
    disk = own_disk(tmp_path, rank)
    options = SaveOptions(timeout_s=20, shared=False)
    with manage(disk, keep_last=2, options=options) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        assert manager.all_steps() == [2, 3]
        assert steps_in(disk) == [2, 3]
        if rank == 0:  # a host that was replaced
            shutil.rmtree(disk / "step_00000002")
            shutil.rmtree(disk / "step_00000003")
        dist.barrier()
        assert manager.latest() == 3
        assert manager.restore()["step"] == 3


# What goes wrong


@ranks(3)
def test_a_save_that_failed_in_the_background_surfaces_at_the_next_call(
    rank: int, world: int, tmp_path: Path
) -> None:
    """Whatever call that is: on all ranks, once, and the manager goes on."""
    with manage(tmp_path) as manager:
        for number, call in enumerate(
            [lambda: manager.save(50, state_of(0)), manager.latest, manager.wait, manager.restore, None]
        ):
            with broken_publish() if rank == 0 else nothing():
                manager.save(100 + number, state_of(number))
                with pytest.raises(FastloadError, match="no more room") as raised:
                    call() if call is not None else ask_until_told(manager)
                told = str(raised.value)
                assert re.match(f"(the earlier save|saving) to .*/step_0*{100 + number}", told), told
                assert told.count("no more room") == 1
            assert manager.all_steps() == list(range(number))
            manager.save(number, state_of(number))
            manager.wait()
        with broken_publish() if rank == 0 else nothing():
            manager.save(99, state_of(99))
            with pytest.raises(FastloadError, match="no more room"):
                manager.close()
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4]


def ask_until_told(manager: CheckpointManager) -> None:
    for step in range(1000):
        time.sleep(0.01)
        manager.should_save(step)


@ranks(3, dies={2: signal.SIGKILL})
def test_a_rank_killed_in_the_middle_of_a_save(rank: int, world: int, tmp_path: Path) -> None:
    manager = manage(tmp_path, keep_last=1, options=SaveOptions(timeout_s=patient(3.0), writers="all"))
    manager.save(1, state_of(1))
    manager.wait()
    if rank == 2:
        LocalTarget.flush = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign,return-value]
    manager.save(2, state_of(2))
    if rank == 2:
        time.sleep(60)
    with pytest.raises(FastloadError):
        manager.wait()
    assert steps_in(tmp_path) == [1]
    manager.close()


def save_and_wait(manager: CheckpointManager, step: int, metrics: dict[str, Any]) -> None:
    manager.save(step, state_of(step), metrics=metrics)
    manager.wait()


@ranks(2)
def test_wrong_arguments(rank: int, world: int, tmp_path: Path) -> None:
    for wrong in ({"every_steps": 0}, {"every_seconds": -1}, {"keep_last": 0}, {"best": "loss"}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            manage(tmp_path, **wrong)
    with pytest.raises(PlanMismatch, match="keep_last: rank 0 1, rank 1 2"):
        manage(tmp_path, keep_last=rank + 1)
    with manage(tmp_path) as manager:
        with pytest.raises(OptionError, match="step"):
            manager.save(-1, {})
        with pytest.raises(FastloadError, match="OptionError: metrics" if rank else "metrics"):
            save_and_wait(manager, 1, {"loss": "low"})  # those of rank 0 count
        save_and_wait(manager, 1, {"loss": 0.5 if rank == 0 else None})
    assert fastload.inspect(tmp_path / "step_00000001").metadata["metrics"] == '{"loss": 0.5}'
    with pytest.raises(KeyError), manage(tmp_path):
        raise KeyError("of the training")


@contextmanager
def broken_publish() -> Iterator[None]:
    real = LocalTarget.publish

    def publish(*arguments: Any, **others: Any) -> None:
        raise fastload.StorageError("no more room")

    LocalTarget.publish = publish  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalTarget.publish = real  # type: ignore[method-assign]


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def warned(name: str, level: int = logging.WARNING) -> Iterator[list[str]]:
    lines: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger(name)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(level)
    yield lines
    logger.setLevel(before)
    logger.removeHandler(handler)
