"""Buckets that are mounted: what a load through the mount reads, and that a save says it cannot."""

from __future__ import annotations

import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

import fastload
from fastload.errors import OptionError
from fastload.storage.local import LocalStorage
from fastload.storage.mounts import bucket_client, file_system_type
from tests.checkpoints import assert_same_bits, load_reference, write_sharded
from tests.storage.mounts import CLIENTS, mounted
from tests.storage.s3_server import BUCKET, KEY, SECRET

pytestmark = pytest.mark.timeout(120)

_NUM_ROWS = 24 << 10  # of 1 KiB


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def checkpoint(tmp_path: Path, s3: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    """A checkpoint in the bucket: its key, and the same files in a local folder."""
    folder, key = tmp_path / "local", uuid.uuid4().hex
    rows = [(f"layer.{number}", "U8", (_NUM_ROWS, 1024)) for number in range(2)]
    write_sharded(folder, {"a.safetensors": rows[:1], "b.safetensors": rows[1:]}, index=True)
    store = boto3.client(
        "s3", endpoint_url=s3["endpoint"], aws_access_key_id=KEY, aws_secret_access_key=SECRET,
        region_name=s3["region"],
    )  # fmt: skip
    for path in folder.iterdir():
        store.upload_file(str(path), BUCKET, f"{key}/{path.name}")
    yield key, folder
    store.close()


@pytest.fixture
def point(client: str, tmp_path: Path, s3: dict[str, Any]) -> Iterator[Path]:
    with mounted(client, tmp_path / client, s3) as where:
        yield where


@pytest.mark.slow(but=["s3fs"])
def test_a_file_is_the_same_one_on_every_mount(
    client: str, tmp_path: Path, s3: dict[str, Any], checkpoint: tuple[str, Path]
) -> None:
    """Each client numbers files as it likes: else every host would read every header to compare them."""
    key, _ = checkpoint
    with ExitStack() as stack:
        points = [stack.enter_context(mounted(client, tmp_path / where, s3)) for where in ("x", "y")]
        os.listdir(points[1])
        (points[1] / "new").touch()  # another file gets a number first
        found = []
        for where in points:
            storage = LocalStorage(str(where / key))
            stack.callback(storage.close)
            found.append((storage.stat("a.safetensors"), storage.stat("b.safetensors")))
    assert found[0][0] is not None
    assert found[0] == found[1]


@pytest.mark.slow(but=["s3fs"])
def test_a_load_reads_once(point: Path, s3: dict[str, Any], checkpoint: tuple[str, Path]) -> None:
    key, local = checkpoint
    server = server_pid(s3)
    before = bytes_sent(server)
    state = fastload.load(str(point / key))
    sent = bytes_sent(server) - before
    assert_same_bits(state, load_reference(local))
    assert sent / sum(tensor.nbytes for tensor in state.values()) < 1.25, "it was read in any order"


@pytest.mark.slow(but=["s3fs"])
def test_a_save_says_at_once_that_it_cannot(point: Path, checkpoint: tuple[str, Path]) -> None:
    before = sorted(os.listdir(point))
    assert file_system_type(str(point)).startswith("fuse.")
    with pytest.raises(OptionError, match=rf"{bucket_client(str(point))}.* s3://"):
        fastload.save({"weight": torch.arange(8)}, point / "runs" / "step_1")
    assert sorted(os.listdir(point)) == before
    with pytest.raises(OptionError, match=" s3://"):
        fastload.stage(checkpoint[1], point / "copy")


def test_a_folder_on_a_disk_is_no_bucket(tmp_path: Path) -> None:
    assert bucket_client(str(tmp_path)) == ""


def server_pid(options: dict[str, Any]) -> int:
    """Finds the server by the port that it listens on."""
    port = options["endpoint"].rpartition(":")[2]
    shown = subprocess.run(["ss", "-ltnpH", f"sport = :{port}"], capture_output=True, text=True, check=True)
    found = re.search(r"pid=(\d+)", shown.stdout)
    assert found is not None, shown
    return int(found[1])


def bytes_sent(pid: int) -> int:
    """Bytes that a process has written so far, to sockets and files."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))
