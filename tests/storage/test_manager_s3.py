"""CheckpointManager on an object store: steps are common prefixes there.

Nothing is loaded: this server answers a range with all of the object.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fastload import CheckpointManager
from fastload.storage import open_storage
from tests.storage.s3_server import BUCKET, s3_server


def test_steps_on_s3(tmp_path: Path) -> None:
    with s3_server(tmp_path / "store") as options:
        root = f"s3://{BUCKET}/runs/7"
        with CheckpointManager(root, keep_last=2, keep_every=3, storage_options=options) as manager:
            assert manager.latest() is None
            for step in range(1, 6):
                manager.save(step, {"weight": torch.full((100,), float(step))}, metrics={"loss": step})
            assert manager.all_steps() == [3, 4, 5]
            # What a save leaves that dies while it publishes: the record comes last.
            (tmp_path / "store" / BUCKET / "runs/7/step_00000009").mkdir()
            (tmp_path / "store" / BUCKET / "runs/7/step_00000009/model.safetensors").write_bytes(b"half")
            manager.save(6, {"weight": torch.zeros(3)})
            assert manager.all_steps() == [3, 5, 6]
        storage = open_storage(root, options)
        assert set(storage.folders()) >= {"step_00000003", "step_00000005", "step_00000006"}
        assert not [name for name in storage.folders() if name.startswith(".")]
        storage.close()
