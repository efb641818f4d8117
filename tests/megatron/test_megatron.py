"""The integration of Megatron Core, with its own `save` and `load` as the control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from tests.dist.harness import ranks

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]
RANKS_IMPORT = ("megatron.core.dist_checkpointing", "fastload.integrations.megatron")
SAVED = (2, 1, 2)  # TP × PP × DP
LOADED = [(2, 1, 2), (4, 1, 1), (1, 1, 4), (2, 2, 1), (1, 2, 2)]
OPTIONS = fastload.SaveOptions(timeout_s=20, block_bytes=4096)
LOAD = fastload.LoadOptions(timeout_s=20)


def by_megatron(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns Megatron's module, with what it asks of CUDA."""
    from megatron.core import dist_checkpointing

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    return dist_checkpointing


@ranks(4)
def test_other_parallelisms(rank: int, world: int, tmp_path: Path) -> None:
    from fastload.integrations import megatron as ours
    from tests.megatron.states import Parallel, state_of, values_of

    with pytest.MonkeyPatch.context() as patch:
        theirs = by_megatron(patch)
        ours.save(state_of(Parallel(*SAVED, rank)), tmp_path / "ours", options=OPTIONS, content_metadata={"v": 1})
        for name, strategy in (("theirs", None), ("strategy", ("fastload", 1))):
            folder = tmp_path / name
            if rank == 0:
                folder.mkdir()
            dist.barrier()
            theirs.save(state_of(Parallel(*SAVED, rank)), str(folder), strategy, content_metadata={"v": 1})
        for sizes in LOADED:
            parallel = Parallel(*sizes, rank)
            # Objects are not resharded: only with the same sizes are there those of random states.
            def empty() -> Any:
                state = state_of(parallel, filled=False)
                if sizes[:2] != SAVED[:2]:
                    del state["rng_state"]
                return state

            expected = values_of(theirs.load(empty(), str(tmp_path / "theirs")))
            assert values_of(theirs.load(empty(), str(tmp_path / "strategy"))) == expected
            assert values_of(theirs.load(empty(), str(tmp_path / "ours"))) == expected
            for name in ("ours", "strategy", "theirs"):
                assert values_of(ours.load(empty(), tmp_path / name, options=LOAD)) == expected, name
