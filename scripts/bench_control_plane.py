"""The control plane of a save and a load by thousands of ranks: messages, bytes, CPU and memory of a rank.

    python scripts/bench_control_plane.py --replay
    python scripts/bench_control_plane.py --replay --optimizer dp_reshardable
    python scripts/bench_control_plane.py --pp 32 --dp 4
    python scripts/bench_control_plane.py --tp 2 --pp 2 --dp 2 --processes

The state is that of a GPT with Megatron Core, two layers in a stage: a trillion parameters with the defaults.
It is saved and loaded. Bytes of tensors, and links between ranks for them, are left out. Rank 0 is a
process, all others are threads of another one, which share what is equal on all of them. With --replay the
answers of the others are encoded as they would, for rank 0 and for the other rank with the most neighbours.
With --processes each rank is one, and rank 0 and the one with the most CPU time are shown.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
from bench_parts.control_plane import Work, measure, measure_all, print_rows
from bench_parts.control_replay import be_all_others
from bench_parts.trillion import OPTIMIZERS, Job

from fastload.comm.tree import children_of


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tp", default=8, show_default=True, help="Tensor parallel ranks.")
@click.option("--pp", default=64, show_default=True, help="Stages of the pipeline.")
@click.option("--dp", default=6, show_default=True, help="Data parallel ranks.")
@click.option("--optimizer", type=click.Choice(OPTIMIZERS), default=OPTIMIZERS[0], show_default=True)
@click.option("--saves", default=2, show_default=True, help="Saves of the same state.")
@click.option("--loads", default=1, show_default=True, help="Loads of it, afterwards.")
@click.option("--staging", default=256, show_default=True, help="Staging of a load, in MiB.")
@click.option("--replay", is_flag=True, help="Replays the answers of all others to rank 0 and one more.")
@click.option("--processes", is_flag=True, help="Each rank is a process, and all are measured.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write it there.")
def main(
    tp: int,
    pp: int,
    dp: int,
    optimizer: str,
    saves: int,
    loads: int,
    staging: int,
    replay: bool,
    processes: bool,
    json_path: Path | None,
) -> None:
    """Measure ranks of a job that saves and loads."""
    job = Job(tp, pp, dp)
    work = Work(job, optimizer, saves, loads, staging << 20, replay)
    with tempfile.TemporaryDirectory(prefix="fastload-control-") as folder:
        if processes:
            rows_of = measure_all(work, Path(folder))
            cpu_s = {at: sum(row["cpu_s"] for row in rows) for at, rows in rows_of.items() if at}
            rows_of = {at: rows_of[at] for at in (0, max(cpu_s, key=cpu_s.__getitem__))}
        elif replay:
            busiest = max(range(1, job.num_ranks), key=lambda rank: len(children_of(rank, job.num_ranks)))
            rows_of = {rank: measure(work, rank, Path(folder), be_all_others) for rank in (0, busiest)}
        else:
            rows_of = {0: measure(work, 0, Path(folder))}
    print_rows(f"{job}, {job.num_ranks:,} ranks, {optimizer}", rows_of)
    if json_path:
        json_path.write_text(json.dumps(rows_of, indent=1) + "\n")


if __name__ == "__main__":
    main()
