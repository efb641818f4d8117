"""Staging on lab hosts: the shared link carries every byte once, and a load of the copies none."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import record_by_hand, write_sharded
from tests.lab.test_load import digest_of, hosts_up, start, storage_bytes

pytestmark = [pytest.mark.lab, pytest.mark.timeout(150)]

_NUM_HOSTS = 4

# Each host sees a folder of its own at one and the same path, as if it were a disk.
ON_ITS_DISK = """
mkdir -p "$1/$(hostname)" && mount --make-rprivate / && mount --bind "$1/$(hostname)" /mnt || exit 1
shift && exec python -m fastload "$@"
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "ckpt"
    rows = [(f"layer.{number}.weight", "F32", (1500, 1000 + number)) for number in range(16)]
    write_sharded(folder, {"a.safetensors": rows[:7], "b.safetensors": rows[7:]}, index=True)
    record_by_hand(folder, 1 << 20)
    return folder


@pytest.fixture(scope="module")
def hosts(checkpoint: Path) -> Iterator[None]:
    with hosts_up(_NUM_HOSTS, "2gbit", "400mbit", checkpoint, "staged"):
        yield


@pytest.fixture
def disks() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="fastload-disks-") as folder:
        yield Path(folder)


def fastload(disks: Path, *arguments: str) -> dict[str, Any]:
    command = ("unshare", "--mount", "bash", "-c", ON_ITS_DISK, "host", str(disks), *arguments, "--json")
    job = start(*command, num_hosts=_NUM_HOSTS)
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


@pytest.mark.slow  # tests/dist/test_stage.py counts the bytes
@pytest.mark.usefixtures("hosts")
def test_each_byte_crosses_the_storage_link_once_and_a_load_reads_nothing(
    checkpoint: Path, disks: Path
) -> None:
    whole = sum(file.stat().st_size for file in checkpoint.iterdir())
    before = storage_bytes()
    report = fastload(disks, "stage", "s3://lab/staged", "/mnt/copy")
    between = storage_bytes()
    assert (report["nbytes"], report["num_hosts"]) == (whole, _NUM_HOSTS)
    assert report["bytes_read"] == whole
    assert (between - before) / whole < 1.02
    loaded = fastload(disks, "load", "/mnt/copy", "--digest", "--names", "*")
    assert loaded["strategy"] == "direct"
    assert loaded["digests"] == [digest_of(checkpoint)] * _NUM_HOSTS
    assert storage_bytes() - between < 0.001 * whole
