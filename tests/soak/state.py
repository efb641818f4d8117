"""Random states into random targets: each load restores everything, or is refused and changes nothing.

    python -m tests.soak.state --draws 2000 --seed 1 [--sharded]

It stops at the first unexpected outcome, shrinks the draw, and prints it. With ``--sharded`` the states are
DTensors of 2 to 6 ranks on random meshes, compared with `full_tensor`.
"""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import click
import hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dist.harness import run_ranks
from tests.soak import shard_cases
from tests.soak.state_cases import draw, run

__all__ = ["soak", "soak_sharded"]

_WORLDS = (2, 3, 4, 4, 6)
_NUM_IN_A_ROW = 20  # draws on the same processes, which keep the groups of all meshes


def soak(num_draws: int, seed: int, folder: Path) -> Counter[str]:
    """Runs `num_draws` draws; returns how often each outcome came."""
    tally: Counter[str] = Counter()

    # Seeds cover the space evenly; hypothesis can shrink its own draws when one fails.
    seeds = st.binary(min_size=12, max_size=12).map(random.Random)
    sources = st.one_of(seeds, seeds, seeds, st.randoms(use_true_random=False))

    @hypothesis.seed(seed)
    @settings(max_examples=num_draws, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(sources)
    def attempt(source: random.Random) -> None:
        case = draw(source)
        hypothesis.note(case.show())
        tally[f"{case.label}: {run(case, folder)}"] += 1

    attempt()
    return tally


def soak_sharded(num_draws: int, seed: int, folder: Path) -> Counter[str]:
    """Runs `num_draws` draws on several ranks; returns how often each outcome came."""
    tally: Counter[str] = Counter()
    for first in range(0, num_draws, _NUM_IN_A_ROW):
        num = min(_NUM_IN_A_ROW, num_draws - first)
        world = _WORLDS[first // _NUM_IN_A_ROW % len(_WORLDS)]
        with contextlib.redirect_stdout(io.StringIO()):  # torch's logs about meshes
            ends = run_ranks(
                shard_cases.run_some, world, deadline_s=120, same=True,
                seed=seed, first=first, num=num, folder=folder / str(first),
            )  # fmt: skip
        tally += ends[0]
        shutil.rmtree(folder / str(first), ignore_errors=True)
    return tally


@click.command()
@click.option("--draws", default=2000, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--sharded", is_flag=True, help="DTensors on random meshes, on several ranks.")
def main(draws: int, seed: int, sharded: bool) -> None:
    """Run the soak."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        tally = (soak_sharded if sharded else soak)(draws, seed, Path(name))
    for line, count in sorted(tally.items()):
        click.echo(f"{count:5d}  {line}")
    seconds = time.monotonic() - began
    click.echo(f"{draws} draws, seed {seed}: all outcomes as expected ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
