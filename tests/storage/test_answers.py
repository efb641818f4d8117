"""What stores and servers answer when they refuse, and when they send more than was asked for."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.errors import CheckpointNotFound, StorageError
from fastload.formats.names import NAMES
from fastload.storage import Storage, locate, open_storage
from tests.checkpoints import write_sharded
from tests.dist.flaky_server import Handler, Server
from tests.dist.flaky_server import serving as serving_until_the_end
from tests.storage.gateway import Answer, Gateway, Request, serving_gateway
from tests.storage.s3_server import BUCKET, client_of


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(10)


@pytest.mark.slow(but=["s3"])
@pytest.mark.parametrize("server", ["s3", "seaweed"])
def test_what_an_object_store_says_is_shown(server: str, request: pytest.FixtureRequest) -> None:
    options = request.getfixturevalue(server)
    stranger, forger = {**options, "access_key_id": "nobody"}, {**options, "secret_access_key": "none"}
    cases = [
        ("nobucket", options, "404 Not Found: NoSuchBucket: The specified bucket does not exist"),
        (BUCKET, stranger, "403 Forbidden: InvalidAccessKeyId: The "),
        (
            BUCKET,
            forger,
            "403 Forbidden: SignatureDoesNotMatch: The request signature we calculated does not",
        ),
    ]
    for bucket, options, says in cases:
        url = f"s3://{bucket}/{uuid.uuid4().hex}"
        for call in (lambda: fastload.load(url, storage_options=options),  # noqa: B023  (called here)
                     lambda: fastload.save({"a": 1}, url, storage_options=options)):  # noqa: B023  # fmt: skip
            with pytest.raises(StorageError) as raised:
                call()
            assert says in str(raised.value)
            assert "<" not in str(raised.value)


def test_a_page_that_a_server_shows_is_left_out() -> None:
    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        def do_GET(self) -> None:
            self.send_error(403)

    with serving(Refuses) as url:
        storage = open_storage(f"{url}/a.safetensors", NAMES, {})
        with pytest.raises(StorageError, match=r"non-2xx status code: 403 Forbidden$"):
            storage.read_into("", 0, [memoryview(bytearray(8))])
        storage.close()


def test_servers_without_ranges_are_told(s3: dict[str, Any], tmp_path: Path) -> None:
    """rclone sends what was asked for, Python's server all of the file; neither says that it is a part."""
    bucket = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    fastload.save({"a": torch.arange(10)}, f"{bucket}/a", storage_options=s3)
    fastload.save({"a": torch.arange(10)}, tmp_path / "a")
    with serving(partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as server:
        for url, options in ((bucket, s3), (server, {})):
            with pytest.raises(StorageError, match=r"answers ranges with status 200, not 206") as raised:
                fastload.load(f"{url}/a", storage_options=options)
            assert not raised.value.transient
            assert raised.value.attempts == 1


@pytest.mark.slow(but=["403--", "409-", "503-Range", "429"])
@pytest.mark.parametrize(
    ("status", "says", "transient"),
    [
        (400, "", False),
        (401, "", False),
        (403, "", False),
        (408, "", True),
        (409, "", True),  # another conditional request is under way
        (409, "status code: 412", True),
        (412, "", False),
        (416, "", False),
        (429, "", True),
        (500, "", True),
        (503, "", True),
        (503, "the server behind this one: status code: 403", True),
        (503, "Range request not supported", True),
    ],
)
def test_which_answers_are_worth_another_try(status: int, says: str, transient: bool) -> None:
    """By what the server answers with, not by what it says."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(says)))
            self.end_headers()
            self.wfile.write(says.encode())

    with serving(Answers) as url:
        storages = [
            open_storage(f"{url}/a.safetensors", NAMES, {}),
            open_storage(
                "s3://bucket/a.safetensors",
                NAMES,
                {"endpoint": url, "access_key_id": "a", "secret_access_key": "b"},
            ),
        ]
        for storage in storages:
            with pytest.raises(StorageError, match=f"status code: {status}") as raised:
                storage.read_into("", 0, [memoryview(bytearray(8))])
            assert raised.value.transient is transient
            assert "answers ranges" not in str(raised.value)
            storage.close()


# Ranges, methods and versions that servers treat in their own way


class Files(Server):
    """Files by path, each in one of the ways that servers have.

    Attributes:
        files: Contents by path.
        ranges: Which ranges it answers with 206: ``all``, ``parts`` (not those that cover a file), ``none``.
        refusal: The status of its responses to HEAD; 0 to answer them.
        log: (method, path, range) of each request.
        sent_bytes: Sum of all bodies, as far as clients took them.
    """

    def __init__(self) -> None:
        super().__init__(_FilesHandler)
        self.files: dict[str, bytes] = {}
        self.ranges, self.refusal = "all", 0
        self.log: list[tuple[str, str, str]] = []
        self.sent_bytes = 0


class _FilesHandler(Handler):
    server: Files

    def do_HEAD(self) -> None:
        self._answer(self.server.refusal)

    def do_GET(self) -> None:
        self._answer(0)

    def _answer(self, refusal: int) -> None:
        path, wanted = self.path.partition("?")[0].lstrip("/"), self.headers.get("Range", "")
        self.server.log.append((self.command, path, wanted))
        content = self.server.files.get(path)
        if refusal or content is None:
            return self._send(refusal or 404, b"", {})
        headers = {"ETag": '"v1"', "Accept-Ranges": "bytes"}
        if not wanted or self.server.ranges == "none":
            return self._send(200, content, headers)
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        if first >= len(content):
            return self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        part = content[first : last + 1]
        if self.server.ranges == "parts" and len(part) == len(content):
            return self._send(200, content, headers)
        span = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        return self._send(206, part, {**headers, "Content-Range": span})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        for begin in range(0, len(body) if self.command == "GET" else 0, 1 << 16):
            part = body[begin : begin + (1 << 16)]
            self.wfile.write(part)
            self.server.sent_bytes += len(part)


@pytest.fixture
def files() -> Iterator[Files]:
    with serving_until_the_end(Files()) as server:
        yield server


def storages_of(server: Files, path: str) -> list[Storage]:
    """The file as one of HTTP, and as an object of S3."""
    keys = {"endpoint": server.url, "access_key_id": "a", "secret_access_key": "b"}
    return [open_storage(f"{server.url}/b/{path}", NAMES), open_storage(f"s3://b/{path}", NAMES, keys)]


def read(storage: Storage, name: str, offset: int, nbytes: int, version: str = "") -> bytes:
    buffer = bytearray(nbytes)
    storage.read_into(name, offset, [memoryview(buffer)], version)
    return bytes(buffer)


def test_a_range_of_a_whole_file_may_be_answered_with_the_file(files: Files, tmp_path: Path) -> None:
    """RFC 9110 allows it, and Tornado, Jupyter and rclone do it: a file of torch.save, and an index."""
    files.ranges = "parts"
    torch.save({"a": torch.arange(100), "b": "text"}, tmp_path / "small.pt")
    write_sharded(tmp_path, {"x.safetensors": [("x", "U8", (9,))]}, index=True)
    files.files = {f"m/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    assert fastload.load(f"{files.url}/m/small.pt")["a"].tolist() == list(range(100))
    assert [*fastload.load(f"{files.url}/m/x.safetensors")] == ["x"]
    assert [*fastload.load(f"{files.url}/m")] == ["x"]
    files.files["b/a.safetensors"] = b"0123456789"
    for storage in storages_of(files, "a.safetensors"):
        assert read(storage, "", 0, 10) == b"0123456789"
        assert read(storage, "", 0, 4) == b"0123"
        with pytest.raises(StorageError, match=r"got 10 of 11 bytes; the file has 10"):
            read(storage, "", 0, 11)
        with pytest.raises(StorageError, match="replaced"):
            read(storage, "", 0, 10, "v0")
        storage.close()


def test_a_long_body_that_does_not_end_is_left() -> None:
    nbytes = 4 << 20

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes 0-{nbytes - 1}/{nbytes}")
            self.send_header("ETag", '"v1"')
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.send_header("Content-Length", str(1 << 40))
            self.end_headers()
            with suppress(OSError):  # once the client is gone
                while True:
                    self.wfile.write(bytes(1 << 16))

    with (
        serving(Endless) as url,
        closing(open_storage(f"{url}/a.safetensors", NAMES)) as storage,
        pytest.raises(StorageError, match=rf"got \d+ of {nbytes} bytes"),
    ):
        read(storage, "", 0, nbytes)


def test_a_server_without_ranges_is_told_before_it_sends_a_large_file(files: Files) -> None:
    files.ranges, large = "none", 1 << 28
    files.files["b/a.safetensors"] = bytes(large)
    for storage in storages_of(files, "a.safetensors"):
        for offset in (0, 5):
            with pytest.raises(StorageError, match=r"answers ranges with status 200, not 206") as raised:
                read(storage, "", offset, 8)
            assert not raised.value.transient
        storage.close()
    assert files.sent_bytes < large, "the bodies are left alone, but for what the sockets hold"


@pytest.mark.parametrize("status", [403, 405, 501])
def test_where_only_get_is_allowed_sizes_come_from_it(files: Files, status: int, tmp_path: Path) -> None:
    """URLs that are signed for GET, of any store; and programs whose routes know nothing else."""
    files.refusal = status
    options = fastload.SaveOptions(max_shard_bytes=80)
    fastload.save({"a": torch.arange(10), "b": torch.arange(9)}, tmp_path / "saved", options=options)
    write_sharded(tmp_path, {"x.safetensors": [("x", "U8", (9,))]}, index=False)
    files.files = {f"saved/{path.name}": path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    files.files |= {"saved/1.bin": b"1", "saved/2.bin": b"2"}
    files.files |= {"x.safetensors": (tmp_path / "x.safetensors").read_bytes(), "b/0.safetensors": b""}
    assert fastload.load(f"{files.url}/saved")["a"].tolist() == list(range(10))
    files.log.clear()
    with closing(open_storage(locate(f"{files.url}/saved"), NAMES)) as opened:
        assert None not in [opened.stat(f"{number}.bin") for number in (1, 2)]
    assert [method for method, *_ in files.log] == ["HEAD", "GET", "GET"], "it is not asked again"
    signed = (
        "x-oss-signature=0123456789abcdef", "q-ak=k&q-signature=0123456789abcdef",
        "X-Tos-Signature=0123456789abcdef", "X-Amz-Signature=0123456789abcdef", "token=of-no-known-kind",
    )  # fmt: skip
    for query in ("", *signed):
        assert [*fastload.load(f"{files.url}/x.safetensors?{query}")] == ["x"]
    with pytest.raises(CheckpointNotFound):
        fastload.load(f"{files.url}/y.safetensors")
    for storage in storages_of(files, "0.safetensors"):
        about = storage.stat("")
        assert about is not None
        assert (about.nbytes, about.version) == (0, "v1")
        storage.close()


def without_tags(request: Request, answer: Answer) -> Answer:
    body = re.sub(b"<ETag>.*?</ETag>", b"", answer.body) if "list-type" in request.path else answer.body
    return Answer(answer.status, answer.headers, body)


def with_other_tags(request: Request, answer: Answer) -> Answer:
    is_list = "list-type" in request.path
    body = re.sub(b'(&#34;|&quot;|")?</ETag>', rb"-1\1</ETag>", answer.body) if is_list else answer.body
    return Answer(answer.status, answer.headers, body)


def without_any_tags(request: Request, answer: Answer) -> Answer:
    """Nor fractions of seconds, but in listings."""
    headers = [pair for pair in answer.headers if pair[0].lower() != "etag"]
    return Answer(answer.status, headers, without_tags(request, answer).body)


@pytest.fixture
def gateway(seaweed: dict[str, Any]) -> Iterator[Gateway]:
    with serving_gateway(seaweed["endpoint"]) as gateway:
        yield gateway


@pytest.mark.slow(but=["with_other_tags", "without_any"])
@pytest.mark.parametrize("change", [without_tags, with_other_tags, without_any_tags])
def test_versions_in_listings_that_objects_do_not_have(
    gateway: Gateway, seaweed: dict[str, Any], change: Any, tmp_path: Path
) -> None:
    """A gateway's own, or none: what is there loads, and what changes is still noticed."""
    gateway.change = change
    options, key = {**seaweed, "endpoint": gateway.url}, uuid.uuid4().hex
    url = f"s3://{BUCKET}/{key}/saved"
    fastload.save({"a": torch.arange(5000), "b": "text"}, url, storage_options=seaweed)
    found = fastload.load(url, storage_options=options)
    assert (found["a"].tolist(), found["b"]) == (list(range(5000)), "text")

    client = client_of(seaweed)
    with closing(client), ExitStack() as stack:

        def put(content: bytes) -> None:
            client.put_object(Bucket=BUCKET, Key=f"{key}/model/x.bin", Body=content)

        put(b"0123456789")
        url = f"s3://{BUCKET}/{key}/model"
        first, second, third = (
            stack.enter_context(closing(open_storage(url, NAMES, options))) for _ in range(3)
        )
        assert first.list() == ["x.bin"]
        about = first.stat("x.bin")
        assert about is not None
        listed = open_storage(f"s3://{BUCKET}/{key}", NAMES, options).folders()["model"].files["x.bin"]
        for version in (about.version, listed.version):
            assert read(first, "x.bin", 0, 10, version) == b"0123456789"
            assert read(second, "x.bin", 2, 3, version) == b"234"
        gateway.log.clear()
        assert read(second, "x.bin", 5, 3, about.version) == b"567"
        assert [request.method for request in gateway.log] == ["GET"], "what was found out is known"
        assert first.read_all("x.bin", listed) == b"0123456789"
        if change is not with_other_tags:
            time.sleep(1.1)  # all that is left to tell it by
        put(b"9876543210")
        for storage in (first, second, third):  # one that has read it, another rank's, and one that begins
            with pytest.raises(StorageError, match="replaced"):
                read(storage, "x.bin", 0, 10, about.version)
            with pytest.raises(StorageError, match="replaced"):
                read(storage, "x.bin", 0, 10, listed.version)


def test_a_listing_from_a_cache_does_not_hide_that_an_object_was_replaced(
    gateway: Gateway, seaweed: dict[str, Any]
) -> None:
    options, key = {**seaweed, "endpoint": gateway.url}, f"{uuid.uuid4().hex}/x.bin"
    cached: list[Answer] = []

    def cache(request: Request) -> Answer | None:
        return cached[0] if cached and "list-type" in request.path else None

    def keep(request: Request, answer: Answer) -> Answer:
        if "list-type" in request.path:
            cached[:] = [answer]
        return answer

    gateway.answer, gateway.change = cache, keep
    with closing(client_of(seaweed)) as client:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"0123456789")
        storage = open_storage(f"s3://{BUCKET}/{key.partition('/')[0]}", NAMES, options)
        storage.list()
        about = storage.stat("x.bin")
        assert about is not None
        time.sleep(1.1)  # stores tell times in seconds
        client.put_object(Bucket=BUCKET, Key=key, Body=b"9876543210")
        with pytest.raises(StorageError, match="replaced"):
            read(storage, "x.bin", 0, 10, about.version)
        storage.close()
