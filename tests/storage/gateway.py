"""A server in front of a store, which passes requests on as they are signed: a gateway, a proxy, or TLS."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from tests.dist.flaky_server import Handler, Server, serving

__all__ = ["Answer", "Authority", "Gateway", "Request", "make_authority", "serving_gateway"]

_OF_THE_CONNECTION = frozenset(
    "connection keep-alive transfer-encoding content-length proxy-connection".split()
)
_TIMEOUT_S = 20


class Request(NamedTuple):
    """A request: method, host that it names, path with query, and headers by lower-case name.

    What S3 takes as a header or in the query of a signed URL counts as a header.
    """

    method: str
    host: str
    path: str
    headers: dict[str, str]


@dataclass
class Answer:
    """A response: status, headers and body."""

    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


class Gateway(Server):
    """Passes requests on to a store.

    Attributes:
        upstream: URL of the store.
        log: The requests so far.
        change: Returns what to answer in place of the store's answer to a request.
        answer: Returns what to answer without the store; None to ask it.
        hold: Surrounds the answer to a request.
    """

    def __init__(self, upstream: str, context: ssl.SSLContext | None = None) -> None:
        super().__init__(_Handler)
        self.upstream, self.scheme = upstream, "https" if context else "http"
        self.log: list[Request] = []
        self.change: Callable[[Request, Answer], Answer] = lambda request, answer: answer
        self.answer: Callable[[Request], Answer | None] = lambda request: None
        self.hold: Callable[[Request], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"


class _Handler(Handler):
    server: Gateway

    def _pass_on(self) -> None:
        url = urlsplit(self.path)  # with a host, if this is used as a proxy
        path = f"{url.path}?{url.query}" if url.query else url.path
        of_url = dict(parse_qsl(url.query)) if "X-Amz-Signature=" in url.query else {}
        if of_url:
            of_url["Authorization"] = f"Credential={of_url['X-Amz-Credential']}"
        headers = {name.lower(): value for name, value in [*of_url.items(), *self.headers.items()]}
        request = Request(self.command, url.netloc or headers["host"], path, headers)
        self.server.log.append(request)
        body = self._body()
        with self.server.hold(request):
            self._answer(request, body)

    def _answer(self, request: Request, body: bytes) -> None:
        answer = self.server.answer(request) or self._ask(request.path, body)
        answer = self.server.change(request, answer)
        self.send_response(answer.status)
        length = str(len(answer.body))
        for name, value in answer.headers:
            if name.lower() == "content-length":  # of a response to HEAD, too
                length = value if self.command == "HEAD" else length
            elif name.lower() not in _OF_THE_CONNECTION:
                self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _ask(self, path: str, body: bytes) -> Answer:
        upstream = urlsplit(self.server.upstream)
        connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.putrequest(self.command, path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _OF_THE_CONNECTION or name.lower() == "content-length":
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, answer.getheaders(), answer.read())


@contextlib.contextmanager
def serving_gateway(upstream: str, context: ssl.SSLContext | None = None) -> Iterator[Gateway]:
    """Runs a gateway to a store until the end of the block."""
    with serving(Gateway(upstream, context)) as gateway:
        yield gateway


class Authority(NamedTuple):
    """A private certificate authority: the path of its certificate, and TLS for a server on 127.0.0.1."""

    path: Path
    context: ssl.SSLContext

    @property
    def pem(self) -> str:
        return self.path.read_text()


def make_authority(folder: Path) -> Authority:
    """Makes a certificate authority that no system knows."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)

    request = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes".split()
    openssl(*request, *"-x509 -keyout ca.key -out ca.pem -days 9 -subj".split(), "/CN=authority of a test")
    openssl(*request, *"-keyout key.pem -out csr.pem -subj".split(), "/CN=localhost")
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=CA:FALSE\n")
    openssl(
        *"x509 -req -in csr.pem -CA ca.pem -CAkey ca.key -CAcreateserial".split(),
        *"-out cert.pem -days 9 -extfile ext".split(),
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return Authority(folder / "ca.pem", context)
