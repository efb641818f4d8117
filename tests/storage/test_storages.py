"""The contract, run against every storage; and what each of them does besides."""

from __future__ import annotations

import importlib.util
import os
import resource
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import fastload
from fastload.errors import ManifestError, OptionError, StorageError
from fastload.ext.remote.fsspec import FsspecStorage
from fastload.ext.remote.obstore import ObjectStorage
from fastload.formats.names import NAMES
from fastload.storage import open_storage, open_target
from fastload.storage.local import LocalStorage
from fastload.testing import FILES, StorageContract, WritableStorageContract
from tests.storage.s3_server import BUCKET, KEY, SECRET, client_of


def fill_folder(files: Mapping[str, bytes], where: str) -> None:
    for name, content in files.items():
        path = Path(where, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def change_file(root: str, name: str, content: bytes) -> None:
    """Writes other content to a file that is there, later than it was written."""
    path = Path(root.partition("://")[2] or root, name)
    path.write_bytes(content)
    os.utime(path, (time.time() + 5, time.time() + 5))


class TestLocal(StorageContract):
    change = staticmethod(change_file)

    def fill(self, files: Mapping[str, bytes], where: str) -> str:
        fill_folder(files, where)
        return where

    def test_url_is_the_root(self, storage: Any, root: str) -> None:
        assert isinstance(storage, LocalStorage)
        assert storage.url == root


class TestFileUrl(StorageContract):
    change = staticmethod(change_file)

    def fill(self, files: Mapping[str, bytes], where: str) -> str:
        fill_folder(files, where)
        return f"file://{where}"

    def test_url_is_the_root(self, storage: Any, root: str) -> None:
        assert isinstance(storage, LocalStorage)
        assert f"file://{storage.url}" == root


class TestRemoteFiles(WritableStorageContract):
    """fsspec's own access to local files, as a stand-in for an object store."""

    change = staticmethod(change_file)

    def place(self, where: str) -> str:
        return f"local://{where}"

    def test_it_is_remote(self, storage: Any) -> None:
        assert isinstance(storage, FsspecStorage)


class TestRemoteMemory(WritableStorageContract):
    def place(self, where: str) -> str:
        return f"memory://{where}"

    def test_it_is_shared_and_not_probed(self, storage: Any) -> None:
        assert isinstance(storage, FsspecStorage)
        assert storage.shared
        assert not storage.probes


class TestS3(StorageContract):
    has_directories = False

    @pytest.fixture(autouse=True)
    def _serve(self, seaweed: dict[str, Any]) -> None:
        self.options = seaweed

    def fill(self, files: Mapping[str, bytes], where: str) -> str:
        with closing(client_of(self.options)) as client:
            root = uuid.uuid4().hex
            for name, content in files.items():
                client.put_object(Bucket=BUCKET, Key=f"{root}/{name}", Body=content)
        return f"s3://{BUCKET}/{root}"

    def change(self, root: str, name: str, content: bytes) -> None:
        with closing(client_of(self.options)) as client:
            client.put_object(
                Bucket=BUCKET, Key=f"{root.removeprefix(f's3://{BUCKET}/')}/{name}", Body=content
            )

    def test_it_is_an_object_store(self, storage: Any) -> None:
        assert isinstance(storage, ObjectStorage)
        assert storage.shared

    def test_an_object_that_stands_for_a_folder_is_no_file(self, tmp_path: Path) -> None:
        files = {"runs/": b"", "runs/a.bin": b"a", "runs/sub/": b"", "runs/sub/b.bin": b"b"}
        storage = self.open(f"{self.fill(files, str(tmp_path))}/runs")
        assert (storage.list(), list(storage.folders())) == (["a.bin"], ["sub"])
        assert list(storage.folders()["sub"].files) == ["b.bin"]
        storage.close()


# Local files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill_folder(FILES, str(tmp_path))
    return tmp_path


def read(storage: Any, name: str, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    storage.read_into(name, offset, [memoryview(buffer)])
    return bytes(buffer)


def open_files() -> dict[int, str]:
    links = {int(fd): f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
    return {fd: os.readlink(link) for fd, link in links.items() if os.path.lexists(link)}


def test_only_reads_that_others_make_too_go_through_the_page_cache(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "a.bin", 4 << 20
    path.write_bytes(bytes(nbytes))

    def direct_bytes(storage: LocalStorage, *, shared: bool) -> int:
        before = storage.direct_bytes_read
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # cold
        storage.share_reads(shared)
        storage.read_into("", 0, [memoryview(bytearray(nbytes))])
        return storage.direct_bytes_read - before

    with closing(LocalStorage(str(path), "direct")) as storage:
        possible = direct_bytes(storage, shared=False)  # 0 where the file system takes none
        assert direct_bytes(storage, shared=True) == possible, "the option goes first"
    with closing(LocalStorage(str(path), "auto")) as storage:
        assert direct_bytes(storage, shared=True) == 0
        # Several times: the page cache may keep a page that has just been used.
        found = (direct_bytes(storage, shared=False) for _ in range(50))
        assert possible in found, "one read changes nothing for the next"


def test_symbolic_links_are_followed_and_dangling_ones_are_missing(folder: Path) -> None:
    (folder / "link.bin").symlink_to("sub/deep/c.bin")
    (folder / "dangling.bin").symlink_to("nowhere")
    (folder / "folder-link").symlink_to("sub")
    storage = LocalStorage(str(folder))
    assert storage.list() == sorted([*(n for n in FILES if "/" not in n), "link.bin"])
    assert storage.stat("link.bin") == storage.stat("sub/deep/c.bin")
    assert read(storage, "link.bin", 0, 4) == b"deep"
    assert storage.stat("dangling.bin") is None
    assert read(storage, "folder-link/deep/c.bin", 0, 4) == b"deep"
    storage.close()


def test_a_link_that_leads_in_a_circle_is_no_file(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    (folder / "sub" / "loop").symlink_to("loop")
    storage = LocalStorage(str(folder))
    assert storage.list() == sorted(name for name in FILES if "/" not in name)
    assert storage.stat("loop") is None
    assert "loop" not in storage.folders()["sub"].files
    assert not storage.folders()["sub"].problem
    storage.close()


def test_descriptors_are_opened_once_not_inherited_and_closed(folder: Path) -> None:
    before = set(open_files())
    storage = LocalStorage(str(folder))
    for _ in range(3):
        storage.stat("a.bin")
        read(storage, "a.bin", 0, 10)
        read(storage, "b.bin", 0, 10)
    mine = {fd: name for fd, name in open_files().items() if fd not in before and str(folder) in name}
    assert sorted(mine.values()) == [str(folder), str(folder / "a.bin"), str(folder / "b.bin")]
    assert not any(os.get_inheritable(fd) for fd in mine)
    storage.close()
    assert set(open_files()) <= before


def test_a_file_replaced_after_it_was_opened_is_read_as_it_was(folder: Path) -> None:
    storage = LocalStorage(str(folder))
    old = storage.stat("b.bin")
    (folder / "new").write_bytes(b"abcdefghij")
    (folder / "new").replace(folder / "b.bin")
    assert read(storage, "b.bin", 0, 10) == b"0123456789"
    assert storage.stat("b.bin") == old
    storage.close()
    again = LocalStorage(str(folder))
    assert read(again, "b.bin", 0, 10) == b"abcdefghij"
    assert again.stat("b.bin") != old
    again.close()


def test_the_version_tells_a_rewritten_file(folder: Path) -> None:
    storage = LocalStorage(str(folder))
    old = storage.stat("b.bin")
    os.utime(folder / "b.bin", ns=(1, 1))
    assert storage.stat("b.bin") != old
    storage.close()


def test_a_file_that_shrinks_while_open_says_so(folder: Path) -> None:
    storage = LocalStorage(str(folder))
    assert read(storage, "a.bin", 0, 5) == FILES["a.bin"][:5]
    os.truncate(folder / "a.bin", 100)
    with pytest.raises(StorageError, match=r"a\.bin \[bytes 100-200\]: the file ends at 100") as raised:
        read(storage, "a.bin", 50, 150)
    assert not raised.value.transient
    assert storage.bytes_read == 55
    storage.close()


def test_short_reads_are_carried_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = os.preadv, []

    def stingy(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return whole(fd, [buffers[0][:3]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    storage = LocalStorage(str(folder))
    buffers = [bytearray(size) for size in (4, 0, 1, 8)]
    storage.read_into("a.bin", 7, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == FILES["a.bin"][7:20]
    assert calls == [7, 10, 11, 12, 15, 18]
    storage.close()


@pytest.mark.parametrize(
    ("number", "transient"), [(5, True), (116, True), (110, True), (13, False), (21, False), (9, False)]
)
def test_which_errors_are_worth_another_try(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, transient: bool
) -> None:
    def broken(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    storage = LocalStorage(str(folder))
    storage.stat("a.bin")
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageError, match=os.strerror(number)) as raised:
        read(storage, "a.bin", 1, 2)
    error = raised.value
    assert (error.url, error.offset, error.nbytes) == (str(folder / "a.bin"), 1, 2)
    assert error.transient is transient
    storage.close()


def test_a_pipe_is_no_file_and_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "pipe.safetensors")
    storage = LocalStorage(str(folder))
    assert "pipe.safetensors" not in (storage.list() or [])
    assert storage.stat("pipe.safetensors") is None
    storage.close()


# Remote files


def test_errors_of_a_remote_storage_name_its_url(tmp_path: Path) -> None:
    fill_folder(FILES, str(tmp_path))
    storage = FsspecStorage(f"local://{tmp_path}", {})
    with pytest.raises(StorageError, match=rf"^local://{tmp_path}/b\.bin \[bytes 5-15\]: got 5 of 10 bytes$"):
        read(storage, "b.bin", 5, 10)


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (TimeoutError("slow"), True),
        (ConnectionResetError(104, "reset"), True),
        (OSError("throttled"), True),
        (PermissionError(13, "denied"), False),
        (FileNotFoundError(2, "gone"), False),
        (ValueError("odd"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_remote_errors_are_worth_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, transient: bool
) -> None:
    fill_folder(FILES, str(tmp_path))
    storage = FsspecStorage(f"local://{tmp_path}", {})

    def broken(*_: Any, **__: Any) -> bytes:
        raise error

    monkeypatch.setattr(LocalFileSystem, "cat_file", broken)
    with pytest.raises(StorageError) as raised:
        read(storage, "b.bin", 0, 1)
    assert raised.value.transient is transient
    assert raised.value.__cause__ is error
    assert type(error).__name__ in str(raised.value)


def test_unknown_schemes() -> None:
    with pytest.raises(OptionError, match=r"cannot open nosuchscheme://bucket/key: .*nosuchscheme"):
        open_storage("nosuchscheme://bucket/key", NAMES)


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    assert open_storage(tmp_path, NAMES).url == str(tmp_path)


@pytest.mark.parametrize("scheme", ["", "local://", "memory://"])
@pytest.mark.parametrize(
    ("name", "content"), [("m.safetensors", bytes(8)), ("x.safetensors.index.json", b"")]
)
def test_empty_headers_and_indexes_are_malformed_on_every_storage(
    scheme: str, name: str, content: bytes, tmp_path: Path
) -> None:
    if scheme == "memory://":
        fsspec.filesystem("memory").pipe_file(f"{tmp_path}/{name}", content)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ManifestError, match=name):
        fastload.inspect(f"{scheme}{tmp_path}")


OPENERS = [open_storage, open_target]


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("opener", OPENERS)
def test_options_of_the_client_may_stand_among_those_of_the_store(
    opener: Any, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"account_name": "a", "account_key": "a2V5"} if scheme == "az" else {}
    client = {"allow_http": "true", "timeout": "7s"}
    closed, real = list[ObjectStorage](), ObjectStorage.close
    monkeypatch.setattr(ObjectStorage, "close", lambda storage: (closed.append(storage), real(storage)))
    opener(f"{scheme}://bucket/runs/a", NAMES, {**given, **client}).close()
    [storage] = closed
    assert {name: storage.store.client_options[name] for name in client} == client


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"endpoint": "not a url"}, "'not a url'"),
        ({"endpoint_url": "127.0.0.1:9000"}, "'127.0.0.1:9000'"),
        ({"aws_endpoint": "http://host:port"}, "'http://host:port'"),
        ({"endpoint": "https://"}, "'https://'"),
        ({"endpoint": "http://a b:9000"}, "'http://a b:9000'"),
        ({"nonsense": 1}, "nonsense"),
        ({"aws_allow_http": True}, ""),  # which obstore does not survive
        ({"client_options": {"nonsense": 1}}, "nonsense"),
        ({"client_options": 5}, "client_options"),
        ({"region": 5}, "int"),
    ],
    ids=str,
)
def test_bad_options_of_a_store_are_named(opener: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError) as raised:
        opener("s3://bucket/runs/a", NAMES, options)
    assert str(raised.value).startswith("cannot open s3://bucket")
    assert says in str(raised.value)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT", "AWS_ENDPOINT_URL"])
@pytest.mark.parametrize("opener", OPENERS)
def test_a_bad_endpoint_of_the_environment_is_named(
    opener: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "my host:9000")
    with pytest.raises(OptionError, match=r"cannot open s3://bucket.*'my host:9000'"):
        opener("s3://bucket/runs/a", NAMES)


@pytest.mark.parametrize("opener", OPENERS)
def test_without_obstore_the_extra_is_named(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "obstore" else real(name))
    with pytest.raises(OptionError, match=r"s3://.* needs obstore: pip install 'fastload-torch\[remote\]'"):
        opener("s3://bucket/runs/a", NAMES)


def test_an_endpoint_that_only_one_of_two_libraries_takes(tmp_path: Path) -> None:
    options = {"endpoint": "http://my_host:9000"}
    open_storage("s3://bucket/runs/a", NAMES, options).close()
    with pytest.raises(OptionError, match=r"cannot open s3://bucket/runs: .*http://my_host:9000"):
        open_target("s3://bucket/runs/a", NAMES, options)


def test_s3_with_a_profile(seaweed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    profile = tmp_path / "credentials"
    profile.write_text(f"[lab]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    options = {"endpoint": seaweed["endpoint"], "region": seaweed["region"]}
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/a"
    fastload.save({"a": torch.arange(10)}, url, storage_options=options)
    assert fastload.load(url, storage_options=options)["a"].tolist() == list(range(10))
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(OptionError, match=r"cannot open s3://.*nobody"):
        open_storage(url, NAMES, options)


def test_s3_without_credentials_says_where_they_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", nobody)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    storage = open_storage("s3://bucket/runs/a", NAMES, {"endpoint": nobody})
    with pytest.raises(StorageError, match=r"s3://bucket/runs/a: .*no AWS_ACCESS_KEY_ID .*, no profile"):
        storage.list()
    storage.close()


def test_a_mapped_file_whose_storage_is_closed_says_so(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    storage = LocalStorage(str(tmp_path))
    mapped = storage.map("a")
    assert mapped is not None
    mapped.check()
    storage.close()
    with pytest.raises(StorageError, match="a: Bad file descriptor"):
        mapped.check()


def test_what_cannot_be_mapped_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    taken: list[int] = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(LocalStorage(str(tmp_path))) as storage:
        assert storage.stat("a") is not None
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1])
        )
        try:
            with suppress(OSError):  # too many open files
                while True:
                    taken.append(os.dup(0))
            mapped = storage.map("a")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for number in taken:
                os.close(number)
        assert mapped is None
        assert storage.map("a") is not None
