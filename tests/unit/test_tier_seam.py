"""A tier that is none of fastload's: what a manager asks of it, in one process."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastload import CheckpointManager, OptionError, SaveOptions
from fastload.errors import ChecksumError
from fastload.policies import IntervalPolicy, Measured
from fastload.training.retention import Lineage, Point
from fastload.training.tier import Found, TierJob

OPTIONS = SaveOptions(timeout_s=20, block_bytes=4096)


@dataclass(eq=False)
class Copied:
    """A copy of a state."""

    point: Point
    lineage: Lineage
    state: Any
    source: str = "process"
    problem: str = ""
    is_damaged: bool = False

    def load(self, arguments: Mapping[str, Any]) -> Any:
        if self.is_damaged:
            raise ChecksumError("the copy")
        return copy.deepcopy(self.state)

    def blames(self, error: BaseException) -> bool:
        return isinstance(error, ChecksumError)


class InProcess:
    """Copies in the memory of this process, which outlive a manager in `copies`."""

    name, num_hosts = "process", 1

    def __init__(self, copies: list[Copied], job: TierJob) -> None:
        self.copies = copies
        self.calls: list[Any] = []

    def admits(self, step: int) -> bool:
        return True

    def save(
        self, point: Point, lineage: Lineage, state: Any, metadata: Mapping[str, str], *, problem: Any = None
    ) -> Any:
        self.copies.append(Copied(point, lineage, copy.deepcopy(state)))
        return SimpleNamespace(report=None, done=lambda: True)

    def wait(self) -> None:
        self.calls.append("wait")

    def survey(self) -> list[Copied]:
        return sorted(self.copies, key=lambda copied: copied.point)

    def restored(self, found: Found | None) -> None:
        self.copies[:] = [copied for copied in self.copies if copied is found]

    def arm(self) -> None:
        self.calls.append("arm")

    def yield_to_training(self) -> None:
        self.calls.append("yield")

    def close(self, *, goes_well: bool, lacking: Point | None, flushes: bool) -> None:
        self.calls.append((goes_well, lacking, flushes))


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((10,), float(step)), "step": step}


Open = Callable[..., CheckpointManager]


@pytest.fixture
def copies() -> list[Copied]:
    return []


@pytest.fixture
def manage(tmp_path: Path, copies: list[Copied]) -> Open:
    given = {"every_steps": 4, "memory_every_steps": 1, "tier": partial(InProcess, copies)}
    return lambda **other: CheckpointManager(tmp_path, options=OPTIONS, **{**given, **other})


def train(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        assert manager.should_save(step)
        manager.save(step, state_of(step))
    manager.wait()


def crash(manager: CheckpointManager, *steps: int) -> InProcess:
    """Saves steps, and ends as an error of the training does."""
    with suppress(ZeroDivisionError), manager:
        train(manager, *steps)
        raise ZeroDivisionError
    tier: Any = manager._tier
    return tier


def test_the_newest_is_restored_from_the_tier(manage: Open, copies: list[Copied]) -> None:
    tier = crash(manage(), *range(1, 7))
    assert tier.calls == ["wait", (False, Point(0, 6), True)]
    with manage() as manager:
        assert manager.latest() == 6
        assert manager.restore()["step"] == 6
        assert manager.restored_from == "process"
        assert [copied.point.step for copied in copies] == [6], "the others are useless now"
        assert manager.restore(step=4)["weight"][0] == 4
        assert manager.restored_from == "storage"


def test_a_damaged_copy_is_passed_over(
    manage: Open, copies: list[Copied], caplog: pytest.LogCaptureFixture
) -> None:
    crash(manage(), *range(1, 6))
    copies[-1].is_damaged = True
    with manage() as manager, caplog.at_level(logging.WARNING, "fastload"):
        assert manager.restore()["step"] == 4
        assert manager.restored_from == "process", "step 4 is in both"
        assert "step 5 in process cannot be restored: the copy" in caplog.text


def test_the_run_went_on_without_the_tier(
    manage: Open, copies: list[Copied], caplog: pytest.LogCaptureFixture
) -> None:
    crash(manage(), *range(1, 7))
    crash(manage(every_steps=1, memory_every_steps=None, tier=None), 5)
    with manage() as manager, caplog.at_level(logging.WARNING, "fastload"):
        assert manager.latest() == 5
        assert manager.restore()["step"] == 5
        assert manager.restored_from == "storage"
    assert "a later one went on without it and saved step 5" in caplog.text
    assert copies == []


def test_only_what_is_passed_over_is_a_warning(
    manage: Open, copies: list[Copied], caplog: pytest.LogCaptureFixture
) -> None:
    """Storage has the newest one, since the intervals differ; then the newest copy is not complete."""
    crash(manage(memory_every_steps=3), 3, 4)
    with manage() as manager, caplog.at_level(logging.INFO, "fastload"):
        assert manager.restore()["step"] == 4
        assert re.search(r"restored step 4 from storage in .* s; process has step 3 only$", caplog.text, re.M)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        train(manager, 5)
        copies[-1].problem = "a host is gone"
        assert manager.restore()["step"] == 4
        warning = next(record for record in caplog.records if record.levelno >= logging.WARNING)
        assert "restored from storage: a host is gone" in warning.getMessage()


def test_what_storage_lacks_at_the_end(manage: Open) -> None:
    for steps, lacking in (((), Point(0, 0)), ((1, 2, 3), Point(0, 3)), ((4,), None), ((5,), Point(0, 5))):
        with manage() as manager:
            train(manager, *steps)
        tier: Any = manager._tier
        assert tier.calls[-1] == (True, lacking, bool(steps)), steps


def test_a_policy_names_the_tier(manage: Open, copies: list[Copied]) -> None:
    class Twice:
        intervals = IntervalPolicy(every_steps=3, memory_every_steps=2, memory_copies=1)

        def due(self, step: int, now_s: float, measured: Measured) -> set[str]:
            assert measured.since_s.keys() == {"storage", "process"}
            return self.intervals.due(step, now_s, measured) | ({"process"} if step == 5 else set())

    with manage(every_steps=None, memory_every_steps=None, save_policy=Twice()) as manager:
        for step in range(1, 7):
            if manager.should_save(step):
                train(manager, step)
        assert manager.all_steps() == [3, 6]
    assert [copied.point.step for copied in copies] == [2, 4, 5, 6]


def test_intervals_are_a_policy(manage: Open) -> None:
    given: dict[str, Any] = {
        "every_steps": None,
        "memory_every_steps": None,
        "save_policy": IntervalPolicy(every_steps=3, memory_every_steps=2, memory_copies=1),
    }
    with manage(**given) as manager:
        assert [step for step in range(1, 9) if manager.should_save(step)] == [2, 3, 4, 6, 8]
    with pytest.raises(OptionError, match="go together"):
        manage(**given, tier=None)
    measured = Measured(1.0, {"storage": 7.0, "memory": 7.0}, {})
    assert IntervalPolicy(every_seconds=7.0).due(1, 0.0, measured) == {"storage"}
    assert IntervalPolicy(every_seconds=7.5).due(1, 0.0, measured) == set()
    with pytest.raises(OptionError, match="use it alone"):
        IntervalPolicy(every="auto", mtbf_s=9e4).due(1, 0.0, measured)


def test_what_cannot_be_a_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"memory_every_steps": 1}
    with pytest.raises(OptionError, match="only one"):
        CheckpointManager(tmp_path, memory=tmp_path, tier=partial(InProcess, []), **given)
    with pytest.raises(OptionError, match="tier='memory': must be callable"):
        CheckpointManager(tmp_path, tier="memory", **given)  # type: ignore[arg-type]
    monkeypatch.setattr("fastload.ext.EXTENSIONS", {})
    with pytest.raises(OptionError, match="memory= needs the extension 'memory', which is not installed"):
        CheckpointManager(tmp_path, memory=tmp_path, **given)
