"""Staging with peers: hosts that take a copy from each other while they make their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload.ext.serve import pool
from fastload.ext.serve.process import READS
from fastload.ext.staging.inventory import BlockRun, take_inventory
from tests.dist.harness import ranks
from tests.dist.peers import faulty_peer

STATE = {f"t{number}": torch.full((100_000 + number,), float(number)) for number in range(4)}
OPTIONS: dict[str, Any] = {"chunk_bytes": 64 << 10, "timeout_s": 60}


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what earlier tests read from origins, since all have the same checkpoint."""
    monkeypatch.setattr(pool, "_GREETING_S", 60.0)
    READS._until_s.clear()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    fastload.save(STATE, tmp_path / "step", options=fastload.SaveOptions(block_bytes=16 << 10))
    (tmp_path / "step" / "config.json").write_text("{}")
    return tmp_path / "step"


def stage(origin: str, to: Path, *sources: Any, group: Any = None, **given: Any) -> fastload.StageReport:
    options = fastload.StageOptions(sources=sources, **{**OPTIONS, **given})
    return fastload.stage(origin, to, process_group=group, options=options)


def assert_copied(copy: Path, saved: Path) -> None:
    for file in saved.iterdir():
        assert (copy / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_copy_comes_from_a_peer_and_small_files_from_the_origin(saved: Path, tmp_path: Path) -> None:
    with faulty_peer(saved) as peer:
        report = stage(f"far://{saved}", tmp_path / "copy", fastload.peers(peer.url))
    assert_copied(tmp_path / "copy", saved)
    nbytes = fastload.inspect(saved).nbytes
    assert (report.bytes_supplied, report.bytes_supplied + report.bytes_read) == (nbytes, report.nbytes)
    assert report.ranks[0].problems == ""


def test_a_copy_is_right_whatever_the_peer_delivers(saved: Path, tmp_path: Path) -> None:
    with faulty_peer(saved, "flip", good_reads=3) as peer:
        report = stage(f"far://{saved}", tmp_path / "copy", fastload.peers(peer.url))
    assert_copied(tmp_path / "copy", saved)
    assert peer.url in report.ranks[0].problems


def test_verified_blocks_are_served_before_the_copy_is_complete(saved: Path, tmp_path: Path) -> None:
    """The copy waits for its last bytes: until then others get those that are there, and no more."""
    nbytes = (saved / "model.safetensors").stat().st_size
    seen: list[Any] = []

    def ask(server: fastload.Server, begin: int) -> int:
        headers = {"Range": f"bytes={begin}-{begin + 999}"}
        request = urllib.request.Request(f"{server.url}/copy/model.safetensors", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return len(response.read())
        except urllib.error.HTTPError as error:
            return error.code

    def look(done: int, total: int) -> None:
        if not seen and done:
            index = json.load(urllib.request.urlopen(f"{server.url}/", timeout=20))
            ranges = index["checkpoints"]["copy"]["ranges"].get("model.safetensors", ())
            begins = [begin for begin, end in ranges if end - begin >= 1000]
            if begins:
                seen.append((ranges, ask(server, begins[0]), ask(server, nbytes - 1000)))

    with fastload.serve(None) as server:
        stage(
            f"far://{saved}", tmp_path / "copy", on_copy=server.follow, progress=look, chunk_bytes=16 << 10,
            staging_bytes=64 << 10,
        )  # fmt: skip
        server.add(tmp_path / "copy")
        assert ask(server, nbytes - 1000) == 1000
    [(ranges, there, missing)] = seen
    assert sum(end - begin for begin, end in ranges) < nbytes
    assert (there, missing) == (1000, 503)


@ranks(4)
def test_hosts_that_come_at_once_take_the_bytes_from_each_other(
    rank: int, world: int, saved: Path, tmp_path: Path
) -> None:
    """Each is a job of its own. Without each other they would read four times the bytes."""
    with fastload.serve(None) as server, fastload.serve(saved, rate="1MB") as origin:
        urls: list[Any] = [None] * world
        dist.all_gather_object(urls, (server.url, origin.url))
        group = next(
            one
            for one in [dist.new_group([each]) for each in range(world)]
            if one is not None and dist.get_rank(one) >= 0
        )
        source = fastload.peers(*(url for url, _ in urls))
        report = stage(urls[0][1], tmp_path / f"copy{rank}", source, group=group, on_copy=server.follow)
        for name in ("fastload.json", "model.safetensors"):
            assert (tmp_path / f"copy{rank}" / name).read_bytes() == (saved / name).read_bytes()
        read: list[Any] = [None] * world
        dist.all_gather_object(read, report.bytes_read)
    assert sum(read) < 2.5 * report.nbytes
    assert report.bytes_read + report.bytes_supplied == report.nbytes


@pytest.mark.parametrize("part", [0.0, 0.3, 0.5, 0.999])
def test_a_turned_order_has_the_same_blocks(saved: Path, part: float) -> None:
    manifest = fastload.inspect(saved)
    inventory = take_inventory(manifest, (), block_bytes=1, nonce="")
    runs = inventory.lacking(bytes(len(inventory.blocks)))
    turned = inventory.turned(runs, part)

    def blocks(given: list[BlockRun]) -> list[int]:
        counts = [(run.first, -(-run.nbytes // inventory.block_bytes)) for run in given]
        return [first + number for first, count in counts for number in range(count)]

    assert sorted(blocks(turned)) == blocks(runs)
    first = blocks(turned)[0]
    assert abs(first / len(inventory.blocks) - part) < 0.1
    assert blocks(turned) == [*range(first, len(inventory.blocks)), *range(first)]


@pytest.mark.slow
def test_the_command_serves_its_copy_until_a_signal(saved: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fastload", "stage", f"file://{saved}", str(tmp_path / "copy")]
    command += ["--serve", "--port", "0", "--peers", "http://127.0.0.1:1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        try:
            assert line.startswith(f"serving {tmp_path}/copy at http://127.0.0.1:"), line
            loaded = fastload.load(f"{line.split()[-1]}/copy")
            assert torch.equal(loaded["t3"], STATE["t3"])
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
