"""The Hugging Face hub as a storage, against a server of its API."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import safetensors.torch
import torch

import fastload
from fastload.errors import CheckpointNotFound, OptionError, StorageError
from fastload.formats.names import NAMES
from fastload.storage import Storage, open_storage
from fastload.testing import StorageContract
from tests.checkpoints import assert_same_bits, load_reference, write_sharded
from tests.hub_server import TOKEN, HubServer, Repo, etag_of, files_in, serving_hub
from tests.pages import page
from tests.unit.test_tracebacks import require_short

ROWS = [("a", "U8", (60_001,)), ("b", "BF16", (70, 100)), ("c", "F32", (0, 3))]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with serving_hub() as hub:
        yield hub


@pytest.fixture
def hub(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The server without repositories, and an empty cache."""
    server.repos.clear()
    server.log.clear()
    server.busy.clear()
    server.cdn.log.clear()
    server.cdn.busy.clear()
    server.cdn.sent_bytes = 0
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return server


class TestHub(StorageContract):
    @pytest.fixture(autouse=True)
    def _serve(self, hub: HubServer) -> None:
        self.hub = hub

    def fill(self, files: Mapping[str, bytes], where: str) -> str:
        name = f"org/model-{next(_numbers)}"
        self.hub.repos[name] = Repo({f"below/this/{path}": content for path, content in files.items()})
        return f"hf://{name}/below/this"

    def change(self, root: str, name: str, content: bytes) -> None:
        """Rewrites the history, as the hub never does."""
        repo = self.hub.repos["/".join(root.split("/")[2:4])]
        for files in repo.commits.values():
            old = files[f"below/this/{name}"]
            files[f"below/this/{name}"] = content
            self.hub.cdn.blobs[etag_of(name, old)] = content


@pytest.fixture
def checkpoint(hub: HubServer, tmp_path: Path) -> Path:
    """A checkpoint that the hub has as org/model."""
    folder = tmp_path / "checkpoint"
    write_sharded(folder, {"x.safetensors": ROWS[:1], "y.safetensors": ROWS[1:]}, index=True)
    (folder / "config.json").write_text("{}")
    hub.repos["org/model"] = Repo(files_in(folder))
    return folder


def open_hub(url: str = "hf://org/model", **options: Any) -> Storage:
    return open_storage(url, NAMES, options)


def test_a_load_reads_the_commit_of_the_moment(
    hub: HubServer, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repo = hub.repos["org/model"]
    first = repo.refs["main"]
    with caplog.at_level(logging.INFO, "fastload"), fastload.open("hf://org/model") as opened:
        repo.commit({name: content[::-1] for name, content in files_in(checkpoint).items()})
        assert_same_bits(opened.load(), load_reference(checkpoint))
        assert [file.version.partition(":")[0] for file in opened.manifest.files] == [first] * 2
    assert f"revision main is commit {first}" in caplog.text
    assert_same_bits(fastload.load(f"hf://org/model@{first}"), load_reference(checkpoint))
    with pytest.raises(fastload.CheckpointError):  # of the new commit
        fastload.load("hf://org/model")


@pytest.mark.parametrize(
    "url",
    [
        "hf://models/org/model",
        "hf://org/model@main",
        "hf://org/model@refs/pr/1",
        "hf://org/model@a%2Fb",
        "hf://org/model/",
    ],
)
def test_ways_to_name_a_revision(hub: HubServer, checkpoint: Path, url: str) -> None:
    repo = hub.repos["org/model"]
    repo.refs |= {"refs/pr/1": repo.refs["main"], "a/b": repo.refs["main"]}
    assert fastload.inspect(url).nbytes == fastload.inspect(checkpoint).nbytes


def test_a_report_has_the_time_to_the_first_byte(hub: HubServer, checkpoint: Path) -> None:
    reports: list[fastload.LoadReport] = []
    fastload.load("hf://org/model", options=fastload.LoadOptions(on_report=reports.append))
    assert reports[0].ranks[0].first_byte_s > 0


def test_long_bodies_are_received_directly(hub: HubServer, tmp_path: Path) -> None:
    state = {f"layer.{number}": torch.full((1 << 18,), number) for number in range(4)}
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    hub.repos["org/large"] = Repo({"x.safetensors": (tmp_path / "x.safetensors").read_bytes()})
    assert_same_bits(fastload.load("hf://org/large"), state)
    direct = [headers for *_, headers in hub.cdn.log if headers.get("accept-encoding") == "identity"]
    assert len(direct) >= 4
    assert all("fastload" in headers["user-agent"] for headers in direct), "as the other requests"


def test_a_single_file_and_one_in_a_directory(hub: HubServer, checkpoint: Path) -> None:
    repo = hub.repos["org/model"]
    repo.commit({f"sub/{name}": content for name, content in files_in(checkpoint).items()})
    file = fastload.load("hf://org/model@main/sub/x.safetensors")
    assert_same_bits(file, load_reference(checkpoint / "x.safetensors"))
    assert_same_bits(fastload.load("hf://org/model/sub"), load_reference(checkpoint))


@pytest.mark.parametrize(
    "url",
    ["hf://", "hf://org/model@main/../x", "hf://org/model/a//b", "hf://org/model@", "hf://org/model/a\nb"],
)
def test_urls_that_are_none(hub: HubServer, url: str) -> None:
    with pytest.raises(OptionError, match=r"must be hf://org/name"):
        open_hub(url)


def test_a_storage_bucket_says_how_it_is_opened(hub: HubServer) -> None:
    with pytest.raises(OptionError, match=r"as S3: s3://runs/step-100 with the endpoint https://s3\.\S+/me "):
        open_hub("hf://buckets/me/runs/step-100")


def test_options(hub: HubServer, checkpoint: Path) -> None:
    with pytest.raises(OptionError, match=r"storage_options are .* not \['revision'\]"):
        open_hub(revision="main")
    with pytest.raises(OptionError, match="can only be read"):
        fastload.save({}, "hf://org/model")


def test_the_token_goes_to_the_hub_only(hub: HubServer, checkpoint: Path) -> None:
    hub.repos["org/model"].gated = True
    found = fastload.load("hf://org/model", storage_options={"token": TOKEN})
    assert_same_bits(found, load_reference(checkpoint))
    assert {headers.get("authorization") for *_, headers in hub.log} == {f"Bearer {TOKEN}"}, hub.log
    assert hub.cdn.log
    assert not [path for path, _, headers in hub.cdn.log if "authorization" in headers]


@pytest.mark.parametrize(
    ("set_up", "url", "token", "error", "message"),
    [
        (
            lambda repo: setattr(repo, "gated", True),
            "hf://org/model",
            None,
            StorageError,
            r"/(model\.safetensors\.index|config)\.json.*: it is gated: accept its conditions at "
            r"http://[^ ]*/org/model, and log in with `hf auth login`, or set HF_TOKEN, on every host$",
        ),
        (
            lambda repo: setattr(repo, "private", True),
            "hf://org/model",
            None,
            CheckpointNotFound,
            r"^hf://org/model: http://[^ ]* has no such model, or it is private: check its name",
        ),
        (
            lambda repo: None,
            "hf://org/other",
            TOKEN,
            CheckpointNotFound,
            r"^hf://org/other: http://[^ ]* has no such model, or it is private",
        ),
        (
            lambda repo: None,
            "hf://org/model@v2",
            None,
            CheckpointNotFound,
            r"^hf://org/model@v2: it has no revision 'v2': see http://[^ ]*/org/model/tree/main$",
        ),
        (
            lambda repo: None,
            "hf://org/model/nothing",
            None,
            CheckpointNotFound,
            r"^hf://org/model/nothing: no such checkpoint$",
        ),
        (
            lambda repo: None,
            "hf://org/model",
            "hf_badtokenofatest",
            StorageError,
            r"^hf://org/model: the hub refuses the token: log in",
        ),
    ],
    ids="gated private missing revision path token".split(),
)
def test_refusals_say_what_to_do(
    hub: HubServer, checkpoint: Path, set_up: Any, url: str, token: str | None, error: Any, message: str
) -> None:
    set_up(hub.repos["org/model"])
    with pytest.raises(error, match=message) as raised:
        fastload.inspect(url, storage_options={"token": token})
    assert "hf_" not in str(raised.value).replace("`hf", "")
    assert "\n" not in str(raised.value)
    require_short(raised.value)


def test_too_many_requests(hub: HubServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hub asks to wait is waited for, if there is time."""
    hub.busy.append(2)
    began = time.monotonic()
    assert fastload.inspect("hf://org/model").nbytes
    assert time.monotonic() - began >= 2
    hub.busy.append(3600)
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"\(HTTP 429\), which asks to wait for 3600 s: try again later"):
        fastload.inspect("hf://org/model")
    assert time.monotonic() - began < 60
    hub.cdn.busy.append(1)
    assert_same_bits(fastload.load("hf://org/model"), load_reference(checkpoint))


def test_an_address_that_expires_is_asked_for_again(hub: HubServer, checkpoint: Path) -> None:
    with closing(open_hub()) as storage:
        about = storage.stat("x.safetensors")
        assert about is not None
        wanted, buffer = (checkpoint / "x.safetensors").read_bytes()[:10], memoryview(bytearray(10))
        storage.read_into("x.safetensors", 0, [buffer], about.version)
        storage.read_into("x.safetensors", 0, [buffer], about.version)
        assert hub.asked("/resolve/") == [f"HEAD /org/model/resolve/{about.version[:40]}/x.safetensors"]
        hub.cdn.signature = "s2"
        with pytest.raises(StorageError, match=r"hf://org/model/x\.safetensors") as raised:
            storage.read_into("x.safetensors", 0, [buffer], about.version)
        assert raised.value.transient
        assert "Signature" not in str(raised.value)
        storage.read_into("x.safetensors", 0, [buffer], about.version)
        assert bytes(buffer) == wanted
        assert len(hub.asked("/resolve/")) == 2


def fetch(hub: HubServer, names: list[str], cache: Path, *, links: bool = True) -> None:
    """Has files in the hub's cache, as huggingface_hub leaves them."""
    repo = hub.repos["org/model"]
    folder, commit = cache / "models--org--model", repo.refs["main"]
    for name in names:
        content = repo.commits[commit][name]
        blob = folder / "blobs" / etag_of(name, content)
        snapshot = folder / "snapshots" / commit / name
        for path in (blob, snapshot, folder / "refs" / "main"):
            path.parent.mkdir(parents=True, exist_ok=True)
        if links:
            blob.write_bytes(content)
            snapshot.symlink_to(os.path.relpath(blob, snapshot.parent))
        else:
            snapshot.write_bytes(content)
    (folder / "refs" / "main").write_text(commit)


@pytest.mark.parametrize("links", [True, False])
def test_cached_files_are_not_downloaded(
    hub: HubServer, checkpoint: Path, tmp_path: Path, links: bool
) -> None:
    fetch(hub, ["x.safetensors", "model.safetensors.index.json"], tmp_path / "cache", links=links)
    assert_same_bits(fastload.load("hf://org/model"), load_reference(checkpoint))
    assert {path.rpartition("/")[2] for path in hub.asked("/resolve/")} == {"y.safetensors"}


@pytest.mark.parametrize("links", [True, False])
def test_what_a_cached_file_lacks_is_downloaded(
    hub: HubServer, checkpoint: Path, tmp_path: Path, links: bool
) -> None:
    fetch(hub, ["x.safetensors", "y.safetensors"], tmp_path / "cache", links=links)
    [cached] = (tmp_path / "cache").rglob("snapshots/*/x.safetensors")
    os.truncate(cached, cached.stat().st_size - 100)
    assert_same_bits(fastload.load("hf://org/model"), load_reference(checkpoint))
    asked = {path.rpartition("/")[2] for path in hub.asked("/resolve/")}
    assert asked == {"x.safetensors", "model.safetensors.index.json"}


@pytest.mark.parametrize("links", [True, False])
def test_offline(
    hub: HubServer, checkpoint: Path, tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(hub, [*files_in(checkpoint)], tmp_path / "cache", links=links)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert_same_bits(fastload.load("hf://org/model"), load_reference(checkpoint))
    commit = hub.repos["org/model"].refs["main"]
    assert_same_bits(fastload.load(f"hf://org/model@{commit}"), load_reference(checkpoint))
    assert not hub.log
    for url in ("hf://org/other", "hf://org/model@v2", "hf://org/model@..%2Frefs%2Fmain%2F.."):
        with pytest.raises(CheckpointNotFound, match=r"HF_HUB_OFFLINE is set: unset it, or fetch"):
            fastload.load(url)


def test_listings_that_lie(hub: HubServer, checkpoint: Path) -> None:
    repo = hub.repos["org/model"]
    commit = repo.refs["main"]
    about = {**repo.commits[commit]}
    hub.cdn.blobs.clear()
    with closing(open_hub()) as storage:
        listed = storage.stat("x.safetensors")
        assert listed is not None
        other = hashlib.sha256(b"other").hexdigest()
        with pytest.raises(StorageError, match="replaced"):
            storage.read_into("x.safetensors", 0, [memoryview(bytearray(4))], f"{commit}:{other}")
        with pytest.raises(StorageError, match="replaced"):
            storage.read_into("x.safetensors", 0, [memoryview(bytearray(4))], "../../etc:passwd")
        repo.commits[commit] = {**about, "x.safetensors": b"x" * 4000}
        with pytest.raises(StorageError, match="replaced"):
            storage.read_into("x.safetensors", 0, [memoryview(bytearray(4))], listed.version)


def test_a_mirror_whose_links_name_the_hub(
    hub: HubServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of its listing all come from the mirror, which alone gets the token."""
    write_sharded(
        checkpoint, {f"more{n}.safetensors": [(f"m{n}", "U8", (9,))] for n in range(5)}, index=False
    )
    (checkpoint / "model.safetensors.index.json").unlink()
    hub.repos["org/model"] = Repo(files_in(checkpoint))
    for origin in ("https://huggingface.invalid", "http://127.0.0.1:9/mirror", "http://[", ""):
        monkeypatch.setattr(hub, "origin", origin)
        hub.log.clear()
        if origin == "http://[":
            with pytest.raises(StorageError, match="the hub's answer is malformed"):
                fastload.load("hf://org/model")
            continue
        options = {"token": TOKEN}
        assert_same_bits(fastload.load("hf://org/model", storage_options=options), load_reference(checkpoint))
        pages = hub.asked("/tree/")
        assert len(pages) == 3
        assert all("recursive=false" in page for page in pages)
        assert ["cursor" in page for page in pages] == [False, True, True]


def test_the_page(hub: HubServer, tmp_path: Path) -> None:
    """The block of docs/storage.md."""
    rows = [("layers.0", "U8", (9,)), ("b", "U8", (9,))]
    write_sharded(tmp_path / "model", {"x.safetensors": rows}, index=False)
    hub.repos["org/model"] = Repo(files_in(tmp_path / "model"))
    (code,) = re.findall(r"```python\n(.*hf://.*)\n```", page("docs/storage.md"))
    names: dict[str, Any] = {"fastload": fastload}
    exec(code, names)
    assert [*names["state"]] == ["layers.0"]
