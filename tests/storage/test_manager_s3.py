"""CheckpointManager on an object store: steps are common prefixes there."""

from __future__ import annotations

import uuid
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import fastload
from fastload import CheckpointManager
from fastload.errors import CheckpointNotFound
from fastload.formats.names import NAMES, RECORD_NAME
from fastload.storage import open_storage
from tests.crash.flaky_proxy import FlakyProxy
from tests.dist.flaky_server import serving
from tests.storage.s3_server import BUCKET, client_of


@pytest.mark.slow(but=["s3"])
@pytest.mark.parametrize("server", ["s3", "seaweed"])
def test_steps_on_s3(server: str, request: pytest.FixtureRequest) -> None:
    options: dict[str, Any] = request.getfixturevalue(server)
    root = f"s3://{BUCKET}/runs/7"
    with CheckpointManager(root, keep_last=2, keep_every=3, storage_options=options) as manager:
        assert manager.latest() is None
        for step in range(1, 6):
            manager.save(step, {"weight": torch.full((100,), float(step))}, metrics={"loss": step})
        assert manager.all_steps() == [3, 4, 5]
        # What a save leaves that dies while it publishes: the record comes last.
        with closing(client_of(options)) as client:
            client.put_object(Bucket=BUCKET, Key="runs/7/step_00000009/model.safetensors", Body=b"half")
        manager.save(6, {"weight": torch.zeros(3), "position": fastload.PerRank(60)})
        assert manager.all_steps() == [3, 5, 6]
        if server == "seaweed":  # rclone answers a range with all of the object
            restored = manager.restore()
            assert torch.equal(restored["weight"], torch.zeros(3))
            assert restored["position"] == 60
            assert torch.equal(manager.restore(step=5)["weight"], torch.full((100,), 5.0))
    storage = open_storage(root, NAMES, options)
    assert set(storage.folders()) >= {"step_00000003", "step_00000005", "step_00000006"}
    assert not [name for name in storage.folders() if name.startswith(".")]
    storage.close()


def test_what_a_listing_of_many_steps_asks(seaweed: dict[str, Any], tmp_path: Path) -> None:
    """One list for all steps, and each record once, several at a time; a truncated copy does not count."""
    num_steps, run = 40, uuid.uuid4().hex
    fastload.save({"weight": torch.ones(100)}, tmp_path / "one", metadata={"step": "1"})
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    client = client_of(seaweed)
    for step in range(1, num_steps + 1):
        for name, content in files.items():
            data = content[:-1] if step == num_steps and name != RECORD_NAME else content
            client.put_object(Bucket=BUCKET, Key=f"{run}/step_{step:08d}/{name}", Body=data)
    for name in (".step_00000001.0.saving/x", "step_00000002-not", "wandb/a"):
        client.put_object(Bucket=BUCKET, Key=f"{run}/{name}", Body=b"other")
    client.close()
    with serving(FlakyProxy(seaweed["endpoint"])) as proxy:
        options = {**seaweed, "endpoint": proxy.url}
        with CheckpointManager(f"s3://{BUCKET}/{run}", storage_options=options) as manager:
            manager.wait()
            proxy.seen.clear()
            assert manager.latest() == num_steps - 1
            lists = [path for method, path in proxy.seen if "list-type" in path]
            records = [path for method, path in proxy.seen if path.endswith(RECORD_NAME)]
            assert (len(lists), len(records), len(proxy.seen)) == (2, num_steps, num_steps + 2)
            proxy.seen.clear()
            assert manager.all_steps() == list(range(1, num_steps))
            assert len(proxy.seen) == 1


class Crash(Exception):
    pass


def move(options: dict[str, Any], base: str, name: str, to: str, *, copies: bool = False) -> None:
    """Copies all objects below a prefix, and deletes them there unless that is to stay."""
    if not options:
        files = fsspec.filesystem("memory")
        files.copy(f"{base}/{name}", f"{base}/{to}", recursive=True)
        if not copies:
            files.rm(f"{base}/{name}", recursive=True)
        return
    run = base.removeprefix(f"s3://{BUCKET}/")
    with closing(client_of(options)) as client:
        for found in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{run}/{name}/").get("Contents", []):
            key = found["Key"]
            source = {"Bucket": BUCKET, "Key": key}
            client.copy_object(
                Bucket=BUCKET, Key=key.replace(f"{run}/{name}/", f"{run}/{to}/"), CopySource=source
            )
            if not copies:
                client.delete_object(**source)


@pytest.mark.slow(but=["s3"])
@pytest.mark.parametrize("kind", ["s3", "memory"])
def test_a_run_is_known_by_its_name_in_the_root(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Memory is found by it, also where there are no directories, and to move is to copy and to delete."""
    options: dict[str, Any] = request.getfixturevalue("seaweed") if kind == "s3" else {}
    base = f"s3://{BUCKET}/{uuid.uuid4().hex}" if kind == "s3" else f"memory://{uuid.uuid4().hex}"

    def live(name: str, wanted: int | None, *, keep: int) -> None:
        given = {"memory": tmp_path, "memory_every_steps": 1, "storage_options": options}
        with suppress(Crash), CheckpointManager(f"{base}/{name}", **given) as manager:
            if wanted is None:
                with pytest.raises(CheckpointNotFound):
                    manager.restore()
            else:
                assert manager.restore()["step"] == wanted
                assert manager.restored_from == "memory"
            assert manager.should_save(keep)
            manager.save(keep, {"weight": torch.ones(3), "step": keep})
            assert manager.latest() == keep
            raise Crash

    live("a", None, keep=1)
    move(options, base, "a", "b", copies=True)
    live("b", None, keep=7)
    move(options, base, "a", "c")
    live("a", None, keep=3)
    live("c", 1, keep=8)
