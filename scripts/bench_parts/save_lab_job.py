"""One job of scripts/bench_save_lab.py, on every host: saves in turn; rank 0 writes one line per save.

python -m bench_parts.save_lab_job SETTINGS.json     (under torchrun)
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench_parts.lab_ranks import Ranks, describe, mounted, own_cpu_s
from bench_parts.save_arms import State, make_state, nbytes_of
from bench_parts.save_lab_arms import CONSOLIDATED, make_arms, make_bucket, remove, stored
from bench_parts.save_shards import is_saved, shard

_SMALL_BYTES = 8 << 20


class Job(Ranks):
    """What a rank does."""

    def run(self) -> None:
        """A small state first: imports and first uses are over then, and what cannot run is known."""
        shards = self.settings["shards"]
        arms = make_arms(dist.get_world_size(), layout=shards)
        small, full = (shard(make_state(size), shards) for size in (_SMALL_BYTES, self.settings["size"]))
        working = [name for name in self.settings["arms"] if self.run_once(name, arms[name], small, turn=-1)]
        for turn in range(self.settings["repeats"]):
            working = [name for name in working if self.run_once(name, arms[name], full, turn=turn)]

    def run_once(self, name: str, save: Callable[..., Any], state: State, *, turn: int) -> bool:
        """Runs one arm on all ranks; returns whether all of them managed."""
        self.write({"begin": name, "turn": turn})
        last = f"{turn + 1}-{self.settings['arms'].index(name)}"
        url = f"{self.settings['root']}/{last}"
        place = Path(self.settings["mount"], last) if name == CONSOLIDATED else url
        gc.collect()
        before = self.crossed()
        dist.barrier()
        error, row, report = "", {}, None
        used, busy, began = own_cpu_s(), Cores(), time.perf_counter()
        try:
            report = save(state, place)
        except Exception as caught:
            error = describe(caught)
        row = {"seconds": time.perf_counter() - began, "cpu_s": own_cpu_s() - used}
        rows = self.gather(error, row)
        cores_busy, crossed = busy.part(), self.crossed() - before
        if rows is None:
            return False
        if report is not None and turn == 0 and self.gather(self.reload(state, url), {}) is None:
            return False
        if self.gather(self.take_away(state, place), {}) is None:
            return False
        self.write(
            {
                "arm": name,
                "turn": turn,
                "nbytes": nbytes_of(state),
                "seconds": max(row["seconds"] for row in rows),
                "cpu_s": sum(row["cpu_s"] for row in rows),
                "storage_bytes": crossed.written,
                "exchanged_bytes": crossed.exchanged,
                "cores_busy": cores_busy,
                "report": report.to_dict() if report is not None else None,
            }
        )
        return True

    def reload(self, state: State, url: str) -> str:
        """Loads what was saved; returns what is wrong with it."""
        try:
            same = is_saved(state, url)
        except Exception as caught:
            return describe(caught)
        return "" if same else f"{url}: what was loaded is not what was saved"

    def take_away(self, state: State, place: str | Path) -> str:
        """Removes what was saved; returns what is wrong with its size."""
        if self.rank != 0:
            return ""
        try:
            if isinstance(place, Path):
                found = {file.name: file.stat().st_size for file in place.glob("*.safetensors")}
                shutil.rmtree(place)
            else:
                found = stored(place)
                remove(place, list(found))
        except Exception as caught:
            return describe(caught)
        whole = sum(found.values()) >= 0.9 * nbytes_of(state)  # uneven shards leave a plain share short
        return "" if whole else f"{place}: {found} is less than {nbytes_of(state)} bytes"


class Cores:
    """Which part of the machine's cores is busy, with whatever runs on them, from now on."""

    def __init__(self) -> None:
        self._before = self._ticks()

    def part(self) -> float:
        total, idle = (now - before for now, before in zip(self._ticks(), self._before, strict=True))
        return 1 - idle / max(1, total)

    @staticmethod
    def _ticks() -> tuple[int, int]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]


def main() -> None:
    warnings.filterwarnings("ignore")  # deprecations, of the libraries
    torch.set_num_threads(1)  # ranks share the cores
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    os.environ["AWS_ENDPOINT_URL"] = settings["endpoint"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings["timeout_s"]))
    if dist.get_rank() == 0:
        make_bucket(settings["root"], within_s=60)
    dist.barrier()
    with contextlib.ExitStack() as stack:
        if CONSOLIDATED in settings["arms"]:
            settings["mount"] = str(Path(settings["results"]).with_name("mount"))
            stack.enter_context(mounted(*settings["sftp"], Path(settings["mount"]), "rw"))
        Job(settings).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
