"""Staging on lab hosts: the shared link carries every byte once, and a load of the copies none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import record_by_hand, write_sharded
from tests.lab.test_lab import lab, why_not
from tests.lab.test_load import digest_of, start, storage_bytes

pytestmark = [pytest.mark.lab, pytest.mark.timeout(150)]

_NUM_HOSTS = 4
_LINK_BYTES_PER_S = 400e6 / 8 * 0.957  # what TCP gets of 400 Mbit/s

# Each host gets a disk of its own for as long as its shell lives; then the load finds the copies there.
_PROLOGUE = """
set -e
mount --make-rprivate / && mount -t tmpfs none /mnt
python -m fastload stage s3://lab/staged /mnt/copy --json > "$1/stage.$RANK"
touch "$1/staged.$RANK"
until [ -e "$1/go" ]; do sleep 0.05; done
python -m fastload load /mnt/copy --json --digest > "$1/load.$RANK"
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "ckpt"
    rows = [(f"layer.{number}.weight", "F32", (4000, 1000 + number)) for number in range(16)]
    write_sharded(folder, {"a.safetensors": rows[:7], "b.safetensors": rows[7:]}, index=True)
    record_by_hand(folder, 1 << 20)
    return folder


@pytest.fixture(scope="module")
def hosts(checkpoint: Path) -> Iterator[None]:
    if reason := why_not():
        pytest.skip(reason)
    try:
        lab("up", str(_NUM_HOSTS), "--host-rate", "2gbit", "--storage-rate", "400mbit")
        lab("put", str(checkpoint), "staged")
        yield
    finally:
        lab("down")


@pytest.mark.usefixtures("hosts")
def test_each_byte_crosses_the_storage_link_once_and_a_load_reads_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    before = storage_bytes()
    command = ("unshare", "--mount", "bash", "-c", _PROLOGUE, "prologue", str(tmp_path))
    job = start(*command, num_hosts=_NUM_HOSTS)
    try:
        while len(list(tmp_path.glob("staged.*"))) < _NUM_HOSTS:
            assert job.poll() is None, job.communicate(timeout=5)
        between = storage_bytes()
        (tmp_path / "go").touch()
        _, err = job.communicate(timeout=100)
    finally:
        job.terminate()
    assert job.returncode == 0, err
    report = json.loads((tmp_path / "stage.0").read_text())
    whole = sum(file.stat().st_size for file in checkpoint.iterdir())
    assert (report["nbytes"], report["num_hosts"]) == (whole, _NUM_HOSTS)
    assert report["bytes_read"] == whole
    assert (between - before) / whole < 1.02
    assert report["total_s"] < 1.10 * whole / _LINK_BYTES_PER_S
    loaded = json.loads((tmp_path / "load.0").read_text())
    assert loaded["strategy"] == "direct"
    assert loaded["digests"] == [digest_of(checkpoint)] * _NUM_HOSTS
    assert storage_bytes() - between < 0.001 * whole
