"""Any state, on any mesh, from any checkpoint: the bits that `distribute_tensor` makes of it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import fastload
from fastload.errors import StorageError
from fastload.transfer import demand
from tests.checkpoints import assert_same_bits
from tests.dist.draws import draw_state, draw_target
from tests.dist.harness import ranks
from tests.dist.test_sharded import emptied, locals_of
from tests.dist.test_sharded_failures import before_reads

DRAWS = 8


@pytest.mark.slow(but=["4-ranks", "1-ranks"])
@ranks(1, 3, 4, 8)
def test_any_mesh_gets_the_bits_of_any_checkpoint(rank: int, world: int, tmp_path: Path) -> None:
    alone, *_ = [dist.new_group([each]) for each in range(world)]
    for number in range(DRAWS):
        rng, own = random.Random(f"{world}/{number}"), random.Random(f"{world}/{number}/{rank}")
        state = draw_state(rng, rng.randint(1, 8))
        path = tmp_path / f"{number}.safetensors"
        if rng.random() < 0.5:
            path = tmp_path / str(number)
        if rank == 0 and path.suffix:
            save_file(state, path)
        elif rank == 0:
            saving = fastload.SaveOptions(block_bytes=4096, max_shard_bytes=rng.choice([100_000, 1 << 30]))
            fastload.save(state, path, options=saving, process_group=alone)
        dist.barrier()
        rng = random.Random(f"{world}/{number}/load")
        cast = rng.choice([None, None, None, torch.float64])
        nbytes = sum(tensor.nbytes for tensor in state.values())
        least = max(16, nbytes // 200)
        options = fastload.LoadOptions(
            strategy=rng.choice(["allgather", "allgather", "broadcast", "direct", "auto"]),
            chunk_bytes=rng.choice([None, least, least + 7, 20_000]),
            staging_bytes=rng.choice([8 << 20, 16 << 20]),
            timeout_s=20,
        )
        odds = rng.choice([0, 0, 0.05, 0.3]) if options.strategy == "allgather" else 0
        sound = rng.randrange(world)
        wanted = {
            name: tensor.to(cast) if cast and tensor.is_floating_point() else tensor
            for name, tensor in state.items()
        }

        def read(_: Any, odds: float = odds * (rank != sound)) -> None:
            if own.random() < odds:  # noqa: B023
                raise StorageError("this disk is broken")

        for _ in range(2):
            target = draw_target(rng, state, world)
            into = target.of(wanted, rank)
            expected = locals_of(into)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(demand, "_SLACK_BYTES", rng.choice([0, 0, 1 << 20]))
                before_reads(patch, read)
                fastload.load(path, into=emptied(into), dtype=cast, strict=False, options=options)
            try:
                assert_same_bits(locals_of(into), expected)
            except AssertionError as error:
                raise AssertionError(f"draw {number}: {options} {target}") from error
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
