"""Collective loads on lab hosts: read once, proved by the counters of the storage link; cut hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload.formats.state import state_digest
from tests.checkpoints import load_reference, write_sharded
from tests.e2e.forked import forking_variables
from tests.lab.test_lab import HOST_1, HOST_2, LAB, PREFIX, STORAGE, lab, why_not

pytestmark = [pytest.mark.lab, pytest.mark.timeout(150)]

_PROGRAM = Path(__file__).with_name("program.py")
_ROOT = Path(__file__).resolve().parents[2]
_NUM_HOSTS = 3
_PORT = 29400


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "ckpt"
    rows = [(f"layer.{number}.weight", "F32", (1000, 1000 + number)) for number in range(12)]
    write_sharded(folder, {"a.safetensors": rows[:7], "b.safetensors": rows[7:]}, index=True)
    return folder


@contextmanager
def hosts_up(
    num_hosts: int, host_rate: str, storage_rate: str, checkpoint: Path, name: str
) -> Iterator[None]:
    """Has a lab with the checkpoint on its storage; or the test is skipped."""
    if reason := why_not():
        pytest.skip(reason)
    try:
        lab("up", str(num_hosts), "--host-rate", host_rate, "--storage-rate", storage_rate)
        lab("put", str(checkpoint), name)
        yield
    finally:
        lab("down")


@pytest.fixture(scope="module")
def hosts(checkpoint: Path) -> Iterator[None]:
    with hosts_up(_NUM_HOSTS, "1gbit", "60mbit", checkpoint, "ckpt"):
        yield


# What torchrun would set for the one rank of a host, without a torchrun on each.
_AS_A_RANK = """
host=$(hostname)
export RANK=$((${host##*host} - 1)) LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
exec "$@"
"""


def start(*command: str, num_hosts: int = _NUM_HOSTS) -> subprocess.Popen[str]:
    environ = os.environ | forking_variables() | {"PYTHONPATH": str(_ROOT)}
    environ |= {"WORLD_SIZE": str(num_hosts), "MASTER_ADDR": HOST_1, "MASTER_PORT": str(_PORT)}
    words = ["bash", "-c", _AS_A_RANK, "rank", *command]
    return subprocess.Popen(
        [str(LAB / "run"), "--plain", "--hosts", str(num_hosts), "--grace", "40", "--", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )


def storage_bytes() -> int:
    sent: int = json.loads(lab("bytes").stdout)["storage_tx"]
    return sent


def digest_of(checkpoint: Path) -> str:
    return state_digest(load_reference(checkpoint))


def digests_of_shards(checkpoint: Path, dim: int, num_hosts: int) -> list[str]:
    """The digest of what each host gets of tensors that are cut in one dimension."""
    whole = load_reference(checkpoint)
    cut = {name: torch.chunk(tensor, num_hosts, dim) for name, tensor in whole.items()}
    return [state_digest({name: parts[host] for name, parts in cut.items()}) for host in range(num_hosts)]


@pytest.mark.slow(but=["s3"])
@pytest.mark.parametrize(
    ("url", "num_hosts"),
    [
        ("s3://lab/ckpt", 2),
        pytest.param("s3://lab/ckpt", 3, marks=pytest.mark.slow),
        (f"http://{STORAGE}:8080/ckpt", 3),
    ],
    ids=["s3-2-hosts", "s3-3-hosts", "http-3-hosts"],
)
@pytest.mark.usefixtures("hosts")
def test_the_storage_link_carries_every_byte_once(checkpoint: Path, url: str, num_hosts: int) -> None:
    before = storage_bytes()
    job = start("python", "-m", "fastload", "load", url, "--json", "--digest", num_hosts=num_hosts)
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    report = json.loads(out)
    assert report["strategy"] == "allgather"
    assert report["digests"] == [digest_of(checkpoint)] * num_hosts
    assert report["read_amplification"] == 1.0
    assert (storage_bytes() - before) / report["bytes_wanted"] < 1.01
    assert [own["host"] for own in report["ranks"]] == [f"{PREFIX}host{n + 1}" for n in range(num_hosts)]


# Cloned machines often have one name; so do containers of one machine that share its name.
_NAMED_ALIKE = ["unshare", "--uts", "sh", "-c", 'hostname same; exec "$@"', "named"]


@pytest.mark.slow
@pytest.mark.usefixtures("hosts")
def test_hosts_of_the_same_name_do_not_share_memory(checkpoint: Path) -> None:
    """They have a network each: what is in the memory of one cannot be told to the other."""
    url = f"http://{STORAGE}:8080/ckpt"
    before = storage_bytes()
    job = start(*_NAMED_ALIKE, "python", "-m", "fastload", "load", url, "--json", "--digest")
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    report = json.loads(out)
    assert [own["host"] for own in report["ranks"]] == ["same"] * _NUM_HOSTS
    assert report["transport"] == "gloo"
    assert report["digests"] == [digest_of(checkpoint)] * _NUM_HOSTS
    assert (storage_bytes() - before) / report["bytes_wanted"] < 1.01


@pytest.mark.slow  # tests/dist/test_sharded.py counts the bytes
@pytest.mark.usefixtures("hosts")
def test_each_host_gets_its_columns_and_storage_delivers_once(checkpoint: Path) -> None:
    before = storage_bytes()
    sharding = ["--mesh", str(_NUM_HOSTS), "--placements", "shard(1)"]
    url = f"http://{STORAGE}:8080/ckpt"
    job = start("python", "-m", "fastload", "load", url, "--json", "--digest", *sharding)
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    report = json.loads(out)
    assert report["digests"] == digests_of_shards(checkpoint, 1, _NUM_HOSTS)
    assert (storage_bytes() - before) / report["bytes_wanted"] < 1.01
    exchanged = sum(own["bytes_received"] for own in report["ranks"]) / report["bytes_wanted"]
    assert exchanged < 1.02 * (1 - 1 / _NUM_HOSTS)  # each host gets those of its own that others read


@pytest.mark.slow  # tests/dist/test_load.py counts the bytes that are read
@pytest.mark.usefixtures("hosts")
def test_some_tensors_cost_their_bytes(checkpoint: Path) -> None:
    before = storage_bytes()
    job = start("python", "-m", "fastload", "load", "s3://lab/ckpt", "--json", "--names", "layer.[37].*")
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    report = json.loads(out)
    assert report["num_tensors"] == 2
    heads_bytes = 2 * (64 << 10)  # of two files, each read with one request
    # What remains are the headers of packets, a percent or so.
    assert (storage_bytes() - before - heads_bytes) / report["bytes_wanted"] < 1.01


@pytest.mark.slow
@pytest.mark.parametrize("how", ["storage", "all"])
@pytest.mark.usefixtures("hosts")
def test_a_host_is_cut_off_while_data_moves(checkpoint: Path, tmp_path: Path, how: str) -> None:
    job = start("python", str(_PROGRAM), "s3://lab/ckpt", str(tmp_path))
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "1.started").exists():
            assert time.monotonic() < deadline, job.communicate(timeout=5)
            time.sleep(0.02)
        lab("cut", HOST_2, *(["--storage"] if how == "storage" else []))
        ends = results(tmp_path, [0, 1, 2] if how == "storage" else [0, 2])
    finally:
        job.terminate()
        lab("heal", HOST_2)
        job.communicate(timeout=30)
    if how == "all":
        assert [(end["error"], end["failures"]) for end in ends] == [("PeerError", [1])] * 2
        return
    assert [end["digest"] for end in ends] == [digest_of(checkpoint)] * _NUM_HOSTS
    notes = [own["note"] for own in ends[0]["ranks"]]
    assert notes[0] == notes[2] == ""
    assert "stopped reading" in notes[1]


@pytest.mark.slow
@pytest.mark.usefixtures("hosts")
def test_only_the_port_of_the_store_is_open_between_the_hosts(tmp_path: Path) -> None:
    """Each rank says whom it does not reach, and what to open; and its process ends as it should.

    In a group that was connected before, and where the ranks form one.
    """
    job = start("python", str(_PROGRAM), "s3://lab/ckpt", str(tmp_path), "8")
    names = [f"{PREFIX}host{number + 1}" for number in range(_NUM_HOSTS)]
    try:
        await_files(tmp_path, "ready", range(_NUM_HOSTS))
        for name in names:
            lab("cut", name, "--but-port", str(_PORT))
        (tmp_path / "go").touch()
        ends = results(tmp_path, [0, 1, 2])
        _, err = job.communicate(timeout=60)
        later = start("python", "-m", "fastload", "load", "s3://lab/ckpt")
        _, said = later.communicate(timeout=60)
        doctor = start("python", "-m", "fastload", "doctor")
        found, _ = doctor.communicate(timeout=120)
    finally:
        job.terminate()
        for name in names:
            lab("heal", name)
        job.communicate(timeout=30)
    assert job.returncode == 0, err
    assert (later.returncode, doctor.returncode) == (1, 1)
    assert re.search(rf"✗ +between hosts +nothing from {PREFIX}host\d to {PREFIX}host\d", found)
    assert "see whether a firewall lets TCP through between all hosts" in found
    assert "the ranks cannot connect to each other: rank 0 on" in said
    assert re.search(rf"could not connect to rank 1 on {HOST_2} at [0-9.]+ port \d+", said)
    for end in ends:
        assert (end["error"], end["failures"]) == ("PeerError", [0, 1, 2]), end
        for rank, name in enumerate(names):
            said = rf"rank {rank} on {name}: WorldError: could not connect to rank \d on {PREFIX}host\d"
            assert re.search(rf"{said} at [0-9.]+ port \d+ \(no answer within [0-9.]+ s\)", end["text"])
        assert re.search(r"open TCP ports \d+ to \d+ between the hosts, or name another", end["text"])


def await_files(folder: Path, suffix: str, ranks: Iterable[int]) -> None:
    deadline = time.monotonic() + 60
    while not all((folder / f"{rank}.{suffix}").exists() for rank in ranks):
        assert time.monotonic() < deadline, sorted(path.name for path in folder.iterdir())
        time.sleep(0.05)


def results(folder: Path, ranks: list[int]) -> list[dict[str, Any]]:
    await_files(folder, "json", ranks)
    time.sleep(0.2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks]
