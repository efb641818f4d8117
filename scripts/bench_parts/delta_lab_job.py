"""One job of scripts/bench_deltas_lab.py, on every host: refreshes a model; rank 0 writes a line per run.

python -m bench_parts.delta_lab_job SETTINGS.json     (under torchrun)
"""

from __future__ import annotations

import gc
import json
import sys
import time
import urllib.request
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastload
from bench_parts.lab_ranks import Ranks, describe, own_cpu_s
from fastload.ext.deltas import patch
from fastload.loading.match import Match

FLOOR = "floor: one host streams the complete checkpoint"
FULL, DELTA = "fastload, the complete checkpoint", "fastload, the delta into a model that holds its base"
ARMS = (FLOOR, FULL, DELTA)

BASE_NAME, DELTA_NAME, FULL_NAME = "base", "delta", "full"
_CHUNK_BYTES = 1 << 20


class Job(Ranks):
    """What a rank does."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.options = fastload.LoadOptions(timeout_s=settings["timeout_s"])
        self.pause_s = 0.0
        self.report: fastload.LoadReport | None = None
        self.state: dict[str, Tensor] = {}
        self._time_patches()

    def run(self) -> None:
        """Runs all arms, first with a small model: this finishes imports and connections."""
        names = self.settings["arms"]
        for turn in range(-1, self.settings["repeats"]):
            kind = "small" if turn < 0 else "large"
            if turn <= 0:
                self.state = self._load_local(kind, BASE_NAME)
            names = [name for name in names if self.run_once(name, kind, turn=turn)]

    def run_once(self, name: str, kind: str, *, turn: int) -> bool:
        """Runs one arm on all ranks; returns whether all of them managed."""
        self.write({"begin": name, "turn": turn})
        self._load_local(kind, BASE_NAME, into=self.state)
        gc.collect()
        url = f"{self.settings['url']}/{kind}"
        self.pause_s = 0.0
        before = self.crossed()
        dist.barrier()
        error, used, began = "", own_cpu_s(), time.perf_counter()
        try:
            if name == FLOOR:
                self._stream(f"{url}/{FULL_NAME}")
            else:
                self._refresh(f"{url}/{FULL_NAME if name == FULL else DELTA_NAME}")
        except Exception as caught:
            error = describe(caught)
        row = {
            "seconds": time.perf_counter() - began,
            "cpu_s": own_cpu_s() - used,
            "pause_s": self.pause_s,
        }
        rows = self.gather(error, row)
        crossed = self.crossed() - before
        if rows is None:
            return False
        if turn <= 0 and name != FLOOR:
            is_same = all(self._is_new(kind, key) for key in self.state)
            if self.gather("" if is_same else "the model is not the new version", {}) is None:
                return False
        self.write(
            {
                "arm": name,
                "turn": turn,
                "seconds": max(row["seconds"] for row in rows),
                "cpu_s": sum(row["cpu_s"] for row in rows),
                "pause_s": max(row["pause_s"] for row in rows),
                "read_bytes": crossed.read,
            }
        )
        return True

    def _load_local(self, kind: str, name: str, into: dict[str, Tensor] | None = None) -> Any:
        path = Path(self.settings["folder"], kind, name)
        return fastload.load(path, into=into, options=replace(self.options, strategy="direct"))

    def _is_new(self, kind: str, name: str) -> bool:
        path = Path(self.settings["folder"], kind, FULL_NAME)
        wanted = fastload.load(path, names=[name], options=replace(self.options, strategy="direct"))
        return torch.equal(self.state[name].view(torch.int16), wanted[name].view(torch.int16))

    def _refresh(self, url: str) -> None:
        with fastload.open(url, options=self.options) as checkpoint:
            checkpoint.load(into=self.state)

    def _stream(self, url: str) -> None:
        if self.rank == 0:
            for file in fastload.inspect(url).files:
                with urllib.request.urlopen(f"{url}/{file.name}") as response:
                    while response.read(_CHUNK_BYTES):
                        pass
        dist.barrier()

    def _time_patches(self) -> None:
        """Measures the time from the first change of a tensor to the last."""
        original = patch._without

        def timed(matched: Match, *rest: Sequence[Any]) -> Match:
            left = original(matched, *rest)

            def finish() -> object:
                began = time.perf_counter()
                result = left.finish()
                self.pause_s = time.perf_counter() - began
                return result

            return replace(left, finish=finish)

        patch._without = timed


def main() -> None:
    warnings.filterwarnings("ignore")  # deprecations, of the libraries
    torch.set_num_threads(1)  # ranks share the cores
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings["timeout_s"]))
    Job(settings).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
