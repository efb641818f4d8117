"""The Hugging Face hub on lab hosts: the link to it carries every byte once, for a load as for copies."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import write_sharded
from tests.lab.test_lab import STORAGE
from tests.lab.test_load import digest_of, hosts_up, start, storage_bytes
from tests.lab.test_stage import ON_ITS_DISK

pytestmark = [pytest.mark.lab, pytest.mark.timeout(150)]

_NUM_HOSTS = 4
_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "ckpt"
    rows = [(f"layer.{number}.weight", "F32", (1000, 1000 + number)) for number in range(8)]
    write_sharded(folder, {"a.safetensors": rows[:5], "b.safetensors": rows[5:]}, index=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def endpoint(checkpoint: Path) -> Iterator[str]:
    """A lab, and the hub on its storage."""
    with hosts_up(_NUM_HOSTS, "2gbit", "400mbit", checkpoint, "unused"):
        words = ["ip", "netns", "exec", STORAGE, sys.executable, "-m", "tests.hub_server"]
        server = subprocess.Popen(
            [*words, str(checkpoint), "8500", "8501", STORAGE], stdout=subprocess.PIPE, text=True, cwd=_ROOT
        )
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.kill()
            server.communicate()


def fastload(*words: str) -> dict[str, Any]:
    job = start(*words, "--json", num_hosts=_NUM_HOSTS)
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


@pytest.mark.slow  # tests/dist/test_hub.py counts the requests
def test_the_link_to_the_hub_carries_every_byte_once(
    checkpoint: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="fastload-disks-") as disks:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HOME", f"{disks}/nothing-cached")
        before = storage_bytes()
        loaded = fastload("python", "-m", "fastload", "load", "hf://org/model", "--digest")
        assert loaded["digests"] == [digest_of(checkpoint)] * _NUM_HOSTS
        assert loaded["read_amplification"] == 1.0
        by_load = storage_bytes() - before
        assert by_load / loaded["bytes_wanted"] < 1.01

        command = ("unshare", "--mount", "bash", "-c", ON_ITS_DISK, "host", disks)
        staged = fastload(*command, "stage", "hf://org/model@main", "/mnt/copy")
        assert staged["num_hosts"] == _NUM_HOSTS
        assert (storage_bytes() - before - by_load) / staged["nbytes"] < 1.01
        for host in range(1, _NUM_HOSTS + 1):
            copy = next(Path(disks).glob(f"*host{host}")) / "copy"
            for file in checkpoint.iterdir():
                assert (copy / file.name).read_bytes() == file.read_bytes()
