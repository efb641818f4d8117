"""When a reader has ended, and when a read may still write."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fastload.errors import Interrupted, StorageError
from fastload.formats.manifest import FileEntry
from fastload.geometry.ranges import ByteRange
from fastload.options import Patience
from fastload.storage import PatientStorage, retry
from fastload.storage.local import LocalStorage
from fastload.transfer.pace import Pace
from fastload.transfer.read import ChunkReader

_TEXT = b"0123456789abcdef"


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[PatientStorage]:
    (tmp_path / "file").write_bytes(_TEXT)
    storage = PatientStorage(LocalStorage(str(tmp_path)), Patience(0))
    yield storage
    storage.close()


def reader_of(storage: PatientStorage, name: str) -> ChunkReader:
    files = [FileEntry(name, len(_TEXT), "", "")]
    return ChunkReader(storage, files, pace=Pace(1, 1))


def test_there_may_be_very_many_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "MAX_BACKOFF_S", 1e-6)
    attempts = itertools.count(1)

    def ask() -> int:
        attempt = next(attempts)
        if attempt <= 1100:
            raise TimeoutError
        return attempt

    assert retry.patiently(ask, lambda error: True, patience=Patience(1100, 600.0)) == 1101


def test_a_thread_that_is_slow_to_end_is_no_read_under_way(storage: PatientStorage) -> None:
    reader, buffer, may_end = reader_of(storage, "file"), bytearray(len(_TEXT)), threading.Event()
    read = reader.submit([ByteRange(0, 0, len(_TEXT), 0)], [memoryview(buffer)])
    read.result(30.0)
    later = reader.submit([ByteRange(0, 0, len(_TEXT), 0)], [memoryview(buffer)])
    later.add_done_callback(lambda _: may_end.wait(30.0))  # as one that has a million buffers to let go of
    try:
        later.result(30.0)
        assert reader.close(wait_s=0.05)
        assert bytes(buffer) == _TEXT
    finally:
        may_end.set()


def test_a_read_that_storage_does_not_answer_is_under_way(storage: PatientStorage, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = reader_of(storage, "pipe")
    read = reader.submit([ByteRange(0, 0, len(_TEXT), 0)], [memoryview(bytearray(len(_TEXT)))])
    assert not reader.close(wait_s=0.05)  # nobody writes to the pipe: opening it does not return
    end = os.open(tmp_path / "pipe", os.O_RDWR)
    os.close(end)
    with pytest.raises(StorageError):
        read.result(30.0)
    assert reader.close(wait_s=30.0)


class Slow(LocalStorage):
    """Is slow to answer, and notes when it is closed."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.num_closed = 0

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], *args: Any) -> None:
        self.asked.set()
        self.may_answer.wait(30.0)
        super().read_into(name, offset, buffers, *args)

    def close(self) -> None:
        self.num_closed += 1
        super().close()


def test_a_storage_is_closed_once_no_read_is_under_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(_TEXT)
    slow, buffer = Slow(str(tmp_path)), bytearray(len(_TEXT))
    storage = PatientStorage(slow, Patience(0))
    reader = reader_of(storage, "file")
    read = reader.submit([ByteRange(0, 0, len(_TEXT), 0)], [memoryview(buffer)])
    assert slow.asked.wait(30.0)
    storage.close()
    storage.close()
    assert not slow.num_closed
    slow.may_answer.set()
    read.result(30.0)
    assert (bytes(buffer), slow.num_closed) == (_TEXT, 1)
    with pytest.raises(Interrupted):
        reader.submit([ByteRange(0, 0, len(_TEXT), 0)], [memoryview(buffer)]).result(30.0)
    assert reader.close(wait_s=30.0)


class Requests(LocalStorage):
    """Counts what is asked for, as where each request costs."""

    probes = False

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.asked: list[tuple[str, int, int]] = []

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], *args: Any) -> None:
        self.asked.append((name, offset, sum(map(len, buffers))))
        super().read_into(name, offset, buffers, *args)


@pytest.mark.parametrize("is_local", [False, True])
def test_spans_with_little_between_them_are_one_request(tmp_path: Path, is_local: bool) -> None:
    content = os.urandom(20_000)
    for name in "ab":
        (tmp_path / name).write_bytes(content)
    local = Requests(str(tmp_path))
    local.probes = is_local
    storage = PatientStorage(local, Patience(0))
    reader = ChunkReader(
        storage,
        [FileEntry(name, len(content), "", "") for name in "ab"],
        pace=Pace(1, 1),
    )
    places = [(0, 10, 100), (0, 174, 4), (0, 300, 1000), (0, 9000, 10), (0, 8990, 15), (1, 9005, 5)]
    spans = [ByteRange(file, offset, nbytes, 0) for file, offset, nbytes in places]
    buffers = [bytearray(nbytes) for nbytes in (60, 44, 1000, 20, 10)]  # cut anywhere
    reader.submit(spans, list(map(memoryview, buffers))).result(30.0)
    assert b"".join(buffers) == b"".join(content[offset : offset + nbytes] for _, offset, nbytes in places)
    merged = [("a", 10, 1290)] if not is_local else [("a", 10, 100), ("a", 174, 4), ("a", 300, 1000)]
    assert local.asked == [*merged, ("a", 9000, 10), ("a", 8990, 15), ("b", 9005, 5)]
    assert reader.close(wait_s=30.0)
    storage.close()


class Meeting(Requests):
    """Answers two requests once both are there, as if each waited for the other."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._both = threading.Barrier(2, timeout=30)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview], *args: Any) -> None:
        self._both.wait()
        super().read_into(name, offset, buffers, *args)


def test_the_requests_of_one_chunk_are_under_way_together(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(_TEXT)
    storage = PatientStorage(Meeting(str(tmp_path)), Patience(0))
    files = [FileEntry(name, len(_TEXT), "", "") for name in "ab"]
    reader = ChunkReader(storage, files, pace=Pace(2, 2))
    data = bytearray(8)
    reader.submit([ByteRange(0, 12, 4), ByteRange(1, 0, 4)], [memoryview(data)]).result(60)
    assert data == b"cdef0123"
    assert reader.close(wait_s=30.0)
    storage.close()


def test_a_chunk_ends_after_all_of_its_requests_with_the_error_of_one(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(_TEXT)
    storage = PatientStorage(Requests(str(tmp_path)), Patience(0))
    files = [FileEntry(name, len(_TEXT), "", "") for name in "ab"]
    reader = ChunkReader(storage, files, pace=Pace(1, 1))
    data = bytearray(8)
    read = reader.submit([ByteRange(0, 12, 4), ByteRange(1, 0, 4)], [memoryview(data)])
    error = read.exception(60)
    assert isinstance(error, StorageError)
    assert error.url.endswith("/a")
    assert data[4:] == b"0123"
    assert reader.close(wait_s=30.0)
    storage.close()
