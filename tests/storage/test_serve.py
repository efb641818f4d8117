"""`fastload.serve`: what clients get, what they are refused, and what the server bears."""

from __future__ import annotations

import asyncio
import errno
import gc
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import fastload
from fastload import OptionError
from fastload.ext.serve import checkpoints
from fastload.ext.serve import server as serving
from fastload.ext.serve.pace import FIRST_PART_BYTES, next_part
from fastload.ext.serve.process import READS
from fastload.storage.local import LocalStorage
from tests.checkpoints import write_sharded
from tests.storage.s3_server import free_ports

STATE = {"a": torch.arange(300_000, dtype=torch.float32), "b": torch.ones(7)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "step"
    fastload.save(STATE, folder)
    (folder / "secret.txt").write_text("not of the checkpoint")
    (folder.parent / "outside.txt").write_text("not of the checkpoint")
    return folder


@pytest.fixture(scope="module")
def server(saved: Path) -> Iterator[fastload.Server]:
    with fastload.serve(saved) as server:
        yield server


def ask(
    server: fastload.Server, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Returns status, headers and body of one request."""
    parts = urlsplit(server.url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)) as client:
        client.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        response = client.getresponse()
        return response.status, dict(response.headers), response.read()


def test_a_file_and_its_ranges_have_the_digest_of_the_record(saved: Path, server: fastload.Server) -> None:
    expected = (saved / "model.safetensors").read_bytes()
    digest = fastload.inspect(saved).record_digest
    status, headers, body = ask(server, "/model.safetensors")
    assert (status, body, headers["ETag"]) == (200, expected, f'"{digest}"')
    for text, begin, end in (("5-9", 5, 10), ("1000-", 1000, len(expected)), ("-7", -7, len(expected))):
        status, headers, body = ask(server, "/model.safetensors", Range=f"bytes={text}")
        assert (status, body) == (206, expected[begin:end])
        assert headers["Content-Range"].endswith(f"/{len(expected)}")
    status, headers, body = ask(server, "/model.safetensors", "HEAD")
    assert (status, int(headers["Content-Length"]), body) == (200, len(expected), b"")
    assert ask(server, "/model.safetensors", If_Match='"another"')[0] == 412
    assert ask(server, "/model.safetensors", If_Match=f'"another", "{digest}"')[0] == 200
    assert ask(server, "/model.safetensors", If_Range='"another"', Range="bytes=0-4")[0] == 200


def test_the_index_says_what_there_is(saved: Path, server: fastload.Server) -> None:
    status, _, body = ask(server, "/")
    index = json.loads(body)
    assert (status, index["fastload"]) == (200, fastload.__version__)
    (checkpoint,) = index["checkpoints"].values()
    assert checkpoint["digest"] == fastload.inspect(saved).record_digest
    assert checkpoint["files"].keys() == {"model.safetensors", "fastload.json"}
    assert checkpoint["ranges"] is None
    assert index["load"]["requests"] == 1


def test_fastload_loads_from_it(server: fastload.Server) -> None:
    loaded = fastload.load(server.url)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE.items())


@pytest.mark.parametrize(
    "path",
    [
        "/secret.txt",
        "/../outside.txt",
        "/%2e%2e/outside.txt",
        "/..%2foutside.txt",
        "//etc/passwd",
        "/./model.safetensors",
        "/model.safetensors/",
        "/model.safetensors%00",
        "/x/model.safetensors",
    ],
)
def test_nothing_else_is_served(server: fastload.Server, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_it_is_read_only(server: fastload.Server, method: str) -> None:
    status, headers, _ = ask(server, "/model.safetensors", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "text",
    [
        "bytes=9-5",
        "bytes=-",
        "bytes=99999999-",
        "bytes=0-1,3-4",
        "bytes=" + ",".join(f"{n}-{n}" for n in range(0, 1000, 2)),
        f"bytes={'9' * 30}-",
        "bytes=-0",
        "lines=1-2",
        "bytes=0x1-5",
    ],
)
def test_what_is_no_range_of_the_file_is_refused(server: fastload.Server, text: str) -> None:
    status, headers, body = ask(server, "/model.safetensors", Range=text)
    assert status == 416
    assert headers["Content-Range"].startswith("bytes */")
    assert len(body) < 100


def test_a_file_that_was_changed_is_gone(tmp_path: Path) -> None:
    fastload.save(STATE, tmp_path / "step")
    with fastload.serve(tmp_path / "step") as server:
        file = tmp_path / "step" / "model.safetensors"
        data = file.read_bytes()
        file.unlink()
        assert ask(server, "/model.safetensors")[0] == 404
        file.write_bytes(data)
        assert ask(server, "/model.safetensors")[0] == 404
        assert ask(server, "/fastload.json")[0] == 200


def test_a_file_that_cannot_be_opened_now_is_not_gone(
    saved: Path, server: fastload.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def fail(name: Any, *given: Any, **how: Any) -> int:
        if name == "model.safetensors":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(name, *given, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert ask(server, "/model.safetensors")[0] == 503
    assert ask(server, "/model.safetensors")[0] == 200


def test_a_root_that_cannot_be_listed_keeps_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastload.save(STATE, tmp_path / "step_00000001")
    with fastload.serve(tmp_path) as server:
        monkeypatch.setattr(checkpoints, "_FRESH_S", 0.0)
        monkeypatch.setattr(LocalStorage, "folders", raise_storage_error)
        assert ask(server, "/step_00000001/model.safetensors")[0] == 200


def raise_storage_error(*_: Any) -> None:
    raise fastload.StorageError("Permission denied", "/root")


@dataclass(frozen=True)
class Copy:
    """A copy that has the first part of its files."""

    manifest: Any
    folder: str
    names: dict[str, str]
    num_there: list[int]
    path: str = "/copy"

    def has(self, name: str, begin: int, end: int) -> bool:
        return end <= self.num_there[0]

    def ranges(self) -> dict[str, list[tuple[int, int]]]:
        return {name: [(0, self.num_there[0])] for name in self.names}


def test_bytes_that_are_on_their_way_are_waited_for(saved: Path) -> None:
    manifest, there = fastload.inspect(saved), [1000]
    names = {name: name for name in ("model.safetensors", "fastload.json")}
    with fastload.serve(None) as server, futures.ThreadPoolExecutor() as threads:
        server.follow(Copy(manifest, str(saved), names, there))
        reading = READS.noted(manifest.record_digest, "model.safetensors", 900, 3000)
        wanted = partial(ask, server, "/copy/model.safetensors")
        assert wanted(Range="bytes=0-999")[0] == 206
        assert wanted(Range="bytes=0-1999")[0] == 503
        with reading:
            assert wanted(Range="bytes=0-3000")[0] == 503
            assert wanted(Range="bytes=5000-6000")[0] == 503
            response = threads.submit(wanted, Range="bytes=0-2999")
            with pytest.raises(futures.TimeoutError):
                response.result(0.2)
            there[0] = 3000
            assert response.result(20)[0] == 206


def test_the_index_is_made_again_after_a_pause() -> None:
    calls = []

    def describe() -> dict[str, int]:
        time.sleep(0.2)
        calls.append(1)
        return {"a": 1}

    index = serving._Index(describe)
    assert [index.text() for _ in range(5)] == ['{"a": 1}'] * 5
    assert len(calls) == 1


def test_the_checkpoints_of_a_run_are_below_their_names(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    with fastload.serve(root) as server:
        assert server.checkpoints == []
        fastload.save(STATE, root / "step_00000001")
        (root / "other").mkdir()
        while not (names := list(json.loads(ask(server, "/")[2])["checkpoints"])):
            time.sleep(0.1)
        assert names == ["step_00000001"]
        loaded = fastload.load(f"{server.url}/step_00000001")
        assert torch.equal(loaded["a"], STATE["a"])


def test_a_sealed_directory_and_a_sealed_file_are_served_without_what_lies_next_to_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "hub"
    write_sharded(
        folder, {"a.safetensors": [("x", "F32", (100,))], "b.safetensors": [("y", "F32", (3,))]}, index=True
    )
    (folder / "config.json").write_text("{}")
    with pytest.raises(fastload.CheckpointError, match="fastload seal"):
        fastload.serve(folder)
    with fastload.serve(tmp_path) as server:
        assert server.checkpoints == []
        assert "not served, for want of checksums: hub: run `fastload seal`" in caplog.text
    fastload.seal(folder)
    with fastload.serve(folder) as server:
        index = json.loads(ask(server, "/")[2])["checkpoints"][""]
        own = {"a.safetensors", "b.safetensors", "model.safetensors.index.json", "fastload.seal.json"}
        assert index["files"].keys() == own
    torch.save({"x": torch.ones(10)}, tmp_path / "last.pt")
    fastload.seal(tmp_path / "last.pt")
    with fastload.serve(tmp_path / "last.pt") as server:
        assert server.checkpoints == ["last.pt"]
        assert ask(server, "/last.pt")[2] == (tmp_path / "last.pt").read_bytes()
        assert ask(server, "/hub/config.json")[0] == 404
    with fastload.serve(tmp_path) as server:
        assert server.checkpoints == ["hub"]
        assert ask(server, "/hub/a.safetensors")[2] == (folder / "a.safetensors").read_bytes()


def test_a_load_of_a_served_run_is_told_its_checkpoints(tmp_path: Path) -> None:
    for step in (8, 40):
        fastload.save({"a": torch.ones(2)}, tmp_path / f"step_{step:08d}")
    with fastload.serve(tmp_path) as server:
        with pytest.raises(fastload.CheckpointNotFound, match=r"this is a run: .* such as step_00000040"):
            fastload.load(server.url)
        assert fastload.load(f"{server.url}/step_00000008")["a"].tolist() == [1.0, 1.0]


def test_a_token_is_asked_for_everything(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("word\n")
    with fastload.serve(saved, token_file=str(tmp_path / "token")) as server:
        for path in ("/", "/model.safetensors", "/none"):
            for header in ("", "Bearer other", "word", "Basic word", "Bearer wordy", "bearer  word"):
                assert ask(server, path, Authorization=header)[0] == 401
        headers = {"Authorization": "Bearer word"}
        loaded = fastload.load(server.url, storage_options={"default_headers": headers})
        assert torch.equal(loaded["a"], STATE["a"])
        with pytest.raises(fastload.StorageError, match=r"default_headers.*Bearer WORD"):
            fastload.load(server.url)
        assert ask(server, "/", Authorization="Bearer word")[0] == 200
        assert ask(server, "/none", Authorization="Bearer word")[0] == 404


def test_without_a_token_or_certificate_only_loopback_is_listened_at(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="insecure=True"):
        fastload.serve(saved, host="0.0.0.0")
    (tmp_path / "token").write_text("word")
    fastload.serve(saved, host="0.0.0.0", insecure=True).close()
    fastload.serve(saved, host="0.0.0.0", token_file=str(tmp_path / "token")).close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rate": "fast"}, "rate='fast'"),
        ({"rate": 0}, "rate=0"),
        ({"max_connections": 0}, "max_connections=0"),
        ({"token_file": "/nowhere"}, "token_file='/nowhere'"),
        ({"certificate": "/nowhere"}, "certificate='/nowhere'"),
        ({"key": "/nowhere"}, "certificate="),
        ({"host": "no.such.host.invalid"}, "cannot listen"),
        ({"port": 70000}, "no port"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(
    saved: Path, arguments: dict[str, object], text: str
) -> None:
    with pytest.raises(OptionError, match=text):
        fastload.serve(saved, **arguments)  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_named_and_one_that_was_closed_is_free(saved: Path) -> None:
    [port] = free_ports(1)
    with fastload.serve(saved, port=port), pytest.raises(OptionError, match="in use"):
        fastload.serve(saved, port=port)
    fastload.serve(saved, port=port).close()


@pytest.mark.parametrize("turns", range(4))
def test_a_connection_that_comes_at_the_end_is_ended(turns: int) -> None:
    asyncio.run(connect_at_the_end(turns))


async def connect_at_the_end(turns: int) -> None:
    """Connects when a server has been told to end and the loop has made some turns."""
    failures: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, failure: failures.append(failure))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    shelf, until = checkpoints.Shelf(None), asyncio.Event()
    terms = serving.ServeTerms(token=None, rate=None, max_connections=8, ident="end")
    running = loop.create_task(serving.Responder(shelf, terms).run(listener, None, until))
    address = listener.getsockname()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    assert (await reader.read()).endswith(b'"checkpoints": {}}')  # from now on it waits for its end
    writer.close()
    with closing(shelf), socket.socket() as client:
        client.settimeout(20)
        until.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        with suppress(ConnectionError):  # it has ended
            client.connect(address)
        await running
        with suppress(ConnectionError):
            assert client.recv(1) == b""
    gc.collect()
    assert not failures


def test_a_process_that_was_forked_does_not_keep_the_port(saved: Path) -> None:
    [port] = free_ports(1)
    with fastload.serve(saved, port=port):
        began, begins = os.pipe()
        if not (pid := os.fork()):
            os.write(begins, b"x")
            time.sleep(60)
            os._exit(0)
        assert os.read(began, 1) == b"x"  # until it has begun, it has the port
    try:
        fastload.serve(saved, port=port).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_nothing_at_the_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(fastload.CheckpointNotFound):
        fastload.serve(tmp_path / "none")


def test_tls_encrypts_and_names_the_host(saved: Path, tmp_path: Path) -> None:
    certificate = tmp_path / "own.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    paths = ["-keyout", str(certificate), "-out", str(tmp_path / "certificate")]
    subprocess.run([*make.split(), *names, *paths], check=True, capture_output=True)
    with certificate.open("ab") as file:
        file.write((tmp_path / "certificate").read_bytes())
    with fastload.serve(saved, certificate=str(certificate)) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(tmp_path / "certificate"))
        port = urlsplit(server.url).port
        with closing(http.client.HTTPSConnection("localhost", port, context=trusting, timeout=20)) as client:
            client.request("GET", "/model.safetensors")
            assert client.getresponse().read() == (saved / "model.safetensors").read_bytes()
        with closing(http.client.HTTPConnection("localhost", port, timeout=20)) as client:
            client.request("GET", "/")
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                client.getresponse()


def connect(server: fastload.Server) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=20)


def test_slow_connections_make_room_for_others(saved: Path) -> None:
    """Many that never end their request: each new one takes the place of the oldest."""
    with fastload.serve(saved, max_connections=8) as server:
        slow = []
        for _ in range(200):
            slow.append(connect(server))
            slow[-1].sendall(b"GET / HTTP/1.1\r\nX: ")
        assert ask(server, "/model.safetensors")[0] == 200
        index = json.loads(ask(server, "/")[2])
        assert index["load"]["connections"] <= 9
        for number, one in enumerate(slow):
            with closing(one), suppress(ConnectionError):
                assert number >= 100 or one.recv(1) == b""


def test_a_connection_is_ended_where_all_others_are_busy(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fastload.serve(saved, max_connections=1, rate="20KB") as server:
        address = ("127.0.0.1", urlsplit(server.url).port)
        with socket.create_connection(address, timeout=20) as busy:
            busy.sendall(b"GET /model.safetensors HTTP/1.1\r\nHost: here\r\n\r\n")
            assert busy.recv(1) == b"H"
            with socket.create_connection(address, timeout=20) as surplus, suppress(ConnectionError):
                assert surplus.recv(1) == b""
            assert busy.recv(1) == b"T"
    gc.collect()
    assert not caplog.records


def test_a_request_that_takes_too_long_to_come_is_ended(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_IDLE_S", 0.5)
    with fastload.serve(saved) as server, closing(connect(server)) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        assert slow.recv(100) == b""


def test_a_client_that_takes_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_STALL_S", 0.5)
    fastload.save({"a": torch.zeros(16 << 20, dtype=torch.uint8)}, tmp_path / "large")
    with fastload.serve(tmp_path / "large") as server, closing(connect(server)) as slow:
        slow.sendall(b"GET /model.safetensors HTTP/1.1\r\nHost: a\r\n\r\n")
        while json.loads(ask(server, "/")[2])["load"]["connections"] > 1:
            time.sleep(0.05)
        received = 0
        with suppress(ConnectionError):
            while part := slow.recv(1 << 20):
                received += len(part)
        assert received < 16 << 20


@pytest.mark.parametrize("bytes_s", [1e4, 1e6, 1e8, 1e10])
def test_a_client_that_takes_little_does_not_seem_to_stall(bytes_s: float) -> None:
    part_bytes = FIRST_PART_BYTES
    for _ in range(50):
        took_s = part_bytes / bytes_s
        assert took_s < serving._STALL_S
        part_bytes = next_part(part_bytes, took_s)


def test_headers_without_end_are_refused(server: fastload.Server) -> None:
    sent = 0
    with closing(connect(server)) as client, suppress(ConnectionError):
        client.sendall(b"GET / HTTP/1.1\r\n")
        while sent < 100 << 20:
            client.sendall(b"X: " + b"y" * 1000 + b"\r\n")
            sent += 1000
    assert sent < 100 << 20


def test_a_rate_is_kept(saved: Path) -> None:
    """The clock may be slowed by load, so that less is sent; never more."""
    with fastload.serve(saved, rate="1MB") as server:
        began_s = time.monotonic()
        threads = [threading.Thread(target=ask, args=(server, "/model.safetensors")) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sent = 2 * (saved / "model.safetensors").stat().st_size
        assert time.monotonic() - began_s >= 0.95 * sent / 1e6 - 0.2


@pytest.mark.slow
def test_the_command_serves_until_a_signal(saved: Path) -> None:
    command = [sys.executable, "-m", "fastload", "serve", str(saved), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split()[-1]
        try:
            assert line.startswith("serving 1 checkpoint at http://127.0.0.1:")
            assert torch.equal(fastload.load(url)["a"], STATE["a"])
            stat = Path(f"/proc/{process.pid}/task").iterdir()
            nices = {int(task.joinpath("stat").read_text().rpartition(")")[2].split()[16]) for task in stat}
            assert os.nice(0) + 10 in nices
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
