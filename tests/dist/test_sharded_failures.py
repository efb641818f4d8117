"""Loads where ranks want different bytes: readers that break are healed, and what cannot be is told to all."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastload
from fastload.errors import PeerError, StorageError
from fastload.transfer import rounds, routed
from fastload.transfer.read import ChunkReader
from tests.checkpoints import assert_same_bits
from tests.dist import faults
from tests.dist.faults import (
    CHUNK_BYTES, PATIENT_S, SLACK_S, TIMEOUT_S, TOLD_S, Outcome, die, fastload_threads, options, outcome_of,
)  # fmt: skip
from tests.dist.harness import ranks, run_ranks
from tests.dist.test_sharded import emptied, locals_of, placed

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
KINDS: dict[str, dict[str, Any]] = {
    "mixed": {"rows": Shard(0), "columns": Shard(1), "all": Replicate()},
    "fsdp": {"rows": Shard(0), "columns": Shard(0), "all": Shard(0)},  # nothing has to be exchanged
}


def tensors() -> dict[str, Tensor]:
    """Somewhat more than 1 MB, in which each number tells its place."""
    return {
        "rows": torch.arange(301 * 512, dtype=torch.float32).reshape(301, 512),
        "columns": (torch.arange(256 * 1001) % 32_003).to(torch.int16).reshape(256, 1001),
        "all": (torch.arange(200_003) * 31 >> 3).to(torch.uint8),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def shards(mesh: DeviceMesh, kind: str = "mixed", dtype: torch.dtype | None = None) -> dict[str, DTensor]:
    """What each rank is to hold, in the end."""
    cast = {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in tensors().items()}
    return {name: placed(cast[name], mesh, [placement]) for name, placement in KINDS[kind].items()}


def load(path: Path, mesh: DeviceMesh, kind: str = "mixed", **changes: Any) -> fastload.LoadReport:
    """Loads, and compares with what is to come."""
    dtype = changes.pop("dtype", None)
    into = shards(mesh, kind, dtype)
    expected, reports = locals_of(into), []
    given = options(on_report=reports.append, **changes)
    fastload.load(path, into=emptied(into), dtype=dtype, process_group=mesh.get_group(), options=given)
    assert_same_bits(locals_of(into), expected)
    return reports[0]


def break_reads(patch: pytest.MonkeyPatch, from_read: int | None, error: Any = None) -> None:
    """Lets all reads of chunks fail on this rank but the first ones."""
    numbers = itertools.count()

    def read(*_: Any) -> None:
        if from_read is not None and next(numbers) >= from_read:
            raise error or StorageError(f"the disk of rank {dist.get_rank()} is broken")

    before_reads(patch, read)


def before_reads(patch: pytest.MonkeyPatch, call: Any) -> None:
    honest = ChunkReader._read_span

    def read(self: ChunkReader, span: Any, buffers: Any) -> None:
        call(span)
        honest(self, span, buffers)

    patch.setattr(ChunkReader, "_read_span", read)


# Healing


@ranks(4)
def test_others_read_for_those_whose_storage_breaks(rank: int, world: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for kind in KINDS:
        for broken in ({1: 0}, {1: 3, 2: 0}, {0: 1, 1: 2, 3: 3}):
            with pytest.MonkeyPatch.context() as patch:
                break_reads(patch, broken.get(rank))
                report = load(path, mesh, kind, timeout_s=20)
            assert [own.rank for own in report.ranks if "stopped reading" in own.note] == list(broken)
            for own in report.ranks:
                assert own.peak_staging_bytes <= fastload.LoadOptions().staging_bytes
    assert fastload_threads() == []


@ranks(5)
def test_readers_break_at_any_moment(rank: int, world: int, path: Path) -> None:
    """Several, one after the other, again while the others read for them; one is whole. Elements are cut."""
    mesh = init_device_mesh("cpu", (world,))
    for draw in range(12):
        everybodys, own = random.Random(draw), random.Random(f"{draw}/{rank}")
        whole, odds = everybodys.randrange(world), everybodys.choice([0.02, 0.1, 0.5])
        changes: dict[str, Any] = {
            "chunk_bytes": everybodys.choice([4_999, 20_001, 65_536]),
            "dtype": everybodys.choice([None, torch.float64]),
        }

        def read(_: Any, odds: float = odds * (rank != whole)) -> None:
            time.sleep(own.choice([0.0, 0.0, 0.002]))  # noqa: B023
            if own.random() < odds:  # noqa: B023
                raise StorageError("this disk is broken")

        with pytest.MonkeyPatch.context() as patch:
            before_reads(patch, read)
            load(path, mesh, everybodys.choice([*KINDS]), timeout_s=20, **changes)


@ranks(3)
def test_if_all_are_broken_all_raise_with_every_cause(rank: int, world: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for kind in KINDS:
        with pytest.MonkeyPatch.context() as patch:
            break_reads(patch, 2 * rank)
            end = outcome_of(lambda: load(path, mesh, kind, timeout_s=PATIENT_S))  # noqa: B023
        assert end.causes == dict.fromkeys(range(world), "StorageError"), end
        assert all(f"the disk of rank {each} is broken" in end.text for each in range(world)), end
        assert end.seconds < TOLD_S
    assert fastload_threads() == []
    load(path, mesh, timeout_s=20)


@pytest.mark.parametrize("strategy", ["direct", "broadcast"])
@ranks(3)
def test_where_nobody_can_take_over_that_reader_is_named_at_once(
    rank: int, world: int, path: Path, strategy: str
) -> None:
    mesh = init_device_mesh("cpu", (world,))
    broken = {"direct": 1, "broadcast": 0}[strategy]
    rounds_done: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        break_reads(patch, 1 if rank == broken else None)
        given = {"strategy": strategy, "timeout_s": PATIENT_S, "read_threads": 1, "chunk_bytes": 4096,
                 "progress": lambda done, _: rounds_done.append(done)}  # fmt: skip
        end = outcome_of(lambda: load(path, mesh, **given))
    assert end.causes == {broken: "StorageError"}, end
    assert end.seconds < TOLD_S
    if rank == broken:
        assert len(rounds_done) < 20, "it goes on although the load has failed"
    assert fastload_threads() == []
