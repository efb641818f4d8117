#!/usr/bin/env python3
"""Costs of metrics and of the log: what a step, a save and the import take with and without them.

    scripts/bench_metrics.py

Prints a table in Markdown, of CPU time, so that other programs do not matter much. Needs opentelemetry-sdk;
the SDK keeps what it gets in memory.
"""

from __future__ import annotations

import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch

import fastload

NUM_STEPS, NUM_TOLD, NUM_REPEATS = 20_000, 300, 7
IMPORT = "import time, torch, fastload; began = time.process_time(); {}; print(time.process_time() - began)"


def step_us(manager: fastload.CheckpointManager) -> float:
    """Returns the microseconds of CPU time of a step of the manager."""
    began = time.process_time()
    for step in range(1, NUM_STEPS + 1):
        manager.should_save(step)
    return (time.process_time() - began) / NUM_STEPS * 1e6


def event_us() -> float:
    """Returns the microseconds in which the end of a load is told."""
    from fastload.comm.group import join
    from fastload.comm.observers import notify

    with tempfile.TemporaryDirectory() as folder:
        fastload.save({"a": torch.ones(1000)}, f"{folder}/a")
        with fastload.open(f"{folder}/a") as checkpoint:
            checkpoint.load()
            report = checkpoint.report
    world = join(call="measuring", timeout_s=60)
    at, began = time.perf_counter(), time.process_time()
    for _ in range(NUM_TOLD):
        notify(world, "load", at, report=report)
    return (time.process_time() - began) / NUM_TOLD * 1e6


def import_ms(statement: str) -> float:
    """Returns the milliseconds of a statement in a new process that has imported torch and fastload."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.format(statement)], capture_output=True, text=True, check=True
    )
    return float(done.stdout) * 1e3


def median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(NUM_REPEATS))


def main() -> None:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from fastload.ext.metrics import enable

    rows = []
    with tempfile.TemporaryDirectory() as folder, fastload.CheckpointManager(folder) as manager:
        rows.append(["off", median(lambda: step_us(manager)), median(event_us)])
    metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))
    enable()
    with tempfile.TemporaryDirectory() as folder, fastload.CheckpointManager(folder) as manager:
        rows.append(["metrics", median(lambda: step_us(manager)), median(event_us)])
    logging.getLogger("fastload").addHandler(logging.NullHandler())
    logging.getLogger("fastload").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder, fastload.CheckpointManager(folder) as manager:
        rows.append(["metrics and log", median(lambda: step_us(manager)), median(event_us)])
    print("| | a step of the manager | the end of a load or save |\n|---|---|---|")
    for name, step, event in rows:
        print(f"| {name} | {step:.2f} µs | {event:.0f} µs |")
    enabled = median(lambda: import_ms("from fastload.ext import metrics; metrics.enable()"))
    print(f"\nimport and `enable()`: {enabled:.0f} ms")


if __name__ == "__main__":
    main()
