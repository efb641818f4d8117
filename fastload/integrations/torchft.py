"""torchft: a transport that heals a replica from the memory of a live one."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import shutil
import socket
import socketserver
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import torchft
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import fastload
from fastload import DeadlineExceeded, LoadOptions, OptionError, SaveOptions
from fastload.formats.names import RECORD_NAME
from fastload.geometry.dtensors import is_dtensor, local_of
from fastload.integrations.frameworks import lone_group, unknown_version
from fastload.options import chosen_options

TESTED = "2026.10.26"
try:
    from torchft.checkpointing.transport import CheckpointTransport
except ImportError as error:
    raise unknown_version(torchft, TESTED, error) from None

__all__ = ["ReplicaTransport"]

T = TypeVar("T")

_SHARED_MEMORY = "/dev/shm"
_POLL_S = 0.02
_SHARDED = "sharded"
"""Key of the mark that a state had DTensors, in the metadata of the checkpoint."""


class ReplicaTransport(CheckpointTransport[T]):  # type: ignore[misc]
    """Sends states to replicas that are behind, over HTTP, for torchft's ``Manager``.

    The sender copies its state to files in memory and serves them until `disallow_checkpoint`. Receivers
    read them in parallel ranges and verify checksums. Nothing is pickled. Each rank of a replica group heals
    from the rank of the same number; DTensors are sent as their local shards.

    Args:
        state_dict: Returns the state of this rank, to receive in place; as for torchft's ``PGTransport``.
            None receives into new host memory, which a state with DTensors cannot.
        folder: A directory for the files, in memory or on a fast disk; None for ``/dev/shm``, or the
            directory for temporary files where there is none.
        host: The name under which other replicas reach this host; None for its host name.
        save_options: How to write the files; None for the defaults.
        load_options: How to read them; None for the defaults.
    """

    def __init__(
        self,
        state_dict: Callable[[], T] | None = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        host: str | None = None,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        if folder is None:
            folder = _SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else tempfile.gettempdir()
        self._state_dict = state_dict
        self._save_options = chosen_options(save_options, SaveOptions)
        self._load_options = chosen_options(load_options, LoadOptions)
        self._folder = Path(tempfile.mkdtemp(prefix="fastload-torchft-", dir=folder))
        self._host = host or socket.gethostname()
        self._token = secrets.token_urlsafe(24)
        self._group = lone_group()
        try:
            self._server = _StateServer(self._folder, self._token)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def metadata(self) -> str:
        """Returns the URL of the states of this rank, which is a secret of the job."""
        return f"http://{self._host}:{self._server.server_port}/{self._token}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Copies a state, and serves it until `disallow_checkpoint`; returns once it is copied.

        Raises:
            OptionError: Something in the state cannot be sent.
            FastloadError: It cannot be copied: there is too little memory in `folder`, for example.
        """
        self.disallow_checkpoint()
        state = tree_map_only(Tensor, local_of, state_dict)
        is_sharded = any(map(is_dtensor, tree_leaves(state_dict)))
        fastload.save(
            state,
            self._folder / str(step),
            process_group=self._group,
            metadata={_SHARDED: "yes"} if is_sharded else None,
            options=replace(self._save_options, timeout_s=timeout.total_seconds(), overwrite=True),
        )

    def disallow_checkpoint(self) -> None:
        """Ends the serving of states; a reply under way is completed."""
        for path in self._folder.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receives a state, once the sender has it.

        Raises:
            DeadlineExceeded: The sender does not serve this step, or not in time.
            OptionError: It has DTensors, and the transport has no `state_dict`.
            FastloadError: As for `fastload.load`.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        url = f"{metadata}/{step}"
        _await(f"{url}/{RECORD_NAME}", deadline, f"rank {src_rank}, step {step}")
        left_s = max(_POLL_S, deadline - time.monotonic())
        options = replace(self._load_options, timeout_s=left_s)
        with fastload.open(url, process_group=self._group, options=options) as checkpoint:
            if self._state_dict is None:
                if checkpoint.metadata.get(_SHARDED):
                    raise OptionError(
                        f"the state of rank {src_rank} has DTensors: give the transport state_dict=, whose "
                        "DTensors are filled in place"
                    )
                return checkpoint.load()  # type: ignore[no-any-return]
            own: dict[int, Tensor] = {}

            def local(tensor: Tensor) -> Tensor:
                shard = local_of(tensor)
                own[id(shard)] = tensor
                return shard

            into = tree_map_only(Tensor, local, self._state_dict())
            checkpoint.load(into=into)
        return tree_map(lambda leaf: own.get(id(leaf), leaf), into)  # type: ignore[no-any-return]

    def shutdown(self, wait: bool = True) -> None:
        """Ends the server, and removes the files."""
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _await(url: str, deadline: float, what: str) -> None:
    """Returns once a file is served.

    Raises:
        DeadlineExceeded: It is not in time.
    """
    while True:
        problem: Exception
        try:
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=max(_POLL_S, deadline - time.monotonic())):
                return
        except OSError as error:
            problem = error
            if isinstance(error, urllib.error.HTTPError):
                error.close()
        if time.monotonic() + _POLL_S > deadline:
            host = urllib.parse.urlsplit(url).netloc  # not the path, which is a secret
            raise DeadlineExceeded(f"receiving the state of {what} from {host} timed out: {problem}")
        time.sleep(_POLL_S)


class _StateServer(ThreadingHTTPServer):
    """Serves the files of a directory, and byte ranges of them, below a secret path.

    Args:
        folder: The directory.
        token: The secret.
    """

    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, folder: Path, token: str) -> None:
        super().__init__(("", 0), partial(_FileHandler, folder, token))
        self._thread = threading.Thread(target=self.serve_forever, name="fastload-torchft", daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        """Binds to IPv4 as well."""
        with suppress(AttributeError, OSError):
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks DNS for its own name
        self.server_port = self.server_address[1]

    def close(self) -> None:
        """Ends the thread and closes the port."""
        self.shutdown()
        self.server_close()
        self._thread.join()


class _FileHandler(BaseHTTPRequestHandler):
    """Replies to HEAD and GET, with at most one byte range."""

    protocol_version = "HTTP/1.1"

    def __init__(self, folder: Path, token: str, *arguments: Any) -> None:
        self._folder, self._token = folder, token
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        with self._opened():
            pass

    def do_GET(self) -> None:
        with self._opened() as (file, begin, nbytes):
            while nbytes > 0:
                sent = os.sendfile(self.connection.fileno(), file, begin, nbytes)
                if not sent:
                    self.close_connection = True  # the file is shorter than it was
                    return
                begin, nbytes = begin + sent, nbytes - sent

    @contextmanager
    def _opened(self) -> Iterator[tuple[int, int, int]]:
        """Sends the head of a reply; yields a descriptor, and offset and length of the body."""
        _, token, *names = urllib.parse.unquote(self.path).split("/")
        path = self._folder.joinpath(*names)
        is_allowed = hmac.compare_digest(token, self._token) and len(names) == 2
        if not is_allowed or ".." in names or not path.is_file():
            self._refuse(HTTPStatus.NOT_FOUND)
            yield -1, 0, 0
            return
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            size = os.fstat(file).st_size
            begin, end = self._range(size)
            if begin >= end and size:
                self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                yield file, 0, 0
                return
            is_part = "Range" in self.headers
            self.send_response(HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK)
            self.send_header("Content-Length", str(end - begin))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{os.fstat(file).st_ino}-{os.fstat(file).st_mtime_ns}"')
            self.send_header("Last-Modified", formatdate(os.fstat(file).st_mtime, usegmt=True))
            if is_part:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
            self.end_headers()
            yield file, begin, end - begin
        finally:
            os.close(file)

    def _range(self, size: int) -> tuple[int, int]:
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "bytes=0-"))
        if match is None or match[0] == "bytes=-":
            return 0, 0
        if not match[1]:
            return max(0, size - int(match[2])), size
        return int(match[1]), min(size, int(match[2]) + 1) if match[2] else size

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Logs nothing: requests name the secret."""
