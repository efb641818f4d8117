"""CheckpointManager on an object store: steps are common prefixes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastload import CheckpointManager
from fastload.storage import open_storage, open_target
from fastload.storage.s3_target import S3Target
from tests.storage.s3_server import BUCKET


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
        target = open_target(f"{root}/x", options)
        assert isinstance(target, S3Target)
        target._client.put_object(Bucket=BUCKET, Key="runs/7/step_00000009/model.safetensors", Body=b"half")
        target.close()
        manager.save(6, {"weight": torch.zeros(3)})
        assert manager.all_steps() == [3, 5, 6]
        if server == "seaweed":  # rclone answers a range with all of the object
            assert torch.equal(manager.restore()["weight"], torch.zeros(3))
            assert torch.equal(manager.restore(step=5)["weight"], torch.full((100,), 5.0))
    storage = open_storage(root, options)
    assert set(storage.folders()) >= {"step_00000003", "step_00000005", "step_00000006"}
    assert not [name for name in storage.folders() if name.startswith(".")]
    storage.close()
