"""Tracebacks of fastload's errors: the frames of the caller, one of fastload, and the message."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import re
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import fastload
from fastload import world
from fastload.errors import FastloadError, StorageError
from fastload.formats.safetensors import reader
from fastload.storage.process import registered_storages
from tests.dist.flaky_server import Handler, Server, serving

MOST_LINES = 15  # of the default traceback, with two frames of the caller
PATIENCE: dict[str, Any] = {"timeout_s": 2, "retries": 0}
REFUSED = "http://127.0.0.1:9"


class _Refusing(Handler):
    """Answers with the status that the path names."""

    def do_HEAD(self) -> None:
        self.send_response(int(self.path.split("/")[1]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_POST = do_HEAD


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(Server(_Refusing)) as refusing:
        yield refusing.url


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fastload.save({"a": torch.ones(3)}, tmp_path / "good")
    fastload.save({"a": torch.ones(3)}, tmp_path / "flipped")
    with open(tmp_path / "flipped" / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    (tmp_path / "bad.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{not json at all")
    (tmp_path / "file").touch()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def full_disk() -> Iterator[None]:
    """Files of this process have at most 100 bytes."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def s3(endpoint: str, **given: Any) -> dict[str, Any]:
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    return {"storage_options": {"endpoint": endpoint, "region": "us-east-1", **keys, **given}}


def error_of(call: Callable[[], Any]) -> FastloadError:
    with pytest.raises(FastloadError) as raised:
        call()
    return raised.value


def frames_of(error: BaseException) -> list[str]:
    """Returns the modules of the frames."""
    return [frame.f_globals["__name__"] for frame, _ in walk_tb(error.__traceback__)]


def num_own(error: BaseException) -> int:
    """Counts the frames of fastload."""
    return sum(module.partition(".")[0] == "fastload" for module in frames_of(error))


def require_short(error: FastloadError) -> None:
    """Checks that an error shows the frames of the caller, one of fastload, and its message."""
    text = "".join(traceback.format_exception(error))
    assert text.count("Traceback (most recent call last)") == 1, text
    assert num_own(error) == 1, text
    assert frames_of(error)[-1].startswith("fastload."), text
    num_extra = str(error).count("\n")
    assert len(text.splitlines()) - num_extra <= MOST_LINES, text


def stream(path: str) -> None:
    with fastload.open(path) as checkpoint:
        for _ in checkpoint.tensors():
            pass


def save_to_full_disk() -> None:
    with full_disk():
        fastload.save({"a": torch.ones(1000)}, "full")


def save_in_background_to_full_disk() -> None:
    with full_disk():
        fastload.async_save({"a": torch.ones(1000)}, "full").wait()


def restore_nothing() -> None:
    with fastload.CheckpointManager("runs") as manager:
        manager.restore()


def save_below_file() -> None:
    with fastload.CheckpointManager("file/runs", async_=False) as manager:
        manager.save(1, {"a": torch.ones(3)})


def wait_for_version() -> None:
    with fastload.watch("runs", timeout_s=0.01, poll_s=0.01) as versions:
        next(versions)


WRONG: dict[str, Callable[[], Any]] = {
    "load": lambda: fastload.load("missing"),
    "open": lambda: fastload.open("missing"),
    "inspect": lambda: fastload.inspect("missing"),
    "verify": lambda: fastload.verify("missing"),
    "prefetch": lambda: fastload.prefetch("missing"),
    "stage": lambda: fastload.stage("missing", "copy"),
    "seal": lambda: fastload.seal("missing"),
    "stage below a file": lambda: fastload.stage("good", "file/copy"),
    "header": lambda: fastload.load("bad.safetensors"),
    "checksum": lambda: fastload.load("flipped"),
    "checksum, verify": lambda: fastload.verify("flipped"),
    "checksum, tensors": lambda: stream("flipped"),
    "names of into": lambda: fastload.load("good", into={"b": torch.ones(3)}),
    "shape": lambda: fastload.load("good", into={"a": torch.ones(4)}),
    "names": lambda: fastload.load("good", names="b"),
    "dtype": lambda: fastload.load("good", dtype="int8"),
    "redistribute": lambda: fastload.redistribute({"a": torch.ones(3)}, {"b": torch.ones(3)}),
    "restore": restore_nothing,
    "watch": wait_for_version,
    "agree": lambda: fastload.world.agree("nothing"),
    "manager": lambda: fastload.CheckpointManager("runs", every_steps=-1),
    "exists": lambda: fastload.save({"a": torch.ones(3)}, "good"),
    "state": lambda: fastload.save({"a": print}, "new"),
    "save_stream": lambda: fastload.save_stream([("a", torch.ones(3))], "new", spool="missing"),
    "save below a file": lambda: fastload.save({"a": torch.ones(3)}, "file/new"),
    "manager below a file": save_below_file,
    "full disk": save_to_full_disk,
    "full disk in the background": save_in_background_to_full_disk,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_uses(folder: Path, wrong: Callable[[], Any]) -> None:
    require_short(error_of(wrong))


def of_http(url: str) -> Callable[[], Any]:
    return lambda: fastload.load(url, options=fastload.LoadOptions(**PATIENCE))


def of_s3(endpoint: str, **given: Any) -> Callable[[], Any]:
    return lambda: fastload.load(
        "s3://bucket/x", **s3(endpoint, **given), options=fastload.LoadOptions(**PATIENCE)
    )


def to_s3(endpoint: str) -> Callable[[], Any]:
    options = fastload.SaveOptions(**PATIENCE)
    return lambda: fastload.save({"a": torch.ones(3)}, "s3://bucket/x", **s3(endpoint), options=options)


REMOTE: dict[str, tuple[Callable[[str], Callable[[], Any]], str]] = {
    "http-404": (lambda url: of_http(f"{url}/404/x.safetensors"), "no such checkpoint"),
    "http-403": (lambda url: of_http(f"{url}/403/x.safetensors"), "403 Forbidden"),
    "http-503": (lambda url: of_http(f"{url}/503/x.safetensors"), "503 Service Unavailable"),
    "http-refused": (lambda _: of_http(f"{REFUSED}/x.safetensors"), "sending request: Connection refused$"),
    "http-name": (
        lambda _: of_http("http://no-such.invalid/x.safetensors"),
        "request: failed to look",
    ),
    "s3-404": (lambda url: of_s3(f"{url}/404"), "404 Not Found"),
    "s3-403": (lambda url: of_s3(f"{url}/403"), "403 Forbidden"),
    "s3-refused": (lambda _: of_s3(REFUSED), "sending request: Connection refused$"),
    "s3-no-keys": (
        lambda _: (
            lambda: fastload.load(
                "s3://bucket/x",
                storage_options={"region": "us-east-1", "metadata_endpoint": REFUSED},
                options=fastload.LoadOptions(**PATIENCE),
            )
        ),
        "no AWS_ACCESS_KEY_ID",
    ),
    "s3-option": (lambda url: of_s3(url, nonsense=1), "'nonsense' is not valid"),
    "s3-save-404": (lambda url: to_s3(f"{url}/404"), "404 Not Found"),
    "s3-save-refused": (lambda _: to_s3(REFUSED), "sending request: Connection refused$"),
}


@pytest.mark.parametrize(("wrong", "reason"), REMOTE.values(), ids=REMOTE)
def test_wrong_urls(
    folder: Path, server: str, wrong: Callable[[str], Callable[[], Any]], reason: str
) -> None:
    error = error_of(wrong(server))
    require_short(error)
    assert re.search(reason, str(error)), error  # of which the library's error would tell more
    assert error.__cause__ is None


# What stays


def test_the_cause_has_the_number_of_the_system(folder: Path) -> None:
    for wrong, number in ((save_to_full_disk, errno.EFBIG), (save_below_file, errno.ENOTDIR)):
        cause = error_of(wrong).__cause__
        assert isinstance(cause, OSError)
        assert cause.errno == number


def test_denied(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    folder.chmod(0)
    os.seteuid(65534)
    try:
        errors = [
            error_of(lambda: fastload.load(folder / "good")),
            error_of(lambda: fastload.save({"a": torch.ones(3)}, folder / "new")),
        ]
    finally:
        os.seteuid(0)
    for error in errors:
        require_short(error)
        assert isinstance(error.__cause__, PermissionError)


def test_an_error_that_the_caller_handles_is_shown(folder: Path) -> None:
    def inspect_another() -> None:
        try:
            raise KeyError("of the caller")
        except KeyError:
            fastload.inspect("missing")

    error = error_of(inspect_another)
    assert isinstance(error.__context__, KeyError)
    assert not error.__suppress_context__
    assert num_own(error) == 1


def test_an_error_that_the_caller_handles_comes_again(folder: Path) -> None:
    with full_disk():
        handle = fastload.async_save({"a": torch.ones(1000)}, "full")
        first = error_of(handle.wait)

    def wait_again() -> None:
        try:
            raise first
        except FastloadError:
            raise_another()

    def raise_another() -> None:
        try:
            raise KeyError("of the caller")
        except KeyError:
            handle.wait()

    again = error_of(wait_again)
    assert again is first
    require_short(again)


def test_a_bug_keeps_all_frames(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(reader, "parse_header", fail)
    with pytest.raises(AssertionError) as raised:
        fastload.load("bad.safetensors")
    assert len(frames_of(raised.value)) > 10


def raise_in_fsspec(monkeypatch: pytest.MonkeyPatch, error: Exception) -> FastloadError:
    """Returns the error of a load whose file system raises."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(LocalFileSystem, "ls", fail)
    return error_of(lambda: fastload.load(f"local://{os.getcwd()}/good"))


def test_an_error_of_a_bug_keeps_all_frames(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = raise_in_fsspec(monkeypatch, AssertionError("a bug"))
    assert isinstance(error, StorageError)
    assert isinstance(error.__cause__, AssertionError)
    assert frames_of(error.__cause__)[-1] == __name__
    assert len(frames_of(error)) > 10


def test_causes_of_an_error_of_storage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = PermissionError("refused")
    refused.__cause__ = KeyError("inside the library")
    error = raise_in_fsspec(monkeypatch, refused)
    require_short(error)
    assert error.__cause__ is None


def test_causes_in_a_cycle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = PermissionError(errno.EPERM, "not permitted"), StorageError("not permitted", "x")
    first.__cause__, second.__cause__ = second, first
    error = raise_in_fsspec(monkeypatch, first)
    require_short(error)
    assert error.__cause__ is first


class _OddStorage(fastload.Storage):
    """Fails in code of its user."""

    def stat(self, name: str) -> fastload.FileStat | None:
        raise StorageError("out of order", self.url)

    def list(self) -> list[str] | None:
        raise StorageError("out of order", self.url)

    def read_into(self, *_: Any) -> None:
        raise AssertionError


def test_frames_of_a_registered_storage_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registered_storages, "odd", _OddStorage)
    error = error_of(lambda: fastload.load("odd://x"))
    assert frames_of(error)[-1] == __name__


class _OddModule(torch.nn.Linear):
    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        raise OSError(errno.EPERM, "of the caller")


def test_frames_of_a_module_stay(folder: Path) -> None:
    fastload.save({"m": torch.nn.Linear(2, 2)}, "module")
    error = error_of(lambda: fastload.load("module", into={"m": _OddModule(2, 2)}))
    assert isinstance(error.__cause__, OSError)
    assert frames_of(error.__cause__)[-1] == __name__


def test_the_log_has_all_frames(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fastload"):
        error_of(lambda: fastload.load("good", into={"b": torch.ones(3)}))
    [text] = [record.exc_text for record in caplog.records if record.exc_text]
    assert "in _compare_names" in text
    assert "in load" in text


def test_public_functions() -> None:
    names = [(fastload, name) for name in fastload.__all__] + [(world, name) for name in world.__all__]
    functions = [value for value in (getattr(of, name) for of, name in names) if inspect.isfunction(value)]
    simple = {function.__name__ for function in functions if not hasattr(function, "__wrapped__")}
    assert simple == {"random_state", "register_storage", "worker_context"}


def test_signatures_stay() -> None:
    assert [*inspect.signature(fastload.load).parameters][:3] == ["path", "into", "device"]
    assert next(iter(inspect.signature(fastload.CheckpointManager).parameters)) == "root"
    assert (fastload.load.__module__, fastload.load.__name__) == ("fastload.api", "load")
