"""What a save leaves behind when it fails: neither the state nor a copy of it, threads or descriptors."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload import SaveOptions
from fastload.errors import OptionError, PeerError, StorageError
from fastload.saving import snapshot
from fastload.storage.local_target import LocalTarget
from tests.dist.faults import fastload_threads
from tests.dist.harness import run_ranks

OPTIONS = SaveOptions(timeout_s=5, retries=0, writers="all")
Collect = Callable[[torch.Tensor], torch.Tensor]


def save_once(path: Path, note: Collect, *, background: bool, bad: bool) -> None:
    state: dict[str, Any] = {"w": note(torch.arange(3 << 20, dtype=torch.float32))}
    if bad:
        state["bad"] = object()
    with contextlib.suppress(OptionError, PeerError, StorageError, RuntimeError):
        if background:
            fastload.async_save(state, path, options=OPTIONS).wait(20)
        else:
            fastload.save(state, path, options=OPTIONS)


def kept_after_failure(rank: int, world: int, path: Path, what: str, background: bool) -> None:
    gc.collect()
    gc.disable()
    made: list[weakref.ref[torch.Tensor]] = []
    allocate = snapshot.allocate_staging

    def note(tensor: torch.Tensor) -> torch.Tensor:
        made.append(weakref.ref(tensor))
        return tensor

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        return note(allocate(*args, **kwargs))

    snapshot.allocate_staging = noted  # type: ignore[assignment]
    victim = rank == min(1, world - 1)
    if what == "all-write" or (what == "write" and victim):

        def fail(*_: Any) -> None:
            raise StorageError("no") if what == "all-write" else RuntimeError("no")

        LocalTarget.write = fail  # type: ignore[method-assign]
    descriptors: list[int] = []
    for _ in range(4):
        save_once(path, note, background=background, bad=what == "describe" and victim)
        if world > 1:
            dist.barrier()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    snapshot.Snapshot._spare.clear()  # which is kept on purpose
    assert made
    until = time.monotonic() + 10  # a thread that ends late on a busy machine lets go of them late
    while (alive := sum(ref() is not None for ref in made)) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive == 0, f"{alive} of {len(made)} buffers are alive"
    assert fastload_threads() == []
    assert descriptors[-1] <= descriptors[1], descriptors
    assert not path.exists()


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("world", "what"),
    [(2, "describe"), (2, "write"), (2, "all-write"), (1, "describe"), (1, "write")],
)
def test_nothing_is_kept_after_a_failed_save(tmp_path: Path, world: int, what: str, background: bool) -> None:
    run_ranks(kept_after_failure, world, path=tmp_path / "a", what=what, background=background)
