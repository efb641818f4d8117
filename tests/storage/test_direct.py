"""Long bodies that are received straight into memory, and those that obstore has to receive instead."""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from fastload.errors import StorageError
from fastload.formats.names import NAMES
from fastload.options import Patience
from fastload.storage import Storage, open_storage
from fastload.storage.http import HttpConnection, HttpFault
from fastload.storage.retry import PatientStorage
from tests.dist.flaky_server import FlakyServer, Server, serve, serving
from tests.storage.gateway import Answer, Gateway, Request, make_authority, serving_gateway

FILE = "a.safetensors"
DATA = random.Random(1).randbytes(3 << 20)
BEGIN, NBYTES = 1000, 1 << 20
AGENT = "fastload"
OBSTORE_ONLY = {"pool_idle_timeout": "30s"}
NOBODY = "http://127.0.0.1:9"


def part(request: Request, **headers: str) -> Answer:
    """Answers with the range that a request asks for."""
    wanted = request.headers.get("range", f"bytes=0-{len(DATA) - 1}")
    begin, end = map(int, wanted.removeprefix("bytes=").split("-"))
    body = DATA[begin : end + 1]
    usual = {
        "ETag": '"v1"',
        "Last-Modified": "Sat, 28 Nov 2026 10:00:00 GMT",
        "Content-Range": f"bytes {begin}-{begin + len(body) - 1}/{len(DATA)}",
    }
    given = {name.replace("_", "-"): text for name, text in headers.items()}
    headers_of_it = [(name, text) for name, text in {**usual, **given}.items() if text]
    if request.method == "HEAD":
        return Answer(200, [*headers_of_it, ("Content-Length", str(len(DATA)))])
    return Answer(206, headers_of_it, body)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving_gateway(NOBODY) as gateway:
        gateway.answer = part
        yield gateway


def opened(url: str, **options: Any) -> Storage:
    return open_storage(f"{url}/{FILE}", NAMES, options, patience=Patience(0, 20, 8))


def outcome(storage: Storage, begin: int = BEGIN, nbytes: int = NBYTES) -> bytes | str:
    """Returns what a read delivers into two buffers, or the text of its error."""
    data = bytearray(nbytes)
    middle = nbytes // 3
    try:
        storage.read_into("", begin, [memoryview(data)[:middle], memoryview(data)[middle:]])
    except StorageError as error:
        return re.sub(r" in [\d.]+.?s", "", str(error))
    return bytes(data)


def clients(gateway: Gateway) -> list[str]:
    """Returns who made each request."""
    agents = [request.headers["user-agent"] for request in gateway.log]
    return ["direct" if agent == AGENT else "obstore" for agent in agents]


def test_long_ranges_come_over_one_connection(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = []
    accept = gateway.get_request
    monkeypatch.setattr(gateway, "get_request", lambda: connections.append(accept()) or connections[-1])
    with closing(opened(gateway.url)) as storage:
        for begin in (BEGIN, 5, 2 * NBYTES):
            assert outcome(storage, begin) == DATA[begin : begin + NBYTES]
        assert clients(gateway) == ["direct"] * 3
        assert len(connections) == 1
        assert outcome(storage, nbytes=1000) == DATA[BEGIN : BEGIN + 1000]
        assert clients(gateway)[3:] == ["obstore"], "short ranges"
        assert storage.bytes_read == 3 * NBYTES + 1000
        assert storage.first_byte_s > 0


def moved(gateway: Gateway) -> Callable[[Request], Answer]:
    """Redirects all requests, except those that have been."""
    there = [("Location", f"{gateway.url}/elsewhere/{FILE}")]
    return lambda request: part(request) if "elsewhere" in request.path else Answer(302, there)


def shortened(request: Request) -> Answer:
    answer = part(request)
    return Answer(206, answer.headers, answer.body[:-1])


ANSWERS: dict[str, Callable[[Request], Answer]] = {
    "the whole file": lambda request: Answer(200, [("ETag", '"v1"')], DATA),
    "another range": lambda request: part(request, Content_Range=f"bytes 0-{NBYTES - 1}/{len(DATA)}"),
    "no size": lambda request: part(request, Content_Range=f"bytes {BEGIN}-{BEGIN + NBYTES - 1}/*"),
    "an encoding": lambda request: part(request, Content_Encoding="gzip"),
    "no version": lambda request: part(request, ETag="", Last_Modified=""),
    "a malformed date": lambda request: part(request, Last_Modified="yesterday"),
    "less": shortened,
    "a page": lambda request: Answer(403, [("Content-Type", "text/html")], b"<html>no</html>"),
    "not found": lambda request: Answer(404),
    "no such range": lambda request: Answer(416),
    "busy": lambda request: Answer(503),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_other_answers_are_left_to_obstore(gateway: Gateway, name: str) -> None:
    gateway.answer = ANSWERS[name]
    with closing(opened(gateway.url, **OBSTORE_ONLY)) as storage:
        expected = outcome(storage)
    assert clients(gateway) == ["obstore"] * len(gateway.log)
    gateway.log.clear()
    with closing(opened(gateway.url)) as storage:
        assert outcome(storage) == expected
        assert clients(gateway)[0] == "direct"
        assert set(clients(gateway)[1:]) == {"obstore"}
        gateway.log.clear()
        gateway.answer = part
        assert outcome(storage) == DATA[BEGIN : BEGIN + NBYTES]
        assert clients(gateway) == ["direct" if name == "busy" else "obstore"], "from then on"


@pytest.mark.parametrize("name", ["the whole file", "a page", "less"])
def test_one_other_answer_changes_nothing_later(gateway: Gateway, name: str) -> None:
    with closing(opened(gateway.url)) as storage:
        outcome(storage)
        gateway.answer = ANSWERS[name]
        assert isinstance(outcome(storage), str), "an error"
        gateway.answer = part
        gateway.log.clear()
        assert outcome(storage) == DATA[BEGIN : BEGIN + NBYTES]
        assert clients(gateway) == ["direct"]


def test_an_object_that_is_never_received_directly_is_left_to_obstore(gateway: Gateway) -> None:
    with closing(opened(gateway.url)) as storage:
        outcome(storage)
        gateway.answer = moved(gateway)
        for _ in range(3):
            assert outcome(storage) == DATA[BEGIN : BEGIN + NBYTES]
        gateway.log.clear()
        assert outcome(storage) == DATA[BEGIN : BEGIN + NBYTES]
        assert set(clients(gateway)) == {"obstore"}


def test_redirects_are_followed(gateway: Gateway) -> None:
    gateway.answer = moved(gateway)
    with closing(opened(gateway.url)) as storage:
        assert outcome(storage) == DATA[BEGIN : BEGIN + NBYTES]
    assert clients(gateway) == ["direct", "obstore", "obstore"]


def test_a_version_is_the_same_for_both(gateway: Gateway) -> None:
    for headers in ({}, {"ETag": ""}, {"ETag": 'W/"weak"', "Last_Modified": ""}):
        gateway.answer = lambda request, headers=headers: part(request, **headers)  # type: ignore[misc]
        with closing(opened(gateway.url)) as storage:
            about = storage.stat("")
            assert about is not None
            storage.read_into("", BEGIN, [memoryview(bytearray(NBYTES))], about.version)
        assert clients(gateway)[-1] == "direct"
        gateway.answer = lambda request: part(request, ETag='"v2"')
        with closing(opened(gateway.url)) as storage, pytest.raises(StorageError, match="replaced"):
            storage.read_into("", BEGIN, [memoryview(bytearray(NBYTES))], about.version)


# Settings


def test_headers_of_the_user_are_sent(gateway: Gateway) -> None:
    headers = {"X-Team": "seven", "user-agent": "ours"}
    with closing(opened(gateway.url, default_headers=headers)) as storage:
        assert outcome(storage) == DATA[BEGIN : BEGIN + NBYTES]
    (request,) = gateway.log
    assert (request.headers["x-team"], request.headers["user-agent"]) == ("seven", "ours")
    with closing(opened(gateway.url.replace("//", "//me:pass@"))) as storage:
        assert outcome(storage) == DATA[BEGIN : BEGIN + NBYTES]
    assert gateway.log[-1].headers["authorization"] == "Basic bWU6cGFzcw=="
    assert clients(gateway)[-1] == "direct"


@pytest.mark.parametrize(
    "options",
    [
        OBSTORE_ONLY,
        {"timeout": "20s"},
        {"default_headers": {"X-Team": b"seven"}},
        {"proxy_url": "{url}"},
    ],
    ids=str,
)
def test_options_of_obstore_only(gateway: Gateway, options: dict[str, Any]) -> None:
    filled = {name: gateway.url if value == "{url}" else value for name, value in options.items()}
    with closing(opened(gateway.url, **filled)) as storage:
        assert outcome(storage) == DATA[BEGIN : BEGIN + NBYTES]
    assert clients(gateway) == ["obstore"]


def test_a_proxy_of_the_environment_gets_all_requests(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", gateway.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with closing(opened("http://somewhere.example")) as storage:
        assert outcome(storage) == DATA[BEGIN : BEGIN + NBYTES]
    with closing(opened(gateway.url)) as storage:
        assert outcome(storage) == DATA[BEGIN : BEGIN + NBYTES]
    assert clients(gateway) == ["obstore", "direct"]
    assert [request.host for request in gateway.log] == ["somewhere.example", gateway.url.partition("//")[2]]


def test_tls(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    with serving_gateway(NOBODY, authority.context) as gateway:
        gateway.answer = part
        for options in (
            {"root_certificate": authority.pem},
            {"root_certificate": authority.pem.encode()},
            {"allow_invalid_certificates": True},
        ):
            with closing(opened(gateway.url, **options)) as storage:
                assert outcome(storage) == DATA[BEGIN : BEGIN + NBYTES]
        assert clients(gateway) == ["direct"] * 3
        with closing(opened(gateway.url)) as storage:
            assert "UnknownIssuer" in str(outcome(storage))
        assert len(gateway.log) == 3


# Faults of the network, after a body has come


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlakyServer]:
    folder = tmp_path_factory.mktemp("served")
    (folder / FILE).write_bytes(DATA)
    with serve(folder) as server:
        yield server


@pytest.mark.slow(but=["reset", "trickle", "503"])
@pytest.mark.parametrize("fault", ["reset", "reset-before", "short", "stall", "trickle", "429", "503"])
def test_what_passes_is_tried_again(server: FlakyServer, fault: str) -> None:
    patience = Patience(3, 30, 2)
    storage = PatientStorage(
        open_storage(f"{server.url}/{FILE}", NAMES, {}, patience=Patience(0, 30, 2)), patience
    )
    with closing(storage):
        assert outcome(storage) == DATA[BEGIN : BEGIN + NBYTES]
        server.log.clear()
        server.faults = [fault, fault]
        assert outcome(storage) == DATA[BEGIN : BEGIN + NBYTES]
    assert server.faults == []
    # An idle connection may have ended meanwhile, so one that ends before an answer is replaced at once.
    assert storage.num_retries == (1 if fault == "reset-before" else 2)
    assert len(server.log) == 3


def test_a_wait_ends_with_the_last_byte_however_few_are_left() -> None:
    sizes = (1, 700_000, 5, 1_000_000, 3, 100_000)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = threading.Thread(target=_send_in_pieces, args=(listener, sizes))
        sender.start()
        connection = HttpConnection(listener.getsockname(), "here", None, 20.0)
        with closing(connection):
            for nbytes in (sum(sizes), 7):
                data = bytearray(nbytes)
                assert connection.get("/", {}, 20.0).nbytes == nbytes
                connection.receive([memoryview(data)[: nbytes // 2], memoryview(data)[nbytes // 2 :]])
                assert bytes(data) == DATA[:nbytes]
            assert connection.is_open()
            connection.get("/", {}, 20.0)
            with pytest.raises(HttpFault, match="before the last byte"):
                connection.receive([memoryview(bytearray(2_000_000))])
        sender.join(20)
        assert not sender.is_alive()


def _send_in_pieces(listener: socket.socket, sizes: Sequence[int]) -> None:
    """Answers with a body in pieces, each of which has come before the next; with 7 bytes; and with less."""
    peer, _ = listener.accept()
    with peer:
        peer.recv(1000)
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % sum(sizes))
        at = 0
        for nbytes in sizes:
            time.sleep(0.05)
            peer.sendall(DATA[at : at + nbytes])
            at += nbytes
        peer.recv(1000)
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n" + DATA[:7])
        peer.recv(1000)
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n" + DATA[:600_000])


class _ClosesLater(BaseHTTPRequestHandler):
    """A server of HTTP/1.0, which keeps no connection, and closes each a moment after the body."""

    def do_GET(self) -> None:
        begin, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.send_response(206)
        self.send_header("ETag", '"v1"')
        self.send_header("Content-Length", str(end + 1 - begin))
        self.send_header("Content-Range", f"bytes {begin}-{end}/{len(DATA)}")
        self.end_headers()
        self.wfile.write(DATA[begin : end + 1])
        self.wfile.flush()
        time.sleep(0.05)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_connection_that_the_server_does_not_keep_is_not_used_again() -> None:
    with serving(Server(_ClosesLater)) as server:
        storage = PatientStorage(
            open_storage(f"{server.url}/{FILE}", NAMES, {}, patience=Patience(0, 30, 10)), Patience(3, 30, 10)
        )
        with closing(storage):
            for begin in range(5):
                assert outcome(storage, begin) == DATA[begin : begin + NBYTES]
            assert storage.num_retries == 0
