"""What a save leaves behind when it fails: neither the state nor a copy of it, threads or descriptors."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fastload
from fastload import SaveOptions
from fastload.errors import OptionError, PeerError, StorageError
from fastload.saving import exchange, snapshot
from fastload.storage.local_target import LocalTarget
from tests.dist.faults import fastload_threads
from tests.dist.harness import run_ranks

OPTIONS = SaveOptions(timeout_s=5, retries=0, writers="all")
Collect = Callable[[torch.Tensor], torch.Tensor]


def save_once(path: Path, note: Collect, *, background: bool, bad: bool, sharded: bool) -> None:
    whole = torch.arange(3 << 20, dtype=torch.float32)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = distribute_tensor(whole.view(-1, 4), mesh, [Shard(1)], src_data_rank=None)
        note(whole.to_local())
    state: dict[str, Any] = {"w": note(whole)}
    del whole
    if bad:
        state["bad"] = object()
    with contextlib.suppress(OptionError, PeerError, StorageError, RuntimeError):
        if background:
            fastload.async_save(state, path, options=OPTIONS).wait(20)
        else:
            fastload.save(state, path, options=OPTIONS)


def kept_after_failures(rank: int, world: int, path: Path, cases: list[str]) -> None:
    gc.collect()
    gc.disable()
    for what, background in itertools.product(cases, (False, True)):
        with pytest.MonkeyPatch.context() as patch:
            try:
                kept_after(what, rank == min(1, world - 1), path, background, patch)
            except BaseException as error:
                error.add_note(f"{what}, {'async' if background else 'sync'}")
                raise


def kept_after(what: str, victim: bool, path: Path, background: bool, patch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    allocate = snapshot.allocate_staging

    def note(tensor: torch.Tensor) -> torch.Tensor:
        made.append(weakref.ref(tensor))
        return tensor

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        return note(allocate(*args, **kwargs))

    patch.setattr(snapshot, "allocate_staging", noted)
    patch.setattr(exchange, "allocate_staging", noted)
    sharded, what = what.startswith("sharded"), what.removeprefix("sharded ")
    if what == "all-write" or (what == "write" and victim):

        def fail(*_: Any) -> None:
            raise StorageError("no") if what == "all-write" else RuntimeError("no")

        patch.setattr(LocalTarget, "write", fail)
    descriptors: list[int] = []
    for _ in range(4):
        bad = what == "describe" and victim
        save_once(path, note, background=background, bad=bad, sharded=sharded)
        dist.barrier()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    snapshot.buffer_pool.clear()  # which is kept on purpose
    assert made
    until = time.monotonic() + 30  # a thread that ends late on a busy machine lets go of them late
    while (alive := sum(ref() is not None for ref in made)) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive == 0, f"{alive} of {len(made)} buffers are alive"
    assert fastload_threads() == []
    while len(os.listdir("/proc/self/fd")) > descriptors[1] and time.monotonic() < until:
        time.sleep(0.05)  # connections are taken down in the background
    assert len(os.listdir("/proc/self/fd")) <= descriptors[1], descriptors
    assert not path.exists()


@pytest.mark.slow(but=["1-rank"])
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, ["describe", "write"]),
        (2, ["describe", "write", "all-write", "sharded describe", "sharded write"]),
    ],
    ids=["1-rank", "2-ranks"],
)
def test_nothing_is_kept_after_a_failed_save(tmp_path: Path, world: int, cases: list[str]) -> None:
    run_ranks(kept_after_failures, world, path=tmp_path / "a", cases=cases)
