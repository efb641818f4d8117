"""What goes wrong on object stores while a checkpoint is written."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import fsspec
import pytest

from fastload.errors import CheckpointExists, OptionError, StorageError
from fastload.ext.remote import s3 as s3_uploads
from fastload.ext.remote.fsspec import FsspecStorage
from fastload.ext.remote.s3 import Multipart, S3Storage
from fastload.formats.names import NAMES, RECORD_NAME, SAVING_NAME
from fastload.options import Patience
from fastload.saving.layout import TensorSpec, lay_out
from fastload.saving.split import split_evenly
from fastload.storage import Target, locate, object_target, open_target
from fastload.storage.object_target import Keys, ObjectTarget, OwnerFile, Streams
from fastload.storage.process import Owner
from tests.crash.flaky_proxy import FlakyProxy
from tests.dist.flaky_server import serving
from tests.e2e.forked import forking_python
from tests.storage.gateway import Answer, Request, serving_gateway
from tests.storage.s3_server import BUCKET, client_of, s3_server

OLD = {"a": b"old a", "b": b"old b", "gone": b"gone"}
NEW = {"a": b"new a!", "b": b"new b!"}


class Killed(BaseException):
    """The process ends here."""


class MortalBucket(FsspecStorage):
    """Ends the process at the n-th change, before or after it is made."""

    changes = ("put", "delete", "delete_folder", "move", "writer")

    def __init__(self, url: str, dies_at: float, *, late: bool) -> None:
        super().__init__(url, {})
        self._left = dies_at
        for name in self.changes:
            setattr(self, name, self._mortal(getattr(super(), name), late))
        delete = self.delete
        self.delete = lambda keys: [delete([key]) for key in keys]  # each is a change of its own

    def _mortal(self, change: Any, late: bool) -> Any:
        def call(*args: Any, **knobs: Any) -> Any:
            self._left -= 1
            if self._left < 0 or (self._left == 0 and not late):
                raise Killed
            result = change(*args, **knobs)
            if self._left == 0:
                raise Killed
            return result

        return call


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_target, "_SETTLE_S", 0.01)


@pytest.fixture
def root() -> str:
    return f"memory://{uuid.uuid4().hex}"


def record_of(files: Mapping[str, bytes]) -> bytes:
    return json.dumps({"files": [{"name": name} for name in sorted({*files, "index"})]}).encode()


def save(target: Target, files: Mapping[str, bytes], *, overwrite: bool = False) -> None:
    target.prepare([(name, len(content)) for name, content in files.items()], overwrite=overwrite)
    for name, content in files.items():
        target.write(name, 0, memoryview(content))
    record = record_of(files)
    target.publish([target.flush()], [("index", b"index"), (RECORD_NAME, record)])
    target.close()


def target_in(bucket: FsspecStorage, url: str, uploads: Streams | None = None) -> ObjectTarget:
    return ObjectTarget(url, bucket, url.rpartition("/")[2], NAMES, uploads or Streams(bucket, timeout_s=5))


def mortal(root: str, dies_at: float = float("inf"), *, late: bool = False) -> ObjectTarget:
    return target_in(MortalBucket(root, dies_at, late=late), f"{root}/step")


def put(root: str, key: str, content: bytes) -> None:
    fsspec.filesystem("memory").pipe_file(f"/{root.removeprefix('memory://')}/{key}", content)


def found(root: str) -> dict[str, bytes]:
    store = fsspec.filesystem("memory")
    prefix = f"/{root.removeprefix('memory://')}/"
    return {path.removeprefix(prefix): store.cat_file(path) for path in store.find(prefix)}


def whole(files: Mapping[str, bytes]) -> dict[str, bytes]:
    small = {"index": b"index", RECORD_NAME: record_of(files)}
    return {f"step/{name}": content for name, content in {**files, **small}.items()}


@pytest.mark.slow(but=["overwrite"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
def test_killed_at_any_change(
    root: str, late: bool, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record is there only beside all of its files; and the next save finds and removes the rest."""
    outcomes = set()
    for dies_at in itertools.count(1):
        place = f"{root}/{dies_at}"
        if overwrite:
            save(mortal(place), OLD)
        try:
            dying = mortal(place, dies_at, late=late)
            save(dying, NEW, overwrite=overwrite)
            break
        except Killed:
            pass
        there = {name: content for name, content in found(place).items() if name.startswith("step/")}
        marked = there.pop(f"step/{SAVING_NAME}", None)
        if f"step/{RECORD_NAME}" in there:
            assert there in (whole(OLD), whole(NEW))
            outcomes.add("new" if there == whole(NEW) else "old")
        else:
            assert marked or not there, "what has no record has an owner file"
            outcomes.add("none" if not there else "rest")
        with monkeypatch.context() as patch:
            patch.setattr(Owner, "is_gone", True)
            kept = f"step/{RECORD_NAME}" in there
            save(mortal(place), OLD, overwrite=kept)
        assert found(place) == whole(OLD)
    assert found(place) == whole(NEW)
    assert outcomes == ({"old", "rest", "none", "new"} if overwrite else {"rest", "none", "new"})


def test_the_rest_of_a_dead_publish_is_cleaned_from_beside_it(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dies_at in range(8, 12):
        with pytest.raises(Killed):
            save(mortal(root, dies_at), NEW)
        monkeypatch.setattr(Owner, "is_gone", True)
        other = target_in(FsspecStorage(root, {}), f"{root}/other")
        assert len(other.clean_abandoned()) == 1
        monkeypatch.undo()
        monkeypatch.setattr(object_target, "_SETTLE_S", 0.01)
        assert found(root) in ({}, whole(NEW))
        mortal(root).remove()


def test_a_publish_that_fails_is_taken_back(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = FsspecStorage(root, {})
    target = target_in(bucket, f"{root}/step")
    real = bucket.put

    def broken(key: str, content: bytes, **knobs: Any) -> bool:
        if key.endswith(RECORD_NAME):
            raise OSError("no route to host")
        return real(key, content, **knobs)

    monkeypatch.setattr(bucket, "put", broken)
    with pytest.raises(
        StorageError, match=rf"step/{RECORD_NAME} \[bytes 0-{len(record_of(NEW))}\]: OSError: no route"
    ):
        save(target, NEW)
    target.abort()
    assert found(root) == {}


@pytest.mark.parametrize("refused", ["put", "delete"], ids=["aborted", "published"])
def test_what_a_save_could_not_remove_the_next_of_that_process_does(
    root: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process lives, but the save has ended, whichever way."""
    bucket, another = FsspecStorage(root, {}), mortal(root)
    uploads = Streams(bucket, timeout_s=5)
    target = target_in(bucket, f"{root}/step", uploads)
    owner = Keys("step", another.prepare([], overwrite=False)["token"]).owner
    delete = bucket.delete

    def broken(key: Any, *content: Any, **knobs: Any) -> bool:
        raise PermissionError("expired")

    def deny(keys: Any) -> None:
        return broken(keys) if f"step/{RECORD_NAME}" in found(root) or refused == "put" else delete(keys)

    monkeypatch.setattr(bucket, "delete", deny)
    if refused == "put":
        monkeypatch.setattr(uploads, "publish", broken)
        with pytest.raises(StorageError, match="expired"):
            save(target, OLD)
        target.abort()
    else:
        save(target, OLD)
    assert f"step/{SAVING_NAME}" in found(root)
    save(mortal(root), NEW, overwrite=True)
    assert found(root) == {**whole(NEW), owner: found(root)[owner]}
    another.abort()
    assert found(root) == whole(NEW)


def test_who_publishes_keeps_others_out_until_silent(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = {"token": "x", "owner": Owner("elsewhere", "k", "p", 1, "1").to_bytes().decode(), "files": ["a"]}
    put(root, f"step/{SAVING_NAME}", json.dumps(lease).encode())
    put(root, "step/a", b"half")
    with pytest.raises(CheckpointExists, match="process 1 on elsewhere is publishing"):
        save(mortal(root), NEW, overwrite=True)
    monkeypatch.setattr(object_target, "_PUBLISHING_S", 0.0)
    save(mortal(root), NEW)
    assert found(root) == whole(NEW)


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_that_both_found_the_place_free_one_wins(
    root: str, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store decides nothing here: it knows no conditions."""
    start, outcomes = threading.Barrier(2), []
    real = OwnerFile.acquire

    def acquire(own: Any, *args: Any, **knobs: Any) -> None:
        check = own.check_free

        def checked(*args: Any, **knobs: Any) -> Any:
            free = check(*args, **knobs)
            start.wait(10)
            return free

        own.check_free = checked
        real(own, *args, **knobs)

    def work(files: Mapping[str, bytes]) -> None:
        target = mortal(root)
        try:
            save(target, files, overwrite=overwrite)
            outcomes.append(files)
        except CheckpointExists:
            target.abort()

    monkeypatch.setattr(object_target, "_SETTLE_S", 0.3)
    monkeypatch.setattr(OwnerFile, "acquire", acquire)
    threads = [threading.Thread(target=work, args=(files,)) for files in (OLD, NEW)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(outcomes) == 1
    assert found(root) == whole(outcomes[0])


@pytest.mark.parametrize("refresh_s", [60.0, -1.0], ids=["at-once", "after-a-while"])
def test_a_save_that_was_taken_for_dead_does_not_commit(
    root: str, refresh_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_target, "_REFRESH_S", refresh_s)
    bucket = FsspecStorage(root, {})
    uploads = Streams(bucket, timeout_s=5)
    target = target_in(bucket, f"{root}/step", uploads)
    real = uploads.publish

    def slow(name: str, receipts: Any) -> None:
        real(name, receipts)
        put(root, f"step/{SAVING_NAME}", b'{"token": "another"}')

    monkeypatch.setattr(uploads, "publish", slow)
    with pytest.raises(StorageError, match="another save assumed that this one was dead"):
        save(target, NEW)
    target.abort()
    assert f"step/{RECORD_NAME}" not in found(root)
    assert found(root)[f"step/{SAVING_NAME}"] == b'{"token": "another"}', "the other one needs it"


def test_a_write_that_waits_in_vain_says_so(root: str) -> None:
    bucket = FsspecStorage(root, {})
    target = target_in(bucket, f"{root}/step", Streams(bucket, timeout_s=0.1))
    target.prepare([("a", 10)], overwrite=False)
    with pytest.raises(StorageError, match=r"step/a \[bytes 5-10\]: the bytes before it did not arrive"):
        target.write("a", 5, memoryview(b"56789"))
    with pytest.raises(StorageError, match="the bytes before it"):
        target.flush()
    target.abort()
    assert found(root) == {}


# S3


class RefusingBucket(FsspecStorage):
    """Whose writers take nothing, but only after a while."""

    def writer(self, key: str) -> Any:
        writer = super().writer(key)

        def refuse(data: memoryview) -> None:
            time.sleep(0.2)
            raise PermissionError("quota")

        writer.write = refuse
        return writer


def test_writes_that_wait_for_one_that_fails_end_with_it(root: str) -> None:
    bucket = RefusingBucket(root, {})
    target = target_in(bucket, f"{root}/step", Streams(bucket, timeout_s=60))
    target.prepare([("a", 10)], overwrite=False)
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(target.write, "a", 0, memoryview(b"01234"))
        second = pool.submit(target.write, "a", 5, memoryview(b"56789"))
        assert "quota" in str(first.exception())
        assert isinstance(second.exception(), StorageError)
    assert time.monotonic() - began < 10
    with pytest.raises(StorageError, match="quota"):
        target.flush()
    target.abort()


@pytest.fixture
def bucket(s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> S3Storage:
    monkeypatch.setattr(s3_uploads, "_PART_BYTES", 1 << 20)
    return S3Storage(locate(f"s3://{BUCKET}/{uuid.uuid4().hex}"), NAMES, s3, Patience(4, 20, 10))


@pytest.fixture
def target(bucket: S3Storage) -> Iterator[ObjectTarget]:
    target = ObjectTarget(f"{bucket.url}/step", bucket, "step", NAMES, Multipart(bucket, NAMES))
    assert not target.ordered
    yield target
    target.abort()
    target.close()


def names(options: Mapping[str, Any], url: str) -> list[str]:
    """The names of what a server has below a URL."""
    prefix = f"{url.removeprefix(f's3://{BUCKET}/')}/"
    listed = client_of(options).list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
    return [entry["Key"].removeprefix(prefix) for entry in listed]


def test_parts_come_from_several_processes(s3: dict[str, Any]) -> None:
    program = (
        "import json, sys; from fastload.formats.names import NAMES\n"
        "from fastload.storage import open_target\n"
        "rank, url, options, ticket = int(sys.argv[1]), *map(json.loads, sys.argv[2:])\n"
        "target = open_target(url, NAMES, options); target.join(ticket)\n"
        "[(name, nbytes)] = ticket['files'].items(); step = target.align_bytes(nbytes)\n"
        "for number in range(rank, -(-nbytes // step), 2):\n"
        "    part = bytes([number]) * min(step, nbytes - number * step)\n"
        "    target.write(name, number * step, memoryview(part))\n"
        "print(json.dumps(target.flush()))"
    )
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/step"
    target = open_target(url, NAMES, s3)
    step = target.align_bytes(1) or 0
    ticket = target.prepare([("a", step + 5)], overwrite=False)
    words = [json.dumps(word) for word in (url, s3, ticket)]
    commands = [[forking_python(), "-c", program, str(rank), *words] for rank in range(2)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    receipts = [json.loads(rank.communicate(timeout=50)[0]) for rank in ranks]
    target.publish(receipts, [(RECORD_NAME, b"{}")])
    key = f"{url.removeprefix(f's3://{BUCKET}/')}/a"
    content = client_of(s3).get_object(Bucket=BUCKET, Key=key)["Body"].read()
    assert content == bytes(step) + bytes([1]) * 5
    assert not target.ordered
    target.close()


@pytest.mark.parametrize(
    ("nbytes", "aligned"),
    [
        (0, 8 << 20),
        (600 << 20, 8 << 20),
        (1200 << 20, 10 << 20),
        (5 << 30, 16 << 20),
        (150 << 30, 16 << 20),
        (1 << 40, 105 << 20),
    ],
)
def test_a_file_has_at_most_ten_thousand_parts(s3: dict[str, Any], nbytes: int, aligned: int) -> None:
    target = open_target(f"s3://{BUCKET}/a", NAMES, s3)
    assert target.align_bytes(nbytes) == aligned
    assert -(-nbytes // aligned) <= 10_000
    target.close()


@pytest.mark.parametrize("mib", [250, 256, 300, 500, 513, 800, 1000, 3000])
def test_four_writers_of_a_small_file_have_even_shares(s3: dict[str, Any], mib: int) -> None:
    specs = [TensorSpec("a", "U8", (mib << 20,), mib << 20)]
    layout = lay_out(specs, max_shard_bytes=5 << 30, block_bytes=None)
    target = open_target(f"s3://{BUCKET}/a", NAMES, s3)
    shares = split_evenly(layout, num_writers=4, align_bytes=target.align_bytes(layout.files[0].nbytes))
    target.close()
    most = max(sum(piece.nbytes for piece in share) for share in shares)
    assert most < 1.07 * layout.nbytes / 4


def test_a_save_that_began_later_and_died_is_replaced(seaweed: dict[str, Any]) -> None:
    """The store refuses the owner file then; a living save is respected, and a dead one is not."""
    bucket = S3Storage(locate(f"s3://{BUCKET}/{uuid.uuid4().hex}"), NAMES, seaweed, Patience(4, 20, 10))
    target = ObjectTarget(f"{bucket.url}/step", bucket, "step", NAMES, Multipart(bucket, NAMES))
    target.prepare([("a", 5)], overwrite=False)
    target.write("a", 0, memoryview(b"abcde"))
    receipts = [target.flush()]

    def begin(other: Owner) -> None:
        lease = {"token": "other", "owner": other.to_bytes().decode(), "files": ["b"]}
        bucket.put(f"step/{SAVING_NAME}", json.dumps(lease).encode())
        bucket.put("step/b", b"half")

    begin(Owner("elsewhere", "k", "p", 1, "1"))
    with pytest.raises(CheckpointExists, match="process 1 on elsewhere is publishing"):
        target.publish(receipts, [(RECORD_NAME, b"{}")])
    begin(replace(Owner.here(), started="before"))
    target.publish(receipts, [(RECORD_NAME, b"{}")])
    target.close()
    assert sorted(names(seaweed, bucket.url)) == ["step/a", f"step/{RECORD_NAME}"]


def test_a_lost_answer_to_the_completion_is_no_error(
    target: ObjectTarget, bucket: S3Storage, s3: dict[str, Any]
) -> None:
    target.prepare([("a", 5)], overwrite=False)
    target.write("a", 0, memoryview(b"abcde"))
    receipt = target.flush()
    client = bucket.client
    real = client.complete_multipart_upload

    def twice(**request: Any) -> Any:
        real(**request)
        return real(**request)

    client.complete_multipart_upload = twice
    target.publish([receipt], [(RECORD_NAME, b"{}")])
    assert names(s3, target.url) == ["a", RECORD_NAME]


def test_a_lost_answer_to_the_owner_file_is_no_error(seaweed: dict[str, Any]) -> None:
    """The next attempt finds one there: its own."""
    with serving(FlakyProxy(seaweed["endpoint"])) as proxy:
        url = f"s3://{BUCKET}/{uuid.uuid4().hex}/step"
        target = open_target(url, NAMES, {**seaweed, "endpoint": proxy.url}, patience=Patience(1, 10, 5))
        proxy.loses = [("PUT", SAVING_NAME)]
        save(target, NEW)
        assert proxy.loses == []
    assert names(seaweed, url) == ["a", "b", RECORD_NAME, "index"]


def test_a_store_that_is_busy_for_a_while_is_outlasted(seaweed: dict[str, Any]) -> None:
    with serving(FlakyProxy(seaweed["endpoint"])) as proxy:
        url = f"s3://{BUCKET}/{uuid.uuid4().hex}/step"
        target = open_target(url, NAMES, {**seaweed, "endpoint": proxy.url}, patience=Patience(4, 20, 10))
        proxy.fails = {("PUT", RECORD_NAME): 503}
        calm = threading.Timer(3.0, proxy.fails.clear)
        calm.start()
        save(target, NEW)
        calm.join()
        assert proxy.log != []


# What is under way when the store goes away: from the first look to what is removed at the end.
_MOMENTS = [
    ("GET", "list-type"),
    ("PUT", "owner.json"),
    ("POST", "a?uploads"),
    ("PUT", "partNumber"),
    ("PUT", SAVING_NAME),
    ("POST", "b?uploadId"),
    ("PUT", f"step/{RECORD_NAME}"),
    ("POST", "?delete"),
]


@pytest.mark.slow
def test_a_store_that_is_away_for_a_while_is_outlasted_at_any_moment(seaweed: dict[str, Any]) -> None:
    """By each request, however short its pauses happen to be."""
    failures: dict[tuple[str, str], BaseException] = {}

    def work(moment: tuple[str, str]) -> None:
        url = f"s3://{BUCKET}/{uuid.uuid4().hex}/step"
        try:
            with serving(FlakyProxy(seaweed["endpoint"])) as proxy:
                target = open_target(
                    url, NAMES, {**seaweed, "endpoint": proxy.url}, patience=Patience(4, 60, 10)
                )
                proxy.dies = moment
                save(target, NEW)
                assert proxy.log != []
            assert names(seaweed, url) == ["a", "b", RECORD_NAME, "index"]
        except BaseException as error:
            failures[moment] = error

    threads = [threading.Thread(target=work, args=(moment,)) for moment in _MOMENTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert failures == {}
    assert not any(thread.is_alive() for thread in threads)


def test_an_upload_that_somebody_ended_is_an_error(
    target: ObjectTarget, bucket: S3Storage, s3: dict[str, Any]
) -> None:
    ticket = target.prepare([("a", 5)], overwrite=False)
    target.write("a", 0, memoryview(b"abcde"))
    receipt = target.flush()
    bucket.client.abort_multipart_upload(**bucket.named("step/a"), UploadId=ticket["uploads"]["a"])
    with pytest.raises(StorageError, match="step/a: the store made None bytes of the 5"):
        target.publish([receipt], [(RECORD_NAME, b"{}")])
    target.abort()
    assert names(s3, target.url) == []


def test_an_upload_that_cannot_begin_is_what_is_told(s3: dict[str, Any]) -> None:
    """Not that those begun before it cannot be ended either."""
    with serving(FlakyProxy(s3["endpoint"])) as proxy:
        url = f"s3://{BUCKET}/{uuid.uuid4().hex}/step"
        target = open_target(url, NAMES, {**s3, "endpoint": proxy.url}, patience=Patience(0, 10, 5))
        proxy.fails = {("POST", "b?uploads"): 403, ("DELETE", "uploadId"): 403}
        with pytest.raises(StorageError, match="CreateMultipartUpload"):
            target.prepare([("a", 5), ("b", 5)], overwrite=False)
        proxy.fails.clear()
        target.close()


def test_lists_do_not_grow_with_the_files(
    target: ObjectTarget, bucket: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lists = bucket.files, [0]

    def files(folder: str) -> dict[str, int]:
        lists[-1] += 1
        return real(folder)

    monkeypatch.setattr(bucket, "files", files)
    for num_files in (1, 7):
        content = {f"{number}": b"abc" for number in range(num_files)}
        target.prepare([(name, 3) for name in content], overwrite=True)
        for name, text in content.items():
            target.write(name, 0, memoryview(text))
        target.publish([target.flush()], [(RECORD_NAME, record_of(content))])
        lists.append(0)
    assert lists[0] == lists[1] > 0


def test_an_orphan_that_cannot_be_removed_keeps_no_other(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = FsspecStorage(root, {})
    stuck, other = Keys("a", "0" * 16), Keys("b", "1" * 16)
    dead = Owner.here().to_bytes().decode()
    for keys in (stuck, other):
        put(root, keys.owner, json.dumps({"owner": dead}).encode())
        put(root, keys.pending("data"), b"x")
    delete = bucket.delete

    def deny(keys: Sequence[str]) -> None:
        if stuck.pending("data") in keys:
            raise PermissionError("denied")
        delete(keys)

    monkeypatch.setattr(bucket, "delete", deny)
    with pytest.raises(StorageError, match="denied"):
        target_in(bucket, f"{root}/step").clean_abandoned()
    assert {path.partition("/")[0] for path in found(root)} == {stuck.folder}


def test_old_files_that_nobody_owns_are_removed(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of a rank that wrote on after the save had given up; and no younger ones."""
    bucket = FsspecStorage(root, {})
    target = target_in(bucket, f"{root}/step")
    folder = Keys("another", "0123456789abcdef")
    old, young = (folder.pending(name) for name in "ab")
    put(root, old, b"x")
    monkeypatch.setattr(object_target, "_ABANDONED_S", 1800.0)
    modified_s = bucket.modified_s
    monkeypatch.setattr(bucket, "modified_s", lambda key: modified_s(key) - 3600 * (key == old))
    put(root, young, b"x")
    assert target.clean_abandoned() == []
    bucket.delete([young])
    assert target.clean_abandoned() == [f"{root}/{folder.folder}"]
    assert found(root) == {}


def test_old_uploads_that_nobody_owns_are_ended(
    target: ObjectTarget, bucket: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other programs are no business of a save."""
    ours = bucket.key("another/model.safetensors")
    others = [bucket.key(name) for name in ("data/video.mp4", "data/deep/model.safetensors")]
    for key in (ours, *others):
        bucket.client.create_multipart_upload(Bucket=BUCKET, Key=key)

    def left() -> list[str]:
        listed = bucket.client.list_multipart_uploads(Bucket=BUCKET, Prefix=bucket.key(""))
        return sorted(upload["Key"] for upload in listed["Uploads"])

    target.prepare([("a", 5)], overwrite=False)
    assert left() == sorted([ours, *others, bucket.key("step/a")])
    target.abort()
    monkeypatch.setattr(object_target, "_ABANDONED_S", -3600.0)
    target.prepare([("a", 5)], overwrite=False)
    assert left() == sorted([*others, bucket.key("step/a")])


def _dated_2010(request: Request, answer: Answer) -> Answer:
    body = re.sub(rb"<Initiated>[^<]*", b"<Initiated>2010-11-10T20:48:33.000Z", answer.body)
    return replace(answer, body=body)


@pytest.mark.parametrize("case", ["dates of the store", "longer than a day"])
def test_the_upload_of_a_living_save_is_left_alone(
    s3: dict[str, Any], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its date: the S3 of moto gives all uploads one of 2010."""
    with serving_gateway(s3["endpoint"]) as gateway:
        storage = {**s3, "endpoint": gateway.url}
        root = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        living, other = (open_target(f"{root}/{name}", NAMES, storage) for name in ("step", "other"))
        file = "model.safetensors"
        living.prepare([(file, 5)], overwrite=False)
        if case == "dates of the store":
            gateway.change = _dated_2010
        else:
            monkeypatch.setattr(object_target, "_ABANDONED_S", -3600.0)
        other.clean_abandoned()
        other.prepare([(file, 5)], overwrite=False)
        for target in (living, other):
            target.write(file, 0, memoryview(b"abcde"))
            target.publish([target.flush()], [(RECORD_NAME, b"{}")])
            target.close()


def test_a_part_that_fails_for_good(tmp_path: Path) -> None:
    with s3_server(tmp_path) as options:
        url = f"s3://{BUCKET}/runs/step"
        target = open_target(url, NAMES, options, patience=Patience(1, 10, 2))
        target.prepare([("a", 5)], overwrite=False)
    refused = rf"{url}/a \[bytes 0-5\]: EndpointConnectionError: .* after 2 attempts$"
    with pytest.raises(StorageError, match=refused):
        target.write("a", 0, memoryview(b"abcde"))
    with pytest.raises(StorageError, match="EndpointConnectionError"):
        target.flush()
    target.abort()
    target.close()


def test_what_loads_also_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client for writing takes the same options, and the same variables, as the one for reading."""
    for name in ("AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "eu-north-7")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    def key_id(client: Any) -> str:
        """The access key that it signs requests with."""
        url = client.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": "a"})
        query = parse_qs(urlsplit(url).query)
        [signer] = query.get("AWSAccessKeyId") or query["X-Amz-Credential"]
        return str(signer.partition("/")[0])

    found = client_of({})
    assert (found.meta.endpoint_url, found.meta.region_name) == ("http://127.0.0.1:9", "eu-north-7")
    assert key_id(found) == "from-environment"
    options = {"aws_endpoint_url": "http://127.0.0.1:8", "aws_access_key_id": "from-options"}
    found = client_of({**options, "secret_access_key": "s"})
    assert found.meta.endpoint_url == "http://127.0.0.1:8"
    assert key_id(found) == "from-options"
    virtual = client_of({"virtual_hosted_style_request": "true"})
    assert virtual.meta.config.s3["addressing_style"] == "virtual"
    with pytest.raises(OptionError, match="cannot open"):
        open_target("s3://bucket/a/b", NAMES, {"no_such_option": "1"})
