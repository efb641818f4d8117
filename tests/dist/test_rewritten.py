"""Files that somebody writes to while they are loaded, or between `open` and `load`: never a mixture."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fastload
from fastload.errors import ChecksumError, FastloadError, PeerError, StorageError
from tests.dist.faults import CHUNK_BYTES, options
from tests.dist.harness import ranks

RANKS_IMPORT = ("torch.distributed.checkpoint",)
NUM_ROWS = 1000
KINDS = ("one.safetensors", "several", "saved", "zip.pt", "old.pt", "bin", "dcp")
SAYS = "changed after it was opened"


def state_of(value: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((NUM_ROWS, 256), float(value)) for name in ("a", "b", "c")}


def write(folder: Path, value: int) -> dict[str, Path]:
    """Writes a checkpoint of each kind, on all ranks; returns where they are."""
    state, places = state_of(value), {kind: folder / kind for kind in KINDS}
    fastload.save(state, places["saved"], options=fastload.SaveOptions(block_bytes=CHUNK_BYTES))
    dcp.save(state, checkpoint_id=places["dcp"])
    if dist.get_rank():
        return places
    save_file(state, places["one.safetensors"])
    places["several"].mkdir()
    for name, tensor in state.items():
        save_file({name: tensor}, places["several"] / f"{name}.safetensors")
    torch.save(state, places["zip.pt"])
    torch.save(state, places["old.pt"], _use_new_zipfile_serialization=False)
    places["bin"].mkdir()
    torch.save(state, places["bin"] / "pytorch_model.bin")
    return places


def files_of(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(path for path in place.iterdir() if path.is_file())


def overwrite(place: Path, other: Path) -> None:
    """Writes what is elsewhere into the very files of a checkpoint."""
    for file, source in zip(files_of(place), files_of(other), strict=True):
        data = source.read_bytes()
        assert file.stat().st_size == len(data), "as an in-place writer leaves it"
        with file.open("r+b") as opened:
            opened.write(data)


def fresh(place: Path, to: Path) -> Path:
    """Copies a checkpoint; what is written to the copy later than an hour ago shows."""
    copy = to / place.name
    (shutil.copytree if place.is_dir() else shutil.copy)(place, copy)
    for file in files_of(copy):
        os.utime(file, ns=(10**18, 10**18))
    return copy


def causes(error: FastloadError) -> list[BaseException]:
    return list(error.failures.values()) if isinstance(error, PeerError) else [error]


@pytest.mark.slow
@ranks(2, deadline_s=120)
def test_a_file_that_is_rewritten_in_place(rank: int, world: int, tmp_path: Path) -> None:
    """Of the same size, between `open` and `load`, and while data move: all kinds, all readers."""
    old, new = write(tmp_path / "old", 1), write(tmp_path / "new", 2)

    def refused(
        kind: str, when: str, load: Callable[[fastload.Checkpoint, Callable[[], None]], object], **more: Any
    ) -> None:
        """Has rank 0 write at some time of a call that has to fail on all ranks."""
        case = tmp_path / f"{kind}-{when}-{len(os.listdir(tmp_path))}"
        dist.barrier()
        if rank == 0:
            case.mkdir()
            fresh(old[kind], case)
        dist.barrier()
        place, written = case / kind, list[int]()

        def strike(*_: Any) -> None:
            if rank == 0 and not written:
                written.append(1)
                overwrite(place, new[kind])

        given = {"chunk_bytes": CHUNK_BYTES, "staging_bytes": 6 * CHUNK_BYTES, "timeout_s": 20, **more}
        if when == "during":
            given["progress"] = strike
        with pytest.raises(FastloadError) as raised, fastload.open(place, options=options(**given)) as opened:  # noqa: PT012
            dist.barrier()
            if when == "between":
                strike()
                dist.barrier()
            load(opened, strike)
        assert written or rank, "it was written to"
        found = causes(raised.value)
        allowed = (StorageError, ChecksumError) if kind == "saved" else StorageError
        assert all(isinstance(cause, allowed) for cause in found), (kind, when, raised.value)
        assert all(SAYS in str(cause) or isinstance(cause, ChecksumError) for cause in found), raised.value
        assert str(place) in str(raised.value)

    def whole(opened: fastload.Checkpoint, strike: Callable[[], None]) -> object:
        return opened.load()

    for when in ("between", "during"):
        for kind in old:
            refused(kind, when, whole)
        refused("one.safetensors", when, whole, strategy="direct")
        refused("one.safetensors", when, whole, strategy="broadcast", io="direct")
        refused("saved", when, whole, verify=False)

    def boxes(opened: fastload.Checkpoint, strike: Callable[[], None]) -> object:
        half = fastload.Box((rank * NUM_ROWS // 2, 0), (NUM_ROWS // 2, 256))
        tensors = {name: [(half, torch.empty(half.sizes))] for name in opened.manifest.by_name}
        return opened.read(tensors)

    def one_by_one(opened: fastload.Checkpoint, strike: Callable[[], None]) -> None:
        for _ in opened.tensors():
            strike()

    for when in ("between", "during"):
        refused("one.safetensors", when, boxes)
        refused("dcp", when, boxes)
        refused("several", when, one_by_one)
        refused("saved", when, lambda opened, _: opened.verify())

    for kind in ("one.safetensors", "several", "zip.pt"):
        (tmp_path / "stage").mkdir(exist_ok=True)
        dist.barrier()
        if rank == 0:
            fresh(old[kind], tmp_path / "stage")
        dist.barrier()
        place, written = tmp_path / "stage" / kind, list[int]()

        def write_once(*_: Any, place: Path = place, written: list[int] = written, kind: str = kind) -> None:
            if not written:
                written.append(1)
                overwrite(place, new[kind])

        given = {"chunk_bytes": CHUNK_BYTES, "staging_bytes": 6 * CHUNK_BYTES}
        stage_options = fastload.StageOptions(timeout_s=20, progress=write_once, **given)
        with pytest.raises(FastloadError, match="changed"):
            fastload.stage(place, tmp_path / "staged" / kind, options=stage_options)


@ranks(2)
def test_what_nobody_writes_to_is_loaded(rank: int, world: int, tmp_path: Path) -> None:
    """Other names of a file, other rights, and its removal are no change of it."""
    place = tmp_path / "one.safetensors"
    if rank == 0:
        save_file(state_of(1), place)
    dist.barrier()
    with fastload.open(place, options=options(timeout_s=20)) as opened:
        dist.barrier()
        if rank == 0:
            os.link(place, tmp_path / "link")
            place.chmod(0o600)
            place.unlink()
        dist.barrier()
        assert torch.equal(opened.load()["b"], state_of(1)["b"])
