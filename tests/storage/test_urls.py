"""URLs with names, passwords, signatures and queries: they open, and their secrets are shown to nobody."""

from __future__ import annotations

import json
import logging
import pickle
import socket
import traceback
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import boto3
import pytest
import torch
from botocore.config import Config
from click.testing import CliRunner

import fastload
from fastload.cli import main
from fastload.errors import (
    CheckpointNotFound,
    FastloadError,
    OptionError,
    PeerError,
    PlanMismatch,
    StorageError,
    from_wire,
    to_wire,
)
from fastload.formats.names import NAMES
from fastload.storage import open_storage
from tests.checkpoints import assert_same_bits, load_reference, write_file, write_sharded
from tests.dist.flaky_server import Handler, Server, serving
from tests.dist.harness import run_ranks
from tests.e2e.test_cli import run
from tests.storage.s3_server import BUCKET, KEY, SECRET

_HEADER = "Basic bWU6aHVudGVyMi9A"  # me:hunter2/@
_USER = "me:hunter2%2F%40"
_SECRETS = ("hunter2", "bWU6aHVudGVyMi9A", "s3cr3t-t0ken-of-mine")


class Guarded(Server):
    """Serves the files of a folder to who sends its header, or its token in the query.

    Attributes:
        log: Paths asked for, and queries.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(_Handler)
        self.folder = folder
        self.log: list[tuple[str, str]] = []

    def at(self, path: str, user: str = _USER) -> str:
        return f"http://{user}@127.0.0.1:{self.server_address[1]}/{path}"


class _Handler(Handler):
    server: Guarded

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        path = self.server.folder / unquote(parts.path).lstrip("/")
        self.server.log.append((parts.path, parts.query))
        allowed = self.headers.get("Authorization") == _HEADER or parts.query == f"token={_SECRETS[2]}"
        if not allowed or not path.is_file():
            return self._send(404 if allowed else 401, f"no {self.path} for you".encode(), {})
        data = path.read_bytes()
        first, last = self.headers.get("Range", f"bytes=0-{len(data)}").removeprefix("bytes=").split("-")
        body = data[int(first) : int(last) + 1]
        span = f"bytes {first}-{int(first) + len(body) - 1}/{len(data)}"
        is_range = "Range" in self.headers
        return self._send(206 if is_range else 200, body, {"Content-Range": span} if is_range else {})

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "ETag": '"v1"', "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    rows = [(f"t{number}", "F32", (20_000 + number, 3)) for number in range(4)]
    write_sharded(folder / "hub", {"a b.safetensors": rows[:2], "c%41.safetensors": rows[2:]}, index=True)
    fastload.save({"t": torch.arange(1000.0), "step": 3}, folder / "saved")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Guarded]:
    with serving(Guarded(folder)) as server:
        yield server


def assert_hidden(told: object, *secrets: str) -> None:
    for secret in (*_SECRETS, *secrets):
        assert secret not in str(told)


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Checks what the log says of errors, with all that they come from."""
    with caplog.at_level(logging.DEBUG, "fastload"):
        yield
    assert_hidden([(record.getMessage(), record.exc_text) for record in caplog.get_records("call")])


def everything_of(error: BaseException) -> str:
    """What anybody may print, log, send or keep of an error."""
    wire = to_wire(error)
    inner = [everything_of(each) for each in error.failures.values()] if isinstance(error, PeerError) else []
    texts = [str(error), repr(error), vars(error), *traceback.format_exception(error), *inner]
    return " ".join(map(str, [*texts, wire, from_wire(wire), pickle.dumps(error)]))


def load(rank: int, world: int, url: str, trace: str) -> tuple[str, str, list[str]]:
    """Loads; returns the report's URL, all of the report, and what was logged."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastload").addHandler(handler)
    logging.getLogger("fastload").setLevel(logging.DEBUG)
    with fastload.open(url, options=fastload.LoadOptions(trace=trace, strategy="allgather")) as checkpoint:
        checkpoint.load()
        assert_hidden([checkpoint.manifest, checkpoint.report, checkpoint, checkpoint.metadata])
        assert checkpoint.report is not None
        return checkpoint.report.url, json.dumps(checkpoint.report.to_dict()), records


@pytest.mark.parametrize("path", ["hub", "hub/", "hub/a b.safetensors", "hub/a%20b.safetensors", "saved"])
def test_a_name_and_a_password_are_sent_and_not_shown(
    server: Guarded, folder: Path, path: str, tmp_path: Path
) -> None:
    url = server.at(path)
    state = fastload.load(url)
    assert_same_bits({n: t for n, t in state.items() if n != "step"}, load_reference(folder / unquote(path)))
    trace = tmp_path / "t.json"
    for shown, report, logged in run_ranks(load, 2, url=url, trace=str(trace)):
        assert shown == server.at(path.rstrip("/"), "***")
        assert_hidden([shown, report, logged, trace.read_text()])


@pytest.mark.parametrize(
    "options",
    [
        {"default_headers": {"authorization": _HEADER}},
        {"client_options": {"default_headers": {"Authorization": _HEADER, "X-A": "b"}}},
    ],
)
def test_a_header_that_is_given_beats_the_url(server: Guarded, options: dict[str, Any]) -> None:
    assert fastload.load(server.at("saved", "me:wrong"), storage_options=options)["step"] == 3
    with_more = {"client_options": {"default_headers": {"X-A": "b"}}}
    assert fastload.load(server.at("saved"), storage_options=with_more)["step"] == 3


def test_a_query_stays_behind_the_names(server: Guarded) -> None:
    url = f"{server.url}/saved?token={_SECRETS[2]}"
    server.log.clear()
    with fastload.open(url) as checkpoint:
        assert checkpoint.load()["step"] == 3
        assert checkpoint.manifest.url == f"{server.url}/saved"
    assert {query for _, query in server.log} == {f"token={_SECRETS[2]}"}
    assert {path for path, _ in server.log} == {f"/saved/{name}" for name in NAMES.likely}
    with pytest.raises(CheckpointNotFound) as raised:
        fastload.load(f"{server.url}/saved/x.safetensors?token={_SECRETS[2]}")
    assert_hidden(everything_of(raised.value))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_refusal_shows_no_password(server: Guarded, num_ranks: int) -> None:
    paths = ("saved", "saved/model.safetensors", "saved/model.safetensors?a=s3cr3t-t0ken-of-mine")
    urls = [server.at(path, user) for user in ("you:hunter2", "hunter2") for path in paths]
    for texts in run_ranks(fail_with, num_ranks, urls=urls):
        assert len(texts) == len(urls)
        for told in texts:
            assert "401" in told
            assert_hidden(told)


def fail_with(rank: int, world: int, urls: list[str]) -> list[str]:
    texts = []
    for url in urls:
        with pytest.raises((StorageError, PeerError)) as raised:
            fastload.load(url, options=fastload.LoadOptions(retries=0, timeout_s=20))
        texts.append(everything_of(raised.value))
    return texts


def disagree(rank: int, world: int, urls: list[str]) -> str:
    with pytest.raises(PlanMismatch) as raised:
        fastload.load(urls[rank])
    return everything_of(raised.value)


def test_ranks_that_name_different_places_show_no_password(server: Guarded) -> None:
    for told in run_ranks(disagree, 2, urls=[server.at("saved"), server.at("hub", "you:hunter2")]):
        assert "path: rank 0 'http://***@127.0.0.1" in told
        assert_hidden(told)


def agree(rank: int, world: int, urls: list[str]) -> Any:
    return fastload.load(urls[rank])["step"]


def test_each_rank_may_have_a_password_of_its_own(server: Guarded) -> None:
    urls = [server.at("saved"), f"{server.url}/saved?token={_SECRETS[2]}".replace("//", "//you:x@", 1)]
    assert run_ranks(agree, 2, urls=urls) == [3, 3]


def test_the_command_line_shows_no_password(server: Guarded, tmp_path: Path) -> None:
    good, bad, query = server.at("saved"), server.at("saved", "hunter2:x"), f"?token={_SECRETS[2]}x"
    copy = str(tmp_path / "copy")
    commands = [
        ["inspect", good], ["inspect", "--json", good], ["inspect", f"{server.url}/saved{query}"],
        ["-vv", "load", good], ["load", "--json", good], ["load", bad], ["verify", good], ["verify", bad],
        ["stage", good, copy], ["stage", good, bad], ["convert", good, f"{copy}2"], ["convert", good, bad],
        ["convert", bad + ".pt", f"{copy}3"], ["ls", good], ["ls", "--json", bad],
        ["prune", "--keep-last", "1", bad], ["size", good], ["size", bad + ".json"], ["size", bad],
        ["size", bad.replace("//", "//'") + ".json"],
        ["plan", good, "--hosts", "1", "--host-gbps", "1", "--storage-gbps", "1"],
        ["plan", good, "--json", "--hosts", "1", "--host-gbps", "1", "--storage-gbps", "1"],
        ["inspect", "sftp://me:hunter2@127.0.0.1/x"], ["ls", "ftp://me:hunter2@127.0.0.1:1/x"],
        ["inspect", "http://me:hunter2/x@127.0.0.1/x"], ["ls", "s3://me:hunter2@bucket/x"],
    ]  # fmt: skip
    for command in commands:
        told = CliRunner().invoke(main, command)
        assert told.output, command
        assert_hidden(f"{command[0]}: {told.output} {told.exception!r}")
        assert told.exception is None or isinstance(told.exception, SystemExit), command


def test_what_the_libraries_below_log_is_not_shown(seaweed: dict[str, Any], tmp_path: Path) -> None:
    """Among it are signatures, and the headers that go to the server."""
    environment = {f"AWS_{name.upper()}": value for name, value in seaweed.items()}
    fastload.save({"t": torch.arange(9)}, tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{}")
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/a"
    done = run("-vv", "convert", str(tmp_path / "a"), url, **environment)
    assert done.returncode == 0, done.stderr
    with closing(open_storage(url, NAMES, seaweed)) as storage:
        assert storage.list() == ["config.json", "fastload.json", "model.safetensors"]
    assert not [line for line in done.stderr.splitlines() if "fastload" not in line]


@pytest.mark.parametrize("user", ["me:'hunter2", 'me:hun"hunter2', "<hunter2"])
def test_a_password_with_a_quote_is_not_shown(user: str) -> None:
    options = fastload.LoadOptions(retries=0, timeout_s=20)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for path in ("x", "x.safetensors"):
        with pytest.raises(StorageError, match=r"^http://\*\*\*@127.0.0.1") as raised:
            fastload.load(f"http://{user}@127.0.0.1:{port}/{path}", options=options)
        assert_hidden(everything_of(raised.value))


@pytest.mark.parametrize("call", [fastload.inspect, fastload.load, lambda url: fastload.save({}, url)])
def test_other_file_systems_show_no_password(call: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (f"ftp://me:hunter2@127.0.0.1:{port}/x/y", f"nosuch://me:hunter2@127.0.0.1:{port}/x/y"):
        with pytest.raises(FastloadError, match=r"//me:\*\*\*@127.0.0.1") as raised:
            call(url)
        assert_hidden(everything_of(raised.value))


def test_a_manager_shows_no_password(tmp_path: Path) -> None:
    root = f"ftp://me:{_SECRETS[0]}@127.0.0.1:1/x"
    with pytest.raises(FastloadError) as raised:
        fastload.CheckpointManager(root, keep_last=1)
    assert_hidden(everything_of(raised.value))
    root = f"memory://me:hunter2@{tmp_path}/runs"
    with fastload.CheckpointManager(root, async_=False, keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, {"step": step})
        assert manager.restore() == {"step": 2}
        assert manager.all_steps() == [2]
        assert fastload.load(manager.path(2)) == {"step": 2}


@pytest.mark.parametrize(
    "options",
    [
        {"client_options": "hunter2"},
        {"secret_access_key": 5, "region": "hunter2", "session_token": "hunter2"},
        {"endpoint": "http://me:hunter2@host:9000"},
        {"endpoint": "http://me:'hunter2@host:9000"},
        {"client_options": {"default_headers": "hunter2"}},
        {"client_options": {"default_headers": {"Authorization": "Bearer hunter2\n"}}},
        {"client_options": {"proxy_url": "http://me:hunter2@:x"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("call", [fastload.inspect, fastload.save])
def test_options_that_cannot_be_used_are_not_shown(call: Any, options: dict[str, Any]) -> None:
    state = ({},) if call is fastload.save else ()
    if options.get("region"):
        options = {**options, "region": 5}
    with pytest.raises(OptionError) as raised:
        call(*state, "s3://bucket/a/b", storage_options=options)
    assert_hidden(everything_of(raised.value))


# Signed URLs of a real store


@pytest.fixture(scope="module")
def signed(seaweed: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What signs the URLs of some objects, of each in one of the two ways; and what they hold."""
    old, client = (
        boto3.client(
            "s3",
            endpoint_url=seaweed["endpoint"],
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name=seaweed["region"],
            config=Config(signature_version=version),
        )
        for version in ("s3", "s3v4")
    )
    path = tmp_path_factory.mktemp("signed") / "model one.safetensors"
    write_file(path, [("t", "F32", (300_000,)), ("u", "I64", (1000,))])
    root = uuid.uuid4().hex
    for name in ("model one.safetensors", "blob", "model.safetensors.index.json"):
        client.put_object(Bucket=BUCKET, Key=f"{root}/{name}", Body=path.read_bytes())

    def sign(name: str, expires_s: int = 600) -> str:
        asked = {"Bucket": BUCKET, "Key": f"{root}/{name}"}
        signer = old if name == "blob" else client
        url: str = signer.generate_presigned_url("get_object", asked, ExpiresIn=expires_s)
        return url

    yield {"sign": sign, "path": path}
    old.close()
    client.close()


def load_signed(rank: int, world: int, urls: list[str], path: Path) -> list[str]:
    with fastload.open(urls[rank]) as checkpoint:
        assert_same_bits(checkpoint.load(), load_reference(path))
        assert checkpoint.report is not None
        assert checkpoint.report.read_amplification == 1.0
        return [checkpoint.report.url, repr(checkpoint.manifest)]


@pytest.mark.slow(but=["blob"])
@pytest.mark.parametrize("name", ["model one.safetensors", "blob"])
def test_a_signed_url_of_one_file(signed: dict[str, Any], name: str) -> None:
    urls = [signed["sign"](name, expires_s) for expires_s in (600, 601, 602)]  # each rank may have its own
    assert len(set(urls)) == 3
    for told in [
        load_signed(0, 1, urls, signed["path"]),
        *run_ranks(load_signed, 3, urls=urls, path=signed["path"]),
    ]:
        assert told[0] == urls[0].partition("?")[0]
        assert_hidden(told, "Signature", KEY)


def test_what_a_signed_url_cannot_do(signed: dict[str, Any]) -> None:
    good = signed["sign"]("blob")
    forged = good.replace("Signature=", "Signature=AAAA")
    for url, error, says in [
        (forged, StorageError, "403"),
        (signed["sign"]("blob").replace("blob", "model.safetensors"), StorageError, "403"),
        (signed["sign"]("other.safetensors"), CheckpointNotFound, "no such checkpoint"),
        (signed["sign"]("model.safetensors.index.json"), OptionError, "signed for this one file"),
    ]:
        with pytest.raises(error, match=says) as raised:
            fastload.load(url)
        assert_hidden(everything_of(raised.value), unquote(url.partition("Signature=")[2]).partition("&")[0])
