"""Tests for storages that others write, as base classes for pytest."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest
import torch

from fastload import CheckpointExists, CheckpointManager, SaveOptions, load, save
from fastload.errors import StorageError
from fastload.formats.names import NAMES
from fastload.storage import FileStat, Storage, WritableStorage, open_storage

__all__ = ["FILES", "StorageContract", "WritableStorageContract"]

FILES = {
    "a.bin": random.Random(1).randbytes(100_003),
    "b.bin": b"0123456789",
    "empty.bin": b"",
    "sub/deep/c.bin": b"deep",
    "sp ace ü%41.bin": b"odd name",
}


class StorageContract:
    """Tests of a registered storage. A test class derives from it and defines `fill` and `change`.

    Attributes:
        options: The ``storage_options`` to open it with.
        has_directories: Whether storage knows directories, so that `Storage.stat` finds the root.
    """

    options: Mapping[str, Any] = {}
    has_directories = True

    def fill(self, files: Mapping[str, bytes], where: str) -> str:
        """Writes files below a fresh root, and returns its URL.

        Args:
            files: Contents by name.
            where: Path of an empty local directory, which no other test has.
        """
        raise NotImplementedError

    def change(self, root: str, name: str, content: bytes) -> None:
        """Replaces the content of a file below a root that `fill` made."""
        raise NotImplementedError

    @pytest.fixture
    def root(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        return self.fill(FILES, str(tmp_path_factory.mktemp("root")))

    @pytest.fixture
    def storage(self, root: str) -> Iterator[Storage]:
        storage = self.open(root)
        yield storage
        storage.close()

    def open(self, url: str) -> Storage:
        """Opens a storage as fastload does."""
        return open_storage(url, NAMES, self.options)

    def read(self, storage: Storage, name: str, offset: int, *sizes: int) -> bytes:
        buffers = [bytearray(size) for size in sizes]
        storage.read_into(name, offset, [memoryview(buffer) for buffer in buffers])
        return b"".join(buffers)

    def test_url_is_the_root(self, storage: Storage, root: str) -> None:
        assert storage.url == root

    def test_stat(self, storage: Storage) -> None:
        for name, content in FILES.items():
            found = storage.stat(name)
            assert isinstance(found, FileStat)
            assert found.nbytes == len(content)
            assert isinstance(found.version, str)
            assert storage.stat(name) == found

    def test_stat_of_what_is_not_there(self, storage: Storage) -> None:
        assert storage.stat("missing.bin") is None
        assert storage.stat("missing/a.bin") is None
        assert storage.stat("sub") is None, "a directory is no file"
        assert storage.stat("b.bin/x") is None, "below a file there is nothing"

    def test_stat_of_the_root(self, storage: Storage, root: str) -> None:
        assert (storage.stat("") is not None) == self.has_directories
        missing = self.open(f"{root}/nothing/here")
        assert missing.stat("") is None
        assert missing.list() is None
        missing.close()

    def test_list_names_files_only_and_sorted(self, storage: Storage) -> None:
        assert storage.list() == sorted(name for name in FILES if "/" not in name)

    def test_folders(self, storage: Storage, root: str) -> None:
        assert [(name, folder.files) for name, folder in storage.folders().items()] == [("sub", {})]
        for where, wanted in (("sub", ["deep"]), ("sub/deep", []), ("nothing", [])):
            below = self.open(f"{root}/{where}")
            assert list(below.folders()) == wanted
            if wanted:
                files = below.folders()["deep"].files
                assert {name: about.nbytes for name, about in files.items()} == {"c.bin": 4}
                assert below.read_all("deep/c.bin", files["c.bin"]) == b"deep"
                with pytest.raises(StorageError, match=r"replaced|got 4"):
                    below.read_all("deep/c.bin", FileStat(7, "of another", 0.0))
            below.close()

    def test_folders_of_some_names(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """What sorts before and after them, and what lies deeper, is not told."""
        names = ["a/b", "step_1/a", "step_1/b", "step_1/deep/c", "step_2-x/a", "step_3", "stepping/a", "z/a"]
        storage = self.open(self.fill(dict.fromkeys(names, b"1234"), str(tmp_path_factory.mktemp("steps"))))
        found = storage.folders("step_")
        assert {name: sorted(folder.files) for name, folder in found.items()} == {
            "step_1": ["a", "b"],
            "step_2-x": ["a"],
        }
        assert {about.nbytes for folder in found.values() for about in folder.files.values()} == {4}
        assert not any(folder.is_link or folder.problem for folder in found.values())
        storage.close()

    def test_stat_says_when_it_was_written(self, storage: Storage) -> None:
        found = storage.stat("b.bin")
        assert found is not None
        assert found.modified_s == 0.0 or abs(found.modified_s - time.time()) < 600

    def test_a_root_that_is_a_file(self, root: str) -> None:
        storage = self.open(f"{root}/b.bin")
        assert storage.list() is None
        found = storage.stat("")
        assert found is not None
        assert found.nbytes == 10
        assert self.read(storage, "", 3, 4) == b"3456"
        storage.close()

    def test_a_root_with_one_file_is_a_directory(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        storage = self.open(self.fill({"one.bin": b"1"}, str(tmp_path_factory.mktemp("one"))))
        assert storage.list() == ["one.bin"]
        storage.close()

    def test_a_slash_at_the_end_means_the_same(self, root: str) -> None:
        storage = self.open(root + "/")
        assert storage.list() == sorted(name for name in FILES if "/" not in name)
        assert self.read(storage, "b.bin", 0, 10) == b"0123456789"
        storage.close()

    def test_read_fills_the_buffers_in_order(self, storage: Storage) -> None:
        data = FILES["a.bin"]
        assert self.read(storage, "a.bin", 0, len(data)) == data
        assert self.read(storage, "a.bin", 17, 1, 0, 4096, 7, 50_000) == data[17 : 17 + 54_104]
        assert self.read(storage, "a.bin", len(data) - 1, 1) == data[-1:]
        assert self.read(storage, "sub/deep/c.bin", 1, 2, 1) == b"eep"
        assert self.read(storage, "sp ace ü%41.bin", 0, 8) == b"odd name"

    def test_more_buffers_than_one_system_call_takes(self, storage: Storage) -> None:
        sizes = [number % 3 for number in range(5000)]
        assert self.read(storage, "a.bin", 5, *sizes) == FILES["a.bin"][5 : 5 + sum(sizes)]

    def test_reading_nothing_is_no_error(self, storage: Storage) -> None:
        before = storage.bytes_read
        assert self.read(storage, "b.bin", 10) == b""
        assert self.read(storage, "b.bin", 10, 0, 0) == b""
        assert self.read(storage, "empty.bin", 0, 0) == b""
        assert storage.bytes_read == before

    def test_a_view_of_a_larger_buffer(self, storage: Storage) -> None:
        buffer = bytearray(b"-" * 12)
        storage.read_into("b.bin", 2, [memoryview(buffer)[1:4], memoryview(buffer)[8:10]])
        assert buffer == b"-234----56--"

    def test_a_read_that_others_on_the_host_make_too(self, storage: Storage) -> None:
        buffer = bytearray(50_000)
        storage.share_reads(True)
        storage.read_into("a.bin", 5, [memoryview(buffer)])
        assert buffer == FILES["a.bin"][5:50_005]

    def test_a_file_that_somebody_writes_to(self, storage: Storage, root: str) -> None:
        """Bytes of another version than a caller has seen are refused: he may have others of the old one."""
        for name, content in (("b.bin", b"9876543210"), ("a.bin", FILES["a.bin"][::-1])):
            about, other = storage.stat(name), storage.stat("sub/deep/c.bin")
            assert about is not None
            assert other is not None
            if not about.version:
                pytest.skip("it has no versions")
            buffer = memoryview(bytearray(10))
            storage.read_into(name, 0, [buffer], about.version)
            self.change(root, name, content)
            with pytest.raises(StorageError, match=r"changed after it was opened|replaced") as raised:
                storage.read_into(name, 0, [buffer], about.version)
            assert (raised.value.offset, raised.value.nbytes, raised.value.transient) == (0, 10, False)
            storage.read_into("sub/deep/c.bin", 0, [buffer[:4]], other.version)
            assert bytes(buffer[:4]) == b"deep"

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 11), (9, 2), (10, 1), (1000, 5)])
    def test_a_file_that_ends_early_is_an_error_that_says_where(
        self, storage: Storage, offset: int, nbytes: int
    ) -> None:
        with pytest.raises(StorageError) as raised:
            self.read(storage, "b.bin", offset, nbytes)
        assert raised.value.url == f"{storage.url}/b.bin"
        assert raised.value.offset is not None
        assert raised.value.nbytes is not None
        assert raised.value.offset + raised.value.nbytes == offset + nbytes

    def test_reading_what_is_not_there(self, storage: Storage) -> None:
        with pytest.raises(StorageError) as raised:
            self.read(storage, "missing.bin", 2, 3)
        error = raised.value
        assert (error.url, error.offset, error.nbytes) == (f"{storage.url}/missing.bin", 2, 3)
        assert not error.transient

    def test_bytes_read_counts_what_came(self, storage: Storage) -> None:
        assert storage.bytes_read == 0
        storage.list()
        storage.stat("a.bin")
        assert storage.bytes_read == 0
        self.read(storage, "a.bin", 0, 1000, 24)
        self.read(storage, "b.bin", 5, 5)
        assert storage.bytes_read == 1029

    def test_threads(self, storage: Storage) -> None:
        data = FILES["a.bin"]
        failures: list[tuple[int, int | str]] = []
        start = threading.Barrier(8)

        def work(number: int) -> None:
            rng = random.Random(number)
            start.wait(10)
            for _ in range(40):
                offset = rng.randrange(len(data) - 2000)
                sizes = [rng.randrange(1000), rng.randrange(1000)]
                if self.read(storage, "a.bin", offset, *sizes) != data[offset : offset + sum(sizes)]:
                    failures.append((number, offset))
                if self.read(storage, "b.bin", 0, 10) != b"0123456789":
                    failures.append((number, "b"))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert failures == []
        assert storage.bytes_read == self._bytes_of(8, 40, len(data))

    @staticmethod
    def _bytes_of(num_threads: int, num_reads: int, nbytes: int) -> int:
        total = 0
        for number in range(num_threads):
            rng = random.Random(number)
            for _ in range(num_reads):
                rng.randrange(nbytes - 2000)
                total += rng.randrange(1000) + rng.randrange(1000) + 10
        return total


class WritableStorageContract(StorageContract):
    """Tests of a registered storage for saves. A test class derives from it and defines `place`."""

    def place(self, where: str) -> str:
        """Returns the URL of a root below which there is nothing yet.

        Args:
            where: Path of an empty local directory, which no other test has.
        """
        raise NotImplementedError

    def fill(self, files: Mapping[str, bytes], where: str) -> str:
        """Writes files below a fresh root, and returns its URL."""
        root = self.place(where)
        with closing(self.open(root)) as storage:
            for name, content in files.items():
                assert storage.put(name, content)
        return root

    def change(self, root: str, name: str, content: bytes) -> None:
        """Replaces the content of a file."""
        with closing(self.open(root)) as storage:
            assert storage.put(name, content)

    def open(self, url: str) -> WritableStorage:
        """Opens a storage as fastload does."""
        storage = super().open(url)
        assert isinstance(storage, WritableStorage)
        return storage

    @pytest.fixture
    def writable(self, root: str) -> Iterator[WritableStorage]:
        storage = self.open(root)
        yield storage
        storage.close()

    def test_put_and_get(self, writable: WritableStorage) -> None:
        assert writable.get("missing.bin") is None
        assert writable.get("missing/a.bin") is None
        for content in (b"first", b"", b"another, which is longer"):
            assert writable.put("new/file.bin", content)
            assert writable.get("new/file.bin") == content
        was_written = writable.put("new/file.bin", b"fresh", fresh=True)
        assert writable.get("new/file.bin") == (b"fresh" if was_written else b"another, which is longer")

    def test_a_writer(self, writable: WritableStorage) -> None:
        for content in (FILES["a.bin"], b"", b"short"):
            writer = writable.writer("new/file.bin")
            for offset in range(0, len(content), 7001):
                writer.write(memoryview(content)[offset : offset + 7001])
            writer.close()
            assert writable.get("new/file.bin") == content

    def test_move_replaces(self, writable: WritableStorage) -> None:
        writable.move("b.bin", "new/moved.bin")
        assert writable.get("b.bin") is None
        assert writable.get("new/moved.bin") == FILES["b.bin"]
        writable.move("a.bin", "new/moved.bin")
        assert writable.get("new/moved.bin") == FILES["a.bin"]

    def test_delete(self, writable: WritableStorage) -> None:
        writable.delete(["b.bin", "missing.bin", "empty.bin", "missing/a.bin"])
        assert writable.get("b.bin") is writable.get("empty.bin") is None
        assert writable.get("a.bin") == FILES["a.bin"]

    def test_files_and_delete_folder(self, writable: WritableStorage) -> None:
        for name in ("run/x.bin", "run/y.bin", "running/z.bin"):
            writable.put(name, name.encode())
        assert writable.files("run") == {"x.bin": 9, "y.bin": 9}
        assert writable.files("missing") == {}
        assert list(writable.folders("runn")) == ["running"]
        writable.delete_folder("run")
        writable.delete_folder("missing")
        assert writable.files("run") == {}
        assert "run" not in writable.folders()
        assert writable.files("running") == {"z.bin": 13}

    def test_modified_s(self, writable: WritableStorage) -> None:
        writable.put("new.bin", b"new")
        assert abs(writable.modified_s("new.bin") - time.time()) < 600
        assert writable.modified_s("missing.bin") == math.inf

    def test_a_state_is_saved_and_loaded(self, root: str) -> None:
        given: dict[str, Any] = {"storage_options": self.options}
        for step in range(2):
            weight = torch.arange(10_000.0) + step
            state = {"weight": weight, "step": step}
            save(state, f"{root}/saved", **given, options=SaveOptions(overwrite=step > 0))
            found = load(f"{root}/saved", **given)
            assert torch.equal(found["weight"], weight)
            assert found["step"] == step
        with pytest.raises(CheckpointExists):
            save(state, f"{root}/saved", **given)
        with closing(self.open(root)) as storage:
            assert [name for name in storage.folders() if name.endswith(".saving")] == []

    def test_a_training_keeps_the_newest_checkpoints(self, root: str) -> None:
        state = {"weight": torch.zeros(100), "step": 0}
        with CheckpointManager(root, keep_last=1, storage_options=self.options) as manager:
            for step in range(1, 4):
                state["step"] = step
                manager.save(step, state)
        with CheckpointManager(root, storage_options=self.options) as manager:
            assert manager.restore(into=state) is not None
        assert state["step"] == 3
        with closing(self.open(root)) as storage:
            assert len([name for name in storage.folders() if name.startswith("step")]) == 1
