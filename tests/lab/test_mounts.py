"""Loads through a mount on each host: what crosses the storage link, the kernel's read-ahead included."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import write_sharded
from tests.lab.test_lab import NAME, STORAGE
from tests.lab.test_load import digest_of, digests_of_shards, hosts_up, start, storage_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "lab"))

import services

pytestmark = [pytest.mark.lab, pytest.mark.timeout(150)]

_NUM_HOSTS = 3
_SFTP_SERVER = "/usr/lib/openssh/sftp-server"
_SFTP_PORT = 2222

# The mount is in the namespace of this rank, and ends with it. What the clients of buckets read ahead at the
# end of a range is some MiB, which show beside so small a checkpoint; in any order it would be several times
# the checkpoint.
_MOUNTED = """
mkdir -p "$1"
case $2 in
sshfs) sshfs -o "ro,directport=$PORT" "$SERVED" "$1" ;;
rclone) rclone mount :s3:lab "$1" --daemon --read-only --config '' --cache-dir "$1.cache" --buffer-size 0 \
    --s3-provider Other --s3-endpoint "$AWS_ENDPOINT_URL" --s3-region "$AWS_REGION" --s3-env-auth ;;
s3fs) s3fs lab "$1" -o "ro,url=$AWS_ENDPOINT_URL,use_path_request_style,multipart_size=5,parallel_count=1" ;;
esac || exit
exec python "${@:3}"
"""
_STREAM = """
import json, sys, fastload
from fastload.formats.state import state_digest
_, _ = fastload.world.initialize("cpu")
with fastload.open(sys.argv[1], options=fastload.LoadOptions(chunk_bytes=1 << 20)) as checkpoint:
    digest = state_digest(dict(checkpoint.tensors()))
    if fastload.world.get_rank() == 0:
        print(json.dumps({**checkpoint.report.to_dict(), "digest": digest}))
"""
_NEEDED = {"sshfs": ["sshfs", "socat", _SFTP_SERVER], "rclone": ["rclone"], "s3fs": ["s3fs"]}
# What clients of buckets read ahead is some MiB of each stream, whatever its length, which shows on a small
# checkpoint. Dealt round by round it was many times the checkpoint.
_MOST = {"sshfs": 1.02, "rclone": 2.0, "s3fs": 2.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "ckpt"
    rows = [(f"layer.{number}.weight", "F32", (1000, 1000 + number)) for number in range(18)]
    write_sharded(folder, {"a.safetensors": rows[:10], "b.safetensors": rows[10:]}, index=True)
    return folder


@pytest.fixture(scope="module")
def hosts(checkpoint: Path) -> Iterator[None]:
    with hosts_up(_NUM_HOSTS, "1gbit", "100mbit", checkpoint, "ckpt"):
        yield


@pytest.fixture(params=sorted(_NEEDED))
def client(request: pytest.FixtureRequest, hosts: None) -> Iterator[str]:
    """A program that mounts, and what it asks."""
    name: str = request.param
    needed = [*_NEEDED[name], "fusermount3"]
    if missing := [tool for tool in needed if shutil.which(tool) is None]:
        pytest.skip(f"a mount needs {', '.join(missing)}: NOT TESTED HERE")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("a mount needs /dev/fuse: NOT TESTED HERE")
    listen = f"TCP-LISTEN:{_SFTP_PORT},bind={services.STORAGE_ADDRESS},fork,reuseaddr,nodelay"
    words = ["socat", listen, f"EXEC:{_SFTP_SERVER}"] if name == "sshfs" else ["sleep", "1000"]
    server = subprocess.Popen(["ip", "netns", "exec", STORAGE, *words])
    yield name
    server.terminate()
    server.wait(10)


def load_through(
    client: str, folder: Path, *options: str, program: Sequence[str] = ("-m", "fastload", "load")
) -> tuple[dict[str, Any], float]:
    """Loads on all hosts; returns the report, and what crossed the storage link ÷ what was wanted."""
    before = storage_bytes()
    served = f"{services.STORAGE_ADDRESS}:{services.DATA_DIR / services.BUCKET}"
    given = [
        f"PORT={_SFTP_PORT}",
        f"SERVED={served}",
        "AWSACCESSKEYID=labkey",
        "AWSSECRETACCESSKEY=labsecret",
    ]
    mount = folder / NAME
    words = ["env", *given, "bash", "-c", _MOUNTED, "mounted", str(mount), client, *program]
    words += [str(mount / "ckpt"), *options]
    job = start(*words, num_hosts=_NUM_HOSTS)
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    report = json.loads(out)
    assert report["strategy"] == "allgather"
    return report, (storage_bytes() - before) / report["bytes_wanted"]


@pytest.mark.slow
def test_the_storage_link_carries_every_byte_once(checkpoint: Path, client: str, tmp_path: Path) -> None:
    report, carried = load_through(client, tmp_path, "--json", "--digest")
    assert report["digests"] == [digest_of(checkpoint)] * _NUM_HOSTS
    assert carried < _MOST[client]


@pytest.mark.slow  # the loads above go through the same mount
@pytest.mark.parametrize("client", ["sshfs"], indirect=True)
def test_a_stream_of_tensors_is_carried_once(checkpoint: Path, client: str, tmp_path: Path) -> None:
    report, carried = load_through(client, tmp_path, program=("-c", _STREAM))
    assert report["digest"] == digest_of(checkpoint)
    assert carried < _MOST[client]


@pytest.mark.slow  # whole tensors go through the same mount
@pytest.mark.parametrize("client", ["sshfs"], indirect=True)
def test_each_host_gets_its_shards_and_all_is_carried_once(
    checkpoint: Path, client: str, tmp_path: Path
) -> None:
    sharding = ["--json", "--digest", "--mesh", str(_NUM_HOSTS), "--placements", "shard(0)"]
    report, carried = load_through(client, tmp_path, *sharding)
    assert report["digests"] == digests_of_shards(checkpoint, 0, _NUM_HOSTS)
    assert carried < _MOST[client]
