"""Policies of the caller: when to save, and what to keep; one process."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastload import CheckpointManager, OptionError, SaveOptions
from fastload.policies import EndedSave, IntervalPolicy, Measured, Retention, SavedCheckpoint
from fastload.training import interval
from fastload.training.interval import PolicyController

OPTIONS = SaveOptions(timeout_s=20, block_bytes=4096)


class Planned:
    """Saves at given steps, and notes what it is told."""

    def __init__(self, steps: dict[int, list[str]]) -> None:
        self.steps = steps
        self.told: list[Measured] = []

    def due(self, step: int, now_s: float, measured: Measured) -> list[str]:
        self.told.append(measured)
        return self.steps.get(step, [])


class PowersOfTwo:
    def __init__(self, num_last: int) -> None:
        self.last = Retention(keep_last=num_last)

    def keep(self, saved: Sequence[SavedCheckpoint]) -> Collection[int]:
        assert [checkpoint.step for checkpoint in saved] == sorted(checkpoint.step for checkpoint in saved)
        powers = {checkpoint.step for checkpoint in saved if checkpoint.step.bit_count() == 1}
        return self.last.keep(saved) | powers


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((10,), float(step))}


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in root.glob("step_*"))


def train(manager: CheckpointManager, num_steps: int) -> list[int]:
    saved = []
    for step in range(1, num_steps + 1):
        if manager.should_save(step):
            saved.append(step)
            manager.save(step, state_of(step), metrics={"loss": 1.0 / step})
            manager.wait()
    return saved


def test_checkpoints_that_a_policy_does_not_name_are_deleted(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every_steps=1, keep_policy=PowersOfTwo(2), options=OPTIONS) as manager:
        train(manager, 11)
    assert steps_in(tmp_path) == [1, 2, 4, 8, 10, 11]


def test_rules_of_retention_are_a_policy(tmp_path: Path) -> None:
    rules = Retention(keep_last=1, keep_every=4)
    with CheckpointManager(tmp_path, every_steps=1, keep_policy=rules, options=OPTIONS) as manager:
        train(manager, 9)
    assert steps_in(tmp_path) == [4, 8, 9]


def test_a_policy_that_fails_deletes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = SimpleNamespace(keep=lambda saved: {}["mine"])
    with (
        caplog.at_level(logging.WARNING, "fastload"),
        CheckpointManager(tmp_path, every_steps=1, keep_policy=broken, options=OPTIONS) as manager,
    ):
        train(manager, 2)
    assert steps_in(tmp_path) == [1, 2]
    assert "cannot clean up" in caplog.text


def test_a_policy_names_the_tiers_of_a_save(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    policy = Planned({2: ["memory"], 3: ["storage"], 5: ["storage", "memory"], 6: ["memory"]})
    root = tmp_path / "run"
    with CheckpointManager(root, save_policy=policy, memory=memory, options=OPTIONS) as manager:
        assert train(manager, 6) == [2, 3, 5, 6]
        assert steps_in(root) == [3, 5]
        assert manager.restore()["weight"][0] == 6
        assert manager.restored_from == "memory"
    assert len(policy.told) == 6, "once a step"
    told = policy.told[-1]
    assert [len(told.saves[tier]) for tier in ("storage", "memory")] == [2, 2]
    assert told.step_s > 0


def test_what_a_policy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=100.0)
    clock = SimpleNamespace(monotonic=lambda: now.s, time=lambda: now.s + 1e9)
    monkeypatch.setattr(interval, "time", clock)
    policy = Planned({})
    controller = PolicyController(policy)

    def save() -> Any:
        now.s += 3.0
        return SimpleNamespace(done=lambda: True, report=SimpleNamespace(background_s=7.0))

    for step in range(4):
        now.s += 2.0
        controller.step_done()
        controller.ask(step)
        if step == 2:
            controller.measure(save)
    assert [told.step_s for told in policy.told] == [0.0, 2.0, 2.0, 2.0], "a stall is no time of a step"
    assert [told.since_s["storage"] for told in policy.told] == [2.0, 4.0, 6.0, 5.0]
    assert policy.told[-1].saves == {"storage": (EndedSave("storage", 3.0, 7.0),)}


def test_a_policy_by_time_is_asked_again_before_its_save_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several ranks a save begins steps after the decision."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(interval, "time", SimpleNamespace(monotonic=lambda: now.s, time=lambda: now.s))
    every_ten_s = SimpleNamespace(
        due=lambda step, now_s, measured: ["storage"] if measured.since_s["storage"] >= 10 else []
    )
    controller = PolicyController(every_ten_s)
    taken = []
    for step in range(100):
        now.s += 0.25
        controller.ask(step)
        taken += [step for tier in controller.take_due()[0]]
        if step - 4 in taken:
            controller.save_begins()
    assert taken == [39, 83], "once every 10 s"


@pytest.mark.parametrize("kept", ["all", {"step_00000001"}, [1.5], None])
def test_a_policy_that_keeps_no_steps_deletes_nothing(
    kept: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = SimpleNamespace(keep=lambda saved: kept)
    with (
        caplog.at_level(logging.WARNING, "fastload"),
        CheckpointManager(tmp_path, every_steps=1, keep_policy=policy, options=OPTIONS) as manager,
    ):
        train(manager, 3)
    assert steps_in(tmp_path) == [1, 2, 3]
    assert "cannot clean up" in caplog.text


def test_a_policy_may_extend_the_rules(tmp_path: Path) -> None:
    class FirstToo(Retention):
        def keep(self, saved: Sequence[SavedCheckpoint]) -> set[int]:
            return {saved[0].step}

    with CheckpointManager(tmp_path, every_steps=1, keep_policy=FirstToo(), options=OPTIONS) as manager:
        train(manager, 4)
    assert steps_in(tmp_path) == [1, 4]


@pytest.mark.parametrize("names", [["memory"], ["disk"], "storage", None])
def test_a_policy_that_names_no_tier_of_the_manager_fails(names: Any, tmp_path: Path) -> None:
    policy = Planned({2: names})
    with CheckpointManager(tmp_path, save_policy=policy, options=OPTIONS) as manager:
        assert not manager.should_save(1)
        with pytest.raises(OptionError, match="save_policy= cannot decide about step 2"):
            manager.should_save(2)
        assert not manager.should_save(3)


def test_a_signal_counts_although_the_policy_fails(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_policy=Planned({2: ["disk"]}), options=OPTIONS) as manager:
        assert not manager.should_save(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(OptionError, match="save_policy="):
            manager.should_save(2)
        assert manager.stop_requested
        assert manager.should_save(3), "the save that the signal asks for"
        assert not manager.should_save(4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_policy": Planned({}), "every_steps": 3},
        {"save_policy": Planned({}), "memory": "auto", "memory_every_seconds": 3},
        {"save_policy": PowersOfTwo(1)},
        {"save_policy": IntervalPolicy(every_steps=2), "mtbf_s": 3600},
        {"save_policy": Planned({}), "budget": 0.5},
        {"keep_policy": PowersOfTwo(1), "keep_last": 3},
        {"keep_policy": Planned({})},
        {"keep_policy": PowersOfTwo},
    ],
)
def test_a_policy_takes_the_place_of_the_keywords(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"(save|keep)_policy="):
        CheckpointManager(tmp_path, **wrong)
