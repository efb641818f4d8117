"""What a peer is asked for, over one connection to it."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from fastload.storage.http import Answer, HttpConnection, HttpFault

_MOST_INDEX_BYTES = 64 << 20


class Endpoint(NamedTuple):
    """Where a server listens, and how to talk to it.

    Attributes:
        host: Its name, by which its certificate is checked.
        address: The address to connect to.
        port: Its port.
        context: The TLS settings; None without TLS.
        token: The token to send; None for none.
    """

    host: str
    address: str
    port: int
    context: ssl.SSLContext | None
    token: str | None

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        named = "" if self.host in (self.address, "") else f" ({self.host})"
        return f"http{'s' if self.context else ''}://{address}:{self.port}{named}"

    def __repr__(self) -> str:
        return str(self)  # without the token


class Connection(HttpConnection):
    """A connection to a server of fastload.

    Args:
        endpoint: The server.
        timeout_s: The longest wait for it to connect.

    Raises:
        HttpFault: It does not connect.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        super().__init__((endpoint.address, endpoint.port), endpoint.host, endpoint.context, timeout_s)
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        self._headers = {"Host": f"{host}:{endpoint.port}"}
        if endpoint.token is not None:
            self._headers["Authorization"] = f"Bearer {endpoint.token}"

    def index(self, timeout_s: float) -> dict[str, Any]:
        """Returns what the server says of itself and its checkpoints.

        Raises:
            HttpFault: It does not answer, or not as a server of fastload does.
        """
        answer = self.get("/", self._headers, timeout_s)
        _require(200, answer)
        if answer.nbytes > _MOST_INDEX_BYTES:
            raise HttpFault(f"its index has {answer.nbytes} bytes")
        body = bytearray(answer.nbytes)
        self.receive([memoryview(body)])
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("checkpoints"), dict):
            raise HttpFault("no server of fastload")
        return found

    def read(
        self, path: str, begin: int, buffers: Sequence[memoryview], digest: str, timeout_s: float
    ) -> float:
        """Fills buffers with the bytes of a file from an offset on; returns the seconds to the first byte.

        Args:
            path: The file on the server.
            begin: First byte.
            buffers: Where they go.
            digest: The digest of the checkpoint.
            timeout_s: The longest time for all of it.

        Raises:
            HttpFault: They did not come, or not all of them.
        """
        began_s = time.monotonic()
        nbytes = sum(map(len, buffers))
        wanted = f"{begin}-{begin + nbytes - 1}"
        headers = {**self._headers, "Range": f"bytes={wanted}", "If-Match": f'"{digest}"'}
        answer = self.get(f"/{quote(path, errors='replace')}", headers, timeout_s)
        _require(206, answer)
        if (answer.nbytes, answer.content_range) != (nbytes, f"bytes {wanted}"):
            raise HttpFault("sent another range than the one that was asked for")
        first_s = time.monotonic() - began_s
        self.receive(buffers)
        return first_s


def _require(status: int, answer: Answer) -> None:
    texts = {
        401: "wants another token than FASTLOAD_PEERS_TOKEN_FILE or token_file= has (401)",
        404: "has no such file any more (404)",
        412: "has another checkpoint now (412)",
        503: "has not got it yet (503)",
    }
    if answer.status != status:
        text = texts.get(answer.status, f"answered with status {answer.status}")
        raise HttpFault(text, is_passing=answer.status == 503)
