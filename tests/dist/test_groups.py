"""Loads by part of a job: sub-groups, several at once, meshes; and that nothing stays behind."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fastload
from fastload.formats.state import state_digest
from tests.checkpoints import assert_same_bits, load_reference, write_file
from tests.dist.harness import ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One checkpoint for each tensor-parallel slice: a.safetensors, b.safetensors, ..."""
    for seed, letter in enumerate("abcd"):
        rows = [(f"{letter}.{number}", "F32", (50 + seed, 7)) for number in range(4)]
        write_file(tmp_path / f"{letter}.safetensors", rows, seed=seed)
    return tmp_path


def load(path: Path, group: Any) -> tuple[str, fastload.LoadReport]:
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=999, timeout_s=20)
    with fastload.open(path, process_group=group, options=options) as checkpoint:
        tensors = checkpoint.load()
    assert_same_bits(tensors, load_reference(path))
    report = checkpoint.report
    assert report is not None
    assert report.bytes_read == report.bytes_wanted
    return state_digest(tensors), report


@ranks(4)
def test_only_the_members_take_part(rank: int, world: int, folder: Path) -> None:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        with pytest.raises(fastload.WorldError, match=f"rank {rank} is not a member"):
            fastload.load(folder / "a.safetensors", process_group=group)
        return  # and waits for nobody
    _, report = load(folder / "a.safetensors", group)
    assert [own.rank for own in report.ranks] == [0, 1]
    assert [own.bytes_read for own in report.ranks] == [report.ranks[0].bytes_read] * 2
    assert [own.header_bytes_read > 0 for own in report.ranks] == [True, False]


@ranks(3)
def test_a_group_of_one(rank: int, world: int, folder: Path) -> None:
    groups = [dist.new_group([member]) for member in range(world)]
    _, report = load(folder / f"{'abc'[rank]}.safetensors", groups[rank])
    assert report.strategy == "direct"
    assert len(report.ranks) == 1


@pytest.mark.slow(but=["5-ranks"])
@ranks(4, 5)
def test_disjoint_groups_load_different_checkpoints_at_once(rank: int, world: int, folder: Path) -> None:
    members = [[0, 3], [member for member in range(world) if member not in (0, 3)]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = 0 if rank in members[0] else 1
    for _ in range(3):
        _, report = load(folder / f"{'ab'[mine]}.safetensors", groups[mine])
        assert len(report.ranks) == len(members[mine])


@ranks(4)
def test_overlapping_groups_one_after_the_other(rank: int, world: int, folder: Path) -> None:
    left, right = dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3])
    if rank != 3:
        load(folder / "a.safetensors", left)
    if rank != 0:
        load(folder / "b.safetensors", right)
    load(folder / "c.safetensors", None)


@pytest.mark.slow(but=["4-ranks"])
@ranks(4, 8)
def test_tensor_times_data_parallel(rank: int, world: int, folder: Path) -> None:
    """Each tensor-parallel slice is a checkpoint of its own, loaded by its data-parallel replicas."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    path = folder / f"{'abcd'[mesh.get_local_rank('tp')]}.safetensors"
    digest, report = load(path, mesh["dp"])
    assert len(report.ranks) == 2
    digests: list[Any] = [None] * world
    dist.all_gather_object(digests, digest)
    assert len(set(digests)) == world // 2
    assert digests[: world // 2] == digests[world // 2 :]
    # The other dimension, as a group.
    _, report = load(folder / "d.safetensors", mesh.get_group("tp"))
    assert len(report.ranks) == world // 2
    with pytest.raises(fastload.WorldError, match="DeviceMesh of 2 dimensions: pass one"):
        fastload.load(path, process_group=mesh)


@ranks(2)
def test_groups_with_the_same_members_do_not_meet(rank: int, world: int, folder: Path) -> None:
    """A thread for each group: what they call has no order between them."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1], use_local_synchronization=True), None]
    failures: list[BaseException] = []

    def load_often(letter: str, group: Any) -> None:
        try:
            for _ in range(4):
                time.sleep(random.random() / 50)
                load(folder / f"{letter}.safetensors", group)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load_often, args=pair) for pair in zip("abc", groups, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert failures == []


@ranks(3)
def test_a_one_dimensional_mesh(rank: int, world: int, folder: Path) -> None:
    _, report = load(folder / "a.safetensors", DeviceMesh("cpu", list(range(world))))
    assert len(report.ranks) == world


@ranks(2)
def test_another_group_goes_on_while_this_one_loads(rank: int, world: int, folder: Path) -> None:
    """The caller's group is not used for the data: its own collectives may run at the same time."""
    failures: list[BaseException] = []
    done = threading.Event()
    ones = torch.ones(8)

    def train() -> None:
        try:
            for _ in range(200):
                dist.all_reduce(ones.clone())
        except BaseException as error:
            failures.append(error)
        done.set()

    thread = threading.Thread(target=train)
    thread.start()
    load(folder / "a.safetensors", None)
    load(folder / "b.safetensors", None)
    thread.join(20)
    assert done.is_set()
    assert failures == []


@ranks(3)
def test_nothing_stays_behind(rank: int, world: int, folder: Path) -> None:
    load(folder / "a.safetensors", None)
    # Those of the host are kept for the next.
    _settle({thread for thread in threading.enumerate() if thread.name == "fastload-host"})
    threads = set(threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))
    tasks = len(os.listdir("/proc/self/task"))
    for number in range(20):
        load(folder / f"{'abcd'[number % 4]}.safetensors", None)
    _settle(threads)
    assert set(threading.enumerate()) <= threads
    dist.barrier()
    limit = time.monotonic() + 5  # sockets of a ring close when the peer has let go too
    while time.monotonic() < limit and len(os.listdir("/proc/self/fd")) > descriptors:
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert len(os.listdir("/proc/self/task")) <= tasks + 1


def _settle(known: set[threading.Thread]) -> None:
    """Gives threads that were told to end the time to do so."""
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        if not [t for t in threading.enumerate() if t not in known and t.name.startswith("fastload")]:
            return
        time.sleep(0.02)
