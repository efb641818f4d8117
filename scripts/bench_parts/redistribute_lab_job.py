"""One job of scripts/bench_redistribute_lab.py, on every host: moves a state; rank 0 writes a line per run.

python -m bench_parts.redistribute_lab_job SETTINGS.json     (under torchrun)
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

import fastload
from bench_parts.lab_ranks import Ranks, describe, own_cpu_s

STREAMS = "floor: each holder streams its shards to one host"
_FIRST, _AGAIN = "fastload.redistribute, first call", "fastload.redistribute, next calls"
_GATHERED = "rank 0 gathers + broadcasts each tensor"
ARMS = (STREAMS, _FIRST, _AGAIN, _GATHERED)

_SMALL_BYTES = 8 << 20
_ROWS = 2048
_ITEM_BYTES = 2  # bfloat16


class State:
    """A state of square tensors that one half of the ranks holds, and the other one wants.

    Args:
        nbytes: About its bytes.
    """

    def __init__(self, nbytes: int) -> None:
        half = dist.get_world_size() // 2
        count = max(2, nbytes // (_ROWS * _ROWS * _ITEM_BYTES))
        self.names = [f"layers.{number}.weight" for number in range(count)]
        self.holders = DeviceMesh("cpu", list(range(half)))
        self.takers = DeviceMesh("cpu", list(range(half, 2 * half)))
        self.held = self._shards(self.holders, lambda number: Shard(0), self._values)
        self.wanted = self.empty()

    def empty(self) -> dict[str, DTensor] | None:
        """Returns new shards to fill."""
        return self._shards(self.takers, self.placement, lambda number: torch.full((_ROWS, _ROWS), -1.0))

    def placement(self, number: int) -> Placement:
        """Returns how the ranks that want a tensor split it."""
        return Shard(number % 2)

    def is_moved(self) -> bool:
        """Whether all wanted shards have their values."""
        if self.wanted is None:
            return True
        expected = self._shards(self.takers, self.placement, self._values)
        assert expected is not None
        return all(
            torch.equal(self.wanted[name].to_local(), expected[name].to_local()) for name in self.names
        )

    def _values(self, number: int) -> Tensor:
        return (torch.arange(_ROWS * _ROWS, dtype=torch.int32) % (1009 + number)).view(_ROWS, _ROWS)

    def _shards(
        self, mesh: DeviceMesh, placement: Callable[[int], Placement], values: Callable[[int], Tensor]
    ) -> dict[str, DTensor] | None:
        at = mesh.get_coordinate()
        if at is None:
            return None
        shards = {}
        for number, name in enumerate(self.names):
            split = placement(number)
            assert isinstance(split, Shard)
            part = values(number).chunk(mesh.size(), split.dim)[at[0]].bfloat16().contiguous()
            shards[name] = DTensor.from_local(part, mesh, [split], run_check=False)
        return shards


class Job(Ranks):
    """What a rank does."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        half = dist.get_world_size() // 2
        self.options = fastload.LoadOptions(timeout_s=settings["timeout_s"])
        self.gathering = dist.new_group(list(range(half)))
        self.spreading = dist.new_group([0, *range(half, 2 * half)])
        self.calls: dict[str, Callable[[State], object]] = {
            STREAMS: self.stream,
            _FIRST: self.redistribute,
            _AGAIN: self.redistribute,
            _GATHERED: self.gather_and_broadcast,
        }

    def run(self) -> None:
        """Runs all arms, first with a small state: this finishes imports and connections."""
        small, full = State(_SMALL_BYTES), State(self.settings["size"])
        working = [name for name in self.settings["arms"] if self.run_once(name, small, turn=-1)]
        for turn in range(self.settings["repeats"]):
            working = [name for name in working if self.run_once(name, full, turn=turn)]

    def run_once(self, name: str, state: State, *, turn: int) -> bool:
        """Runs one arm on all ranks; returns whether all of them managed."""
        self.write({"begin": name, "turn": turn})
        if name == _FIRST:
            state.wanted = state.empty()  # at other addresses
        elif name == _AGAIN and _FIRST not in self.settings["arms"]:
            self.redistribute(state)
        gc.collect()
        before = self.crossed()
        dist.barrier()
        error, used, began = "", own_cpu_s(), time.perf_counter()
        try:
            self.calls[name](state)
        except Exception as caught:
            error = describe(caught)
        row = {"seconds": time.perf_counter() - began, "cpu_s": own_cpu_s() - used}
        rows = self.gather(error, row)
        crossed = self.crossed() - before
        if rows is None:
            return False
        if turn <= 0 and name != STREAMS:
            wrong = "" if state.is_moved() else "the shards that arrived are not those of the state"
            if self.gather(wrong, {}) is None:
                return False
        for shard in (state.wanted or {}).values():
            shard.to_local().fill_(-1)
        self.write(
            {
                "arm": name,
                "turn": turn,
                "seconds": max(row["seconds"] for row in rows),
                "cpu_s": sum(row["cpu_s"] for row in rows),
                "most_entered_bytes": max(crossed.entered, default=0),
                "most_left_bytes": max(crossed.left, default=0),
            }
        )
        return True

    def redistribute(self, state: State) -> None:
        fastload.redistribute(state.held, state.wanted, options=self.options)

    def stream(self, state: State) -> None:
        half = dist.get_world_size() // 2
        for name in state.names:
            if state.held is not None:
                dist.send(state.held[name].to_local().view(torch.uint8), self.rank + half)
            elif state.wanted is not None:
                into = state.wanted[name].to_local()
                dist.recv(into.view(torch.uint8).view(-1), self.rank - half)

    def gather_and_broadcast(self, state: State) -> None:
        half = dist.get_world_size() // 2
        for number, name in enumerate(state.names):
            whole = (
                torch.empty(_ROWS, _ROWS, dtype=torch.bfloat16)
                if self.rank in (0, *range(half, 2 * half))
                else None
            )
            if state.held is not None:
                parts = list(whole.chunk(half)) if whole is not None else None
                dist.gather(state.held[name].to_local(), parts, dst=0, group=self.gathering)
            if whole is not None:
                dist.broadcast(whole, 0, group=self.spreading)
            if state.wanted is not None and whole is not None:
                dim = number % 2
                state.wanted[name].to_local().copy_(whole.chunk(half, dim)[self.rank - half])


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
