"""Lines of the log for what users watch: one for each load, save, restore, stage and deletion."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

import fastload

STATE = {"a": torch.arange(1000.0), "b": torch.arange(7)}
TIME, SIZE, RATE = r"\d+\.\d\d s", r"[\d.]+ kB", r"[\d.,]+ [kMG]?B/s"


def lines_of(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [f"{one.name}: {one.getMessage()}" for one in caplog.records if one.levelno == level]


def test_each_event_is_one_line(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    run, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    step_1, step_2 = run / "step_00000001", run / "step_00000002"
    rules = {"every_steps": 1, "keep_last": 1, "memory": memory, "memory_copies": 1}
    with caplog.at_level(logging.DEBUG, logger="fastload"):
        with fastload.CheckpointManager(run, **rules, memory_every_steps=2) as manager:
            for step in (1, 2):
                assert manager.should_save(step)
                manager.save(step, STATE)
                manager.wait()
            manager.restore()
        fastload.stage(step_2, tmp_path / "copy")
        fastload.save(STATE, tmp_path / "other")
    moved = rf"{SIZE} in {TIME}, {RATE}"
    loads = rf"fastload\.load: loaded .* from memory: {moved}; \w+, read 1\.00 ×"
    wanted = [
        rf"fastload\.save: saved step 1 to storage: {moved}; training waited {TIME}",
        rf"fastload\.save: saved step 2 to memory: {moved}; training waited {TIME}",
        rf"fastload\.save: saved step 2 to storage: {moved}; training waited {TIME}",
        rf"fastload\.delete: deleted step 1, {step_1}: {SIZE} in {TIME}",
        loads,
        rf"fastload\.restore: restored step 2 from memory in {TIME}; the newest on storage is step 2",
        rf"fastload\.stage: staged {step_2} to {tmp_path / 'copy'}: {moved}; read 1\.00 ×",
        rf"fastload\.save: saved {tmp_path / 'other'} to storage: {moved}; training waited {TIME}",
    ]
    found = lines_of(caplog, logging.INFO)
    for pattern in wanted:
        assert sum(re.fullmatch(pattern, line) is not None for line in found) == 1, (pattern, found)
    assert len(found) == len(wanted)
    phases = [line for line in lines_of(caplog, logging.DEBUG) if line.startswith("fastload.load: ")]
    assert re.fullmatch(r"fastload\.load: rank 0 of [^:]*: (\w+ \d+\.\d{3} s(, )?)+", phases[0])
    assert {"read", "exchange", "place", "total"} <= set(phases[0].split())
    assert lines_of(caplog, logging.WARNING) == []


def test_a_logger_of_one_kind_is_enough(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO, logger="fastload.save"):
        fastload.save(STATE, tmp_path / "a")
        fastload.load(tmp_path / "a")
    assert [line.partition(" ")[0] for line in lines_of(caplog, logging.INFO)] == ["fastload.save:"]
    assert lines_of(caplog, logging.DEBUG) == []


def test_what_fails_is_no_line_of_success(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO, logger="fastload"), pytest.raises(fastload.CheckpointNotFound):
        fastload.load(tmp_path / "nothing")
    assert lines_of(caplog, logging.INFO) == []
