"""What every target must do. A test class derives from `TargetContract` and says where one can be made."""

from __future__ import annotations

import json
import random
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from fastload.errors import CheckpointExists, OptionError, StorageError
from fastload.formats.names import NAMES, RECORD_NAME
from fastload.options import Patience
from fastload.storage import Target, open_storage, open_target
from tests.e2e.forked import forking_python

INDEX = ("model.safetensors.index.json", b'{"index": 1}')


def small_files(files: Iterable[str]) -> list[tuple[str, bytes]]:
    """What a save of some files writes beside them; the record names them."""
    record = {"files": [{"name": name} for name in files]}
    return [INDEX, (RECORD_NAME, json.dumps(record).encode())]


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def write_shares(targets: list[Target], files: Mapping[str, bytes]) -> None:
    """Deals the files to the targets, in pieces where a file may be cut, and writes them in turn."""
    align = targets[0].align_bytes(max(map(len, files.values())))
    turn = 0
    for name, content in files.items():
        buffer = memoryview(bytearray(content))
        step = align or len(content)
        for offset in range(0, len(content), step):
            targets[turn % len(targets)].write(name, offset, buffer[offset : offset + step])
            turn += 1


class TargetContract:
    """The tests; `place` returns a URL below which nothing is yet."""

    options: Mapping[str, Any] = {}
    processes = True  # whether other processes see the same storage

    def place(self, where: str) -> str:
        raise NotImplementedError

    @pytest.fixture
    def root(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        return self.place(str(tmp_path_factory.mktemp("root")))

    @pytest.fixture
    def url(self, root: str) -> str:
        return f"{root}/step-7"

    def target(self, url: str) -> Target:
        return open_target(url, NAMES, self.options, patience=Patience(4, 20, 10))

    @pytest.fixture
    def files(self, root: str) -> dict[str, bytes]:
        return self.contents(root, 1)

    def contents(self, root: str, seed: int, num_parts: int = 2) -> dict[str, bytes]:
        with closing(self.target(f"{root}/x")) as target:
            part_bytes = target.align_bytes(0) or 1_000_000
        rng = random.Random(seed)
        sizes = {"model-00001-of-00002.safetensors": num_parts * part_bytes + 12_345, "b.safetensors": 1003}
        return {name: rng.randbytes(nbytes) for name, nbytes in sizes.items()}

    def begin(self, url: str, files: Mapping[str, bytes], num: int = 1, **knobs: bool) -> list[Target]:
        targets = [self.target(url) for _ in range(num)]
        sizes = [(name, len(content)) for name, content in files.items()]
        ticket = through_json(targets[0].prepare(sizes, overwrite=knobs.get("overwrite", False)))
        for other in targets[1:]:
            other.join(ticket)
        return targets

    def save(self, url: str, files: Mapping[str, bytes], num: int = 1, *, overwrite: bool = False) -> None:
        targets = self.begin(url, files, num, overwrite=overwrite)
        write_shares(targets, files)
        receipts = [through_json(target.flush()) for target in targets]
        targets[0].publish(receipts, small_files(files))
        for target in targets:
            target.close()

    def read(self, url: str) -> dict[str, bytes]:
        storage = open_storage(url, NAMES, self.options)
        found = {}
        for name in storage.list() or ():
            stat = storage.stat(name)
            assert stat is not None
            buffer = bytearray(stat.nbytes)
            storage.read_into(name, 0, [memoryview(buffer)])
            found[name] = bytes(buffer)
        storage.close()
        return found

    def leftovers(self, root: str) -> list[str]:
        """Everything below the root that is not the checkpoints' own."""
        raise NotImplementedError

    @pytest.mark.parametrize("num", [1, 3])
    def test_what_is_written_is_there(self, root: str, url: str, files: dict[str, bytes], num: int) -> None:
        self.save(url, files, num)
        assert self.read(url) == {**files, **dict(small_files(files))}
        assert self.leftovers(root) == []

    def test_url_is_where_it_will_be(self, url: str) -> None:
        target = self.target(url)
        assert target.url == url
        target.close()

    def test_nothing_is_seen_until_it_is_published(self, url: str, files: dict[str, bytes]) -> None:
        (target,) = self.begin(url, files)
        write_shares([target], files)
        receipt = target.flush()
        assert self.read(url) == {}
        target.publish([receipt], small_files(files))
        target.close()

    def test_what_is_there_is_not_overwritten(self, root: str, url: str, files: dict[str, bytes]) -> None:
        self.save(url, files)
        with pytest.raises(CheckpointExists, match="step-7"):
            self.begin(url, self.contents(root, 2))
        assert self.read(url) == {**files, **dict(small_files(files))}
        assert self.leftovers(root) == []

    def test_overwrite_replaces_all_of_it(self, root: str, url: str, files: dict[str, bytes]) -> None:
        self.save(url, {**files, "more.safetensors": b"more"})
        files = self.contents(root, 2)
        self.save(url, files, 2, overwrite=True)
        assert self.read(url) == {**files, **dict(small_files(files))}
        assert self.leftovers(root) == []

    def test_overwrite_of_nothing(self, url: str, files: dict[str, bytes]) -> None:
        self.save(url, files, overwrite=True)
        assert self.read(url) == {**files, **dict(small_files(files))}

    def test_what_is_no_checkpoint_is_never_overwritten(self, url: str, files: dict[str, bytes]) -> None:
        target = self.begin(url, {"thesis.safetensors": b"x"})[0]
        target.write("thesis.safetensors", 0, memoryview(b"x"))
        target.publish([target.flush()], [("thesis.tex", b"years of work")])
        target.close()
        with pytest.raises(OptionError, match=r"no fastload\.json"):
            self.begin(url, files, overwrite=True)
        with pytest.raises(CheckpointExists):
            self.begin(url, files)
        assert self.read(url)["thesis.tex"] == b"years of work"

    def test_what_is_not_the_checkpoints_own_is_kept(
        self, root: str, url: str, files: dict[str, bytes]
    ) -> None:
        users = {"config.json": b"{}", "tokenizer.model": bytes(range(256))}
        self.save_beside(url, {"model-00002-of-00002.safetensors": b"more"}, users)
        self.save(url, files, 2, overwrite=True)
        assert self.read(url) == {**files, **dict(small_files(files)), **users}
        assert self.leftovers(root) == []

    @pytest.mark.parametrize("name", ["ema.safetensors", "config.json"], ids=["read-as-a-part", "written-to"])
    def test_what_cannot_be_kept_is_not_replaced(
        self, root: str, url: str, files: dict[str, bytes], name: str
    ) -> None:
        self.save_beside(url, files, {name: b"x"})
        with pytest.raises(OptionError, match=rf"has other files.*\['{name}'\].*move them away"):
            self.begin(url, {**files, "config.json": b"new"}, overwrite=True)
        assert self.read(url) == {**files, **dict(small_files(files)), name: b"x"}
        assert self.leftovers(root) == []

    def save_beside(self, url: str, files: Mapping[str, bytes], users: Mapping[str, bytes]) -> None:
        """Saves a checkpoint beside files that its record does not name."""
        (target,) = self.begin(url, files)
        write_shares([target], files)
        target.publish([target.flush()], [*users.items(), *small_files(files)])
        target.close()

    def test_abort_leaves_nothing(self, root: str, url: str, files: dict[str, bytes]) -> None:
        targets = self.begin(url, files, 2)
        write_shares(targets, files)
        for target in reversed(targets):
            target.abort()
            target.abort()
            with pytest.raises(StorageError, match="aborted"):
                target.flush()
            target.close()
        assert self.read(url) == {}
        assert self.leftovers(root) == []
        self.save(url, files)

    def test_bytes_that_nobody_wrote_are_noticed(self, root: str, url: str, files: dict[str, bytes]) -> None:
        targets = self.begin(url, files, 2)
        write_shares(targets, files)
        with pytest.raises(StorageError, match=r"step-7/\S+ \[bytes \d+-\d+\]: no rank wrote it"):
            targets[0].publish([targets[1].flush()], small_files(files))
        for target in targets:
            target.abort()
            target.close()
        assert self.read(url) == {}
        assert self.leftovers(root) == []

    def test_of_two_saves_to_one_place_one_wins(self, root: str, url: str) -> None:
        contents = [self.contents(root, seed) for seed in range(2)]
        targets = [self.begin(url, files)[0] for files in contents]
        for target, files in zip(targets, contents, strict=True):
            write_shares([target], files)
        receipts = [target.flush() for target in targets]
        start, outcomes = threading.Barrier(2), ["", ""]

        def publish(number: int) -> None:
            start.wait(10)
            try:
                targets[number].publish([receipts[number]], small_files(files))
                outcomes[number] = "won"
            except (CheckpointExists, StorageError) as error:  # or it is told that another took its place
                outcomes[number] = str(error)
                targets[number].abort()

        threads = [threading.Thread(target=publish, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert outcomes.count("won") == 1, outcomes
        assert "step-7" in outcomes[1 - outcomes.index("won")]
        assert self.read(url) == {**contents[outcomes.index("won")], **dict(small_files(files))}
        for target in targets:
            target.close()
        assert self.leftovers(root) == []

    def test_what_another_save_published_meanwhile_stays(self, root: str, url: str) -> None:
        files, others = ({"b.safetensors": content} for content in (b"late", b"early"))
        (target,) = self.begin(url, files)
        write_shares([target], files)
        receipt = target.flush()
        self.save(url, others)
        with pytest.raises(CheckpointExists, match="step-7"):
            target.publish([receipt], small_files(files))
        target.abort()
        target.close()
        assert self.read(url) == {**others, **dict(small_files(others))}
        assert self.leftovers(root) == []

    def test_threads(self, root: str, url: str) -> None:
        files = self.contents(root, 3, num_parts=5)
        (target,) = self.begin(url, files)
        name = max(files, key=lambda name: len(files[name]))
        step = target.align_bytes(len(files[name])) or 100_000
        left = list(range(0, len(files[name]), step))
        if not target.ordered:
            random.Random(0).shuffle(left)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if not left:
                        return
                    offset = left.pop(0)
                target.write(name, offset, memoryview(files[name])[offset : offset + step])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        write_shares([target], {other: content for other, content in files.items() if other != name})
        for thread in threads:
            thread.join(30)
        target.publish([target.flush()], small_files(files))
        target.close()
        assert self.read(url) == {**files, **dict(small_files(files))}

    def test_living_saves_are_not_cleaned(self, root: str, url: str, files: dict[str, bytes]) -> None:
        targets = self.begin(url, files, 2)
        write_shares(targets, files)
        self.save(f"{root}/step-8", files)
        other = self.target(f"{root}/step-9")
        assert other.clean_abandoned() == []
        other.close()
        targets[0].publish([target.flush() for target in targets], small_files(files))
        for target in targets:
            target.close()
        assert self.read(url) == {**files, **dict(small_files(files))}

    def test_dead_saves_are_cleaned_by_the_next(self, root: str, url: str, files: dict[str, bytes]) -> None:
        if not self.processes:
            pytest.skip("no other process sees this storage")
        self.leave_behind(url)
        assert self.leftovers(root) != []
        self.save(f"{root}/step-8", files)
        assert self.leftovers(root) == []

    def leave_behind(self, url: str) -> None:
        """Lets another process prepare a save, write some of it and be killed."""
        program = (
            "import os, sys, json, threading; from fastload.formats.names import NAMES\n"
            "from fastload.storage import open_target\n"
            "target = open_target(sys.argv[1], NAMES, json.loads(sys.argv[2]))\n"
            "target.prepare([('a.safetensors', 5000)], overwrite=False)\n"
            "target.write('a.safetensors', 0, memoryview(bytes(5000)))\n"
            # On a file system, a put that is cut off would leave an owner file that names nobody.
            "[one.join() for one in threading.enumerate() if one.name.startswith('fastload-owner')]\n"
            "os.kill(os.getpid(), 9)"
        )
        command = [forking_python(), "-c", program, url, json.dumps(dict(self.options))]
        assert subprocess.run(command, timeout=50).returncode == -9

    def test_remove(self, root: str, url: str, files: dict[str, bytes]) -> None:
        self.save(url, files)
        self.save(f"{root}/step-8", files)
        target = self.target(url)
        target.remove()
        target.close()
        assert self.read(url) == {}
        assert self.read(f"{root}/step-8") == {**files, **dict(small_files(files))}
        assert self.leftovers(root) == []

    def test_only_who_sees_what_was_prepared_can_join(self, url: str, files: dict[str, bytes]) -> None:
        targets = self.begin(url, files)
        sizes = [(name, len(content)) for name, content in files.items()]
        other = self.target(url + "-elsewhere")
        ticket = other.prepare(sizes, overwrite=False)
        other.abort()
        late = self.target(url)
        with pytest.raises(StorageError):
            late.join(ticket)
        for target in (late, other, *targets):
            target.abort()
            target.close()

    @pytest.fixture(autouse=True)
    def _no_threads_left(self) -> Iterator[None]:
        def busy() -> int:
            return len([thread for thread in threading.enumerate() if thread.name != "fastload-idle"])

        before = busy()
        yield
        assert busy() <= before + 1
