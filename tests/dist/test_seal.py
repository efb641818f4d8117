"""`fastload.seal`: checksums of checkpoints that other programs wrote, by which everything verifies."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fastload
from fastload.errors import (
    CheckpointError,
    ChecksumError,
    ManifestError,
    OptionError,
    UnsupportedVersion,
)
from fastload.formats.names import SEAL_NAME
from fastload.loading.access import samples_of
from tests.checkpoints import (
    assert_same_bits,
    flip,
    load_reference,
    rot,
    seal,
    write_hub_cache,
    write_sharded,
)
from tests.dist.harness import ranks
from tests.dist.test_readers import own_disk
from tests.dist.test_readers import pytestmark as needs_mounts

OPTIONS = fastload.LoadOptions(timeout_s=20)
ROWS = [("a", "U8", (600_001,)), ("b", "BF16", (700, 100)), ("c", "F32", (0, 3)), ("d", "I64", ())]


def as_safetensors(folder: Path) -> None:
    write_sharded(folder, {"x.safetensors": ROWS[:1], "y.safetensors": ROWS[1:]}, index=True)


def tensors() -> dict[str, torch.Tensor]:
    wide = torch.arange(300_000.0).reshape(500, 600)
    return {"wide": wide, "turned": wide[:100, :9].clone().t(), "one": torch.tensor(3)}


def as_dcp(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a process group
        dcp.save({"model": tensors(), "lr": 0.1}, checkpoint_id=folder, no_dist=True)


def as_bin(folder: Path) -> None:
    folder.mkdir()
    torch.save(tensors(), folder / "pytorch_model.bin")


FORMATS = {as_safetensors: ("x.safetensors", "a"), as_dcp: ("__0_0.distcp", "model.wide")}
FORMATS[as_bin] = ("pytorch_model.bin", "wide")


def load(folder: Path) -> tuple[dict[str, torch.Tensor], fastload.LoadReport]:
    with fastload.open(folder, options=OPTIONS) as checkpoint:
        state = checkpoint.load()
    assert checkpoint.report is not None
    return state.get("model", state), checkpoint.report


@pytest.mark.slow(but=["1-ranks"])
@ranks(1, 3, deadline_s=100)
def test_all_that_reads_verifies(rank: int, world: int, tmp_path: Path) -> None:
    for write, (name, tensor) in FORMATS.items():
        folder, copy = tmp_path / write.__name__, tmp_path / f"{write.__name__}-copy"
        if rank == 0:
            write(folder)
            (folder / "config.json").write_text("{}")
        torch.distributed.barrier()
        before, _ = load(folder)
        with pytest.raises(CheckpointError, match=r"no checksums.*fastload seal"):
            fastload.verify(folder, options=OPTIONS)
        report = fastload.seal(folder, options=OPTIONS)
        assert report.bytes_verified == report.nbytes == sum(one.bytes_read for one in report.ranks)
        after, loaded = load(folder)
        assert 0 < loaded.bytes_verified <= loaded.bytes_read < loaded.bytes_verified + 8000 * world
        assert_same_bits(after, before)
        assert str(report).startswith(f"{folder}: sealed: {report.num_blocks} block")
        checked = fastload.verify(folder, options=OPTIONS)
        assert str(checked).startswith(f"{folder}: intact: {report.num_blocks} block")
        assert (checked.num_blocks, checked.nbytes) == (report.num_blocks, report.nbytes)
        assert checked.bytes_verified == report.nbytes
        fastload.stage(folder, copy)
        assert (copy / SEAL_NAME).read_bytes() == (folder / SEAL_NAME).read_bytes()
        fastload.verify(copy, options=OPTIONS)
        torch.distributed.barrier()

        if rank == 0:
            flip(folder / name, 250_000)
        torch.distributed.barrier()
        for call in (fastload.load, fastload.verify):
            with pytest.raises(ChecksumError, match=rf"{name}: block \d+ .* of tensor '{tensor}'"):
                call(folder, options=OPTIONS)
        with pytest.raises(ChecksumError, match=name):
            fastload.stage(folder, tmp_path / f"{write.__name__}-spoiled")
        torch.distributed.barrier()


def write_file(path: Path, scale: float = 1) -> None:
    state = {name: (scale * tensor).contiguous() for name, tensor in tensors().items()}
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)


@pytest.mark.slow(but=["1-ranks"])
@ranks(1, 3)
def test_a_single_file_has_its_seal_next_to_it(rank: int, world: int, tmp_path: Path) -> None:
    for name in ("model.safetensors", "last.pt"):
        path, copy = tmp_path / name, tmp_path / f"copy of {name}"
        seal_path = tmp_path / f"{name}.{SEAL_NAME}"
        if rank == 0:
            write_file(path)
        torch.distributed.barrier()
        before = fastload.load(path, options=OPTIONS)
        with pytest.raises(CheckpointError, match=r"no checksums.*fastload seal"):
            fastload.verify(path, options=OPTIONS)
        first = fastload.stage(path, copy)
        report = fastload.seal(path, options=OPTIONS)
        assert report.bytes_verified == report.nbytes == sum(one.bytes_read for one in report.ranks)
        assert seal_path.is_file()
        after, loaded = load(path)
        assert loaded.bytes_verified >= report.nbytes
        assert_same_bits(after, before)
        assert fastload.verify(path, options=OPTIONS).bytes_verified == report.nbytes
        staged = fastload.stage(path, copy, options=fastload.StageOptions(overwrite=True))
        assert first.path == staged.path == str(copy / name)
        assert (copy / seal_path.name).read_bytes() == seal_path.read_bytes()
        assert fastload.verify(staged.path, options=OPTIONS).bytes_verified == report.nbytes
        torch.distributed.barrier()

        if rank == 0:
            flip(path, path.stat().st_size // 2)
        torch.distributed.barrier()
        for call in (fastload.load, fastload.verify):
            with pytest.raises(ChecksumError, match=rf"{name}: block \d+ .* of tensor 'wide'"):
                call(path, options=OPTIONS)
        with pytest.raises(ChecksumError, match=name):
            fastload.stage(path, tmp_path / f"spoiled {name}")
        torch.distributed.barrier()
        if rank == 0:
            write_file(path, scale=2)
            path.write_bytes(path.read_bytes().replace(b"turned", b"burned"))
        torch.distributed.barrier()
        with pytest.raises(ChecksumError, match=rf"{re.escape(str(seal_path))} .*seal it again, or remove"):
            fastload.load(path, options=OPTIONS)
        fastload.seal(path, options=OPTIONS)
        fastload.verify(path, options=OPTIONS)
        torch.distributed.barrier()
        if rank == 0:
            seal_path.write_bytes(b"{}")
        torch.distributed.barrier()
        with pytest.raises(
            ManifestError, match=rf"{re.escape(str(seal_path))}: it has no checksum of its own"
        ):
            fastload.load(path, options=OPTIONS)
        torch.distributed.barrier()


@ranks(1, 2)
def test_damage_between_tensors_is_found_wherever_a_load_finds_it(
    rank: int, world: int, tmp_path: Path
) -> None:
    path = tmp_path / "last.pt"
    if rank == 0:
        write_file(path)
    torch.distributed.barrier()
    fastload.seal(path, options=OPTIONS)
    fastload.verify(path, options=OPTIONS)
    torch.distributed.barrier()
    if rank == 0:
        flip(path, path.read_bytes().index(b"data/1"))  # in the zip archive's own header of a storage
    torch.distributed.barrier()
    for call in (fastload.load, fastload.verify, fastload.seal):
        with pytest.raises(ManifestError, match=r"'last/data/1' is not where the directory says"):
            call(path, options=OPTIONS)


def change_a_header(folder: Path) -> None:
    text = (folder / "y.safetensors").read_bytes()
    (folder / "y.safetensors").write_bytes(text.replace(b'"d"', b'"e"'))
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"d"', '"e"'))


def change_a_value(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    text, value = path.read_bytes(), b"\x3f\xb9\x99\x99\x99\x99\x99\x9a"  # the 0.1 of a pickle
    assert text.count(value) == 1
    path.write_bytes(text.replace(value, value[:-1] + b"\x9b"))


def add_a_file(folder: Path) -> None:
    torch.save({"more": torch.ones(1)}, folder / "more.bin")
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"one": "pytorch_model.bin", "more": "more.bin"}})
    )


def remove_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def change_the_index(folder: Path) -> None:
    """So that the tensors stay the same."""
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "metadata": {"total_size": 3}}))


def as_bins(folder: Path) -> None:
    as_bin(folder)
    add_a_file(folder)


def remove_the_index_of_bins(folder: Path) -> None:
    (folder / "pytorch_model.bin.index.json").unlink()


@pytest.mark.parametrize(
    ("write", "change"),
    [
        (as_safetensors, change_a_header),
        (as_safetensors, remove_the_index),
        (as_safetensors, change_the_index),
        (as_dcp, change_a_value),
        (as_bin, add_a_file),
        (as_bins, remove_the_index_of_bins),
    ],
)
def test_what_was_changed_since_is_refused_until_it_is_sealed_again(
    tmp_path: Path, write: Callable[[Path], None], change: Callable[[Path], None]
) -> None:
    folder = tmp_path / "checkpoint"
    write(folder)
    fastload.seal(folder)
    change(folder)
    for call in (fastload.load, fastload.verify):
        with pytest.raises(ChecksumError, match=r"changed after `fastload seal`.*seal it again") as raised:
            call(folder)
        is_gone = "its index, which it had then, is missing" in str(raised.value)
        assert is_gone == change.__name__.startswith("remove")
    fastload.seal(folder)
    fastload.load(folder)


def test_a_seal_of_the_first_version_does_not_cover_the_index(tmp_path: Path) -> None:
    """As fastload 0.2.0 wrote it; that of a directory without an index has this version still."""
    folder = tmp_path / "checkpoint"
    as_safetensors(folder)
    index = (folder / "model.safetensors.index.json").read_bytes()
    remove_the_index(folder)
    fastload.seal(folder)
    assert json.loads((folder / SEAL_NAME).read_text())["version"] == 1
    (folder / "model.safetensors.index.json").write_bytes(index)
    fastload.verify(folder)
    fastload.seal(folder)
    assert json.loads((folder / SEAL_NAME).read_text())["version"] == 2
    fastload.verify(folder)


@pytest.mark.parametrize(
    ("damage", "error", "reason"),
    [
        (lambda path: flip(path, 40), ChecksumError, "the seal is damaged"),
        (lambda path: path.write_bytes(b"{}"), ManifestError, "no checksum of its own"),
        (lambda path: path.write_bytes(b"[" * 100_000), ManifestError, "nested too deeply"),
        (lambda path: seal(path, version=3), UnsupportedVersion, "update fastload"),
        (lambda path: seal(path, checksums=["00" * 8]), ManifestError, r"\[1\] checksums for"),
        (lambda path: seal(path, checksums=[3, {}]), ManifestError, "not hex digits"),
        (lambda path: seal(path, block_bytes=0), ManifestError, "block_bytes"),
        (lambda path: seal(path, block_bytes=1), ManifestError, "checksums for"),
        (lambda path: seal(path, digest=None), ManifestError, "digest"),
        (lambda path: seal(path, more=1), ManifestError, "exactly the keys"),
    ],
)
def test_seals_are_parsed_strictly(tmp_path: Path, damage: Any, error: type[Exception], reason: str) -> None:
    folder = tmp_path / "checkpoint"
    as_safetensors(folder)
    fastload.seal(folder)
    damage(folder / SEAL_NAME)
    with pytest.raises(error, match=reason):
        fastload.load(folder)


def test_what_cannot_be_sealed(tmp_path: Path) -> None:
    (tmp_path / "views").mkdir()
    base = torch.zeros(100)
    torch.save({"all": base, "part": base[3:50]}, tmp_path / "views" / "pytorch_model.bin")
    with pytest.raises(ManifestError, match=r"share bytes.*fastload convert"):
        fastload.seal(tmp_path / "views")
    fastload.save({"a": base}, tmp_path / "own")
    with pytest.raises(CheckpointError, match=r"has checksums already.*fastload verify"):
        fastload.seal(tmp_path / "own")
    memory = fsspec.filesystem("memory")
    torch.save({"a": base}, tmp_path / "last.pt")
    memory.pipe("/sealing/last.pt", (tmp_path / "last.pt").read_bytes())
    with pytest.raises(
        CheckpointError, match=r"single file, and .* put it into a directory of its own .*, and seal"
    ):
        fastload.seal("memory://sealing/last.pt")
    memory.rm("/sealing", recursive=True)
    with pytest.raises(OptionError, match="can only be read"):
        fastload.seal("https://example.invalid/checkpoint")


def test_files_of_the_hub_are_compared_with_its_sha_256(tmp_path: Path) -> None:
    snapshot = write_hub_cache(tmp_path, {"x.safetensors": ROWS[:1], "y.safetensors": ROWS[1:]})
    with pytest.raises(ChecksumError, match=r"x\.safetensors: not the file on the hub: SHA-256 0+1 "):
        fastload.seal(snapshot)
    for link in snapshot.glob("*.safetensors"):
        blob = link.resolve()
        named = blob.with_name(hashlib.sha256(blob.read_bytes()).hexdigest())
        blob.rename(named)
        link.unlink()
        link.symlink_to(named)
    verified = fastload.verify(snapshot)
    assert (verified.num_blocks, verified.num_files) == (0, 2), "files have no blocks"
    assert re.search(r": intact: \S+ kB in 2 files\n", str(verified))
    fastload.seal(snapshot)
    assert_same_bits(fastload.load(snapshot), load_reference(snapshot))

    folder = tmp_path / "local"  # as `hf download --local-dir` leaves it
    as_safetensors(folder)
    metadata = folder / ".cache" / "huggingface" / "download" / "x.safetensors.metadata"
    metadata.parent.mkdir(parents=True)
    digest = hashlib.sha256((folder / "x.safetensors").read_bytes()).hexdigest()
    metadata.write_text(f"{'a' * 40}\n{digest}\n{(folder / 'x.safetensors').stat().st_mtime}\n")
    rot(folder / "x.safetensors", 1000)
    with pytest.raises(ChecksumError, match="not the file on the hub"):
        fastload.seal(folder)
    os.utime(folder / "x.safetensors", (2e9, 2e9))  # changed on purpose
    fastload.seal(folder)


@needs_mounts
@ranks(2)
def test_each_copy_gets_its_seal_if_they_are_equal(rank: int, world: int, tmp_path: Path) -> None:
    folder = own_disk(tmp_path, rank) / "checkpoint"
    write_sharded(folder, {"x.safetensors": [("a", "U8", (5_000_000,))]}, index=False)
    torch.distributed.barrier()
    fastload.seal(folder, options=OPTIONS)
    assert fastload.verify(folder, options=OPTIONS).bytes_verified == 2 * 5_000_000
    text = (folder / SEAL_NAME).read_bytes()
    sampled = samples_of(fastload.inspect(folder))
    between = next(one.end for one, after in pairwise(sampled) if after.offset > one.end)
    if rank == 1:
        rot(folder / "x.safetensors", between)
    torch.distributed.barrier()
    with pytest.raises(ChecksumError, match=r"the copies on .*, .* differ"):
        fastload.seal(folder, options=OPTIONS)
    assert (folder / SEAL_NAME).read_bytes() == text
