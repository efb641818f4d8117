"""The memory tier on several ranks that look like hosts of their own: what is kept, and what comes back."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fastload
from fastload import CheckpointManager, LoadOptions, SaveOptions
from fastload.errors import CheckpointError, CheckpointNotFound, OptionError
from fastload.ext.memory import copies
from fastload.ext.memory import save as tier_save
from fastload.ext.memory.folder import JobFolder, find_jobs, find_memory
from fastload.ext.memory.target import MemoryTarget
from fastload.report import LoadReport, SaveReport
from fastload.saving.snapshot import BufferPool
from tests.checkpoints import flip
from tests.dist.harness import ranks, run_ranks
from tests.dist.hosts import can_mount, mount_memory, set_clock
from tests.dist.patience import patient
from tests.dist.test_manager import warned

OPTIONS = SaveOptions(timeout_s=20, block_bytes=1 << 16)
RANKS_IMPORT = ("fastload.ext.memory.tier", "torch.distributed.tensor")
needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs mounts of its own")
ROOT = "root"
MODEL, SHARES, MANIFEST, COMMIT = "model.safetensors", "shares.json", "manifest.json", "fastload.json"


class Crash(Exception):
    pass


def state_of(step: int, num_rows: int = 300_000) -> dict[str, Any]:
    values = torch.arange(8 * num_rows, dtype=torch.float32) + step
    return {"weight": values.view(-1, 8), "bias": torch.full((13,), float(step)), "step": step}


def small_state_of(step: int) -> dict[str, Any]:
    return state_of(step, 75_000)


def is_state(found: Any, step: int, state: Callable[[int], Any] = state_of) -> bool:
    wanted = state(step)
    return (
        all(torch.equal(found[name], wanted[name]) for name in ("weight", "bias")) and found["step"] == step
    )


def manage(folder: Path, memory: Path, **arguments: Any) -> CheckpointManager:
    """Opens the manager of a rank, whose host has its memory in a directory with its name."""
    own = memory / socket.gethostname()
    own.mkdir(exist_ok=True, parents=True)
    given = {"memory": own, "memory_every_steps": 1, "options": OPTIONS, **arguments}
    return CheckpointManager(folder / ROOT, **given)


def keep(manager: CheckpointManager, *steps: int, state: Callable[[int], Any] = state_of) -> None:
    """Keeps steps in memory only."""
    for step in steps:
        assert manager.should_save(step)
        manager.save(step, state(step))
        assert manager.latest() == step, "it is complete"


def crash(manager: CheckpointManager) -> None:
    """Ends a manager as an error of the training does."""
    with suppress(Crash), manager:
        raise Crash


@contextmanager
def not_saved() -> Iterator[list[logging.LogRecord]]:
    """Yields what is told of saves to memory that fail; on ranks other than 0 that is for debugging."""
    found: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("fastload.ext.memory.tier"), logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def job_in(memory: Path, host: int) -> Path:
    """The folder of the one job that a host has something of."""
    [job] = (memory / f"host{host}" / f"fastload-{os.geteuid()}").iterdir()
    return job


def checkpoint_in(memory: Path, host: int, name: str = MANIFEST) -> Path:
    """A file of the one in-memory checkpoint that counts on a host."""
    [record] = job_in(memory, host).glob(f"*/{MANIFEST}")
    return record.with_name(name)


def place_of(memory: Path, host: int, share: float) -> int:
    """A place in the model's file: that part of it has been written."""
    return int(share * checkpoint_in(memory, host, MODEL).stat().st_size)


# What may have become of the hosts: 0 and 1 keep each other's shares, and 2 and 3 do. Each returns the step
# that is to come back, whence, and a part of what is told.


def all_are_here(memory: Path) -> tuple[int, str, str]:
    return 3, "memory", "the newest on storage is step 1"


def one_is_gone(memory: Path) -> tuple[int, str, str]:
    shutil.rmtree(memory / "host1")
    return 3, "memory", ""


def two_of_different_groups_are_gone(memory: Path) -> tuple[int, str, str]:
    shutil.rmtree(memory / "host0")
    shutil.rmtree(memory / "host3")
    return 3, "memory", ""


def two_partners_are_gone(memory: Path) -> tuple[int, str, str]:
    shutil.rmtree(memory / "host2")
    shutil.rmtree(memory / "host3")
    return 1, "storage", "2 of the 4 shares of step 3 are on no host"


def all_are_gone(memory: Path) -> tuple[int, str, str]:
    shutil.rmtree(memory)
    return 1, "storage", "nothing is in memory"


def a_byte_of_one_copy_is_damaged(memory: Path) -> tuple[int, str, str]:
    flip(checkpoint_in(memory, 2, MODEL), place_of(memory, 2, 0.6))
    return 3, "memory", ""


def other_bytes_of_both_copies_are_damaged(memory: Path) -> tuple[int, str, str]:
    flip(checkpoint_in(memory, 0, MODEL), place_of(memory, 0, 0.1))
    flip(checkpoint_in(memory, 1, MODEL), place_of(memory, 1, 0.2))
    flip(checkpoint_in(memory, 2, MODEL), place_of(memory, 2, 0.6))
    flip(checkpoint_in(memory, 3, MODEL), place_of(memory, 3, 0.9))
    return 3, "memory", ""


def a_byte_of_both_copies_is_damaged(memory: Path) -> tuple[int, str, str]:
    for host in (0, 1):
        flip(checkpoint_in(memory, host, MODEL), place_of(memory, host, 0.3))
    return 1, "storage", "65536 bytes of step 3 are missing or damaged on all hosts"


def a_header_is_damaged(memory: Path) -> tuple[int, str, str]:
    flip(checkpoint_in(memory, 0, MODEL), 40)
    return 3, "memory", ""


def a_commit_record_is_damaged(memory: Path) -> tuple[int, str, str]:
    flip(checkpoint_in(memory, 0, COMMIT), 200)
    flip(checkpoint_in(memory, 2, COMMIT), 20)
    return 3, "memory", ""


def a_file_is_cut_off_and_another_one_gone(memory: Path) -> tuple[int, str, str]:
    os.truncate(checkpoint_in(memory, 1, MODEL), place_of(memory, 1, 0.3))
    checkpoint_in(memory, 2, MODEL).unlink()
    return 3, "memory", ""


def what_a_host_says_of_shares_is_damaged(memory: Path) -> tuple[int, str, str]:
    flip(checkpoint_in(memory, 0, SHARES), 20)
    return 3, "memory", ""


def what_all_hosts_say_of_shares_is_damaged(memory: Path) -> tuple[int, str, str]:
    for host in range(4):
        flip(checkpoint_in(memory, host, SHARES), 20)
    return 1, "storage", "cannot be restored: all copies of step 3 in memory are damaged"


def what_hosts_say_they_have_is_damaged(memory: Path) -> tuple[int, str, str]:
    flip(checkpoint_in(memory, 0), 60)
    flip(checkpoint_in(memory, 3), 5)
    return 3, "memory", ""


def it_was_not_recorded_everywhere(memory: Path) -> tuple[int, str, str]:
    """The ranks were killed while they recorded it: all its bytes were on their hosts."""
    for host in (1, 2):
        checkpoint_in(memory, host).unlink()
    return 3, "memory", ""


def it_was_recorded_on_too_few_hosts(memory: Path) -> tuple[int, str, str]:
    for host in (0, 1):
        checkpoint_in(memory, host).unlink()
    return 1, "storage", "2 of the 4 shares of step 3 are on no host"


def a_host_returns_with_an_old_generation(memory: Path) -> tuple[int, str, str]:
    shutil.rmtree(memory / "host1")
    shutil.copytree(memory / "old" / "host1", memory / "host1")
    return 3, "memory", ""


def hosts_have_different_newest_steps(memory: Path) -> tuple[int, str, str]:
    """Some had recorded step 3, and lost it together; all have still had step 2."""
    for host in range(4):
        [old] = job_in(memory / "old", host).glob(f"*/{MANIFEST}")
        shutil.copytree(old.parent, job_in(memory, host) / old.parent.name, dirs_exist_ok=True)
    for host in (2, 3):
        for record in job_in(memory, host).glob(f"*/{MANIFEST}"):
            if b'"step": 3' in record.read_bytes():
                shutil.rmtree(record.parent)
    return 2, "memory", "the newest on storage is step 1"


def storage_has_a_newer_step(memory: Path) -> tuple[int, str, str]:
    return 4, "storage", "memory has step 3 only"


VARIANTS = [
    all_are_here,
    one_is_gone,
    two_of_different_groups_are_gone,
    two_partners_are_gone,
    all_are_gone,
    a_byte_of_one_copy_is_damaged,
    other_bytes_of_both_copies_are_damaged,
    a_byte_of_both_copies_is_damaged,
    a_header_is_damaged,
    a_commit_record_is_damaged,
    a_file_is_cut_off_and_another_one_gone,
    what_a_host_says_of_shares_is_damaged,
    what_all_hosts_say_of_shares_is_damaged,
    what_hosts_say_they_have_is_damaged,
    it_was_not_recorded_everywhere,
    it_was_recorded_on_too_few_hosts,
    a_host_returns_with_an_old_generation,
    hosts_have_different_newest_steps,
    storage_has_a_newer_step,
]


@ranks(2)
def test_only_rank_0_answers_new_names(rank: int, world: int, tmp_path: Path) -> None:
    """Answers of thousands of ranks are short as long as they are equal."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        for module in ("fastload.training.manager", "fastload.ext.memory.run"):
            patch.setattr(f"{module}.new_token", lambda: asked.append(rank) or "0" * 16)
        manage(tmp_path, tmp_path / "memory").close()
    assert asked == ([] if rank else [0, 0])


@ranks(4, ranks_per_host=1, deadline_s=120)
def test_what_comes_back(rank: int, world: int, tmp_path: Path) -> None:
    """A job is killed, and its hosts come back as they may: with the right bytes, whencesoever.

    Their clocks differ by days.
    """
    logging.getLogger("fastload").setLevel(logging.ERROR)
    set_clock((0.0, 3 * 86400.0, -3 * 86400.0, 0.0)[rank])
    first, base = tmp_path / "base", tmp_path / "variants"
    manager = manage(tmp_path, first)
    manager.save(1, small_state_of(1))
    manager.wait()
    keep(manager, 2, state=small_state_of)
    own = f"host{rank}"
    shutil.copytree(first / own, first / "old" / own)
    keep(manager, 3, state=small_state_of)
    model_bytes = checkpoint_in(first, rank, MODEL).stat().st_size
    [taken] = find_jobs(str(first / own))
    assert 1.9 * 2 * model_bytes / 4 < taken.nbytes < 2.1 * 2 * model_bytes / 4, "2 copies × 2"
    with CheckpointManager(tmp_path / "other", options=OPTIONS) as other:
        other.save(4, small_state_of(4))
    for variant in VARIANTS:
        memory = base / variant.__name__
        wanted: list[Any] = [None]
        if rank == 0:
            shutil.copytree(first, memory)
            wanted = [variant(memory)]
            if variant is storage_has_a_newer_step:
                (tmp_path / "other" / "step_00000004").rename(tmp_path / ROOT / "step_00000004")
        dist.broadcast_object_list(wanted)
        step, source, why = wanted[0]
        reports: list[LoadReport] = []
        again = manage(tmp_path, memory)
        options = LoadOptions(timeout_s=20, chunk_bytes=1 << 16, on_report=reports.append)
        if variant is all_are_here:
            assert again.latest() == 3
        state = again.restore(options=options)
        assert is_state(state, step, small_state_of), variant
        found = (again.restored_step, again.restored_from, reports[0].source)
        assert found == (step, source, source), (variant, found, reports[0].source_why)
        assert why in reports[0].source_why, (variant, reports[0].source_why)
        if variant in (all_are_here, one_is_gone):
            assert reports[0].read_amplification == 1.0
            shares = [each.bytes_read for each in reports[0].ranks]
            assert max(shares) <= sum(shares) / 4 + (1 << 16) or variant is one_is_gone
            assert (shares[1] == 0) == (variant is one_is_gone)
        crash(again)
        dist.barrier()


# Ranks die


STAGES = {
    "copying": (MemoryTarget, "write"),
    "sending": (MemoryTarget, "read"),
    "before recording": (JobFolder, "record"),
    "after recording": (JobFolder, "touch"),
}


def die_in(stage: str) -> None:
    """Has this rank killed when it comes to a stage of its next save to memory."""
    place, name = STAGES[stage]
    real = getattr(place, name)

    def struck(*given: Any) -> None:
        if stage == "after recording":
            real(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(place, name, struck)


def keep_and_die(rank: int, world: int, folder: Path, stage: str, victims: list[int]) -> None:
    logging.getLogger("fastload").setLevel(logging.ERROR)
    manager = manage(folder, folder / "memory", options=replace(OPTIONS, timeout_s=patient(3.0)))
    keep(manager, 1, 2)
    if rank in victims:
        die_in(stage)
    assert manager.should_save(3)
    with not_saved() as failures:
        manager.save(3, state_of(3))
        until = time.monotonic() + patient(20.0)
        while not failures and time.monotonic() < until:
            time.sleep(0.01)
    [failure] = failures
    assert failure.getMessage().startswith("step 3 is not saved to memory: "), "it counts nowhere"


def restore_after(rank: int, world: int, folder: Path) -> int | None:
    manager = manage(folder, folder / "memory")
    assert manager.latest() == manager.latest()
    state = manager.restore()
    assert manager.restored_from == "memory"
    assert is_state(state, state["step"])
    return manager.restored_step


@pytest.mark.slow(but=["sending"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_generation_before_is_whole_when_ranks_are_killed(stage: str, tmp_path: Path) -> None:
    everyone = "recording" in stage
    victims = list(range(4)) if everyone else [1]
    dies = dict.fromkeys(victims, signal.SIGKILL)
    how: dict[str, Any] = {"ranks_per_host": 1, "folder": tmp_path}
    run_ranks(keep_and_die, 4, dies=dies, stage=stage, victims=victims, **how)
    if not everyone:
        shutil.rmtree(tmp_path / "memory" / "host1")  # the machine is gone, too
    found = run_ranks(restore_after, 4, **how)
    assert set(found) == {3 if stage == "after recording" else 2}


# Who saved and who loads


@ranks(4, ranks_per_host=1)
def test_shards_come_back_into_any_mesh_and_any_world(rank: int, world: int, tmp_path: Path) -> None:
    whole = {"a": torch.randn(1031, 1021), "b": torch.randn(7, 3), "c": torch.randn(4000, 512)}
    for tensor in whole.values():
        dist.broadcast(tensor, 0)
    mesh = init_device_mesh("cpu", (4,))
    parts = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    state = {**parts, "rng": fastload.PerRank(torch.tensor([rank])), "step": 5}
    manager = manage(tmp_path, tmp_path / "memory")
    keep(manager, 5, state=lambda _: state)
    grid = init_device_mesh("cpu", (2, 2))
    # Each of these is what a job with that many ranks and hosts would do.
    for placements in ([Replicate(), Shard(0)], [Shard(1), Shard(0)]):
        again = manage(tmp_path, tmp_path / "memory")
        into = {name: distribute_tensor(torch.zeros_like(t), grid, placements) for name, t in whole.items()}
        found = {**into, "rng": None, "step": 0}
        again.restore(into=found)
        assert again.restored_from == "memory"
        assert found["step"] == 5
        for name, tensor in whole.items():
            assert torch.equal(into[name].full_tensor(), tensor), (placements, name)
        crash(again)
    skip = fastload.LoadOptions(timeout_s=OPTIONS.timeout_s, per_rank_mismatch="skip")
    for members in ([0, 2], [1, 2, 3], [0, 1], [3]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        again = manage(tmp_path, tmp_path / "memory", process_group=group)
        if {0, 1} >= set(members) or {2, 3} >= set(members):
            with pytest.raises(CheckpointNotFound, match="2 of the 4 shares of step 5 are on no host"):
                again.restore(options=skip)
        else:
            found = again.restore(options=skip)
            assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
            assert found["rng"] is None
        crash(again)
    dist.barrier()


@pytest.mark.slow
@ranks(4, ranks_per_host=2)
def test_ranks_of_a_host_and_jobs_on_it_share_the_place(rank: int, world: int, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    ours, other = manage(tmp_path / "a", memory), manage(tmp_path / "b", memory)
    keep(ours, 1)
    keep(other, 7)
    keep(ours, 2)
    dist.barrier()
    shutil.rmtree(memory / "host0", ignore_errors=True)  # one machine is replaced
    dist.barrier()
    for folder, step in ((tmp_path / "a", 2), (tmp_path / "b", 7)):
        manager = manage(folder, memory)
        assert is_state(manager.restore(), step)
        assert manager.restored_from == "memory"
    # All ranks on one host: what it has is one copy, of all.
    group = [dist.new_group([each]) for each in range(world)][rank]
    root = tmp_path / f"of rank {rank}"
    keep(manage(root, memory, process_group=group), 3)
    assert is_state(manage(root, memory, process_group=group).restore(), 3)
    dist.barrier()
    # And then it has more ranks, and more hosts.
    grown = manage(tmp_path / "of rank 2", memory)
    assert is_state(grown.restore(), 3)
    assert grown.restored_from == "memory"
    dist.barrier()


# Beside a training


@pytest.mark.slow
@ranks(3, ranks_per_host=1)
def test_training_does_not_wait_and_nothing_stays_behind(rank: int, world: int, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    jobs = memory / f"host{rank}" / f"fastload-{os.geteuid()}"
    go_on = threading.Event()
    real = copies.send_copies

    def held_up(*given: Any, **more: Any) -> int:
        assert rank != 1 or go_on.wait(20)
        return real(*given, **more)

    tier_save.send_copies = held_up  # type: ignore[attr-defined]
    with manage(tmp_path, memory, every_steps=4, memory_every_steps=2) as manager:
        answers = [step for step in range(1, 8) if manager.should_save(step)]
        assert answers == [2, 4, 6], "nothing was kept"
        assert manager.should_save(10)
        manager.save(10, state_of(10))
        assert not manager.should_save(14), "the last one is still on its way, on one host"
        assert not manager.should_save(14)
        assert manager.should_save(16)
        manager.save(16, state_of(16))
        manager.wait()
        assert sorted(path.name for path in (tmp_path / ROOT).glob("step_*")) == ["step_00000016"]
        go_on.set()
        dist.barrier()
        assert manager.latest() == 16
        keep(manager, 18)
        assert manager.all_steps() == [16]
    dist.barrier()
    assert list(jobs.iterdir()) == [], "the newest is written to storage"
    with suppress(ZeroDivisionError), manage(tmp_path, memory) as manager:
        assert is_state(manager.restore(), 18)
        manager.save(19, state_of(19))
        manager.wait()
        raise ZeroDivisionError
    dist.barrier()
    assert len(list(jobs.iterdir())) == 1, "whoever crashed is to be restarted"
    with manage(tmp_path, memory) as manager:
        assert is_state(manager.restore(), 19)
        assert manager.restored_from == "storage"
    dist.barrier()
    assert list(jobs.iterdir()) == [], "all that was there is older than what is on storage"
    with manage(tmp_path, memory) as manager:
        assert is_state(manager.restore(), 19)
        keep(manager, 20)
        manager.save(21, state_of(21))
    dist.barrier()
    assert list(jobs.iterdir()) == []


@contextmanager
def filled(folder: Path, stage: str) -> Iterator[None]:
    """Has somebody else fill a file system when this rank first comes to a stage of a save to memory."""
    place, name = STAGES[stage]
    real, rest = getattr(place, name), folder / "of somebody else"

    def fill() -> None:
        with suppress(OSError), rest.open("xb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def after(*given: Any) -> Any:
        fill()
        return real(*given)

    setattr(place, name, after)
    try:
        yield
    finally:
        setattr(place, name, real)
        rest.unlink(missing_ok=True)


@needs_mounts
@ranks(2, ranks_per_host=1)
def test_a_tier_that_is_full(rank: int, world: int, tmp_path: Path) -> None:
    """A file system of the one host has no room from the first, or has none any more while it is written."""
    memory = tmp_path / "memory"
    memory.mkdir(exist_ok=True)
    mount_memory(memory, rank, (24 << 20) if rank == 1 else 1 << 50)
    mount_memory(Path("/dev/shm"), rank, 64 << 20)  # as containers have it
    assert rank == 1 or find_memory() == str(memory)

    def try_to_keep(manager: CheckpointManager, step: int, state: Any, why: str, *, is_news: bool) -> None:
        with not_saved() as failures:
            assert manager.should_save(step)
            manager.save(step, state)
            assert manager.latest() != step
        [failure] = failures
        assert failure.getMessage().startswith(f"step {step} is not saved to memory: ")
        assert why in failure.getMessage()
        assert (failure.levelno >= logging.WARNING) == (is_news and rank == 0)

    def large(step: int) -> dict[str, Any]:
        return {**state_of(step), "more": torch.ones(5_000_000)}

    with manage(tmp_path, memory) as manager:
        for step, stage in ((1, "copying"), (4, "sending"), (7, "before recording")):
            keep(manager, step)
            try_to_keep(manager, step + 1, large(step + 1), "an in-memory checkpoint needs", is_news=True)
            with filled(memory, stage) if rank == 1 else nullcontext():
                try_to_keep(manager, step + 2, state_of(step + 2), "No space left", is_news=False)
                assert manager.latest() == step
                again = manage(tmp_path, memory)
                assert is_state(again.restore(), step)
                crash(again)
        keep(manager, 10)
        manager.save(11, large(11))


@ranks(2, ranks_per_host=1)
def test_a_rank_without_memory_for_its_copy(rank: int, world: int, tmp_path: Path) -> None:
    def take(*given: Any, **more: Any) -> Any:
        raise MemoryError("page-locked memory of 9.6 MB refused")

    for victim in (0, 1):
        with manage(tmp_path / str(victim), tmp_path / "memory", every_steps=5) as manager:
            keep(manager, 1)
            with not_saved() as failures, pytest.MonkeyPatch.context() as patch:
                if rank == victim:
                    patch.setattr(BufferPool, "take", take)
                assert manager.should_save(2)
                manager.save(2, state_of(2))
                assert manager.latest() == 1
            [failure] = failures
            assert "refused" in failure.getMessage()
            assert (failure.levelno >= logging.WARNING) == (rank == 0)
            keep(manager, 3)
            assert is_state(manager.restore(), 3)
            manager.save(4, state_of(4))


@pytest.mark.parametrize("goes_back", [True, False])
def test_what_is_saved_after_going_back_is_newer_than_what_memory_has(
    goes_back: bool, tmp_path: Path
) -> None:
    """Also by a run that begins anew, and asks for nothing."""
    with contextlib.suppress(Crash), manage(tmp_path, tmp_path / "memory", every_steps=50) as manager:
        assert manager.should_save(50)
        manager.save(50, small_state_of(50))
        manager.wait()
        assert manager.latest() == 50
        keep(manager, 60, 61, state=small_state_of)
        raise Crash
    step = 55 if goes_back else 5
    with contextlib.suppress(Crash), manage(tmp_path, tmp_path / "memory") as manager:
        if goes_back:
            assert is_state(manager.restore(step=50), 50, small_state_of)
        manager.save(step, small_state_of(step))
        manager.wait()
        raise Crash
    with manage(tmp_path, tmp_path / "memory") as manager:
        assert manager.latest() == step
        assert is_state(manager.restore(), step, small_state_of)
        assert manager.restored_from == "storage"


def test_a_damaged_checkpoint_on_storage_does_not_hide_a_newer_step_in_memory(tmp_path: Path) -> None:
    memory, root = tmp_path / "memory", tmp_path / ROOT
    with contextlib.suppress(Crash), manage(tmp_path, memory) as manager:
        manager.save(20, small_state_of(20))
        manager.wait()
        keep(manager, 28, state=small_state_of)
        raise Crash
    with CheckpointManager(root, options=OPTIONS) as manager:
        manager.save(30, small_state_of(30))
    flip(root / "step_00000030" / MODEL, -1)
    reports: list[LoadReport] = []
    with manage(tmp_path, memory) as manager, warned("fastload.training.restore") as lines:
        assert manager.latest() == 30, "nobody has looked at its data"
        state = manager.restore(options=LoadOptions(timeout_s=20, on_report=reports.append))
        assert is_state(state, 28, small_state_of)
        assert (manager.restored_step, manager.restored_from) == (28, "memory")
        assert (reports[0].source, reports[0].source_why) == ("memory", "the newest on storage is step 20")
        assert len(lines) == 1
        assert "step 30 cannot be restored, falling back to 28" in lines[0]
    with CheckpointManager(root, options=OPTIONS) as manager:
        assert is_state(manager.restore(), 28, small_state_of), (
            "which was written there when the job had ended"
        )
        manager.save(29, small_state_of(29))
        assert manager.latest() == 29
    assert not list(memory.glob("*/*/*")), "nothing is left in memory"


@pytest.mark.parametrize("on_storage", [False, True])
def test_what_is_damaged_everywhere_is_no_fresh_start(on_storage: bool, tmp_path: Path) -> None:
    memory, root = tmp_path / "memory", tmp_path / ROOT
    with contextlib.suppress(Crash), manage(tmp_path, memory) as manager:
        if on_storage:
            manager.save(3, small_state_of(3))
            manager.wait()
        keep(manager, 7, state=small_state_of)
        raise Crash
    if on_storage:
        flip(root / "step_00000003" / MODEL, -1)
    [model] = memory.glob(f"*/*/*/*/{MODEL}")
    os.truncate(model, 1000)
    with manage(tmp_path, memory) as manager:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="damaged" if on_storage else "of step 7") as raised:
                manager.restore()
            assert not isinstance(raised.value, CheckpointNotFound), "which may be taken for a new run"


@pytest.mark.parametrize("steps", [(15, 20), (20,)])
def test_a_step_that_was_saved_again_after_going_back_is_that_one(
    steps: tuple[int, ...], tmp_path: Path
) -> None:
    """Memory still has the one of the same step that was given up."""
    memory = tmp_path / "memory"
    with contextlib.suppress(Crash), manage(tmp_path, memory) as manager:
        manager.save(10, small_state_of(10))
        manager.wait()
        keep(manager, 20, state=small_state_of)
        raise Crash
    again = {step: {**small_state_of(step), "step": 1000 + step} for step in steps}
    with contextlib.suppress(Crash), manage(tmp_path, memory, memory_every_steps=1000) as manager:
        assert is_state(manager.restore(step=10), 10, small_state_of)
        assert is_state(manager.restore(step=20), 20, small_state_of), "as long as it is the only one"
        assert is_state(manager.restore(step=10), 10, small_state_of)
        for step in steps:
            manager.save(step, again[step])
        manager.wait()
        raise Crash
    for step in (20, None):
        with contextlib.suppress(Crash), manage(tmp_path, memory) as manager:
            assert manager.restore(step=step)["step"] == 1020, step
            assert (manager.restored_step, manager.restored_from) == (20, "storage")
            raise Crash


@ranks(4, ranks_per_host=2)
def test_each_save_is_reported_with_its_tier(rank: int, world: int, tmp_path: Path) -> None:
    reports: list[SaveReport] = []
    options = replace(OPTIONS, on_report=reports.append)
    with manage(tmp_path, tmp_path / "memory", every_steps=3, options=options) as manager:
        for step in range(1, 5):
            assert manager.should_save(step)
            manager.save(step, state_of(step))
            assert manager.latest() == step, "it has ended"
    found = sorted((Path(report.url).name[-1], report.tier) for report in reports)
    assert found == [("1", "memory"), ("2", "memory"), ("3", "memory"), ("3", "storage"), ("4", "memory")]
    kept = next(report for report in reports if report.tier == "memory")
    assert (kept.num_copies, kept.num_writers, kept.nbytes) == (2, 4, reports[-1].nbytes)
    assert kept.bytes_written == kept.nbytes > 0
    assert [own.rank for own in kept.ranks] == [0, 1, 2, 3]
    assert kept.total_s >= kept.stall_s > 0


@pytest.mark.slow(but=["state", "step"])
@ranks(2, ranks_per_host=1)
@pytest.mark.parametrize("what", ["state", "on_report", "step"])
def test_what_one_rank_cannot_keep_stops_no_rank(rank: int, world: int, tmp_path: Path, what: str) -> None:
    """No save to memory raises: the other ranks would go on, and wait for the one that did."""
    is_bad = [rank == 1]

    def refuse(report: SaveReport) -> None:
        if is_bad[0]:
            raise RuntimeError("no room for reports")

    options = replace(OPTIONS, on_report=refuse if what == "on_report" else None)
    with (
        not_saved() as lines,
        manage(tmp_path, tmp_path / "memory", every_steps=100, options=options) as manager,
    ):
        assert manager.should_save(1)
        state = {"x": object()} if is_bad[0] and what == "state" else small_state_of(1)
        manager.save("one" if is_bad[0] and what == "step" else 1, state)  # type: ignore[arg-type]
        assert manager.latest() == (1 if what == "on_report" else None)
        is_bad[0] = False
        keep(manager, 2, state=small_state_of)
        [line] = lines
    cause = {"state": "cannot be saved", "on_report": "no room for reports", "step": "step='one'"}[what]
    told = line.getMessage()
    assert cause in told
    assert told.startswith(f"step 1 is {'' if what == 'on_report' else 'not '}saved to memory: ")


def saves_without_memory(folder: Path, restored: int, *steps: int) -> dict[int, dict[str, Any]]:
    """Has a start without the tier go back to a step on storage, and save others; returns their states."""
    states = {step: {**small_state_of(step), "step": 1000 + step} for step in steps}
    with contextlib.suppress(Crash), CheckpointManager(folder / ROOT, options=OPTIONS) as manager:
        assert is_state(manager.restore(step=restored), restored, small_state_of)
        for step, state in states.items():
            manager.save(step, state)
        manager.wait()
        raise Crash
    return states


@pytest.mark.slow(but=["steps1", "steps5"])
@pytest.mark.parametrize(
    ("steps", "newest"), [((20,), 20), ((15,), 15), ((15, 20), 20), ((25,), 25), ((10,), 10), ((5,), 5)]
)
def test_what_a_start_without_the_tier_saved_after_going_back_is_newer_than_memory(
    steps: tuple[int, ...], newest: int, tmp_path: Path
) -> None:
    """Whatever its steps: memory still has step 20 of the start before it."""
    crash_at(tmp_path, 10, 20)
    states = saves_without_memory(tmp_path, 10, *steps)
    for step in (newest, None):
        with contextlib.suppress(Crash), manage(tmp_path, tmp_path / "memory") as manager:
            assert manager.latest() == newest
            assert manager.restore(step=step)["step"] == states[newest]["step"], step
            assert (manager.restored_step, manager.restored_from) == (newest, "storage")
            raise Crash


@pytest.mark.parametrize("asks", ["restores", "saves", "saves to memory", "does nothing"])
def test_a_stale_step_in_memory_is_not_written_to_storage(asks: str, tmp_path: Path) -> None:
    """When the job ends, and after a signal."""
    crash_at(tmp_path, 10, 20)
    saves_without_memory(tmp_path, 10, 15)
    with manage(tmp_path, tmp_path / "memory", every_steps=100) as manager:
        if asks == "restores":
            assert manager.restore()["step"] == 1015
        if asks == "saves":
            manager.save(16, small_state_of(16))
        if asks == "saves to memory":
            keep(manager, 16, state=small_state_of)
        signal.raise_signal(signal.SIGUSR1)
        manager.should_save(17)
        assert manager.stop_requested
    with CheckpointManager(tmp_path / ROOT, options=OPTIONS) as manager:
        assert 20 not in manager.all_steps()
        assert manager.latest() == (16 if asks.startswith("saves") else 15)


def test_a_step_that_a_later_start_kept_in_memory_is_not_stale(tmp_path: Path) -> None:
    """It knows the step that a start without the tier saved."""
    crash_at(tmp_path, 10, 20)
    states = saves_without_memory(tmp_path, 10, 15)
    memory = tmp_path / "memory"
    with contextlib.suppress(Crash), manage(tmp_path, memory, every_steps=17) as manager:
        assert manager.restore()["step"] == states[15]["step"]
        keep(manager, 16, state=small_state_of)
        assert manager.should_save(17)
        manager.save(17, small_state_of(17))  # to both, the one to storage as its own
        manager.wait()
        keep(manager, 18, state=small_state_of)
        raise Crash
    with contextlib.suppress(Crash), manage(tmp_path, memory) as manager:
        assert manager.latest() == 18
        assert is_state(manager.restore(), 18, small_state_of)
        assert manager.restored_from == "memory"
        raise Crash
    with manage(tmp_path, memory) as manager:
        assert is_state(manager.restore(), 18, small_state_of), "of the start before the last one"
        assert manager.restored_from == "memory"


def test_a_step_that_an_earlier_version_kept_in_memory_is_restored(tmp_path: Path) -> None:
    """Its manifest does not say which start of the job saved it."""
    crash_at(tmp_path, 10, 20)
    [path] = (tmp_path / "memory").glob(f"*/*/*/*/{MANIFEST}")
    body = json.loads(path.read_bytes().partition(b"\n")[2])
    del body["incarnation"], body["origin"]
    text = json.dumps({**body, "version": 1}).encode()
    path.write_bytes(b"\n".join([xxhash.xxh3_128_hexdigest(text).encode(), text]))
    with manage(tmp_path, tmp_path / "memory") as manager:
        assert manager.latest() == 20
        assert is_state(manager.restore(), 20, small_state_of)
        assert manager.restored_from == "memory"


def test_a_stale_step_in_memory_is_taken_if_what_is_newer_is_damaged(tmp_path: Path) -> None:
    crash_at(tmp_path, 10, 20)
    saves_without_memory(tmp_path, 10, 15)
    flip(tmp_path / ROOT / "step_00000015" / MODEL, -1)
    with manage(tmp_path, tmp_path / "memory") as manager, warned("fastload.training.restore") as lines:
        assert is_state(manager.restore(), 20, small_state_of)
        assert manager.restored_from == "memory"
    assert len(lines) == 1
    assert "step 15 cannot be restored, falling back to 20" in lines[0]


def crash_at(folder: Path, *steps: int, **arguments: Any) -> None:
    """Has a job die that has the first step on storage, and the others in memory."""
    with contextlib.suppress(Crash), manage(folder, folder / "memory", **arguments) as manager:
        manager.save(steps[0], small_state_of(steps[0]))
        manager.wait()
        keep(manager, *steps[1:], state=small_state_of)
        raise Crash


@pytest.mark.parametrize("what", ["deleted", "moved away", "moved away, and there is a new one"])
def test_a_root_that_is_begun_anew_is_another_run(what: str, tmp_path: Path) -> None:
    crash_at(tmp_path, 1, 7)
    root = tmp_path / ROOT
    if what == "deleted":
        shutil.rmtree(root)
    else:
        root.rename(tmp_path / "away")
    if what == "moved away, and there is a new one":
        with CheckpointManager(root, options=OPTIONS) as manager:
            manager.save(3, small_state_of(3))
    with contextlib.suppress(Crash), manage(tmp_path, tmp_path / "memory") as manager:
        if what == "moved away, and there is a new one":
            assert manager.latest() == 3
            assert is_state(manager.restore(), 3, small_state_of)
        else:
            assert manager.latest() is None
            with pytest.raises(
                CheckpointNotFound, match="no checkpoint to restore, and nothing is in memory"
            ):
                manager.restore()
        keep(manager, 5, state=small_state_of)
        raise Crash
    with manage(tmp_path, tmp_path / "memory") as manager:
        assert is_state(manager.restore(), 5, small_state_of), "it has what it has kept itself"
    if what != "deleted":  # and the old one goes on where it is now
        root.rename(tmp_path / "the new one")
        (tmp_path / "away").rename(root)
        with manage(tmp_path, tmp_path / "memory") as manager:
            assert is_state(manager.restore(), 7, small_state_of)
            assert manager.restored_from == "memory"


def test_a_root_that_was_moved_is_the_same_run_and_a_copy_is_not(tmp_path: Path) -> None:
    crash_at(tmp_path, 1, 7)
    (tmp_path / "copy").mkdir()
    shutil.copytree(tmp_path / ROOT, tmp_path / "copy" / ROOT)
    with contextlib.suppress(Crash), manage(tmp_path / "copy", tmp_path / "memory") as manager:
        assert is_state(manager.restore(), 1, small_state_of), "what is in memory is of the other one"
        keep(manager, 9, state=small_state_of)
        raise Crash
    (tmp_path / "moved").mkdir()
    (tmp_path / ROOT).rename(tmp_path / "moved" / ROOT)
    with contextlib.suppress(Crash), manage(tmp_path / "moved", tmp_path / "memory") as manager:
        assert is_state(manager.restore(), 7, small_state_of)
        raise Crash
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    for again in ("link", "moved"):
        with contextlib.suppress(Crash), manage(tmp_path / again, tmp_path / "memory") as manager:
            assert is_state(manager.restore(), 7, small_state_of), "however it is spelled"
            raise Crash
    with manage(tmp_path / "copy", tmp_path / "memory") as manager:
        assert is_state(manager.restore(), 9, small_state_of)


@needs_mounts
@ranks(3, ranks_per_host=1)
def test_hosts_with_roots_of_their_own_are_one_run(rank: int, world: int, tmp_path: Path) -> None:
    """Also if one of them is replaced, or has had another run."""
    (tmp_path / "disk").mkdir(exist_ok=True)
    disk, own = mount_memory(tmp_path / "disk", rank, 64 << 20), {"options": replace(OPTIONS, shared=False)}

    def crash_after(step: int | None, *steps: int, state: int | None = None) -> None:
        with contextlib.suppress(Crash), manage(disk, tmp_path / "memory", **own) as manager:
            if state is not None:
                assert is_state(manager.restore(), state, small_state_of)
                assert manager.restored_from == "memory"
            if step is not None:
                manager.save(step, small_state_of(step))
                manager.wait()
            keep(manager, *steps, state=small_state_of)
            raise Crash

    crash_after(1, 2)
    if rank == 1:
        shutil.rmtree(disk / ROOT)
    crash_after(None, 3, state=2)
    if rank == 0:
        shutil.rmtree(disk / ROOT)
    crash_after(None, 4, state=3)
    crash_after(None, state=4)


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for wrong in (
        {"memory": tmp_path},
        {"memory_every_steps": 3},
        {"memory": tmp_path, "memory_every_steps": 0},
        {"memory": tmp_path, "memory_every_seconds": -1.0},
        {"memory": tmp_path, "memory_every_steps": 3, "memory_copies": 0},
        {"memory": "", "memory_every_steps": 3},
        {"memory": tmp_path, "memory_every_steps": 1, "options": SaveOptions(block_bytes=5000)},
    ):
        with pytest.raises(OptionError):
            CheckpointManager(tmp_path / ROOT, **wrong)


@ranks(2, ranks_per_host=1)
def test_the_intervals_follow_from_what_saves_take(rank: int, world: int, tmp_path: Path) -> None:
    """Failures every 40 s and steps of 20 ms: the first save comes soon, the others as the stall allows."""
    memory = tmp_path / f"host{rank}"
    memory.mkdir()
    for given in ({}, {"memory": memory}, {"memory": memory, "memory_every_steps": 7}):
        arguments = {"every": "auto", "mtbf_s": 40.0, "restart_s": 0.0, "budget": 0.1, **given}
        with CheckpointManager(tmp_path / str(len(given)), options=OPTIONS, **arguments) as manager:
            saved: list[int] = []
            kept: list[int] = []
            for step in itertools.count(1):
                time.sleep(0.02 if rank == 0 else 0.0)
                if manager.should_save(step):
                    answer = manager._schedule.answer_for(step)
                    manager.save(step, {"weight": torch.zeros(1000) + step, "step": step})
                    saved += [step] if answer.save else []
                    kept += [step] if answer.tier else []
                    if len(saved) >= 2 and len(kept) >= (2 if given else 0):
                        break
            manager.wait()
            seen: list[Any] = [None] * world
            dist.all_gather_object(seen, (saved, kept))
            assert seen[0] == seen[1]
            assert min(saved + kept) >= 2
            assert (kept == []) == (not given)
            assert len(given) < 2 or all(step % 7 == 0 for step in kept)
    with pytest.raises(OptionError, match="needs mtbf_s="):
        fastload.CheckpointManager(tmp_path, every="auto")
