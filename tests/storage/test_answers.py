"""What stores and servers answer when they refuse, and when they send more than was asked for."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.errors import StorageError
from fastload.formats.names import NAMES
from fastload.storage import open_storage
from tests.storage.s3_server import BUCKET


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
