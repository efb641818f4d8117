"""Metrics and spans, as OpenTelemetry's SDK gets them."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fastload
from fastload.comm import observers
from fastload.ext import metrics as fastload_metrics
from tests.e2e.forked import run_forked
from tests.pages import ROOT

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import metrics, trace
from opentelemetry.metrics import _internal as metrics_state
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once

STATE = {"a": torch.arange(1000.0), "b": torch.arange(7)}
NBYTES = 4056
NO_STEP = {"every_seconds": 3600.0}


class Telemetry(NamedTuple):
    """What the SDK has."""

    reader: InMemoryMetricReader
    exporter: InMemorySpanExporter

    def points(self) -> dict[str, list[Any]]:
        data = self.reader.get_metrics_data()
        found: dict[str, list[Any]] = {}
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                assert scope.scope.name == "fastload"
                for metric in scope.metrics:
                    found.setdefault(metric.name, []).extend(metric.data.data_points)
        return found

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody observes fastload, and OpenTelemetry has no providers."""
    monkeypatch.setattr(observers, "_registered", [])
    monkeypatch.setattr(observers, "_listeners", [])
    monkeypatch.setattr(fastload_metrics, "_is_on", False)
    observers._switch_on.cache_clear()
    for module, kind in ((metrics_state, "METER"), (trace, "TRACER")):
        monkeypatch.setattr(module, f"_{kind}_PROVIDER_SET_ONCE", Once())
        monkeypatch.setattr(module, f"_{kind}_PROVIDER", None)


@pytest.fixture
def telemetry(off: None) -> Iterator[Telemetry]:
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider([reader]), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    metrics.set_meter_provider(meters)
    trace.set_tracer_provider(tracers)
    yield Telemetry(reader, exporter)
    meters.shutdown()
    tracers.shutdown()


def value(points: dict[str, list[Any]], name: str) -> float:
    """The only value of an instrument: the sum of a histogram."""
    (point,) = points[name]
    return point.sum if hasattr(point, "sum") else point.value


def test_loads_and_saves_are_measured(telemetry: Telemetry, tmp_path: Path) -> None:
    fastload_metrics.enable()
    fastload_metrics.enable()  # changes nothing
    fastload.save(STATE, tmp_path / "a")
    fastload.load(tmp_path / "a")
    points = telemetry.points()
    nbytes = sum(map(os.path.getsize, (tmp_path / "a").glob("*.safetensors")))
    assert value(points, "fastload.save.size") == nbytes
    assert value(points, "fastload.load.size") == value(points, "fastload.load.io") == NBYTES
    assert value(points, "fastload.load.read_amplification") == 1.0
    assert value(points, "fastload.load.retries") == value(points, "fastload.load.supplied") == 0
    assert value(points, "fastload.load.duration") > 0
    assert 0 < value(points, "fastload.save.stall.duration") <= value(points, "fastload.save.duration")
    (load,), (save,) = points["fastload.load.duration"], points["fastload.save.duration"]
    assert dict(load.attributes) == {"fastload.tier": "storage", "fastload.strategy": "direct"}
    assert dict(save.attributes) == {"fastload.tier": "storage"}
    assert load.count == save.count == 1
    assert 1.0 in load.explicit_bounds, "the buckets are for seconds"
    assert "fastload.checkpoint.age" not in points, "no manager is open"


def test_failures_have_the_type_of_their_error(telemetry: Telemetry, tmp_path: Path) -> None:
    fastload_metrics.enable()
    with pytest.raises(fastload.CheckpointNotFound):
        fastload.load(tmp_path / "nothing")
    with pytest.raises(fastload.FastloadError):
        fastload.save({"a": object()}, tmp_path / "a")
    (tmp_path / "file").touch()
    handle = fastload.async_save(STATE, tmp_path / "file" / "b")
    with pytest.raises(fastload.FastloadError) as caught:
        handle.wait()
    points = telemetry.points()
    (load,) = points["fastload.load.duration"]
    assert load.attributes["error.type"] == "CheckpointNotFound"
    counts = {point.attributes["error.type"]: point.count for point in points["fastload.save.duration"]}
    assert sum(counts.values()) == 2
    assert type(caught.value).__name__ in counts
    assert "fastload.save.size" not in points


def test_a_training_has_gauges_restores_and_memory_saves(telemetry: Telemetry, tmp_path: Path) -> None:
    fastload_metrics.enable()
    memory = tmp_path / "memory"
    memory.mkdir()
    intervals = {"every_steps": 10, "memory_every_steps": 1, "memory_copies": 1}
    with fastload.CheckpointManager(tmp_path / "run", memory=memory, **intervals) as manager:
        for step in (1, 10):
            assert manager.should_save(step)
            manager.save(step, STATE)
            manager.wait()
        points = telemetry.points()
        by_tier = {point.attributes["fastload.tier"]: point for point in points["fastload.save.duration"]}
        assert {tier: point.count for tier, point in by_tier.items()} == {"memory": 2, "storage": 1}
        age, goodput = value(points, "fastload.checkpoint.age"), value(points, "fastload.goodput")
        assert by_tier["storage"].sum <= age
        assert 0 <= goodput < 1
        manager.restore()
        (restored,) = telemetry.points()["fastload.restore.duration"]
        assert dict(restored.attributes) == {"fastload.tier": "memory"}
        (load,) = telemetry.points()["fastload.load.duration"]
        assert load.attributes["fastload.tier"] == "memory"
    assert "fastload.checkpoint.age" not in telemetry.points()


def test_a_restore_that_falls_back_is_counted(telemetry: Telemetry, tmp_path: Path) -> None:
    fastload_metrics.enable()
    with fastload.CheckpointManager(tmp_path, every_steps=1, async_=False) as manager:
        for step in (1, 2):
            manager.save(step, STATE)
        file = next((tmp_path / "step_00000002").glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        manager.restore()
        assert manager.restored_step == 1
    assert value(telemetry.points(), "fastload.restore.fallbacks") == 1


def test_spans_are_below_that_of_the_caller(telemetry: Telemetry, tmp_path: Path) -> None:
    fastload_metrics.enable()
    tracer = trace.get_tracer("a training")
    with tracer.start_as_current_span("checkpoint"):
        handle = fastload.async_save(STATE, tmp_path / "a")
    handle.wait()
    with fastload.open(tmp_path / "a") as checkpoint, tracer.start_as_current_span("start"):
        checkpoint.load()
    spans = telemetry.spans()
    for call, caller, phases in (
        ("save", "checkpoint", {"snapshot", "write", "commit"}),
        ("load", "start", {"read", "place"}),
    ):
        span = spans[f"fastload.{call}"]
        assert span.parent is not None
        assert span.parent.span_id == spans[caller].context.span_id
        assert span.attributes is not None
        assert str(tmp_path / "a") in str(span.attributes["fastload.what"])
        below = {
            name.rpartition(".")[2]: one
            for name, one in spans.items()
            if one.parent is not None and one.parent.span_id == span.context.span_id
        }
        assert phases <= below.keys()
        for one in below.values():
            assert span.start_time <= one.start_time <= one.end_time <= span.end_time


def test_spans_of_a_load_in_another_thread_are_below_its_caller(telemetry: Telemetry, tmp_path: Path) -> None:
    fastload_metrics.enable()
    tracer = trace.get_tracer("a training")
    fastload.save(STATE, tmp_path / "a")

    def load(checkpoint: fastload.Checkpoint) -> None:
        with tracer.start_as_current_span("worker"):
            checkpoint.load()

    with tracer.start_as_current_span("main"), fastload.open(tmp_path / "a") as checkpoint:
        thread = threading.Thread(target=load, args=(checkpoint,))
        thread.start()
        thread.join()
    spans = telemetry.spans()
    parent = spans["fastload.load"].parent
    assert parent is not None
    assert parent.span_id == spans["worker"].context.span_id


def test_redistributions_are_measured(telemetry: Telemetry) -> None:
    fastload_metrics.enable()
    fastload.redistribute(STATE, {name: torch.zeros_like(tensor) for name, tensor in STATE.items()})
    points = telemetry.points()
    assert value(points, "fastload.redistribute.size") == NBYTES
    assert "fastload.tier" not in points["fastload.redistribute.duration"][0].attributes
    assert not any(name.startswith("fastload.load") for name in points)


def test_managers_share_the_gauges(telemetry: Telemetry, tmp_path: Path) -> None:
    fastload_metrics.enable()
    with fastload.CheckpointManager(tmp_path / "model", **NO_STEP):
        with fastload.CheckpointManager(tmp_path / "averages", **NO_STEP):
            assert value(telemetry.points(), "fastload.checkpoint.age") > 0
        assert value(telemetry.points(), "fastload.checkpoint.age") > 0
    assert "fastload.checkpoint.age" not in telemetry.points()


def test_threads_that_enable_them_at_once_do_it_once(off: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastload.ext.metrics import instruments

    def slow(**arguments: Any) -> Any:
        made.append(meter(**arguments))
        time.sleep(0.05)
        return made[-1]

    made: list[Any] = []
    meter = instruments.Meter
    monkeypatch.setattr(instruments, "Meter", slow)
    threads = [threading.Thread(target=fastload_metrics.enable) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == len(observers._listeners) == 1


def test_the_span_of_a_save_that_fails_says_why(
    telemetry: Telemetry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastload_metrics.enable()

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(fastload.StorageError):
        fastload.save(STATE, tmp_path / "a")
    span = telemetry.spans()["fastload.save"]
    assert span.attributes is not None
    assert span.attributes["error.type"] == "StorageError"
    assert not span.status.is_ok
    assert "No space left" in str(span.status.description)


def test_an_environment_variable_switches_them_on(
    telemetry: Telemetry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastload.save(STATE, tmp_path / "a")
    assert telemetry.points() == {}
    observers._switch_on.cache_clear()
    monkeypatch.setenv("FASTLOAD_METRICS", "ranks")
    fastload.load(tmp_path / "a")
    (load,) = telemetry.points()["fastload.load.duration"]
    assert load.attributes["fastload.rank"] == 0


def test_an_environment_variable_that_cannot_be_used(
    off: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTLOAD_METRICS", "yes please")
    with pytest.raises(fastload.OptionError, match="FASTLOAD_METRICS='yes please': must be 1, ranks or 0"):
        fastload.save(STATE, tmp_path / "a")


def test_without_opentelemetry_the_extra_is_named(
    off: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("fastload.ext.metrics.instruments", "fastload.ext.metrics.spans"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(fastload.OptionError, match=r"pip install 'fastload-torch\[metrics\]'"):
        fastload_metrics.enable()
    monkeypatch.setenv("FASTLOAD_METRICS", "1")
    with caplog.at_level(logging.WARNING):
        fastload.save(STATE, tmp_path / "a")
    assert "pip install 'fastload-torch[metrics]'" in caplog.text


def test_what_is_off_is_not_imported(tmp_path: Path) -> None:
    program = """
import sys
import torch
import fastload
path, others = sys.argv[1], ("opentelemetry", "fastload.ext.metrics", "fastload.ext.reports")
with fastload.CheckpointManager(path, every_steps=1) as manager:
    assert manager.should_save(1)
    manager.save(1, {"a": torch.ones(3)})
    manager.restore()
print([name for name in sys.modules if name.startswith(others)])
"""
    environment = {name: text for name, text in os.environ.items() if name != "FASTLOAD_METRICS"}
    done = run_forked(["-c", program, str(tmp_path)], cwd=ROOT, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
