"""Ranks of one job with different versions of fastload: one error on all of them, before anything else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import fastload
from fastload.base.version import PROTOCOL, __version__
from fastload.comm import store
from fastload.comm.group import join_in
from fastload.comm.store import Member
from fastload.comm.world import World
from tests.dist.faults import PATIENT_S, TOLD_S, Outcome, checkpoint, is_intact, options, outcome_of
from tests.dist.harness import run_ranks


@dataclass(frozen=True)
class Case:
    """Who differs from the others, and how.

    Attributes:
        others: Ranks that have another version.
        changes: What is different.
        late: A rank that comes after the others.
        in_tree: Whether the ranks are connected in a tree, or only have a store.
    """

    others: tuple[int, ...]
    changes: dict[str, object]
    late: int
    in_tree: bool = True


CASES = [
    Case((1,), {"__version__": "0.3.0"}, late=1),
    Case((1,), {"__version__": "0.3.0"}, late=0),
    Case((0, 2), {"PROTOCOL": PROTOCOL + 1}, late=2),
    Case((1,), {"PROTOCOL": PROTOCOL + 1}, late=0, in_tree=False),
]


def load_with_another_version(rank: int, world: int, path: Path) -> list[Outcome]:
    root, ends, given = dist.distributed_c10d._get_default_store(), [], options(timeout_s=PATIENT_S)
    for case in CASES:
        if case.in_tree:
            call = partial(fastload.load, path, process_group=dist.new_group(range(world)), options=given)
        else:
            namespace = dist.PrefixStore("job", root)
            call = partial(meet, partial(join_in, namespace, Member(rank, world), timeout_s=PATIENT_S))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in case.changes.items() if rank in case.others else ():
                patch.setattr(store, name, value)
            dist.barrier()
            if rank == case.late:
                time.sleep(0.5)
            ends.append(outcome_of(call))
        dist.barrier()
    assert is_intact(fastload.load(path, options=given))
    return ends


def meet(join: Callable[..., World]) -> None:
    world = join(call="looking around")
    with world.together(), world.step():
        pass


def test_all_ranks_raise_one_error_that_names_the_versions(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "x.safetensors")
    of_ranks = run_ranks(load_with_another_version, 3, path=path)
    for case, ends in zip(CASES, zip(*of_ranks, strict=True), strict=True):
        usual = f"{__version__} (protocol {PROTOCOL})"
        found = {"__version__": __version__, "PROTOCOL": PROTOCOL} | case.changes
        other = f"{found['__version__']} (protocol {found['PROTOCOL']})"
        parts = [f"{usual} on ranks 0, 2", f"{other} on rank 1"]
        if case.others == (0, 2):
            parts = [f"{other} on ranks 0, 2", f"{usual} on rank 1"]
        for end in ends:
            assert end.kind == "WorldError", end
            assert end.text.startswith(f"the ranks run different versions of fastload: {'; '.join(parts)}:")
            assert end.seconds < TOLD_S, end
