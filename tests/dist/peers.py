"""Peers that misbehave on demand, and an origin that is far away: for tests of `fastload.peers`."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import fastload
from fastload.ext.serve.checkpoints import digest_of
from fastload.storage.local import LocalStorage
from tests.dist.flaky_server import Handler, Server, serving

__all__ = ["FAULTS", "FarStorage", "FaultyPeer", "faulty_peer"]

FAULTS = (
    "absent", "another", "cut", "flip", "garbage", "gone", "huge index", "ident", "length", "malformed",
    "name", "page", "refuse", "reset", "shifted", "short", "stall", "token", "trickle",
)  # fmt: skip
"""How a `FaultyPeer` fails."""


class FarStorage(LocalStorage):
    """A directory that all hosts read through one link; in tests the scheme ``far``."""

    shared = True
    in_order = False

    def __init__(self, url: str) -> None:
        super().__init__(url.removeprefix("far://"))


fastload.register_storage("far", FarStorage)


class FaultyPeer(Server):
    """Serves a checkpoint as `fastload.serve` does, but for a fault.

    Args:
        folder: The checkpoint.
        fault: One of `FAULTS`, or empty for none.
        good_reads: Reads that are right before the fault.

    Attributes:
        reads: The number of reads so far.
        served_bytes: The bytes that were sent.
    """

    def __init__(self, folder: Path, fault: str = "", *, good_reads: int = 0) -> None:
        super().__init__(_Handler)
        self.folder = folder
        self.fault = fault
        self.good_reads = good_reads
        self.reads = 0
        self.served_bytes = 0
        self.lock = threading.Lock()
        self.ranges: Mapping[str, Sequence[tuple[int, int]]] | None = None
        self.coming: Mapping[str, Sequence[tuple[int, int]]] = {}
        self.digest = digest_of(fastload.inspect(folder))

    def takes_fault(self) -> str:
        """Returns the fault of the next read; empty for none."""
        with self.lock:
            self.reads += 1
            return self.fault if self.reads > self.good_reads else ""


class _Handler(Handler):
    server: FaultyPeer

    def do_GET(self) -> None:
        if self.path == "/":
            self._index()
        else:
            self._read()

    def _index(self) -> None:
        fault = self.server.fault if not self.server.good_reads else ""
        digest = "0" * 32 if fault == "another" else self.server.digest
        about = {"digest": digest, "ranges": self.server.ranges, "coming": self.server.coming}
        checkpoints = {} if fault == "absent" else {"\ud800" if fault == "name" else "": about}
        ident: object = ["other"] if fault == "ident" else "other"
        body = json.dumps({"id": ident, "checkpoints": checkpoints}).encode()
        if fault == "malformed":
            body = json.dumps({"checkpoints": {"": {**about, "ranges": {"model.safetensors": 7}}}}).encode()
        if fault == "page":
            body = b"<html>hello</html>"
        if fault == "token":
            self._send(401, b"")
        elif fault == "huge index":
            self._send(200, b"", length=1 << 40)
        else:
            self._send(200, body)

    def _read(self) -> None:
        begin, end = (int(part) for part in self.headers["Range"].removeprefix("bytes=").split("-"))
        data = bytearray((self.server.folder / self.path.lstrip("/")).read_bytes()[begin : end + 1])
        fault, place = self.server.takes_fault(), f"bytes {begin}-{end}/9999999"
        if fault == "flip":
            data[len(data) // 2] ^= 1
        elif fault == "shifted":
            place = f"bytes {begin + 1}-{end + 1}/9999999"
        elif fault == "garbage":
            self.wfile.write(b"\x00\xff" * 100)
            self.close_connection = True
            return
        if fault in ("gone", "ident", "name", "refuse"):
            self._send(503 if fault == "refuse" else 404, b"")
        elif fault == "reset":
            self._reset()
        elif fault == "stall":
            time.sleep(20)
            self.close_connection = True
        elif fault == "short":
            self._send(206, data[:-1], place)
        elif fault == "length":
            self._send(206, data, place, length=None)
        elif fault == "trickle":
            self._send(206, data, place, pause_s=0.2)
        elif fault == "cut":
            self._send(206, data[: len(data) // 2], place, length=len(data))
            self.close_connection = True
        else:
            with self.server.lock:
                self.server.served_bytes += len(data)
            self._send(206, data, place)

    def _send(
        self,
        status: int,
        body: bytes | bytearray,
        place: str = "",
        *,
        length: int | None = -1,
        pause_s: float = 0.0,
    ) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(len(body) if length < 0 else length))
        if place:
            self.send_header("Content-Range", place)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            if not pause_s:
                self.wfile.write(body)
            for at in range(0, len(body) if pause_s else 0, 16):
                self.wfile.write(body[at : at + 16])
                time.sleep(pause_s)


@contextlib.contextmanager
def faulty_peer(folder: Path, fault: str = "", *, good_reads: int = 0) -> Iterator[FaultyPeer]:
    """Runs a peer with a fault until the end of the block."""
    with serving(FaultyPeer(folder, fault, good_reads=good_reads)) as peer:
        yield peer
