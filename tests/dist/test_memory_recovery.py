"""`fastload flush`: what a dead run has left in memory goes to storage, once and verified."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fastload
from fastload.errors import (
    FastloadError,
    IncompleteCheckpoint,
    OptionError,
    PeerError,
    StorageError,
    WorldError,
)
from fastload.ext.memory import flush
from fastload.ext.memory.recovery import Recovery, recover
from fastload.storage.local import LocalStorage
from tests.checkpoints import flip
from tests.dist.flush_draws import Processes, run_draw
from tests.dist.harness import ranks, run_ranks
from tests.dist.patience import patient
from tests.dist.test_memory_flush import OPTIONS, files, parts, steps_in
from tests.dist.test_memory_tier import (
    COMMIT,
    ROOT,
    VARIANTS,
    checkpoint_in,
    crash,
    is_state,
    keep,
    manage,
    small_state_of,
    storage_has_a_newer_step,
)

RANKS_IMPORT = ("fastload.ext.memory.recovery", "torch.distributed.tensor")


def flushed(folder: Path, host: int | None = None) -> Recovery:
    """Flushes the memory of a host, by default this rank's own."""
    own = socket.gethostname() if host is None else f"host{host}"
    return recover(folder / ROOT, str(folder / "memory" / own))


def left_behind(folder: Path, *steps: int, rank: int, **arguments: Any) -> None:
    """Leaves the last of some steps in memory, and the first one on storage."""
    manager = manage(folder, folder / "memory", **arguments)
    manager.save(0, parts(0, rank))
    keep(manager, *steps, state=lambda step: parts(step, rank))
    crash(manager)


@ranks(3, ranks_per_host=1)
def test_the_newest_step_is_written_as_a_save_would_have_it(rank: int, world: int, tmp_path: Path) -> None:
    options = fastload.SaveOptions(timeout_s=20, block_bytes=1 << 16, max_shard_bytes=3 << 20)
    left_behind(tmp_path, 1, 2, rank=rank, options=options, deltas=True)
    done = flushed(tmp_path, world - 1 - rank)  # ranks of the flush are not those of the run
    assert (done.step, done.why) == (2, "")
    assert steps_in(tmp_path) == [0, 2]
    written = tmp_path / ROOT / "step_00000002"
    fastload.save(parts(2, rank), tmp_path / "plain", options=OPTIONS)
    assert files(written) == files(tmp_path / "plain"), "as a save would have it"
    assert fastload.load(written)["rng"].tolist() == [rank, 2]
    before = (written / COMMIT).read_bytes()
    again = flushed(tmp_path)
    assert (again.step, again.why) == (None, "step 2 is on storage, and memory has nothing newer than step 2")
    assert (written / COMMIT).read_bytes() == before
    with manage(tmp_path, tmp_path / "memory") as manager:
        assert manager.restore()["step"] == 2
        assert manager.restored_from == "memory"


@ranks(2, ranks_per_host=1)
def test_a_run_that_lives_and_processes_that_share_a_host(rank: int, world: int, tmp_path: Path) -> None:
    manager = manage(tmp_path, tmp_path / "memory")
    keep(manager, 1)
    with pytest.raises(WorldError, match=r"of the run in .* live on host0:\S+, host1:\S+: end them first"):
        flushed(tmp_path)
    crash(manager)
    with pytest.raises(OptionError, match=r"ranks 0, 1 all run on host0:\S+: start one process a host"):
        flushed(tmp_path, 0)
    assert steps_in(tmp_path) == []
    other = recover(tmp_path / "other", str(tmp_path / "memory" / socket.gethostname()))
    assert (other.step, other.why) == (None, "no training has used a memory tier with this root")
    dist.barrier()
    shutil.rmtree(tmp_path / "memory" / socket.gethostname())
    (tmp_path / "memory" / socket.gethostname()).mkdir()
    dist.barrier()
    assert flushed(tmp_path).why == "no host has a checkpoint of this run in memory"
    own = tmp_path / "memory" / socket.gethostname()
    assert not any(path for path in own.rglob("*") if path.name == "job"), "no folder is left"


@ranks(4, ranks_per_host=1)
def test_hosts_that_are_gone(rank: int, world: int, tmp_path: Path) -> None:
    """Hosts 0 and 1 keep each other's shares, and 2 and 3 do."""
    left_behind(tmp_path, 1, rank=rank)
    dist.barrier()
    if rank == 0:
        shutil.copytree(tmp_path / "memory", tmp_path / "copy", symlinks=True)
        for host in (2, 3):
            shutil.rmtree(tmp_path / "memory" / f"host{host}")
            (tmp_path / "memory" / f"host{host}").mkdir()
    dist.barrier()
    lacking = (
        r"2 of the 4 shares of step 1 are on no host, and no checkpoint on storage is as new. Missing: 2, 3; "
        r"host0:\S+ has 0, 1; host1:\S+ has 0, 1; host2:\S+ has none; host3:\S+ has none\. Start this"
    )
    with pytest.raises(IncompleteCheckpoint, match=lacking):
        flushed(tmp_path)
    assert steps_in(tmp_path) == [0]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(tmp_path / "memory" / "host3")
        shutil.move(tmp_path / "copy" / "host3", tmp_path / "memory" / "host3")
        shutil.rmtree(tmp_path / "memory" / "host0")
        (tmp_path / "memory" / "host0").mkdir()
    dist.barrier()
    assert flushed(tmp_path).step == 1
    assert fastload.load(tmp_path / ROOT / "step_00000001")["rng"].tolist() == [rank, 1]


@ranks(2, ranks_per_host=1)
def test_a_later_start_went_on_without_the_tier(rank: int, world: int, tmp_path: Path) -> None:
    left_behind(tmp_path, 5, rank=rank)
    with fastload.CheckpointManager(tmp_path / ROOT, options=OPTIONS) as manager:
        manager.save(3, parts(3, rank))
    done = flushed(tmp_path)
    assert done.step is None
    assert done.why == (
        "step 5 in memory is of an earlier start of the job; a later one went on without it and saved step 3"
    )


# What is said of hosts whose memory has nothing that could be written; of the others the newest step is.
OUTCOMES = {
    "two_partners_are_gone": "2 of the 4 shares of step 3 are on no host",
    "all_are_gone": "no host has a checkpoint of this run in memory",
    "a_byte_of_both_copies_is_damaged": "is damaged on all hosts that have it",
    "what_all_hosts_say_of_shares_is_damaged": "all copies of step 3 in memory are damaged",
    "it_was_recorded_on_too_few_hosts": "2 of the 4 shares of step 3 are on no host",
    "storage_has_a_newer_step": "step 4 is on storage, and memory has nothing newer than step 3",
}


@ranks(4, ranks_per_host=1, deadline_s=120)
def test_what_is_written(rank: int, world: int, tmp_path: Path) -> None:
    """The hosts have what a restore may find, damage included: no wrong byte gets to storage."""
    logging.getLogger("fastload").setLevel(logging.ERROR)
    first, base, own = tmp_path / "base", tmp_path / "variants", f"host{rank}"
    manager = manage(tmp_path, first)
    manager.save(1, small_state_of(1))
    manager.wait()
    keep(manager, 2, state=small_state_of)
    shutil.copytree(first / own, first / "old" / own)
    keep(manager, 3, state=small_state_of)
    crash(manager)
    with fastload.CheckpointManager(tmp_path / "other", options=OPTIONS) as other:
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
        step, source, _ = wanted[0]
        (memory / own).mkdir(parents=True, exist_ok=True)
        try:
            done = recover(tmp_path / ROOT, str(memory / own))
            outcome = done.why
        except FastloadError as error:
            done, outcome = None, str(error)
        assert OUTCOMES.get(variant.__name__, "") in outcome, (variant, outcome)
        if source == "memory":
            assert (done, outcome) == (Recovery(done.root, step, done.nbytes), ""), (variant, outcome)
        written = [name for name in steps_in(tmp_path) if name not in (1, 4)]
        assert written == ([step] if source == "memory" else []), (variant, outcome)
        for name in written:
            assert is_state(fastload.load(tmp_path / ROOT / f"step_{name:08d}"), name, small_state_of), (
                variant
            )
        dist.barrier()
        if rank == 0 and written:
            shutil.rmtree(tmp_path / ROOT / f"step_{step:08d}")
        dist.barrier()


@ranks(2, ranks_per_host=1)
def test_damage_of_what_each_rank_has_of_its_own(rank: int, world: int, tmp_path: Path) -> None:
    """Such files are on every host, and are written by one."""
    left_behind(tmp_path, 1, rank=rank)
    folder = checkpoint_in(tmp_path / "memory", rank).parent
    names = [path.name for path in folder.glob("*.safetensors")]
    [own] = [name for name in names if not name.startswith("model")]
    dist.barrier()
    if rank == 0:
        flip(checkpoint_in(tmp_path / "memory", 0, own), -1)
    dist.barrier()
    assert flushed(tmp_path).step == 1
    assert fastload.load(tmp_path / ROOT / "step_00000001")["rng"].tolist() == [rank, 1]


@ranks(2, ranks_per_host=1)
def test_a_host_that_cannot_read_its_copy(rank: int, world: int, tmp_path: Path) -> None:
    left_behind(tmp_path, 1, rank=rank)
    read = LocalStorage.read_into

    def fail(storage: LocalStorage, name: str, *arguments: Any) -> None:
        if name.endswith(".safetensors"):
            raise StorageError("Input/output error (EIO)", f"{storage.url}/{name}")
        read(storage, name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(LocalStorage, "read_into", fail)
        assert flushed(tmp_path).step == 1
    assert fastload.load(tmp_path / ROOT / "step_00000001")["rng"].tolist() == [rank, 1]


def leave_one_copy(rank: int, world: int, tmp_path: Path) -> None:
    left_behind(tmp_path, 1, rank=rank, memory_copies=1)


def test_ls_asks_the_hosts_on_which_it_runs(tmp_path: Path) -> None:
    run_ranks(leave_one_copy, 2, ranks_per_host=1, tmp_path=tmp_path)
    ls = ["-m", "fastload", "ls", str(tmp_path / ROOT), "--memory"]
    statuses, output = Processes(
        [[*ls, str(tmp_path / "memory" / f"host{n}")] for n in range(2)], tmp_path
    ).end(patient(60))
    assert statuses == [0, 0], output
    assert output.endswith("a restore takes step 1 from memory: the newest on storage is step 0\n")
    statuses, output = Processes([[*ls, str(tmp_path / "memory" / "host0")]], tmp_path).end(patient(60))
    assert statuses == [0], output
    alone = (
        "a restore takes step 0 from storage: 1 of the 2 shares of step 1 are on no host\nthe memory of other"
    )
    assert alone in output


def killed_while_it_writes(rank: int, world: int, tmp_path: Path) -> None:
    """Leaves a step in memory, and flushes it; rank 1 dies when it has written its bytes."""
    left_behind(tmp_path, 1, rank=rank)
    os.environ["FASTLOAD_TIMEOUT_S"] = "4"
    write = flush._write

    def write_and_die(*arguments: Any) -> Any:
        written = write(*arguments)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flush, "_write", write_and_die)
        with pytest.raises(PeerError, match=r"writing step 1 from memory .*rank 1 on host1"):
            flushed(tmp_path)


def flush_again(rank: int, world: int, tmp_path: Path) -> None:
    assert flushed(tmp_path).step == 1
    assert fastload.load(tmp_path / ROOT / "step_00000001")["rng"].tolist() == [rank, 1]


@pytest.mark.timeout(150)
def test_a_host_that_is_killed_in_the_middle(tmp_path: Path) -> None:
    run_ranks(killed_while_it_writes, 2, ranks_per_host=1, dies={1: signal.SIGKILL}, tmp_path=tmp_path)
    assert steps_in(tmp_path) == [0]
    run_ranks(flush_again, 2, ranks_per_host=1, tmp_path=tmp_path)
    assert steps_in(tmp_path) == [0, 1]


@pytest.mark.slow(but=["1016"])
@pytest.mark.parametrize("seed", [1016, 1026, 1028, 1036])
def test_trainings_and_flushes_that_are_killed(seed: int, tmp_path: Path) -> None:
    """A few of the draws of scripts/flush_draws.py: killed flushes, a damaged copy, a lost host."""
    run_draw(seed, tmp_path / "draw")
