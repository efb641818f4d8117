"""The examples of the page "Watch what it does", with the programs that they are for."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import socket
import struct
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.machinery import PathFinder
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from tests.dist.harness import ranks
from tests.pages import page

WATCH = Path(sys.prefix) / "watch"  # apart, for Lightning and transformers would log to what is there
STATE = {"a": torch.arange(1000.0)}
BLOCK = re.compile(r"^#+ (?P<heading>[^\n]+)$|^```python\n(?P<code>.*?)^```$", re.M | re.S)


@cache
def blocks() -> dict[str, str]:
    """The only block below each heading."""
    found, heading = {}, ""
    for match in BLOCK.finditer(page("docs/watching.md")):
        heading = match["heading"] or heading
        if match["code"]:
            assert heading not in found
            found[heading] = match["code"]
    return found


CASES = {
    "Watch what it does",
    "Loggers",
    "Reports",
    "TensorBoard",
    "Weights & Biases",
    "Progress",
    "Prometheus",
    "OTLP",
    "Listeners of your own",
}


def test_each_example_is_run_here() -> None:
    assert blocks().keys() == CASES


def run(heading: str, folder: Path, **names: Any) -> dict[str, Any]:
    """Runs an example, with these names; `/checkpoints` is the folder."""
    code = blocks()[heading].replace("/checkpoints/", f"{folder}/").replace("9464", str(names.get("port", 0)))
    exec(compile(code, heading, "exec"), names)
    return names


def needs(*modules: str) -> Any:
    def is_missing(name: str) -> bool:
        try:
            return not PathFinder.find_spec(name, [str(WATCH)]) and not importlib.util.find_spec(name)
        except ModuleNotFoundError:
            return True

    missing = [name for name in modules if is_missing(name)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")


@ranks(2)
def test_lines_of_the_log(rank: int, world: int, tmp_path: Path) -> None:
    with redirect_stderr(StringIO()) as said:
        logging.getLogger().handlers.clear()
        run("Watch what it does", tmp_path)
        fastload.save(STATE, tmp_path / "a")
    assert ("INFO:fastload.save:saved " in said.getvalue()) == (rank == 0)
    run("Loggers", tmp_path)
    assert logging.getLogger("fastload.load").isEnabledFor(logging.DEBUG)


@ranks(2)
def test_reports(rank: int, world: int, tmp_path: Path) -> None:
    with redirect_stdout(StringIO()) as said:
        run("Reports", tmp_path, rank=rank, state=STATE)
    assert ("step_00000010, step 10: 1 tensor, 4" in said.getvalue()) == (rank == 0)


@needs("tensorboard")
@ranks(1)
def test_tensorboard(rank: int, world: int, tmp_path: Path) -> None:
    sys.path.append(str(WATCH))
    names = run("TensorBoard", tmp_path, rank=rank)
    with fastload.CheckpointManager(tmp_path / "run", options=names["options"]) as manager:
        manager.save(10, STATE)
    names["writer"].close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    (seconds,) = events.Scalars("checkpoint/seconds")
    assert seconds.step == 10
    assert seconds.value > 0


@needs("wandb")
@ranks(1)
def test_wandb(rank: int, world: int, tmp_path: Path) -> None:
    sys.path.append(str(WATCH))
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    import wandb

    names = run("Weights & Biases", tmp_path, rank=rank)
    with fastload.CheckpointManager(tmp_path / "run", options=names["options"]) as manager:
        manager.save(10, STATE)
    wandb.finish()
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    (values,) = logged(file.read_bytes())
    assert {name for name in values if name[0] != "_"} == {
        "checkpoint/step",
        "checkpoint/seconds",
        "checkpoint/stall",
    }
    assert values["checkpoint/step"] == "10"
    assert float(values["checkpoint/seconds"]) > 0


def logged(data: bytes) -> Iterator[dict[str, str]]:
    """What a run has logged, as JSON. Its file has blocks of 32 KiB with records: a CRC, a length, a kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, text = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        text, at = text + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a complete one, or the last part of one
            record, text = Record.FromString(text), b""
            if record.WhichOneof("record_type") == "history":
                yield {item.key or item.nested_key[0]: item.value_json for item in record.history.item}


@ranks(2)
def test_progress(rank: int, world: int, tmp_path: Path) -> None:
    fastload.save(STATE, tmp_path / "llama")
    with redirect_stdout(StringIO()) as said:
        run("Progress", tmp_path, rank=rank)
    assert ("100% of 0.0 GB" in said.getvalue()) == (rank == 0)


@needs("opentelemetry.exporter.prometheus", "opentelemetry.sdk", "prometheus_client")
@ranks(2)
def test_prometheus(rank: int, world: int, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run("Prometheus", tmp_path, rank=rank, port=port)
    with fastload.CheckpointManager(tmp_path / "run") as manager:
        manager.save(10, STATE)
        manager.wait()
        if rank == 0:
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
            assert re.search(r'^fastload_save_duration_seconds_count{.*tier="storage".*} 1\.0$', text, re.M)
            assert re.search(r"^fastload_checkpoint_age_seconds{.*} \d", text, re.M)
            assert re.search(r"^fastload_goodput(_ratio)?{.*} [01]\.\d", text, re.M)


class Collector(BaseHTTPRequestHandler):
    """Keeps what it is sent, by path."""

    got: dict[str, list[bytes]] = {}  # noqa: RUF012

    def do_POST(self) -> None:
        self.got.setdefault(self.path, []).append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@needs("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk")
@ranks(1)
def test_otlp(rank: int, world: int, tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        names = run("OTLP", tmp_path)
        fastload.save(STATE, tmp_path / "a")
        names["meters"].shutdown()
        names["tracers"].shutdown()
    server.shutdown()
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    sent = b"".join(Collector.got["/v1/metrics"])  # protobuf: a message after another one is one of both
    found = {
        metric.name: metric
        for resource in ExportMetricsServiceRequest.FromString(sent).resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert found["fastload.save.size"].histogram.data_points[0].sum > 4000
    spans = {
        span.name
        for resource in ExportTraceServiceRequest.FromString(
            b"".join(Collector.got["/v1/traces"])
        ).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
    assert {"fastload.save", "fastload.save.write"} <= spans


@ranks(2)
def test_a_listener(rank: int, world: int, tmp_path: Path) -> None:
    with redirect_stdout(StringIO()) as said:
        run("Listeners of your own", tmp_path)
        with pytest.raises(fastload.CheckpointNotFound):
            fastload.load(tmp_path / "nothing")
    assert ("load failed after 0." in said.getvalue()) == (rank == 0)


@needs("opentelemetry")
def test_the_page_names_each_metric() -> None:
    from fastload.ext.metrics.instruments import AGE, COUNTERS, GOODPUT, HISTOGRAMS

    text = page("docs/watching.md")
    for name in (*HISTOGRAMS, *COUNTERS, AGE, GOODPUT):
        short = name.removeprefix("fastload.stage")
        assert f"`{name}`" in text or f"`{short}`" in text, name
