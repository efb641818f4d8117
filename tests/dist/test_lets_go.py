"""What loads, verifications and stagings leave behind when they fail: no buffers, threads or descriptors.

Without the garbage collector, so that a cycle of an error and what it failed with is found.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastload
from fastload.comm import shared_memory
from fastload.errors import FastloadError, StorageError
from fastload.ext.staging.local_copy import LocalCopy
from fastload.ext.staging.write_files import FileWriter
from fastload.loading import targets
from fastload.storage.local import LocalStorage
from fastload.transfer import transport
from tests.checkpoints import flip, record_by_hand, write_sharded
from tests.dist.faults import fastload_threads, num_descriptors
from tests.dist.harness import run_ranks
from tests.dist.hosts import can_mount, mount_disk

CHUNK_BYTES = 16 << 10
ROWS = [(f"t{number}", "F32", (20_000 + number,)) for number in range(6)]
BLOCK_BYTES = 5000
Call = Callable[[Path, Path], None]


@pytest.fixture
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    for name in ("good", "damaged"):
        write_sharded(folder / name, {"a.safetensors": ROWS[:3], "b.safetensors": ROWS[3:]}, index=True)
        record_by_hand(folder / name, BLOCK_BYTES)
    flip(folder / "damaged" / "b.safetensors", 200_000)
    return folder


class Refusing(nn.Module):
    """Takes no state, once its tensors are there."""

    def __init__(self) -> None:
        super().__init__()
        self.t0 = nn.Parameter(torch.zeros(20_000))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no")


def noted_buffers(patch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    made: list[weakref.ref[torch.Tensor]] = []
    for owner, name in (
        (transport, "allocate_buffers"), (shared_memory, "_map"),
        (targets, "allocate"),
    ):  # fmt: skip
        real = getattr(owner, name)

        def noted(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            made.extend(map(weakref.ref, found if isinstance(found, list) else [found]))
            return found

        patch.setattr(owner, name, noted)
    return made


def load(saved: Path, disk: Path) -> None:
    options = fastload.LoadOptions(timeout_s=5, chunk_bytes=CHUNK_BYTES, retries=0)
    fastload.load(saved, options=options)


def load_into_what_refuses(saved: Path, disk: Path) -> None:
    options = fastload.LoadOptions(timeout_s=5, chunk_bytes=CHUNK_BYTES, retries=0, strategy="allgather")
    fastload.load(saved, into=Refusing(), strict=False, options=options)


def verify(saved: Path, disk: Path) -> None:
    fastload.verify(saved, options=fastload.LoadOptions(timeout_s=5, chunk_bytes=CHUNK_BYTES, retries=0))


def stage(saved: Path, disk: Path) -> None:
    options = fastload.StageOptions(timeout_s=5, chunk_bytes=CHUNK_BYTES, retries=0)
    fastload.stage(saved, disk / "copy", options=options)


def refuse(*_: Any, **__: Any) -> None:
    raise StorageError("no")


def strike(patch: pytest.MonkeyPatch, what: str) -> None:
    """Lets this process fail in each call from now on."""
    if what in ("write", "flush", "note"):
        patch.setattr(LocalCopy, what, refuse)
    elif what == "place":
        patch.setattr(FileWriter, what, refuse)
    elif what == "read":
        real = LocalStorage.read_into

        def read_into(self: LocalStorage, name: str, offset: int, *more: Any) -> None:
            if name == "b.safetensors" and offset > 100_000:
                raise StorageError("no")
            real(self, name, offset, *more)

        patch.setattr(LocalStorage, "read_into", read_into)


def fails(call: Callable[[], None]) -> bool:
    try:
        call()
    except FastloadError:  # which pytest.raises would keep
        return True
    return False


def kept_after_failures(
    rank: int, world: int, cases: list[tuple[Call, str]], tmp_path: Path, saved: Path, disks: Path
) -> None:
    disk = mount_disk(tmp_path, disks, rank) if world > 1 and can_mount() else tmp_path
    gc.collect()
    gc.disable()
    for call, what in cases:
        with pytest.MonkeyPatch.context() as patch:
            made = noted_buffers(patch)
            if what.startswith("all-") or rank == world - 1:
                strike(patch, what.removeprefix("all-"))
            try:
                nothing_is_kept(world, call, saved / ("damaged" if what == "damage" else "good"), disk, made)
            except BaseException as error:
                error.add_note(f"in {call.__name__}, {what}")
                raise


def nothing_is_kept(
    world: int, call: Call, saved: Path, disk: Path, made: list[weakref.ref[torch.Tensor]]
) -> None:
    descriptors: list[int] = []
    for _ in range(4):
        assert fails(partial(call, saved, disk))
        dist.barrier()
        fastload_threads()  # waits for those that take a group down, and its descriptors with it
        descriptors.append(num_descriptors())
    assert made or world > 1  # on some rank
    until = time.monotonic() + 30  # a thread that ends late on a busy machine lets go of them late
    while (alive := sum(ref() is not None for ref in made)) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive == 0, f"{alive} of {len(made)} buffers are alive"
    assert fastload_threads() == []
    assert num_descriptors(at_most=descriptors[1]) <= descriptors[1], descriptors


@pytest.mark.slow(but=["1"])
@pytest.mark.parametrize("world", [1, 3])
def test_nothing_is_kept(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, saved: Path, world: int
) -> None:
    cases = [
        (load, "all-read"), (load, "damage"), (load_into_what_refuses, "nothing"),
        (verify, "read"), (verify, "all-read"), (verify, "damage"),
        (stage, "all-read"), (stage, "damage"), (stage, "write"), (stage, "all-write"),
        (stage, "place"), (stage, "note"), (stage, "flush"),
    ]  # fmt: skip
    disks = tmp_path_factory.mktemp("disks")
    run_ranks(kept_after_failures, world, cases=cases, tmp_path=tmp_path, saved=saved, disks=disks)
