"""What fastload does on a real GPU, in at most five minutes: correctness over NCCL, failures, rates.

    scripts/gpu_check --out DIR                   on the first CUDA device
    scripts/gpu_check --device emu                a rehearsal on the emulated accelerator
    scripts/gpu_check --device cpu                a rehearsal in host memory, over Gloo
    scripts/gpu_check --only load,save            some stages

Stages run one after the other, the most telling first, each with a limit. The report is written again after
every stage: report.md has tables, report.json every value, and log.txt what the stages printed.
"""

from __future__ import annotations

import argparse  # and not click: the machine may have no more than torch and what fastload needs
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint  # noqa: F401  (once, and not in each stage)

import fastload.saving.save  # noqa: F401  (likewise)
from gpu_check_parts import copies, exits, facts, failures, kills, loads, nccl, overlap, saves, suite, worlds
from gpu_check_parts import streams as side_streams
from gpu_check_parts.report import Report
from gpu_check_parts.stages import SIZES, Outcome, Sizes, Stage, StageProcess

BUDGET_S = {"cuda": 285.0, "emu": 150.0, "cpu": 150.0}  # for all stages
_LEAST_S = 3.0  # that a stage is begun with
_MEMORY = "/dev/shm"

STAGES = [
    Stage("facts", "The machine", 8, facts.run),
    Stage("nccl", "Two ranks on one device, without fastload's transfers", 20, nccl.run),
    Stage("tests-2", "Tests of two ranks", 60, suite.two_ranks),
    Stage("streams", "Loads with collectives of the caller on side streams", 30, side_streams.run),
    Stage("load", "Loads of a checkpoint in memory", 40, loads.run),
    Stage("save", "Saves in the background", 35, saves.run),
    Stage("overlap", "The caller's stream running back to back under a load", 12, overlap.run),
    Stage("copies", "Rates of copies", 12, copies.run),
    Stage("failures", "After failures that fastload survives", 32, failures.run),
    Stage("worlds", "One and four ranks", 25, worlds.run),
    Stage("kills", "Killed ranks", 36, kills.run),
    Stage("exits", "Ends of programs", 20, exits.run),
    Stage("tests-kills", "Tests in which a rank is killed", 30, suite.kills),
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "emu", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu_check"))
    parser.add_argument("--only", default="", metavar="A,B", help=", ".join(stage.name for stage in STAGES))
    parser.add_argument("--size", choices=SIZES, help="full on CUDA, otherwise small")
    parser.add_argument("--folder", type=Path, help="for checkpoints, in place of /dev/shm")
    given = parser.parse_args(arguments)
    only = [name for name in given.only.split(",") if name]
    if unknown := set(only) - {stage.name for stage in STAGES}:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    stages = [stage for stage in STAGES if not only or stage.name in only]
    if given.device == "emu":
        from tests.accelerator import build

        build.library()  # not in a stage: it may take a minute
    outcomes = check(
        stages,
        given.out,
        kind=given.device,
        size=given.size or ("full" if given.device == "cuda" else "small"),
        folder=given.folder,
    )
    sys.exit(any(outcome.state not in ("ok", "not run") for outcome in outcomes))


def check(
    stages: Sequence[Stage], out: Path, *, kind: str, size: str, folder: Path | None = None
) -> list[Outcome]:
    """Runs stages, and writes the report after each.

    Args:
        stages: The stages, in their order.
        out: Folder of the report.
        kind: Of the device; see `devices.Device`.
        size: Name of the sizes.
        folder: For checkpoints; by default in memory.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    out.mkdir(parents=True, exist_ok=True)
    for name in ("report.json", "report.md", "log.txt", "running.log", "running.jsonl"):
        (out / name).unlink(missing_ok=True)
    outcomes = [Outcome(stage) for stage in stages]
    report = Report(out, kind, size, outcomes)
    limit = time.monotonic() + BUDGET_S[kind]
    place = Path(tempfile.mkdtemp(prefix="gpu-check-", dir=folder or _roomy_folder(SIZES[size])))
    use_mps = False
    gc.collect()
    gc.freeze()  # forks that look for garbage leave what is here alone
    try:
        for outcome in outcomes:
            left_s = limit - time.monotonic()
            if left_s < _LEAST_S:
                outcome.state, outcome.why = "not run", "no time is left"
                continue
            outcome.state = "running"
            report.write()
            work = place / outcome.stage.name
            work.mkdir()
            given = {"kind": kind, "sizes": SIZES[size], "folder": work, "use_mps": use_mps}
            _run(outcome, left_s, out, **given)
            shutil.rmtree(work, ignore_errors=True)
            use_mps = outcome.found["facts"].get(nccl.MPS_WORKS, use_mps)
            report.write()
    finally:
        shutil.rmtree(place, ignore_errors=True)
        report.write()
    return outcomes


def _run(outcome: Outcome, left_s: float, out: Path, **given: Any) -> None:
    """Runs a stage, and notes what became of it."""
    stage = outcome.stage
    running = StageProcess(stage, min(stage.limit_s, left_s), out, **given)
    try:
        outcome.state, outcome.why = running.wait()
    except BaseException as error:
        outcome.state, outcome.why = "interrupted", repr(error)
        raise
    finally:
        outcome.seconds = running.seconds
        outcome.found = running.take_results(out / "log.txt")
        print(f"{stage.name}: {outcome.state} {outcome.why} ({outcome.seconds:.1f} s)", flush=True)


def _roomy_folder(sizes: Sizes) -> str:
    """Returns /dev/shm if it has the room, else the folder with the most: the kernel caches its files."""
    folders = [path for path in (_MEMORY, tempfile.gettempdir()) if Path(path).exists()]
    free = {path: shutil.disk_usage(path).free for path in folders}
    return _MEMORY if free.get(_MEMORY, 0) >= 3 * sizes.load_bytes else max(folders, key=free.__getitem__)
