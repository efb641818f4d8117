"""The contract of targets, run against every one of them."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fastload.errors import CheckpointExists, OptionError
from fastload.ext.remote import s3 as s3_uploads
from fastload.ext.remote.obstore import ObjectStorage
from fastload.formats.names import NAMES
from fastload.options import Patience
from fastload.storage import Target, locate, object_target, open_target
from fastload.storage.local_target import LocalTarget
from fastload.storage.object_target import ObjectTarget, Streams
from tests.storage.s3_server import BUCKET, client_of
from tests.storage.target_contract import TargetContract, small_files, write_shares


def hidden(names: list[str]) -> list[str]:
    return sorted(name for name in names if ".saving" in name or name.endswith(".new"))


class TestLocal(TargetContract):
    def place(self, where: str) -> str:
        return where

    def leftovers(self, root: str) -> list[str]:
        return hidden([str(path) for path in Path(root).rglob("*")])

    def test_it_is_local(self, url: str) -> None:
        assert isinstance(self.target(url), LocalTarget)


class TestLocalBuffered(TestLocal):
    def target(self, url: str) -> Target:
        return open_target(f"file://{url}", NAMES, io="buffered")

    def test_url_is_where_it_will_be(self, url: str) -> None:
        assert self.target(url).url == url


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no /dev/shm")
class TestInMemory(TestLocal):
    """tmpfs, where writes past the page cache make no sense, but are asked for."""

    @pytest.fixture
    def root(self) -> Iterator[str]:
        root = f"/dev/shm/fastload-{uuid.uuid4().hex}"
        os.mkdir(root)
        yield root
        shutil.rmtree(root)

    def target(self, url: str) -> Target:
        return open_target(url, NAMES, io="direct")


class TestFsspecMemory(TargetContract):
    processes = False

    def place(self, where: str) -> str:
        return f"memory://{where}"

    def leftovers(self, root: str) -> list[str]:
        return hidden(fsspec.filesystem("memory").find(root.removeprefix("memory://")))

    def test_it_is_of_objects(self, url: str) -> None:
        assert isinstance(self.target(url), ObjectTarget)


class TestFsspecFiles(TargetContract):
    def place(self, where: str) -> str:
        return f"local://{where}"

    def leftovers(self, root: str) -> list[str]:
        return hidden([str(path) for path in Path(root.removeprefix("local://")).rglob("*")])


class TestS3(TargetContract):
    @pytest.fixture(autouse=True)
    def _serve(self, s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.options = s3
        monkeypatch.setattr(s3_uploads, "_PART_BYTES", 1 << 20)  # which this server takes, and is faster

    def client(self) -> Any:
        return client_of(self.options)

    def read(self, url: str) -> dict[str, bytes]:
        """Reads by S3's own client, since this server answers a range with all of the object.

        What two have written and deleted at once the server may list for a moment after it is gone.
        """
        client, prefix = self.client(), url.removeprefix(f"s3://{BUCKET}/") + "/"
        until = time.monotonic() + 10
        while True:
            found = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
            keys = [entry["Key"] for entry in found]
            try:
                bodies = [client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys]
            except client.exceptions.NoSuchKey:
                assert time.monotonic() < until, f"listed, but not there: {keys}"
                time.sleep(0.1)
                continue
            return {key.removeprefix(prefix): body for key, body in zip(keys, bodies, strict=True)}

    def place(self, where: str) -> str:
        return f"s3://{BUCKET}/{uuid.uuid4().hex}/runs"

    def leftovers(self, root: str) -> list[str]:
        client, prefix = self.client(), root.removeprefix(f"s3://{BUCKET}/")
        objects = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
        try:
            uploads = client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", ())
        except client.exceptions.NoSuchUpload:  # rclone, until the bucket has its first one
            uploads = ()
        return hidden([found["Key"] for found in objects]) + [found["Key"] for found in uploads]


class TestSeaweed(TestS3):
    """A store that honours conditions, too."""

    @pytest.fixture(autouse=True)
    def _serve(self, seaweed: dict[str, Any]) -> None:
        self.options = seaweed

    def read(self, url: str) -> dict[str, bytes]:
        return TargetContract.read(self, url)

    def test_a_condition_decides_at_once(
        self, url: str, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(object_target, "_SETTLE_S", float("nan"))  # no sleep takes that
        self.save(url, files)

    def test_what_others_put_there_meanwhile_stays(self, url: str) -> None:
        files = {"b.safetensors": b"ours"}
        (target,) = self.begin(url, files)
        write_shares([target], files)
        receipt = target.flush()
        key = f"{url.removeprefix(f's3://{BUCKET}/')}/b.safetensors"
        self.client().put_object(Bucket=BUCKET, Key=key, Body=b"theirs")
        with pytest.raises(CheckpointExists, match="not empty"):
            target.publish([receipt], small_files(files))
        target.abort()
        target.close()
        assert self.read(url) == {"b.safetensors": b"theirs"}

    def test_conditions_can_be_turned_off(self, url: str, files: dict[str, bytes]) -> None:
        """For stores that refuse what they do not know."""
        self.options = {**self.options, "conditional_put": "disabled"}
        self.save(url, files)
        assert self.read(url) == {**files, **dict(small_files(files))}

    def test_folders_leave_nothing(self, root: str, url: str, files: dict[str, bytes]) -> None:
        self.save(url, files)
        (target,) = self.begin(url, files, overwrite=True)
        target.abort()
        target.remove()
        target.close()
        prefix = root.removeprefix(f"s3://{BUCKET}/") + "/"
        found = self.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix, Delimiter="/")
        assert found.get("CommonPrefixes", []) == []

    def test_a_url_says_the_keys_as_they_are(self, root: str, files: dict[str, bytes]) -> None:
        for url in (
            f"{root}/{name}" for name in ("a b", "50%", "a%20b/step", "a#b?c=d", "ünïcode/step", "end ")
        ):
            self.save(url, files)
            assert self.read(url) == {**files, **dict(small_files(files))}
            prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
            found = self.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix, Delimiter="/")["Contents"]
            assert {entry["Key"].removeprefix(prefix) for entry in found} == {
                *files,
                *dict(small_files(files)),
            }
        assert self.leftovers(root) == []

    def test_slashes_more_than_enough(self, root: str, files: dict[str, bytes]) -> None:
        for url in (f"{root}//step", f"{root}//steps//1//"):
            self.save(url, files)
            assert self.read(url) == {**files, **dict(small_files(files))}
        assert (
            self.read(f"{root}/step") == self.read(f"{root}/steps/1") == {**files, **dict(small_files(files))}
        )

    def test_an_object_that_stands_for_a_folder_is_not_in_the_way(
        self, url: str, files: dict[str, bytes]
    ) -> None:
        self.client().put_object(Bucket=BUCKET, Key=url.removeprefix(f"s3://{BUCKET}/") + "/", Body=b"")
        self.save(url, files)
        assert self.read(url) == {**files, **dict(small_files(files))}


@pytest.mark.slow  # TestObstoreMemory goes the same way
class TestObstore(TestS3):
    """The way of stores that are not S3, where whole files are dealt to the ranks; on S3, for want of one."""

    processes = False  # another process would take it for what it is

    def target(self, url: str) -> Target:
        parent, _, name = url.rpartition("/")
        bucket = ObjectStorage(locate(parent), NAMES, self.options, Patience(2, 20, 10))
        return ObjectTarget(url, bucket, name, NAMES, Streams(bucket, timeout_s=20))


class TestObstoreMemory(TargetContract):
    """A store that honours conditions on a put, as Google's and Azure's do."""

    processes = False

    def place(self, where: str) -> str:
        self.bucket = ObjectStorage(locate("memory:///"), NAMES, {}, Patience(2, 20, 10))
        vars(self.bucket)["_store_for_writers"] = self.bucket.store  # another one would be empty
        return f"memory://{where}"

    def target(self, url: str) -> Target:
        return ObjectTarget(
            url, self.bucket, url.rpartition("/")[2], NAMES, Streams(self.bucket, timeout_s=20)
        )

    def read(self, url: str) -> dict[str, bytes]:
        folder = url.rpartition("/")[2]
        return {name: self.bucket.get(f"{folder}/{name}") or b"" for name in self.bucket.files(folder)}

    def leftovers(self, root: str) -> list[str]:
        return hidden(self.bucket.folders())

    def test_a_condition_decides_at_once(
        self, url: str, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(object_target, "_SETTLE_S", float("nan"))  # no sleep takes that
        self.save(url, files)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://host/model", "https:// can only be read"),
        ("s3://bucket", "below the bucket"),
        ("s3://bucket/", "below the bucket"),
        ("gs://bucket", "below the bucket"),
        ("nosuchscheme://a/b", "nosuchscheme"),
    ],
)
def test_where_nothing_can_be_saved(url: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        open_target(url, NAMES)
