"""An S3 server that refuses a part for good, or a rank that dies there: nothing is seen of it afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload.ext.remote import s3
from fastload.formats.names import NAMES
from fastload.options import Patience
from fastload.storage import open_target
from tests.crash.flaky_proxy import FlakyProxy
from tests.crash.saves import End, end_of, save, state, version_of
from tests.dist.faults import PATIENT_S, SLACK_S, TOLD_S
from tests.dist.flaky_server import serving
from tests.dist.harness import run_ranks
from tests.storage.s3_server import BUCKET, client_of, s3_server

URL = f"s3://{BUCKET}/runs/a"


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[tuple[FlakyProxy, dict[str, Any], Path]]:
    with s3_server(tmp_path) as options, serving(FlakyProxy(options["endpoint"])) as proxy:
        # Read from where the server keeps it, since this one answers some ranges with more than asked for.
        yield proxy, {**options, "endpoint": proxy.url}, tmp_path / URL.removeprefix("s3://")


def put(
    rank: int,
    world: int,
    version: int,
    storage: Any,
    victim: int = -1,
    timeout_s: float = PATIENT_S,
    **how: Any,
) -> End:
    s3._PART_BYTES = 1 << 20  # which this server takes
    if rank == victim:
        real = s3.Multipart.write

        def write(self: Any, name: str, offset: int, part: memoryview) -> None:
            if (offset >> 20) % 3 == 1:  # of each rank's three
                os.kill(os.getpid(), signal.SIGKILL)
            real(self, name, offset, part)

        s3.Multipart.write = write  # type: ignore[method-assign]
    return end_of(lambda: save(state(version), URL, storage=storage, timeout_s=timeout_s, retries=1, **how))


def objects(storage: Any) -> tuple[list[str], list[str]]:
    """Returns the names of all objects, and those of all uploads that have not ended."""
    with closing(client_of(storage)) as client:
        found = client.list_objects_v2(Bucket=BUCKET).get("Contents", ())
        uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    return sorted(each["Key"] for each in found), sorted(each["Key"] for each in uploads)


WHOLE = [f"runs/a/{name}" for name in ("fastload.json", "model.safetensors")]

# Part 5 is one of rank 1's.
CASES = [
    ("PUT", "partNumber=5", 500, True),
    ("POST", "uploads", 403, False),
    ("PUT", "fastload.saving.json", 500, False),  # which nobody sees then: what is there stays
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", CASES, ids=["part-500-async", "begin-403-sync", "marker-500-sync"])
def test_refused_for_good(proxy: Any, fault: tuple[str, str, int, bool]) -> None:
    server, storage, folder = proxy
    first = run_ranks(put, 3, version=1, storage=storage, background=False)
    assert [end.kind for end in first] == ["saved"] * 3, first
    method, text, status, background = fault
    server.fails[method, text] = status
    ends = run_ranks(put, 3, version=2, storage=storage, background=background, overwrite=True)
    culprit = 1 if text.startswith("partNumber") else 0
    for end in ends:
        assert (end.kind, list(end.causes)) == ("PeerError", [culprit]), ends
        assert str(status) in end.causes[culprit], ends
        assert URL in end.causes[culprit], ends
        assert end.seconds < TOLD_S, "told, not waited for"
        assert end.threads == [], ends
    assert server.log != []
    server.fails.clear()
    assert objects(storage) == (WHOLE, [])
    assert version_of(fastload.load(folder)) == 1
    again = run_ranks(put, 2, version=3, storage=storage, background=background, overwrite=True)
    assert [end.kind for end in again] == ["saved"] * 2, again
    assert version_of(fastload.load(folder)) == 3
    assert objects(storage) == (WHOLE, [])


def test_a_server_that_stalls_in_the_middle_of_a_part_gets_it_once(proxy: Any) -> None:
    server, storage, folder = proxy
    data = os.urandom(16 << 20)  # more than sockets buffer
    server.stalls["PUT", "partNumber=1"] = 5.5
    target = open_target(URL, NAMES, storage, patience=Patience(retries=0))
    target.prepare([("data", len(data))], overwrite=False)
    target.write("data", 0, memoryview(data))
    target.publish([target.flush()], [("fastload.json", b"{}")])
    target.close()
    assert (folder / "data").read_bytes() == data


@pytest.mark.slow
def test_killed_between_parts(proxy: Any) -> None:
    (_, storage, folder), victim = proxy, 0
    run_ranks(put, 3, version=1, storage=storage, background=False)
    how = {"storage": storage, "background": True, "overwrite": True}
    ends = run_ranks(put, 3, dies={victim: signal.SIGKILL}, version=2, victim=victim, timeout_s=8.0, **how)
    for end in (end for rank, end in enumerate(ends) if rank != victim):
        assert (end.kind, list(end.causes)) == ("PeerError", [victim]), ends
        assert end.seconds < 8.0 + SLACK_S, ends
        assert end.threads == [], ends
    assert version_of(fastload.load(folder)) == 1
    again = run_ranks(put, 2, version=3, **how)
    assert [end.kind for end in again] == ["saved"] * 2, again
    assert version_of(fastload.load(folder)) == 3
    assert objects(storage) == (WHOLE, [])
