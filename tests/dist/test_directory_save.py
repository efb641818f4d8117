"""Directories of checkpoints and small files that cannot be made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.errors import PeerError, PlanMismatch
from fastload.integrations.directory_save import DirectorySave
from tests.dist.harness import ranks

OPTIONS = fastload.SaveOptions(timeout_s=20, overwrite=True)


@ranks(2)
def test_a_directory_that_cannot_be_made(rank: int, world: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"
    published: list[str] = []

    def save(number: int, add_files: Any) -> None:
        states = {"": {"w": torch.full((3,), float(min(number, 4)))}, "optimizer": {"step": number}}
        DirectorySave(
            str(path),
            states,
            add_files=add_files,
            on_publish=lambda: published.append("now"),
            process_group=None,
            options=OPTIONS,
        ).wait()

    def add(folder: str) -> None:
        Path(folder, "config.json").write_text("{}")

    def refuse(folder: str) -> None:
        raise OSError(28, "No space left on device", os.path.join(folder, "config.json"))

    with pytest.raises(PeerError, match=r"publishing .*/checkpoint-1(?s:.*)rank 0.*No space left"):
        save(1, refuse)
    assert not path.exists()
    save(2, add)
    with pytest.raises(PeerError, match="No space left"):
        save(3, refuse)  # the old one stays
    with pytest.raises(PlanMismatch, match=r"rank 0 4, rank 1 5"):
        save(4 + rank, add)
    assert fastload.load(path)["w"].tolist() == [2.0] * 3
    assert fastload.load(path / "optimizer") == {"step": 2}
    assert (path / "config.json").read_text() == "{}"
    assert published == (["now"] if rank == 0 else [])
    assert os.listdir(tmp_path) == ["checkpoint-1"]
