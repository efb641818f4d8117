"""What is the caller's own and raises after the data have moved: all ranks raise, with the cause, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastload
from fastload.comm.world import World
from fastload.errors import MismatchError, PeerError
from tests.dist.harness import ranks

OPTIONS = fastload.LoadOptions(timeout_s=20)


class Model(nn.Linear):
    """A module with a `load_state_dict` of its own, which may refuse."""

    def __init__(self, refuses: bool) -> None:
        super().__init__(3, 2)
        self.refuses = refuses

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.refuses:
            raise RuntimeError("no room for weights")
        return super().load_state_dict(state_dict, *args, **kwargs)


class Hooked(nn.Linear):
    """A module with a hook that runs once the tensors are there, and may refuse."""

    def __init__(self, refuses: bool) -> None:
        super().__init__(3, 2)

        def check(*_: Any) -> None:
            if refuses:
                raise RuntimeError("no room for weights")

        self.register_load_state_dict_post_hook(check)


class Sampler:
    """What gets its state as a whole, and may refuse."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise RuntimeError("no room for weights")


Make = Callable[[bool], Any]


@pytest.fixture
def saved(tmp_path: Path, make: Make) -> Path:
    torch.manual_seed(0)
    fastload.save({"own": make(False).state_dict(), "w": torch.arange(8.0)}, tmp_path / "saved")
    return tmp_path / "saved"


def refused(victim: int, world: int, load: Callable[[], Any]) -> str:
    """Loads, and returns what one rank says of it, which is what all of them raise."""
    with pytest.raises(fastload.FastloadError, match="no room for weights") as raised:
        load()
    causes = raised.value.failures if isinstance(raised.value, PeerError) else {0: raised.value}
    assert causes.keys() == {victim}
    assert isinstance(causes[victim], MismatchError)
    assert isinstance(raised.value, PeerError) == (world > 1)
    return str(causes[victim])


@pytest.mark.slow(but=["3-ranks"])
@ranks(1, 3, same=True)
@pytest.mark.parametrize("make", [Model, Hooked, Sampler])
def test_what_refuses_on_one_rank_fails_all(rank: int, world: int, saved: Path, make: Make) -> str:
    victim = world - 1
    into = {"own": make(rank == victim), "w": torch.zeros(8)}
    refusal = refused(victim, world, lambda: fastload.load(saved, into=into, options=OPTIONS))
    again = {"own": make(False), "w": torch.zeros(8)}
    fastload.load(saved, into=again, options=OPTIONS)
    assert torch.equal(again["w"], torch.arange(8.0))
    return refusal


@ranks(3)
@pytest.mark.parametrize("make", [Model])
def test_it_is_told_to_ranks_that_call_nothing(rank: int, world: int, saved: Path, make: Make) -> None:
    into = {"own": make(True)} if rank == 1 else {"w": torch.zeros(8)}
    refused(1, world, lambda: fastload.load(saved, into=into, strict=False, options=OPTIONS))


@pytest.mark.slow(but=["3-ranks"])
@ranks(1, 3)
@pytest.mark.parametrize("make", [Sampler])
def test_a_report_that_cannot_be_told_fails_all(rank: int, world: int, saved: Path, make: Make) -> None:
    def refuse(report: fastload.LoadReport) -> None:
        raise RuntimeError("no room for reports")

    victim = world - 1
    options = fastload.LoadOptions(timeout_s=20, on_report=refuse if rank == victim else None)
    with pytest.raises(PeerError if world > 1 else RuntimeError, match="no room for reports") as raised:
        fastload.load(saved, options=options)
    assert world == 1 or raised.value.failures.keys() == {victim}  # type: ignore[attr-defined]
    fastload.load(saved, options=OPTIONS)


@ranks(2)
@pytest.mark.parametrize("make", [Sampler])
def test_plain_tensors_cost_no_more_meetings(
    rank: int, world: int, saved: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather, steps = World.gather, []

    def noted(self: World, what: str, *args: Any, **kwargs: Any) -> Any:
        steps.append(what.split(" ")[0])
        return gather(self, what, *args, **kwargs)

    monkeypatch.setattr(World, "gather", noted)
    fastload.load(saved, into={"w": torch.zeros(8)}, strict=False, options=OPTIONS)
    plain = [*steps]
    steps.clear()
    fastload.load(saved, into={"own": make(False), "w": torch.zeros(8)}, options=OPTIONS)
    assert steps == [*plain, "restoring"]
