"""A server with the HTTP API of the Hugging Face hub, and the CDN that it redirects to, on two ports.

Run as a program, ``python -m tests.hub_server FOLDER HUB_PORT CDN_PORT HOST``, it serves one repository,
``org/model``, until it is killed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.dist.flaky_server import Handler, Server, serving

TOKEN = "hf_goodtokenofatest"
_LFS_BYTES = 1000  # files of this size, and weights, are on the CDN
_PAGE = 3
_API = re.compile(
    r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<what>revision|tree|paths-info)/(?P<rev>[^/]+)/?(?P<path>.*)"
)
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)")


def oid_of(content: bytes) -> str:
    """The name of a small file in git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(name: str, content: bytes) -> bool:
    return len(content) >= _LFS_BYTES or name.endswith(".safetensors")


@functools.cache
def etag_of(name: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if is_large(name, content) else oid_of(content)


@functools.cache
def cdn_tag_of(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


class Repo:
    """A repository: its commits, the newest last, each with all of its files.

    Attributes:
        gated: Whether only `TOKEN` opens it.
        private: Whether it seems not to exist without `TOKEN`.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refs: dict[str, str] = {}
        self.gated = self.private = False
        self.commit(files)

    def commit(self, files: Mapping[str, bytes]) -> str:
        name = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[name] = dict(files)
        self.refs["main"] = name
        return name


class HubServer(Server):
    """The hub.

    Attributes:
        repos: Its repositories, by name.
        cdn: The server of large files.
        log: (method, path, headers) of each request.
        busy: Answers to come with status 429, each with its Retry-After in seconds.
        on_revision: Called once the commit of a revision is told.
        origin: What the links to the next page of a listing begin with.
    """

    def __init__(self, host: str = "127.0.0.1", ports: tuple[int, int] = (0, 0)) -> None:
        super().__init__(_HubHandler, (host, ports[0]))
        self.repos: dict[str, Repo] = {}
        self.cdn = CdnServer(host, ports[1])
        self.log: list[tuple[str, str, dict[str, str]]] = []
        self.busy: list[int] = []
        self.on_revision: Callable[[], object] = lambda: None
        self.origin = self.url

    def asked(self, what: str) -> list[str]:
        """The requests with some text in their path, each with its method."""
        return [f"{method} {path}" for method, path, _ in self.log if what in path]


class CdnServer(Server):
    """The CDN, whose addresses are signed. A token is an error to it, as to S3.

    Attributes:
        blobs: Contents by SHA-256.
        signature: The one that it takes now.
        log: (path, range, headers) of each request.
        sent_bytes: Sum of all bodies.
        busy: As for the hub.
        damaged: SHA-256 of blobs that have a bit flipped in their last byte.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(_CdnHandler, (host, port))
        self.blobs: dict[str, bytes] = {}
        self.signature = "s1"
        self.log: list[tuple[str, str, dict[str, str]]] = []
        self.busy: list[int] = []
        self.lock = threading.Lock()
        self.sent_bytes = 0
        self.damaged: set[str] = set()


class _Answering(Handler):
    def headers_seen(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.headers.items()}

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def is_busy(self, busy: list[int]) -> bool:
        if not busy:
            return False
        self.send(429, b"slow down", Retry_After=str(busy.pop(0)))
        return True

    def send_file(self, content: bytes, tag: str) -> bytes:
        """Sends a file, or the range that was asked for; returns what it sent."""
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if self.command == "HEAD" or span is None:
            self.send(200, content, ETag=f'"{tag}"', Accept_Ranges="bytes")
            return b"" if self.command == "HEAD" else content
        begin, end = int(span[1]), min(int(span[2]) + 1, len(content))
        if begin >= len(content):
            self.send(416, Content_Range=f"bytes */{len(content)}")
            return b""
        part, place = content[begin:end], f"bytes {begin}-{end - 1}/{len(content)}"
        self.send(206, part, ETag=f'"{tag}"', Content_Range=place)
        return part


class _HubHandler(_Answering):
    server: HubServer

    def do_GET(self) -> None:
        hub, url = self.server, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        api, file = _API.fullmatch(url.path), _RESOLVE.fullmatch(url.path)
        found = api or file
        if found is not None:  # the client asks for more on its own
            hub.log.append((self.command, self.path, self.headers_seen()))
            if self.is_busy(hub.busy):
                return
        repo = hub.repos.get(found["repo"]) if found else None
        given = self.headers.get("Authorization", "")
        if given not in ("", f"Bearer {TOKEN}"):
            self.send(401, X_Error_Message="Invalid credentials in Authorization header")
        elif found is None or repo is None or (repo.private and not given):
            self.send(401 if not given else 404, X_Error_Code="RepoNotFound", X_Error_Message="not found")
        elif (commit := self._commit(repo, unquote(found["rev"]))) is None:
            self.send(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        elif api is not None:
            self._answer_api(api, repo.commits[commit], commit, url.query, body)
        elif repo.gated and not given:
            self.send(401, X_Error_Code="GatedRepo", X_Error_Message="Access to model is restricted")
        else:
            self._resolve(repo.commits[commit], commit, unquote(found["path"]))

    do_HEAD = do_POST = do_GET

    @staticmethod
    def _commit(repo: Repo, revision: str) -> str | None:
        return repo.refs.get(revision, revision if revision in repo.commits else None)

    def _answer_api(
        self, call: re.Match[str], files: Mapping[str, bytes], commit: str, query: str, body: bytes
    ) -> object:
        path, wanted = unquote(call["path"]), parse_qs(query)
        if call["what"] == "revision":
            self._json({"id": call["repo"], "sha": commit})
            return self.server.on_revision()
        entries = self._entries(files)
        if call["what"] == "paths-info":
            paths = parse_qs(body.decode()).get("paths", [])
            return self._json([entries[each] for each in paths if each in entries])
        start = f"{path}/" if path else ""
        below = [entry for name, entry in entries.items() if name.startswith(start) and name != path]
        if wanted.get("recursive") != ["true"]:
            below = [entry for entry in below if "/" not in entry["path"].removeprefix(start)]
        if path and not below:
            return self.send(404, X_Error_Code="EntryNotFound", X_Error_Message="not found")
        begin = int(wanted.get("cursor", ["0"])[0])
        following = f"{self.server.origin}{self.path.partition('&cursor')[0]}&cursor={begin + _PAGE}"
        more = {"Link": f'<{following}>; rel="next"'} if begin + _PAGE < len(below) else {}
        return self._json(below[begin : begin + _PAGE], **more)

    @staticmethod
    def _entries(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        for name, content in files.items():
            parts = name.split("/")
            for depth in range(1, len(parts)):
                folder = "/".join(parts[:depth])
                entries[folder] = {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}
            large = is_large(name, content)
            oid = oid_of(b"pointer") if large else etag_of(name, content)
            entry = {"type": "file", "path": name, "oid": oid, "size": len(content)}
            if large:
                entry["lfs"] = {"oid": etag_of(name, content), "size": len(content), "pointerSize": 134}
            entries[name] = entry
        return dict(sorted(entries.items()))

    def _json(self, value: Any, **headers: str) -> None:
        self.send(200, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def _resolve(self, files: Mapping[str, bytes], commit: str, path: str) -> None:
        if (content := files.get(path)) is None:
            self.send(404, X_Error_Code="EntryNotFound", X_Error_Message="not found", X_Repo_Commit=commit)
        elif is_large(path, content):
            tag, cdn = etag_of(path, content), self.server.cdn
            cdn.blobs[tag] = content
            location = f"{cdn.url}/blobs/{tag}?name={quote(path)}&Signature={cdn.signature}"
            headers = {
                "X_Linked_ETag": f'"{tag}"',
                "X_Linked_Size": str(len(content)),
                "ETag": '"of-the-answer"',
            }
            self.send(302, Location=location, X_Repo_Commit=commit, **headers)
        else:
            self.send_file(content, etag_of(path, content))


class _CdnHandler(_Answering):
    server: CdnServer

    def do_GET(self) -> None:
        cdn, url = self.server, urlsplit(self.path)
        cdn.log.append((self.path, self.headers.get("Range", ""), self.headers_seen()))
        name = url.path.removeprefix("/blobs/")
        content = cdn.blobs.get(name)
        if content is not None and name in cdn.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if self.is_busy(cdn.busy):
            return
        if "Authorization" in self.headers or content is None:
            self.send(400, b"<Error><Code>InvalidArgument</Code></Error>")
        elif parse_qs(url.query)["Signature"] != [cdn.signature]:
            self.send(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        else:
            sent = self.send_file(content, cdn_tag_of(content))
            with cdn.lock:
                cdn.sent_bytes += len(sent)

    do_HEAD = do_GET


@contextlib.contextmanager
def serving_hub() -> Iterator[HubServer]:
    """Serves until the end of the block."""
    hub = HubServer()
    with serving(hub), serving(hub.cdn):
        yield hub


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def main(folder: str, hub_port: str, cdn_port: str, host: str) -> None:
    hub = HubServer(host, (int(hub_port), int(cdn_port)))
    hub.repos["org/model"] = Repo(files_in(Path(folder)))
    threading.Thread(target=hub.cdn.serve_forever, daemon=True).start()
    print(hub.url, flush=True)
    hub.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
