"""The Hugging Face hub once for all ranks: bytes counted by a server of its API."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload.errors import ChecksumError
from fastload.formats.safetensors.header import LENGTH_BYTES
from fastload.formats.safetensors.reader import NEAR_BYTES
from tests.checkpoints import assert_same_bits, load_reference, write_sharded
from tests.dist.harness import run_ranks
from tests.dist.test_readers import own_disk
from tests.dist.test_readers import pytestmark as needs_mounts
from tests.hub_server import TOKEN, HubServer, Repo, files_in, serving_hub

NUM_RANKS = 4
ROWS = [(f"t{number}", "F32", (20_000 + number, 3)) for number in range(6)]
OPTIONS = fastload.LoadOptions(chunk_bytes=64 << 10, timeout_s=40)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    write_sharded(folder, {"a.safetensors": ROWS[:4], "b.safetensors": ROWS[4:]}, index=True)
    (folder / "config.json").write_text('{"model_type": "test"}')
    return folder


@pytest.fixture
def hub(folder: Path) -> Iterator[HubServer]:
    with serving_hub() as hub:
        hub.repos["org/model"] = Repo(files_in(folder))
        yield hub


def hub_options(hub: HubServer, cache: Path) -> dict[str, Any]:
    return {"endpoint": hub.url, "cache_dir": str(cache), "token": TOKEN}


def load(rank: int, world: int, folder: Path, storage_options: dict[str, Any]) -> None:
    with fastload.open("hf://org/model", storage_options=storage_options, options=OPTIONS) as checkpoint:
        assert_same_bits(checkpoint.load(), load_reference(folder))
    assert checkpoint.report is not None
    assert checkpoint.report.read_amplification == 1.0


def test_ranks_download_every_byte_once_of_one_commit(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    repo = hub.repos["org/model"]
    first = repo.refs["main"]
    hub.on_revision = lambda: repo.commit({"a.safetensors": b"other"})
    options = hub_options(hub, tmp_path / "cache")
    run_ranks(load, NUM_RANKS, ranks_per_host=1, folder=folder, storage_options=options)
    files = [path.read_bytes() for path in folder.glob("*.safetensors")]
    data = sum(len(file) - LENGTH_BYTES - int.from_bytes(file[:LENGTH_BYTES], "little") for file in files)
    assert hub.cdn.sent_bytes == data + len(files) * NEAR_BYTES, "the data, and what has the headers"
    assert hub.asked("/revision/") == ["GET /api/models/org/model/revision/main"]
    assert len(hub.asked("/tree/")) == 2  # pages
    resolved = [path for path in hub.asked("/resolve/") if "index.json" not in path]
    assert all(f"/resolve/{first}/" in path for path in resolved)
    assert len(resolved) <= 2 * NUM_RANKS


def copy_and_verify(
    rank: int, world: int, folder: Path, disk: Path, storage_options: dict[str, Any], damaged: bool
) -> None:
    given: dict[str, Any] = {"storage_options": storage_options}
    copy, stage_options = (
        own_disk(disk, rank) / "copy",
        fastload.StageOptions(chunk_bytes=1 << 16, timeout_s=40),
    )
    if damaged:
        for call in (
            lambda: fastload.verify("hf://org/model", options=OPTIONS, **given),
            lambda: fastload.stage("hf://org/model", copy, options=stage_options, **given),
        ):
            with pytest.raises(ChecksumError, match=r"a\.safetensors: not the file on the hub: SHA-256"):
                call()
        assert not copy.exists()
        return
    report = fastload.stage("hf://org/model", copy, options=stage_options, **given)
    assert (report.num_hosts, report.bytes_read) == (world, sum(map(len, files_in(folder).values())))
    assert {name: files_in(copy).get(name) for name in files_in(folder)} == files_in(folder)
    assert fastload.stage("hf://org/model", copy, options=stage_options, **given).bytes_read == 0
    verified = fastload.verify("hf://org/model", options=OPTIONS, **given)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert (verified.num_files, verified.bytes_verified) == (2, weights)
    assert [own.bytes_verified > 0 for own in verified.ranks].count(True) == 2


@pytest.mark.slow
@needs_mounts
def test_copies_have_the_sha_256_of_the_hub(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    given: dict[str, Any] = {
        "folder": folder,
        "disk": tmp_path / "disk",
        "storage_options": hub_options(hub, tmp_path / "cache"),
    }
    run_ranks(copy_and_verify, NUM_RANKS, ranks_per_host=1, damaged=False, **given)
    name = hashlib.sha256((folder / "a.safetensors").read_bytes()).hexdigest()
    hub.cdn.damaged = {name}
    run_ranks(copy_and_verify, 2, ranks_per_host=1, damaged=True, **given)
