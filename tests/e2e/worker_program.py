"""A training of one rank whose data come from worker processes: worker_program.py METHOD ROOT shelter|plain

It trains until it is told on stdin to go on, then ends, with workers that wait or are at something long.
"""

from __future__ import annotations

import select
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fastload

NUM_ITEMS = 8


class Slow(Dataset[Tensor]):
    def __init__(self, item_s: float) -> None:
        self.item_s = item_s

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, number: int) -> Tensor:
        time.sleep(self.item_s)
        return torch.tensor(number)


def told_to_go_on() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def main() -> None:
    method, root, how = sys.argv[1:]
    context: Any = fastload.worker_context(method) if how == "shelter" else method
    forked = method == "fork"  # else processes take so long to start that one has to do
    settings: dict[str, Any] = {"batch_size": None, "multiprocessing_context": context}
    settings |= {"num_workers": 2 if forked else 1, "persistent_workers": not forked}
    global kept  # until Python itself ends the workers
    kept = loader = DataLoader(Slow(0.01), **settings)
    list(loader)  # what torch imports in the first turn would swallow the error of a worker that dies in it
    with fastload.CheckpointManager(root, every_steps=1000) as manager:
        print("open", flush=True)
        num_epochs = 0
        while not told_to_go_on():
            assert [int(number) for number in loader] == list(range(NUM_ITEMS))
            num_epochs += 1
            manager.should_save(num_epochs)
            print(f"epoch {num_epochs}", flush=True)
        manager.save(num_epochs, {"epochs": num_epochs})
        print(f"told {manager.stop_requested}", flush=True)
    if forked:
        kept = iter(DataLoader(Slow(1000.0), **settings))


if __name__ == "__main__":
    main()
