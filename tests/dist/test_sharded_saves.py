"""Saves of DTensors: the files that one rank with the whole state would write, whatever the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fastload
from tests.dist.harness import ranks
from tests.dist.test_sharded import MESHES, make, placed


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def options(**changes: Any) -> fastload.SaveOptions:
    return fastload.SaveOptions(**{"timeout_s": 20, "block_bytes": 4096, "writers": "all", **changes})


def save_plain(state: Any, path: Path, rank: int, **changes: Any) -> dict[str, bytes]:
    """Saves the whole state by rank 0 alone; returns the files."""
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][0]
    if rank == 0:
        fastload.save(state, path, process_group=alone, options=options(**changes))
    dist.barrier()
    return files(path)


@ranks(4)
def test_each_mesh_writes_the_files_of_one_rank(rank: int, world: int, tmp_path: Path) -> None:
    tensors = make(tmp_path)
    tensors["large"] = torch.randn(1031, 1021)
    state = {"model": tensors, "step": 3, "names": ["a", ("b", 1.5)]}
    expected = save_plain(state, tmp_path / "plain", rank, max_shard_bytes=3 << 20)
    for number, (shape, placements) in enumerate(MESHES.values()):
        mesh = init_device_mesh("cpu", shape)
        sharded = {name: placed(tensor, mesh, placements) for name, tensor in tensors.items()}
        path = tmp_path / str(number)
        save = fastload.async_save if number % 2 else fastload.save
        saved = save({**state, "model": sharded}, path, options=options(max_shard_bytes=3 << 20))
        if isinstance(saved, fastload.SaveHandle):
            saved.wait()
        dist.barrier()
        found = files(path)
        assert found.keys() == expected.keys()
        for name, data in expected.items():
            assert found[name] == data, (placements, name)
