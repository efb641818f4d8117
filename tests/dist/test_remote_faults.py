"""HTTP servers that fail or are far away: the load heals, or fails everywhere with the cause."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastload
from fastload.errors import PeerError, StorageError
from fastload.ext.remote.obstore import FIRST_BYTES
from fastload.formats.names import NAMES
from tests.checkpoints import assert_same_bits, load_reference, write_sharded
from tests.dist.faults import SLACK_S
from tests.dist.flaky_server import FlakyServer, serve
from tests.dist.harness import ranks, run_ranks

_CHUNK_BYTES = 64 << 10
_TIMEOUT_S = 24.0  # one request may take a sixth of three quarters of it
_FAULTS = ["503", "429", "reset-before", "reset", "short", "wrong-length", "stall", "trickle"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    rows = [(f"t{number}", "F32", (20_000 + number, 3)) for number in range(5)]
    write_sharded(folder / "ckpt", {"a.safetensors": rows[:3], "b.safetensors": rows[3:]}, index=True)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[FlakyServer]:
    with serve(folder) as server:
        yield server


def options(timeout_s: float = _TIMEOUT_S) -> fastload.LoadOptions:
    return fastload.LoadOptions(strategy="allgather", chunk_bytes=_CHUNK_BYTES, timeout_s=timeout_s)


def load(rank: int, world: int, url: str, folder: Path, timeout_s: float = _TIMEOUT_S) -> int:
    """Loads, compares, and returns how often storage was tried again."""
    with fastload.open(f"{url}/ckpt", options=options(timeout_s)) as checkpoint:
        tensors = checkpoint.load()
    assert_same_bits(tensors, load_reference(folder / "ckpt"))
    assert checkpoint.report is not None
    return sum(own.retries for own in checkpoint.report.ranks)


@pytest.mark.slow(but=["1-stall", "6-reset-before", "6-503", "6-wrong-length"])
@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize("burst", [1, 6])
def test_what_passes_is_tried_again(server: FlakyServer, folder: Path, fault: str, burst: int) -> None:
    if fault in ("stall", "trickle") and burst > 1:
        burst = 2  # each costs a request's longest time
    server.faults += [fault] * burst
    retries = run_ranks(load, 3, url=server.url, folder=folder)
    assert server.faults == []
    assert retries == [burst] * 3


def test_a_server_that_dies_and_returns(server: FlakyServer, folder: Path) -> None:
    server.dead_until = time.monotonic() + 5
    retries = run_ranks(load, 3, url=server.url, folder=folder, timeout_s=60.0)
    assert retries[0] > 0


def test_only_the_first_rank_asks_for_metadata(server: FlakyServer, folder: Path) -> None:
    run_ranks(load, 4, url=server.url, folder=folder)
    of_guess = f"bytes=0-{FIRST_BYTES - 1}"
    stats = [path for method, path, wanted in server.log if method == "HEAD" or wanted == of_guess]
    guesses = [f"/ckpt/{name}" for name in NAMES.likely]
    assert sorted(stats) == sorted(guesses)
    gets = [wanted for method, _, wanted in server.log if method == "GET" and wanted != of_guess]
    headers = [wanted for wanted in gets if wanted.startswith(("bytes=0-", "bytes=8-"))]
    assert len(headers) == 2, "with the sizes of two files; the index has come with the guess"


def load_far(rank: int, world: int, url: str, folder: Path) -> None:
    far = fastload.LoadOptions(strategy="allgather", chunk_bytes=16 << 10, timeout_s=240.0)
    assert_same_bits(fastload.load(f"{url}/ckpt", options=far), load_reference(folder / "ckpt"))


def test_all_ranks_know_from_the_headers_that_storage_is_far_away(server: FlakyServer, folder: Path) -> None:
    """The first rank reads them. Together both begin with 64 reads; 40 wait until all are under way."""
    server.late_s = 0.03
    server.num_together = 40
    run_ranks(load_far, 2, url=server.url, folder=folder)
    assert server.num_together, "fewer reads were under way"


def fail(rank: int, world: int, url: str) -> dict[int, str]:
    began = time.monotonic()
    with pytest.raises(PeerError) as raised, fastload.open(f"{url}/ckpt", options=options()) as checkpoint:
        checkpoint.load()
    assert time.monotonic() - began < _TIMEOUT_S + SLACK_S
    for cause in raised.value.failures.values():
        assert isinstance(cause, StorageError)
        assert cause.url.startswith(url)
        assert cause.nbytes
    return {rank: str(cause).split("]: ")[1][:40] for rank, cause in raised.value.failures.items()}


@pytest.mark.parametrize("fault", ["403", "replaced", "503"])
def test_what_does_not_pass_ends_on_every_rank(server: FlakyServer, fault: str) -> None:
    server.faults += [fault] * 1000
    causes = run_ranks(fail, 3, url=server.url)
    assert causes[0] == causes[1] == causes[2]
    assert sorted(causes[0]) == [0, 1, 2]
    for cause in causes[0].values():
        assert ("replaced" in cause) == (fault == "replaced")


@ranks(3)
def test_no_server_at_all(rank: int, world: int) -> None:
    with pytest.raises(PeerError, match=r"127.0.0.1:9") as raised:
        fastload.load("http://127.0.0.1:9/ckpt", options=fastload.LoadOptions(timeout_s=4))
    assert isinstance(raised.value.failures[0], StorageError)
    assert raised.value.failures[0].attempts == 5
