"""What `fastload plan` would have said of the loads that scripts/bench_lab.py measured."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench_parts.lab_tables import cells
from bench_parts.tables import AS_IT_WAS, print_table
from fastload.formats.manifest import TensorEntry
from fastload.options import SETTINGS
from fastload.planning.cluster import Cluster, Requests
from fastload.planning.simulate import ReplicatedLoad

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

from limits import LONGEST, SHORTEST, parse_connection_rate, parse_seconds
from network import parse_rate

GOODPUT = 0.957  # what TCP gets of a capped link, measured
_OPENING_S = Cluster.opening_s
_OPTIONS = {
    "--storage-rate": "storage_bytes_per_s",
    "--per-host-storage-rate": "host_storage_bytes_per_s",
    "--host-rate": "host_bytes_per_s",
}


def print_predictions(result: dict[str, Any], regime: str) -> None:
    """Prints the measured and the predicted seconds of fastload's arms side by side."""
    table = Table(box=SIMPLE_HEAD, title=f"{regime}: measured and predicted, s")
    heads = ("hosts", "arm", "measured", "predicted", "predicted ÷ measured", "bound by", "within 10 %")
    for head in heads:
        table.add_column(head, justify="left" if head in ("arm", "bound by") else "right", no_wrap=True)
    for hosts, by_arm in cells(result, regime).items():
        for arm, cell in by_arm.items():
            if cell.report is None or arm in (AS_IT_WAS, "fastload prefetched"):
                continue
            seconds, bound_by = predicted(result, regime, hosts, cell.report)
            ratio = seconds / cell.seconds
            row = (f"{cell.seconds:.2f}", f"{seconds:.2f}", f"{ratio:.3f}", bound_by)
            table.add_row(str(hosts), arm, *row, "yes" if abs(ratio - 1) <= 0.1 else "no")
    if table.rows:
        print_table(table)


def predicted(result: dict[str, Any], regime: str, hosts: int, report: dict[str, Any]) -> tuple[float, str]:
    """Returns the seconds and what bounds them.

    All hosts of the lab share the cores of one machine. What those manage is measured, with links as
    fast as they get (`unshaped_s`), and is the rate that a rank can pass on.
    """
    words = result["rates"][regime]
    rates = dict(zip(words[::2], words[1::2], strict=True))
    links: dict[str, Any] = {
        option: GOODPUT * parse_rate(rates[name]) / 8 for name, option in _OPTIONS.items() if name in rates
    }
    requests = Requests(
        latency_s=(SHORTEST + LONGEST) / 2 * parse_seconds(rates.get("--latency", "0s")),
        connection_bytes_per_s=parse_connection_rate(rates["--connection-rate"])
        if "--connection-rate" in rates
        else math.inf,
    )
    num_locals = result.get("ranks_per_host", 1)
    unshaped_s = result.get("unshaped_s", {}).get(str(hosts))
    if unshaped_s is not None:
        # The ranks of a host share what enters it.
        links["rank_bytes_per_s"] = result["nbytes"] / num_locals / max(0.01, unshaped_s - _OPENING_S)
    wanted = [TensorEntry("all", "U8", (result["nbytes"],), 0, 0, result["nbytes"])]
    cluster = Cluster(num_hosts=hosts, ranks_per_host=num_locals, requests=requests, **links)
    load = ReplicatedLoad(wanted, cluster)
    done = load.predict(
        report["strategy"],
        staging_bytes=SETTINGS["staging_bytes"].default,
        chunk_bytes=report["chunk_bytes"],
    )
    return done.total_s, done.bound_by
