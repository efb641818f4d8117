"""A server with the part of Azure's Blob API that saves and loads need, whose copies take their time."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.dist.flaky_server import Handler, Server, serving

__all__ = ["ACCOUNT", "AzureServer", "azure_server"]

ACCOUNT = {"account_name": "acct", "account_key": base64.b64encode(b"k" * 32).decode()}
_STARTED = "2023-01-01T00:00:00Z"
_STAMP = ("Last-Modified", formatdate(1_700_000_000, usegmt=True))


@dataclass
class Copy:
    """A copy that is pending: its source, and how often its status was asked for."""

    source: str
    num_looks: int = 0


class AzureServer(Server):
    """Blobs by name, without the container.

    Attributes:
        blobs: The contents.
        pending: Copies of tensor files that are not done, by the name of the blob that they make.
        looks: How often the status of a copy is asked for before it ends.
        ends: How copies end: ``success``, ``failed``, ``aborted`` or ``never``.
        has_length: Whether a blob has its length while it is copied.
        behind_s: Seconds that its clock is behind. Signatures of its future are refused, as by Azure.
        signs: Whether it gives keys to sign with to users with a token.
        log: (method, name, query) of each request.
        lost: Copies whose source was deleted before they were done.
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        super().__init__(_AzureHandler)
        self.blobs: dict[str, bytes] = {}
        self.blocks: dict[tuple[str, str], bytes] = {}
        self.pending: dict[str, Copy] = {}
        self.looks, self.ends, self.has_length = 3, "success", True
        self.behind_s = 0.0
        self.log: list[tuple[str, str, dict[str, list[str]]]] = []
        self.headers: list[dict[str, str]] = []
        self.lost: list[str] = []
        self.lock = threading.Lock()
        self.scheme = "https" if context else "http"
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def look(self, name: str) -> tuple[str, str]:
        """Returns the status of a copy and its progress, and ends it if it is time."""
        copy = self.pending[name]
        copy.num_looks += 1
        if copy.num_looks <= self.looks or self.ends == "never":
            return "pending", f"{min(copy.num_looks, self.looks)}/{self.looks + 1}"
        if copy.source not in self.blobs:
            self.lost.append(name)
        self.blobs[name] = self.blobs.get(copy.source, b"") if self.ends == "success" else b""
        if self.ends == "success":
            del self.pending[name]
        return self.ends, ""


class _AzureHandler(Handler):
    server: AzureServer

    def _send(self, status: int, body: bytes = b"", *headers: tuple[str, str]) -> None:
        self.send_response(status)
        names = {name for name, _ in headers}
        for name, value in (*headers, ("x-ms-request-id", "1")):
            self.send_header(name, value)
        if "Content-Length" not in names:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self._now_s() if timestamp is None else timestamp)

    def _now_s(self) -> float:
        return time.time() - self.server.behind_s

    def _tag(self, name: str) -> tuple[str, str]:
        return "ETag", f'"0x{hashlib.md5(self.server.blobs.get(name, b"")).hexdigest()[:16]}"'

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        name = [*unquote(url.path).split("/", 2), ""][2]
        query = parse_qs(url.query, keep_blank_values=True)
        self.server.log.append((self.command, name, query))
        self.server.headers.append({key.lower(): value for key, value in self.headers.items()})
        with self.server.lock:
            self._answer(name, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _answer(self, name: str, query: dict[str, list[str]], body: bytes) -> None:
        server, what = self.server, query.get("comp", [""])[0]
        ways: dict[tuple[str, str], Callable[[], None]] = {
            ("GET", "list"): lambda: self._list(query),
            ("PUT", "block"): lambda: self._put_block(name, query, body),
            ("PUT", "blocklist"): lambda: self._put(name, b"".join(self._blocks(name, body))),
            ("PUT", ""): lambda: self._put(name, body),
            ("POST", "batch"): lambda: self._batch(body),
            ("DELETE", ""): lambda: self._send(202 if server.blobs.pop(name, None) is not None else 404),
            ("GET", ""): lambda: self._get(name),
            ("HEAD", ""): lambda: self._get(name),
        }
        if datetime.fromisoformat(query.get("st", [_STARTED])[0][:19] + "+00:00").timestamp() > self._now_s():
            return self._send(403, b"<?xml version='1.0'?><Error><Code>AuthenticationFailed</Code></Error>")
        if "x-ms-copy-source" in self.headers:
            return self._copy(name)
        return ways.get((self.command, what), lambda: self._send(501))()

    def _copy(self, name: str) -> None:
        source = unquote(urlsplit(self.headers["x-ms-copy-source"]).path).split("/", 2)[2]
        status = "success"
        if self.server.looks and name.endswith(".safetensors"):
            self.server.pending[name], status = Copy(source), "pending"
        else:
            self.server.blobs[name] = self.server.blobs[source]
        self._send(202, b"", self._tag(name), _STAMP, ("x-ms-copy-id", "1"), ("x-ms-copy-status", status))

    def _get(self, name: str) -> None:
        server, about = self.server, list[tuple[str, str]]()
        if name in server.pending:
            status, said = server.look(name)
            if status == "pending":
                about.append(("x-ms-copy-progress", said))
            about += [("x-ms-copy-status", status), ("x-ms-copy-status-description", "404 NotFound")]
        data = server.blobs.get(name, b"" if name in server.pending else None)
        if data is None:
            return self._send(404, b"<?xml version='1.0'?><Error><Code>BlobNotFound</Code></Error>")
        about += [self._tag(name), _STAMP, ("x-ms-blob-type", "BlockBlob")]
        wanted = self.headers.get("Range") or self.headers.get("x-ms-range")
        if not wanted or self.command == "HEAD":
            return self._send(200, data, *about, ("Content-Length", str(len(data))))
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        span = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return self._send(206, part, *about, ("Content-Range", span))

    def _put(self, name: str, body: bytes) -> None:
        if self.headers.get("If-None-Match") == "*" and name in self.server.blobs:
            return self._send(409, b"<?xml version='1.0'?><Error><Code>BlobAlreadyExists</Code></Error>")
        self.server.blobs[name] = body
        return self._send(201, b"", self._tag(name), _STAMP)

    def _put_block(self, name: str, query: dict[str, list[str]], body: bytes) -> None:
        self.server.blocks[name, query["blockid"][0]] = body
        self._send(201)

    def _blocks(self, name: str, body: bytes) -> list[bytes]:
        found = re.findall(r"<(?:Uncommitted|Latest)>([^<]*)</", body.decode())
        return [self.server.blocks[name, each] for each in found]

    def _batch(self, body: bytes) -> None:
        edge, parts = "batchresponse_1", []
        for number, target in enumerate(re.findall(r"DELETE (\S+) HTTP", body.decode())):
            self.server.blobs.pop(unquote(urlsplit(target).path).split("/", 2)[2], None)
            head = f"--{edge}\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
            parts.append(f"{head}HTTP/1.1 202 Accepted\r\nx-ms-request-id: 1\r\n\r\n")
        text = f"{''.join(parts)}--{edge}--\r\n".encode()
        self._send(202, text, ("Content-Type", f"multipart/mixed; boundary={edge}"))

    def _list(self, query: dict[str, list[str]]) -> None:
        server = self.server
        prefix, delimiter = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
        sizes = {name: len(data) for name, data in server.blobs.items()}
        for name, copy in server.pending.items():
            sizes.setdefault(name, len(server.blobs.get(copy.source, b"")) if server.has_length else 0)
        rows, folders = [], set()
        for name, nbytes in sorted(sizes.items()):
            rest = name.removeprefix(prefix)
            if name.startswith(prefix) and delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
            elif name.startswith(prefix):
                tag = self._tag(name)[1].strip('"')
                rows.append(
                    f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{_STAMP[1]}</Last-Modified>"
                    f"<Etag>{tag}</Etag><Content-Length>{nbytes}</Content-Length><Content-Type>x</Content-Type>"
                    "<BlobType>BlockBlob</BlobType></Properties></Blob>"
                )
        rows += [f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in sorted(folders)]
        found = f"<Prefix>{escape(prefix)}</Prefix><Blobs>{''.join(rows)}</Blobs><NextMarker/>"
        head = '<?xml version="1.0" encoding="utf-8"?>'
        text = f'{head}<EnumerationResults ContainerName="c">{found}</EnumerationResults>'
        self._send(200, text.encode(), ("Content-Type", "application/xml"))


@contextlib.contextmanager
def azure_server(context: Any = None) -> Iterator[AzureServer]:
    """Runs the server until the end of the block."""
    with serving(AzureServer(context)) as server:
        yield server
