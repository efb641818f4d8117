"""Checkpoints that older commits wrote load for ever; `tests/recorded_states.py` says what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fastload
from fastload import CheckpointManager, PerRank
from fastload.cli import main
from fastload.errors import MismatchError
from tests.dist.harness import ranks
from tests.recorded_states import STATES, STEPS, own_state, parts, plain_state, sharded_state, step_state
from tests.unit.test_state import assert_same

RANKS_IMPORT = ("torch.distributed.tensor",)
DATA = Path(__file__).resolve().parents[1] / "data" / "recorded"
COMMITS = sorted(path.name for path in DATA.iterdir())


def places(state: str) -> list[Path]:
    """Where commits have saved a state, if they could."""
    found = [DATA / commit / state for commit in COMMITS if (DATA / commit / state).exists()]
    assert found, state
    return found


def test_there_is_something_of_everything() -> None:
    assert len(COMMITS) >= 5
    assert {state: len(places(state)) > 1 for state in STATES} == dict.fromkeys(STATES, True)


@pytest.mark.parametrize("commit", COMMITS)
def test_by_one_process(commit: str) -> None:
    plain = DATA / commit / "plain"
    assert_same(fastload.load(plain), plain_state())
    found = fastload.load(plain)
    assert found["tied"][0] is found["tied"][1]
    assert fastload.verify(plain).num_blocks > 20
    assert fastload.inspect(plain).metadata == {"made": "by hand"}
    into: dict[str, Any] = {"model": {"0.weight": torch.zeros(2, 3)}, "numbers": None}
    fastload.load(plain, into=into, strict=False)
    assert_same(into["model"]["0.weight"], plain_state()["model"]["0.weight"])
    assert_same(into["numbers"], plain_state()["numbers"])


@pytest.mark.parametrize("place", places("run"), ids=lambda place: place.parent.name)
def test_a_run(place: Path) -> None:
    with CheckpointManager(place) as manager:
        assert manager.all_steps() == sorted(STEPS)
        assert manager.latest() == STEPS[-1], "the one that was saved last, after going back"
        assert_same(manager.restore(), step_state(STEPS[-1]))
        assert_same(manager.restore(step=7), step_state(7))
    listed = CliRunner().invoke(main, ["ls", str(place)])
    assert listed.exit_code == 0
    assert "1.75" in listed.stdout, "the loss of step 7"


@ranks(2)
def test_by_several_ranks(rank: int, world: int) -> None:
    for place in places("own"):
        wanted = {name: getattr(one, "value", one) for name, one in own_state(rank, PerRank).items()}
        assert_same(fastload.load(place), wanted)
    for place in places("plain"):
        assert_same(fastload.load(place, options=fastload.LoadOptions(strategy="allgather")), plain_state())
    mesh = init_device_mesh("cpu", (2,))
    for place in places("sharded"):
        assert_same(fastload.load(place), {"step": 4, **parts()})
        columns = {name: distribute_tensor(one, mesh, [Shard(1)]) for name, one in parts().items()}
        for state in (sharded_state(), columns):
            for tensor in state.values():
                if isinstance(tensor, DTensor):
                    tensor.to_local().zero_()
            fastload.load(place, into=state, strict=False)
            assert_same({name: state[name].full_tensor() for name in parts()}, parts())


@ranks(3)
def test_by_another_number_of_ranks(rank: int, world: int) -> None:
    for place in places("own"):
        with pytest.raises(MismatchError, match="cursor"):
            fastload.load(place)
        assert_same(fastload.load(place, names="weight"), {"weight": own_state(0, PerRank)["weight"]})
    dist.barrier()
