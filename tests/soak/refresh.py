"""Refreshes in a row, every fifth with a fault: never a mixture, versions ascend, and nothing leaks.

    python -m tests.soak.refresh --refreshes 500 --seed 1

In each life of 50 refreshes, four ranks serve the versions of a trainer, which is another job. It stops at
the first wrong end.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import click

from tests.dist.harness import run_ranks
from tests.e2e.forked import forking_python
from tests.soak.refresh_cases import KILLED_AT, WORLD, serve

_A_LIFE = 50


@click.command()
@click.option("--refreshes", default=500, show_default=True)
@click.option("--first", default=0, show_default=True, help="Life to begin with.")
@click.option("--seed", default=1, show_default=True)
def main(refreshes: int, first: int, seed: int) -> None:
    """Run the soak."""
    tally: Counter[str] = Counter()
    growth: list[tuple[int, int]] = []
    began = time.monotonic()
    for life in range(first, first - (-refreshes // _A_LIFE)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "root").mkdir()
            (folder / "orders").mkdir()
            dies = {WORLD - 1 - index: signal.SIGKILL for index in range(len(KILLED_AT))}
            results = run_ranks(
                serve, WORLD, deadline_s=400, dies=dies, ranks_per_host=2,
                folder=folder, python=forking_python(), seed=f"{seed}/{life}", num=_A_LIFE,
            )  # fmt: skip
        lived = [each for each in results if each is not None]
        tally.update(lived[0][0])
        growth += [(more_bytes, more_open) for _, more_bytes, more_open in lived]
        click.echo(f"life {life}: {sum(tally.values())} ends, {time.monotonic() - began:.0f} s", err=True)
    for line, count in sorted(tally.items()):
        click.echo(f"{count:5d}  {line}")
    most_bytes, most_open = (max(each) for each in zip(*growth, strict=True))
    click.echo(f"memory grew by at most {most_bytes / 2**20:.1f} MiB, descriptors by {most_open}")
    click.echo(f"{refreshes} refreshes, seed {seed}: every one ended as it may")


if __name__ == "__main__":
    main()
