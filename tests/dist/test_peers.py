"""Loads from peers: which bytes come from whom, and what a peer can do wrong."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload.ext.serve import pool
from fastload.ext.serve.addresses import parse_addresses
from fastload.ext.serve.connection import Endpoint
from fastload.ext.serve.peer import KnownPeer, Offer
from fastload.ext.serve.pool import PeerPool
from fastload.ext.serve.process import SERVERS
from fastload.ext.serve.server import ServeTerms
from tests.checkpoints import flip, write_sharded
from tests.dist.harness import ranks
from tests.dist.peer_draws import make_checkpoint, run_draw
from tests.dist.peers import FAULTS, faulty_peer
from tests.pages import page

OPTIONS: dict[str, Any] = {"chunk_bytes": 64 << 10, "timeout_s": 60}


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has late peers cost little time where there are some; elsewhere the load of the machine makes none."""
    name = request.node.name
    is_late = name.startswith("test_draws") or any(
        fault in name for fault in ("stall", "trickle", "all_peers_may_end")
    )
    late_s = 60.0
    if is_late:
        late_s = 5.0 if "in_the_middle" in name else 1.0  # there another peer has to be in time
    for limit in ("_LATE_S", "_LEAST_LATE_S"):
        monkeypatch.setattr(pool, limit, late_s)
    for limit in ("_GREETING_S", "_TRIAL_S", *(() if is_late else ("_CONNECT_S", "_INDEX_S"))):
        monkeypatch.setattr(pool, limit, 60.0)
    if "slow_by_far" not in name:
        monkeypatch.setattr("fastload.ext.serve.peer._MEASURED_S", 60.0)  # no peer is slower than storage
    monkeypatch.setattr("fastload.ext.serve.peer._SILENT_S", 60.0)
    yield
    SERVERS.clear()


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"t{number}": torch.randn(40_000 + number, generator=generator) for number in range(6)}


@pytest.fixture
def saved(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    fastload.save(state, tmp_path / "step", options=fastload.SaveOptions(block_bytes=16 << 10))
    return tmp_path / "step"


def served(path: Path | str, **given: Any) -> fastload.Server:
    """A server in this process that is a peer to it, too."""
    server = fastload.serve(path, **given)
    SERVERS.clear()
    return server


def load(origin: str, *sources: Any, into: Any = None, **given: Any) -> tuple[Any, fastload.LoadReport]:
    reports: list[fastload.LoadReport] = []
    sources_given = sources or None
    options = fastload.LoadOptions(sources=sources_given, on_report=reports.append, **{**OPTIONS, **given})
    return fastload.load(origin, into=into, options=options), reports[0]


def assert_equal(loaded: Any, state: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor), name


def test_all_data_come_from_a_peer(saved: Path, state: dict[str, torch.Tensor]) -> None:
    with served(saved) as server:
        loaded, report = load(f"far://{saved}", fastload.peers(server.url))
    assert_equal(loaded, state)
    nbytes = fastload.inspect(saved).nbytes
    assert (report.bytes_read, report.bytes_supplied, report.ranks[0].problems) == (0, nbytes, "")
    assert report.bytes_verified == nbytes


def test_several_peers_share_the_work(saved: Path, state: dict[str, torch.Tensor]) -> None:
    with ExitStack() as stack:
        peers = [stack.enter_context(faulty_peer(saved)) for _ in range(3)]
        loaded, report = load(f"far://{saved}", fastload.peers(*(peer.url for peer in peers)))
    assert_equal(loaded, state)
    assert report.bytes_read == 0
    assert all(peer.served_bytes for peer in peers)
    assert sum(peer.served_bytes for peer in peers) == fastload.inspect(saved).nbytes


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_peer_does_wrong_comes_from_the_origin_and_is_named(
    saved: Path, state: dict[str, torch.Tensor], fault: str
) -> None:
    with faulty_peer(saved, fault) as peer:
        loaded, report = load(f"far://{saved}", fastload.peers(peer.url))
    assert_equal(loaded, state)
    nbytes = fastload.inspect(saved).nbytes
    assert report.bytes_read + report.bytes_supplied == nbytes
    assert report.bytes_supplied == 0
    assert peer.url in report.ranks[0].problems


@pytest.mark.parametrize("fault", ["cut", "flip", "gone", "reset", "stall"])
def test_another_peer_takes_the_place_of_one_that_fails_in_the_middle(
    saved: Path, state: dict[str, torch.Tensor], fault: str
) -> None:
    with faulty_peer(saved, fault, good_reads=2) as bad, faulty_peer(saved) as good:
        loaded, report = load(f"far://{saved}", fastload.peers(bad.url, good.url))
    assert_equal(loaded, state)
    assert report.bytes_read == 0
    if bad.reads > 2:  # else the other one was faster by far
        assert bad.url in report.ranks[0].problems
    assert good.url not in report.ranks[0].problems
    assert bad.reads <= 2 + 2 * pool._MOST_REQUESTS, "it is left alone"


def test_all_peers_may_end_in_the_middle(saved: Path, state: dict[str, torch.Tensor]) -> None:
    with served(saved, rate="1MB") as server:
        timer = threading.Timer(0.3, server.close)
        timer.start()
        loaded, report = load(f"far://{saved}", fastload.peers(server.url))
        timer.join()
    assert_equal(loaded, state)
    assert report.bytes_read > 0
    assert server.url in report.ranks[0].problems


@pytest.mark.parametrize(("origin_mb_s", "is_left"), [(20, False), (39, False), (50, True)])
def test_peers_that_are_slow_by_far_are_left_for_the_origin(origin_mb_s: int, is_left: bool) -> None:
    """Two peers deliver 5 MB/s each."""
    own = PeerPool(list, "digest")
    own._questions.begin(time.monotonic(), resolves=True)
    peers = [KnownPeer(Endpoint("a", "127.0.0.1", port, None, None), Offer("", None, {})) for port in (1, 2)]
    own._peers = {peer.endpoint: peer for peer in peers}
    for peer in peers:
        peer.speed._bytes, peer.speed._seconds = 10e6, 2.0
    own._origin._bytes, own._origin._seconds = 2e6 * origin_mb_s, 2.0
    loan = own.lend("a", 0, [1000])
    assert (loan.peer is None) == is_left
    assert all(peer.is_left == is_left for peer in peers)
    assert all(("and storage 50.0 MB/s" in peer.problem) == is_left for peer in peers)
    own.close()


def test_nobody_waits_for_the_first_bytes_of_a_new_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    own = PeerPool(list, "digest")
    own._questions.begin(time.monotonic(), resolves=True)
    new, known = (
        KnownPeer(Endpoint("a", "127.0.0.1", port, None, None), Offer("", None, {})) for port in (1, 2)
    )
    own._peers = {peer.endpoint: peer for peer in (new, known)}
    known.speed._bytes, known.speed._seconds = 200e6, 1.0
    ends = [number << 20 for number in range(1, 9)]
    first = own.lend("a", 0, ends)
    assert (first.peer, first.end) == (new, 1 << 20), "it is asked for little"
    assert own.lend("a", 0, ends).peer is known
    monkeypatch.setattr(pool, "_TRIAL_S", 0.0)
    monkeypatch.setattr("fastload.ext.serve.peer._SILENT_S", 0.0)
    assert own.lend("a", 0, ends).peer is None, "both bring nothing"
    own.close()


def test_peers_are_asked_once_more_before_the_origin_is_read() -> None:
    """A peer has said a moment ago that it has nothing, and reads the same of the origin now."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            here = {"digest": "digest", "ranges": {}, "coming": {"a": [[0, 1000]]}}
            body = json.dumps({"checkpoints": {"": here}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        own = PeerPool(list, "digest")
        own._questions.begin(time.monotonic(), resolves=True)
        own._questions.end()
        endpoint = Endpoint("a", "127.0.0.1", server.server_port, None, None)
        peer = KnownPeer(endpoint, Offer("", {}, {}), answered_s=time.monotonic() - 0.1, has_answered=True)
        own._peers = {endpoint: peer}
        loan = own.lend("a", 0, [1000])
        own.close()
        server.shutdown()
    assert loan.peer is not None
    assert loan.is_coming


def test_a_slow_peer_has_few_bytes_under_way() -> None:
    own = PeerPool(list, "digest")
    own._questions.begin(time.monotonic(), resolves=True)
    peer = KnownPeer(Endpoint("a", "127.0.0.1", 1, None, None), Offer("", None, {}))
    own._peers = {peer.endpoint: peer}
    peer.speed._bytes, peer.speed._seconds = 8e6, 1.0
    ends = [number << 18 for number in range(1, 33)]
    for _ in range(2):
        loan = own.lend("a", 0, ends)
        assert loan.end <= 0.25 * 8e6
    now_s = time.monotonic()
    assert own._choose("a", 0, ends, now_s)[1] is None
    own.close()


def test_the_error_of_the_origin_is_raised_if_no_peer_has_the_bytes(saved: Path) -> None:
    data = saved / "model.safetensors"
    with faulty_peer(saved, "flip", good_reads=1) as peer:
        flip(data, data.stat().st_size - 1000)
        with pytest.raises(fastload.ChecksumError, match="damaged"):
            load(f"far://{saved}", fastload.peers(peer.url))


def test_peers_heal_an_origin_with_damage(
    saved: Path, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    copy = tmp_path / "copy" / "step"
    fastload.save(state, copy, options=fastload.SaveOptions(block_bytes=16 << 10))
    flip(saved / "model.safetensors", (saved / "model.safetensors").stat().st_size - 1000)
    with served(copy) as server:
        loaded, _ = load(f"far://{saved}", fastload.peers(server.url))
    assert_equal(loaded, state)


def test_a_peer_with_another_checkpoint_of_the_same_name_is_not_asked(
    saved: Path, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    other = tmp_path / "other" / "step"
    fastload.save({name: tensor + 1 for name, tensor in state.items()}, other)
    with served(other) as server:
        loaded, report = load(f"far://{saved}", fastload.peers(server.url))
    assert_equal(loaded, state)
    assert (report.bytes_supplied, report.ranks[0].problems) == (0, f"{server.url} has no such checkpoint")


def test_tokens_and_certificates(
    saved: Path, state: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(name)
    wrong = str(tmp_path / "wrong")
    token, certificate = str(tmp_path / "right"), str(tmp_path / "both.pem")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    made = ["-keyout", certificate, "-out", str(tmp_path / "certificate")]
    subprocess.run([*make.split(), *names, *made], check=True, capture_output=True)
    (tmp_path / "both.pem").write_bytes(
        (tmp_path / "both.pem").read_bytes() + (tmp_path / "certificate").read_bytes()
    )
    ca_file = str(tmp_path / "certificate")
    with served(saved, token_file=token, certificate=certificate) as server:
        port = server.url.rpartition(":")[2]
        cases = {
            f"https://localhost:{port}": ({"token_file": token, "ca_file": ca_file}, ""),
            f"dns+https://localhost:{port}": ({"token_file": token, "ca_file": ca_file}, ""),
            f"https://127.0.0.1:{port}": ({"token_file": token, "ca_file": ca_file}, "TLS"),
            f"hosts+https://localhost:{port}": (
                {"token_file": wrong, "ca_file": ca_file},
                "401",
            ),
            f"https://localhost:{port}/": ({"token_file": token}, "TLS"),
        }
        for address, (given, problem) in cases.items():
            loaded, report = load(f"far://{saved}", fastload.peers(address, **given))
            assert_equal(loaded, state)
            assert problem in report.ranks[0].problems, address
            assert (report.bytes_read == 0) == (not problem), address
        monkeypatch.setenv("FASTLOAD_PEERS_TOKEN_FILE", token)
        monkeypatch.setenv("FASTLOAD_PEERS_CA_FILE", ca_file)
        monkeypatch.setenv("FASTLOAD_PEERS", f"hosts+https://localhost:{port}")
        assert load(f"far://{saved}")[1].bytes_read == 0
        assert load(f"far://{saved}", fastload.peers("http://localhost:1"))[1].bytes_supplied == 0
    assert "right" not in repr(fastload.peers("http://a", token_file=token))


def test_the_digest_may_be_given_for_a_path_that_is_not_trusted(
    saved: Path, state: dict[str, torch.Tensor]
) -> None:
    digest = fastload.inspect(saved).record_digest
    with served(saved) as server:
        loaded, report = load(server.url, fastload.peers(server.url, digest=digest))
        assert_equal(loaded, state)
        assert report.bytes_supplied == fastload.inspect(saved).nbytes
        with pytest.raises(fastload.OptionError, match="record_digest"):
            fastload.peers(server.url, digest="")
        with pytest.raises(fastload.ChecksumError, match="is wanted"):
            load(server.url, fastload.peers(server.url, digest="0" * 32))


def test_a_peer_with_a_part_gives_that_part(saved: Path, state: dict[str, torch.Tensor]) -> None:
    size = (saved / "model.safetensors").stat().st_size
    with faulty_peer(saved) as peer:
        peer.ranges = {"model.safetensors": [(0, 100_000), (300_000, size // 2)], "other": [(0, 5)]}
        loaded, report = load(f"far://{saved}", fastload.peers(peer.url))
    assert_equal(loaded, state)
    assert 0 < report.bytes_supplied <= 100_000 + size // 2 - 300_000
    assert report.bytes_supplied == peer.served_bytes
    assert report.bytes_read + report.bytes_supplied == fastload.inspect(saved).nbytes


def test_bytes_that_a_peer_announces_and_never_has_come_from_storage(
    saved: Path, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_SHORT_REST_S", 0.0)
    coming = {"model.safetensors": [(0, (saved / "model.safetensors").stat().st_size)]}
    with faulty_peer(saved, "refuse") as peer:
        peer.ranges, peer.coming = {}, coming
        loaded, report = load(f"far://{saved}", fastload.peers(peer.url), timeout_s=30)
    assert_equal(loaded, state)
    assert report.bytes_read == fastload.inspect(saved).nbytes
    assert f"{peer.url} announced bytes that did not come" in report.ranks[0].problems


def test_a_process_asks_none_of_its_own_servers(saved: Path, state: dict[str, torch.Tensor]) -> None:
    with fastload.serve(saved) as server:
        loaded, report = load(f"far://{saved}", fastload.peers(server.url))
    assert_equal(loaded, state)
    assert (report.bytes_supplied, report.ranks[0].problems) == (0, "")


def test_nothing_shows_a_token() -> None:
    endpoint = Endpoint("a", "127.0.0.1", 1, None, "word")
    assert "word" not in repr(KnownPeer(endpoint))
    assert "word" not in repr(ServeTerms("word", None, 1, "ident"))


def test_a_verification_reads_storage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(saved) as server:
        monkeypatch.setenv("FASTLOAD_PEERS", server.url)
        flip(saved / "model.safetensors", (saved / "model.safetensors").stat().st_size - 1000)
        with pytest.raises(fastload.ChecksumError):
            fastload.verify(f"far://{saved}")


def test_without_checksums_peers_are_not_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "hub"
    write_sharded(folder, {"a.safetensors": [("x", "F32", (50_000,))]}, index=False)
    with faulty_peer(folder) as peer:
        _, report = load(f"far://{folder}", fastload.peers(peer.url))
        assert (peer.reads, report.bytes_supplied) == (0, 0)
        assert "fastload seal" in caplog.text
        fastload.seal(folder)
    with served(folder) as server:
        _, report = load(f"far://{folder}", fastload.peers(server.url))
    assert report.bytes_read == 0


def test_a_delta_and_its_base_come_from_peers(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    fastload.save(state, tmp_path / "step_1")
    changed = {**state, "t0": state["t0"].clone()}
    changed["t0"][5] = 7
    fastload.save(changed, tmp_path / "step_2", options=fastload.SaveOptions(base=tmp_path / "step_1"))
    with served(tmp_path) as server:
        loaded, report = load(f"far://{tmp_path}/step_2", fastload.peers(server.url))
    assert_equal(loaded, changed)
    assert report.bytes_read < 10_000
    assert report.bytes_supplied >= fastload.inspect(tmp_path / "step_1").nbytes


def test_a_file_of_torch_save_comes_from_a_peer(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state, tmp_path / "last.pt")
    fastload.seal(tmp_path / "last.pt")
    with served(tmp_path / "last.pt") as server:
        loaded, report = load(f"{server.url}/last.pt", fastload.peers(server.url))
        assert_equal(loaded, state)
        assert report.bytes_supplied == 0, "a seal next to a URL of HTTP is not read"


def test_a_load_leaves_no_thread_and_no_connection(saved: Path) -> None:
    with served(saved) as server:
        load(f"far://{saved}", fastload.peers(server.url, "http://127.0.0.1:1"))
        ends_s = time.monotonic() + 30
        while any("fastload-peers" in thread.name for thread in threading.enumerate()):
            assert time.monotonic() < ends_s
            time.sleep(0.05)


@pytest.fixture
def peer_url(saved: Path) -> Iterator[str]:
    with served(saved) as server:
        yield server.url


@ranks(3)
def test_a_byte_enters_a_job_once(
    rank: int, world: int, saved: Path, peer_url: str, state: dict[str, torch.Tensor]
) -> None:
    loaded, report = load(f"far://{saved}", fastload.peers(peer_url))
    assert_equal(loaded, state)
    assert report.strategy == "allgather"
    assert (report.bytes_read, report.bytes_supplied) == (0, fastload.inspect(saved).nbytes)
    assert all(own.bytes_supplied for own in report.ranks)


@ranks(3)
def test_ranks_may_have_different_peers(
    rank: int, world: int, saved: Path, peer_url: str, state: dict[str, torch.Tensor]
) -> None:
    loaded, report = load(f"far://{saved}", *([fastload.peers(peer_url)] if rank == 1 else []))
    assert_equal(loaded, state)
    nbytes = fastload.inspect(saved).nbytes
    assert report.bytes_read + report.bytes_supplied == nbytes
    assert [bool(own.bytes_supplied) for own in report.ranks] == [False, True, False]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("hosts://node[01-03,07],login2:7000", ["node01", "node02", "node03", "node07", "login2"]),
        ("hosts://n[1-2]m[3-4]", ["n1m3", "n1m4", "n2m3", "n2m4"]),
        ("dns://a.b.c:80", ["a.b.c"]),
        ("http://[::1]:80,https://y,dns+https://z:3", ["::1", "y", "z"]),
    ],
)
def test_addresses(text: str, hosts: list[str]) -> None:
    assert [host for one in parse_addresses(text) for host in one.hosts] == hosts


@pytest.mark.parametrize(
    "text",
    ["", "node1", "ftp://x", "http://x/y", "http://x:99999", "http://", "hosts://a[1-", "hosts://a[2-1]",
     "hosts://a,,b", "hosts://a[1-999999999]", "http+https://x", "http://u:p@x", "hosts://a[x]"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(fastload.OptionError, match=r"peers|hosts"):
        fastload.peers(text)


def test_the_programs_of_the_page_run(
    saved: Path, state: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model, stage_and_serve = re.findall(r"^```python\n(.*?)^```$", page("docs/peers.md"), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("word")
    model = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with served(saved, token_file="token") as server:
        monkeypatch.setenv("FASTLOAD_PEERS_TOKEN_FILE", "token")
        port = server.url.rpartition(":")[2]
        here = {
            '"http://host1:7070", "hosts://node[01-08]:7070"': f'"{server.url}", "hosts://127.0.0.[1-2]:{port}"',
            "dns://llama.default.svc:7070": f"dns://localhost:{port}",
            "port=7070": "port=0",
            "s3://bucket/llama": f"far://{saved}",
            "/local/llama": str(tmp_path / "copy"),
        }
        for written, replacement in here.items():
            assert written in load_model + stage_and_serve
            load_model, stage_and_serve = (
                code.replace(written, replacement) for code in (load_model, stage_and_serve)
            )
        names: dict[str, Any] = {"model": model}
        exec(load_model, names)
        assert_equal(model, state)
        for tensor in model.values():
            tensor.zero_()
        headers = {"default_headers": {"Authorization": "Bearer word"}}  # as any client sends the token
        names["serve_requests"] = lambda: assert_equal(
            fastload.load(f"{names['server'].url}/copy", storage_options=headers), state
        )
        exec(stage_and_serve, names)
    assert_equal(model, state)
    assert names["report"].bytes_supplied == fastload.inspect(saved).nbytes


def test_a_watch_takes_versions_and_deltas_from_a_server(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    """The engine has no other way to the root of the trainer."""
    root = tmp_path / "run"
    fastload.save(state, root / "step_00000001")
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with served(root) as server, fastload.watch(server.url, poll_s=0.05, timeout_s=60) as versions:
        for step in (1, 2, 3):
            if step > 1:
                state["t0"][step] = step
                base = root / f"step_{step - 1:08}"
                options = fastload.SaveOptions(base=base)
                fastload.save(state, root / f"step_{step:08}", options=options)
            version = next(versions)
            version.load(into=into)
            assert (version.step, versions.version) == (step, step)
            assert_equal(into, state)
            assert version.checkpoint.report is not None
            if step > 1:
                assert version.checkpoint.report.bytes_read < 10_000


def test_a_server_of_another_kind_has_no_listing(saved: Path) -> None:
    with faulty_peer(saved, "page") as peer, pytest.raises(fastload.StorageError, match="no listing"):
        next(fastload.watch(peer.url, poll_s=0.05, timeout_s=60))


@pytest.mark.parametrize("seed", [3, 9, 12, 17, 19])
def test_draws(seed: int, tmp_path: Path) -> None:
    """A few of those of scripts/peer_draws.py."""
    print(run_draw(seed, tmp_path, make_checkpoint(tmp_path)))


VERSIONS, LATE, DYING = 20, 10, 12  # the version at which an engine comes, and one at which another dies


def state_at(step: int) -> dict[str, torch.Tensor]:
    """The state of a step: in each, other tenths of the elements of the first one are changed."""
    state = {f"t{number}": torch.arange(1_000_000, dtype=torch.float32) + number for number in range(4)}
    for before in range(2, step + 1):
        generator = torch.Generator().manual_seed(before)
        places = torch.randint(1_000_000, (100_000,), generator=generator)
        for tensor in state.values():
            tensor[places] = float(before)
    return state


@pytest.mark.slow  # a watch of one engine is tested above
@ranks(5, dies={4: signal.SIGKILL}, deadline_s=400)
def test_a_trainer_serves_its_versions_to_engines_of_other_jobs(
    rank: int, world: int, tmp_path: Path
) -> None:
    """Rank 0 trains and serves. The others are jobs of their own, which see its server only."""
    root, acknowledged, url_file = tmp_path / "run", tmp_path / "loaded", tmp_path / "url"
    if rank == 0:
        acknowledged.mkdir()
        train(root, acknowledged, url_file)
        return
    while not (acknowledged / (str(LATE - 1) if rank == 3 else "")).exists() or not url_file.exists():
        time.sleep(0.05)
    group = _alone(rank, world)
    into = {name: torch.zeros_like(tensor) for name, tensor in state_at(1).items()}
    after = LATE - 1 if rank == 3 else None
    options = fastload.LoadOptions(timeout_s=200)
    with fastload.watch(
        url_file.read_text(), after=after, newest_only=False, poll_s=0.2, timeout_s=200,
        process_group=group, options=options,
    ) as versions:  # fmt: skip
        for version in versions:
            version.load(into=into)
            assert_equal(into, state_at(version.step))
            (acknowledged / f"{version.step}-{rank}").touch()
            if rank == 4 and version.step == DYING:
                os.kill(os.getpid(), signal.SIGKILL)
            if version.step == VERSIONS:
                return


def _alone(rank: int, world: int) -> Any:
    """A group of this rank alone, which no other rank takes part in making."""
    return dist.new_group([rank], use_local_synchronization=True)


def train(root: Path, acknowledged: Path, url_file: Path) -> None:
    """Saves one version after the other, as soon as all engines have the last one."""
    root.mkdir()
    with fastload.serve(root) as server:
        (url_file.parent / "new").write_text(server.url)
        (url_file.parent / "new").rename(url_file)
        group = _alone(0, 5)
        sent = most = 0.0  # in all steps, since what goes at the end of one may count in the next
        for step in range(1, VERSIONS + 1):
            before = sent_by(server)
            base = root / f"step_{step - 1:08}" if step > 1 else None
            options = fastload.SaveOptions(base=base)
            fastload.save(state_at(step), root / f"step_{step:08}", process_group=group, options=options)
            engines = [n for n in (1, 2, 3, 4) if (n != 3 or step >= LATE) and (n != 4 or step <= DYING)]
            while not all((acknowledged / f"{step}-{engine}").exists() for engine in engines):
                time.sleep(0.02)
            nbytes = sum(path.stat().st_size for path in (root / f"step_{step:08}").iterdir())
            if step not in (1, LATE):  # where bases are read, too
                opening = step * (64 << 10)  # the headers of its bases
                sent += sent_by(server) - before
                most += len(engines) * (1.2 * nbytes + opening)
                assert sent <= most
            (acknowledged / str(step)).touch()


def sent_by(server: fastload.Server) -> int:
    with urllib.request.urlopen(f"{server.url}/", timeout=60) as response:
        sent: int = json.load(response)["load"]["bytes_sent"]
    return sent
