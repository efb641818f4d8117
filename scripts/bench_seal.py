"""The rate of `fastload seal`, next to one sequential reader of the same files.

    .venv/bin/python scripts/bench_seal.py --size 2GiB --ranks 2

Both read with direct I/O, so that the page cache has no part in it. Repetitions alternate.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import safetensors.torch
import torch

_FILE_BYTES = 512 << 20


def make(folder: Path, nbytes: int) -> None:
    """Writes safetensors files with random bytes, as the reference library does."""
    generator = torch.Generator().manual_seed(0)
    for number in range(max(1, nbytes // _FILE_BYTES)):
        shape = (min(nbytes, _FILE_BYTES) // (8 << 20), 1 << 20)
        rows = torch.randint(0, 1 << 62, shape, generator=generator)
        tensors = {f"{number}.{row}": rows[row].clone() for row in range(len(rows))}
        safetensors.torch.save_file(tensors, folder / f"{number}.safetensors")
    os.sync()


def dd(folder: Path) -> float:
    """Reads the files one after the other; returns the seconds."""
    began = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        command = ["dd", f"if={file}", "of=/dev/null", "bs=4M", "iflag=direct"]
        subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def seal(folder: Path, num_ranks: int) -> float:
    """Seals the directory; returns the seconds from the call to the report."""
    start = ["torch.distributed.run", "--nproc-per-node", str(num_ranks), "-m"] if num_ranks > 1 else []
    command = [sys.executable, "-m", *start, "fastload", "seal", str(folder), "--json"]
    environment = {**os.environ, "FASTLOAD_IO": "direct"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(json.loads(done.stdout)["total_s"])


@click.command()
@click.option("--size", default="2GiB", show_default=True, help="Bytes of the checkpoint: a number of GiB.")
@click.option("--ranks", default=2, show_default=True, help="Ranks on this host.")
@click.option("--repeats", default=7, show_default=True, help="Of each.")
@click.option(
    "--folder", default=None, help="Where to make the checkpoint, if not in the temporary directory."
)
def main(size: str, ranks: int, repeats: int, folder: str | None) -> None:
    """Time `fastload seal` and dd."""
    nbytes = int(float(re.sub("GiB$", "", size)) * (1 << 30))
    with tempfile.TemporaryDirectory(dir=folder) as made:
        place = Path(made)
        make(place, nbytes)
        arms: dict[str, Callable[[], float]] = {"dd": lambda: dd(place), "seal": lambda: seal(place, ranks)}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(repeats):
            for name, run in arms.items():
                seconds[name].append(run())
    for name, of_arm in seconds.items():
        rates = sorted(nbytes / 1e9 / each for each in of_arm)
        median = statistics.median(rates)
        print(f"{name:4} {median:.2f} GB/s ({rates[0]:.2f} to {rates[-1]:.2f})")
    ratios = sorted(own / other for own, other in zip(seconds["seal"], seconds["dd"], strict=True))
    print(f"seal ÷ dd, pairwise: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
