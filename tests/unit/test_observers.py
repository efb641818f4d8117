"""Observers of loads and saves."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

import fastload
from fastload.base.stopwatch import Stopwatch
from fastload.comm import observers
from fastload.comm.group import join
from fastload.comm.observers import Event, observe, register_listener, register_observer
from fastload.comm.world import World

STATE = {"a": torch.arange(100.0), "b": torch.arange(7)}


class Listener:
    """An observer that notes what it is told."""

    def __init__(self, notes: list[Any], world: World) -> None:
        self._notes = notes

    def begin(self, hosts: Sequence[str]) -> None:
        self._notes.append(f"begin on {len(hosts)} ranks")

    def follow(self, watches: Mapping[str, Stopwatch]) -> None:
        for stage, watch in watches.items():
            watch.listeners += (lambda begin_s, end_s, facts, stage=stage: self._notes.append(stage),)

    def add(self, stage: str, began_s: float) -> None:
        self._notes.append(stage)

    def end(self, name: str, began_s: float, error: BaseException | None) -> None:
        self._notes.append(f"{name} ends: {type(error).__name__}")

    def close(self, about: Mapping[str, Any]) -> None:
        self._notes.append(about)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What an observer of all loads and saves is told."""
    monkeypatch.setattr(observers, "_registered", [])
    notes: list[Any] = []
    register_observer(partial(Listener, notes))
    return notes


def test_an_observer_is_told_of_the_stages_and_ends_of_saves_and_loads(
    notes: list[Any], tmp_path: Path
) -> None:
    fastload.save(STATE, tmp_path / "step_1")
    about = notes.pop()
    assert about["what"] == f"saving to {tmp_path / 'step_1'}"
    assert about["nbytes"] == sum(map(os.path.getsize, (tmp_path / "step_1").glob("*.safetensors")))
    assert notes[-2:] == ["commit", "save ends: NoneType"]
    assert {"begin on 1 ranks", "write"} <= {note for note in notes if isinstance(note, str)}
    notes.clear()
    with fastload.open(tmp_path / "step_1") as checkpoint:
        for _ in range(2):
            checkpoint.load()
            assert notes[0] == "begin on 1 ranks"
            assert {"read", "place"} <= set(notes[1:-2])
            assert notes[-2:] == [
                "load ends: NoneType",
                {"what": f"loading {tmp_path / 'step_1'}", "bytes_wanted": 456},
            ]
            del notes[1:]


def test_an_observer_is_told_of_a_load_that_fails(notes: list[Any], tmp_path: Path) -> None:
    fastload.save(STATE, tmp_path / "step_1")
    notes.clear()
    with fastload.open(tmp_path / "step_1") as checkpoint:
        (tmp_path / "step_1" / "model.safetensors").write_bytes(b"")
        with pytest.raises(fastload.StorageError):
            checkpoint.load()
    assert notes[-2] == "load ends: StorageError"


def test_an_observer_is_told_of_a_save_that_fails(notes: list[Any], tmp_path: Path) -> None:
    fastload.save(STATE, tmp_path / "step_1")
    notes.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", _no_space)
        with pytest.raises(fastload.StorageError):
            fastload.save(STATE, tmp_path / "step_2")
    about = {"what": f"saving to {tmp_path / 'step_2'}", "nbytes": ANY}
    assert notes[-2:] == ["save ends: StorageError", about]


def _no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_observer_is_told_of_a_save_to_memory(notes: list[Any], tmp_path: Path) -> None:
    intervals = {"every_steps": 10, "memory_every_steps": 1, "memory_copies": 1}
    memory = tmp_path / "memory"
    memory.mkdir()
    with fastload.CheckpointManager(tmp_path / "run", memory=memory, **intervals) as manager:
        notes.clear()
        assert manager.should_save(1)
        manager.save(1, STATE)
        manager.wait()
        told = list(notes)
    assert told[0] == "snapshot"
    assert "begin on 1 ranks" in told
    assert told[-2:] == ["save ends: NoneType", {"what": "saving step 1 to memory", "nbytes": ANY}]


def test_what_an_observer_raises_fails_no_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Broken(Listener):
        def _raise(self, *_: Any) -> None:
            raise RuntimeError("the server of metrics is gone")

        follow = add = end = close = _raise

    monkeypatch.setattr(observers, "_registered", [partial(Broken, [])])
    fastload.save(STATE, tmp_path / "step_1")
    options = fastload.LoadOptions(trace=tmp_path / "trace")
    with fastload.open(tmp_path / "step_1", options=options) as checkpoint:
        assert torch.equal(checkpoint.load()["a"], STATE["a"])
        assert checkpoint.trace_error is None
    assert "the server of metrics is gone" in caplog.text
    assert (tmp_path / "trace").exists()


def test_what_a_listener_of_a_stopwatch_raises_fails_no_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Broken(Listener):
        def follow(self, watches: Mapping[str, Stopwatch]) -> None:
            for watch in watches.values():
                watch.listeners += (lambda *_: 1 / 0, lambda *_: self._notes.append("work"))

    notes: list[Any] = []
    monkeypatch.setattr(observers, "_registered", [partial(Broken, notes)])
    fastload.save(STATE, tmp_path / "step_1")
    assert torch.equal(fastload.load(tmp_path / "step_1")["a"], STATE["a"])
    assert "ZeroDivisionError" in caplog.text
    assert notes.count("work") > 3


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_observer_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fastload.save(STATE, tmp_path / "step_1")
    monkeypatch.setattr(observers, "_registered", [lambda world: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        fastload.open(tmp_path / "step_1")
    gc.collect()


def test_without_its_extension_trace_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fastload.ext.EXTENSIONS", {})
    for kind in (fastload.LoadOptions, fastload.SaveOptions):
        with pytest.raises(fastload.OptionError, match="trace= needs the extension 'trace'"):
            kind(trace=tmp_path / "trace.json")


def test_nobody_listens_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any) -> None:
        raise AssertionError("an extension is looked for")

    monkeypatch.setattr(observers, "extension", ask)
    watch = Stopwatch()
    nobody = observe(join(call="saving", timeout_s=60), None)
    nobody.follow({"read": watch})
    assert watch.listeners == ()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What a listener is told."""
    monkeypatch.setattr(observers, "_listeners", [])
    events: list[Event] = []
    register_listener(events.append)
    return events


def test_a_listener_is_told_what_ends(events: list[Event], tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    with fastload.CheckpointManager(run, every_steps=1, keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, STATE)
            manager.wait()
        assert manager.restore()["b"].tolist() == STATE["b"].tolist()
    fastload.stage(run / "step_00000002", copy)
    told = [event.name for event in events]
    assert told == ["manage", "save", "save", "delete", "load", "restore", "close", "stage"]
    of = {event.name: event.facts for event in events}
    assert of["save"]["report"].step == 2
    assert of["load"]["report"].url == str(run / "step_00000002")
    assert of["restore"] == {"step": 2, "source": "storage", "why": "", "num_damaged": 0}
    assert (of["delete"]["step"], of["delete"]["url"]) == (1, str(run / "step_00000001"))
    assert of["delete"]["nbytes"] > 456
    assert of["stage"]["report"].path == str(copy)
    assert all(event.rank == 0 and event.seconds >= 0 for event in events)


def test_a_listener_is_told_of_what_fails(events: list[Event], tmp_path: Path) -> None:
    def fail(call: Callable[[], object]) -> BaseException:
        with pytest.raises(fastload.FastloadError) as caught:
            call()
        return caught.value

    (tmp_path / "file").touch()
    fastload.save(STATE, tmp_path / "saved")
    with fastload.CheckpointManager(tmp_path / "run") as manager:
        events.clear()
        errors = [
            fail(lambda: fastload.load(tmp_path / "nothing")),
            fail(lambda: fastload.load(tmp_path / "saved", names=["c"])),
            fail(lambda: fastload.save(object(), tmp_path / "a")),
            fail(lambda: fastload.save(STATE, tmp_path / "file" / "a")),
            fail(fastload.async_save(STATE, tmp_path / "file" / "a").wait),
            fail(lambda: fastload.stage(tmp_path / "saved", tmp_path / "file" / "a")),
            fail(manager.restore),
        ]
    told = [(event.name, type(event.facts["error"])) for event in events if event.name != "close"]
    names = ["load", "load", "save", "save", "save", "stage", "restore"]
    assert told == [(name, type(error)) for name, error in zip(names, errors, strict=True)]


def test_a_listener_is_told_of_redistributions(events: list[Event]) -> None:
    into = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    reports = [fastload.redistribute(STATE, into) for _ in range(2)]
    with pytest.raises(fastload.MismatchError):
        fastload.redistribute(STATE, {"a": torch.zeros(3)})
    assert [event.name for event in events] == ["redistribute"] * 3
    assert [event.facts["report"] for event in events[:2]] == reports
    assert type(events[2].facts["error"]) is fastload.MismatchError


def test_a_listener_is_told_of_streams(events: list[Event], tmp_path: Path) -> None:
    fastload.save(STATE, tmp_path / "a")
    events.clear()
    with fastload.open(tmp_path / "a") as checkpoint:
        assert dict(checkpoint.tensors()).keys() == STATE.keys()
        (event,) = events
        assert (event.name, event.facts["report"]) == ("load", checkpoint.report)
        stream = checkpoint.tensors()
        next(stream)
        with pytest.raises(ValueError, match="mine"), stream:
            raise ValueError("mine")
    assert [type(event.facts.get("error")) for event in events] == [type(None), ValueError]


def test_what_a_listener_raises_fails_no_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    events: list[Event] = []
    monkeypatch.setattr(observers, "_listeners", [lambda event: 1 / 0, events.append])
    fastload.save(STATE, tmp_path / "a")
    assert "a listener failed" in caplog.text
    assert len(events) == 1
