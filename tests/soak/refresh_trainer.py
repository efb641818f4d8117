"""The trainer of the soak of refreshes: saves what files in a folder order, one after the other.

    python -m tests.soak.refresh_trainer ROOT ORDERS

An order is a JSON file ``0001.json``; it is deleted once it is done.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastload
from tests.checkpoints import flip

__all__ = ["content", "step_path"]

_SHAPES = {"layers.0.weight": (128, 300), "layers.1.weight": (300, 128), "bias": (300,)}
_OPTIONS = {"timeout_s": 20.0, "block_bytes": 1 << 13}
_LEAST_S = 0.002


def content(version: int) -> dict[str, Tensor]:
    """Every 50th element says which version it is; which ones are these, too."""
    found = {}
    for name, shape in _SHAPES.items():
        flat = torch.arange(torch.Size(shape).numel()) % 97
        flat[version % 50 :: 50] = version % 256
        found[name] = flat.view(shape).bfloat16()
    return found


def step_path(root: Path, version: int) -> Path:
    return root / f"step_{version:08d}"


def obey(root: Path, order: dict[str, Any]) -> None:
    """Saves a version, and does to it what is ordered."""
    version, base, fault = order["version"], order["base"], order["fault"]
    time.sleep(order["after_s"])
    path = step_path(root, version)
    options = fastload.SaveOptions(**_OPTIONS, base=root / base if base else None)
    if fault == "killed":  # somewhere in the save
        threading.Timer(order["at_s"], os.kill, (os.getpid(), signal.SIGKILL)).start()
    aside = root / f"aside-{version}" if fault in ("damaged", "gone") else path
    if fault in ("missing base", "wrong base"):
        options = fastload.SaveOptions(**_OPTIONS, base=root / f"base-{version}")
        fastload.save(content(version - 1), root / f"base-{version}", options=_whole())
        aside = root / f"aside-{version}"
    fastload.save(content(version), aside, options=options)
    if fault == "killed":
        signal.pause()
    data = next(iter(sorted(aside.glob("*.safetensors"))), None)
    if fault == "damaged" and data is not None:
        flip(data, -1 - int(order["part"] * (data.stat().st_size - 1)))
    elif fault == "gone" and data is not None:
        data.unlink()
    elif fault == "missing base":
        shutil.rmtree(root / f"base-{version}")
    elif fault == "wrong base":
        shutil.rmtree(root / f"base-{version}")
        fastload.save(content(version - 2), root / f"base-{version}", options=_whole())
    if aside != path:
        aside.rename(path)
    if fault == "raced":  # retention deletes it as soon as a newer one exists
        time.sleep(order["at_s"])
        fastload.save(content(version + 1), step_path(root, version + 1), options=_whole())
        shutil.rmtree(path)
    for old in sorted(root.glob("step_*"))[:-6]:
        if old.name not in (base, order["keep"]):
            shutil.rmtree(old)


def _whole() -> fastload.SaveOptions:
    return fastload.SaveOptions(**_OPTIONS)


def main(root: Path, orders: Path) -> None:
    while True:
        for path in sorted(orders.glob("*.json")):
            order = json.loads(path.read_text())
            path.unlink()  # else it would be done again by the next trainer
            obey(root, order)
        time.sleep(_LEAST_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
