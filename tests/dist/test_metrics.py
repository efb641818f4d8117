"""Metrics of several ranks: of the job once, or of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from tests.dist.harness import ranks

pytest.importorskip("opentelemetry.sdk")

STATE = {"a": torch.arange(1_000_000.0)}


@ranks(2)
@pytest.mark.parametrize("each_rank", [False, True])
def test_the_job_is_measured_once_or_by_rank(rank: int, world: int, tmp_path: Path, each_rank: bool) -> None:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from fastload.ext.metrics import enable

    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    enable(each_rank=each_rank)
    fastload.save(STATE, tmp_path / "a")
    options = fastload.LoadOptions(strategy="allgather", chunk_bytes=500_000)
    with fastload.open(tmp_path / "a", options=options) as checkpoint:
        checkpoint.load()
    report = checkpoint.report
    assert report is not None
    points = points_of(reader.get_metrics_data())
    if rank and not each_rank:
        assert points == {}
        return
    read, load = points["fastload.load.io"], points["fastload.load.duration"]
    assert read.value == (report.ranks[rank].bytes_read if each_rank else report.bytes_read)
    assert load.sum == (report.ranks[rank].total_s if each_rank else report.total_s)
    assert load.attributes.get("fastload.rank") == (rank if each_rank else None)
    assert ("fastload.load.size" in points) == (rank == 0)
    assert "fastload.save.stall.duration" in points


def points_of(data: Any) -> dict[str, Any]:
    """The only point of each instrument."""
    found = {}
    for resource in data.resource_metrics if data is not None else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                (found[metric.name],) = metric.data.data_points
    return found
