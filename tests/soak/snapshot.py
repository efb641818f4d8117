"""Random trainings that overlap saves with steps: the state as of each call, or an error, never a mixture.

    python -m tests.soak.snapshot --draws 300 --seed 1

It stops at the first wrong end.
"""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import click

from tests.dist.harness import run_ranks
from tests.soak.snapshot_cases import require_same, run_killed, run_some


@click.command()
@click.option("--draws", default=300, show_default=True)
@click.option("--first", default=0, show_default=True, help="Draw to begin with.")
@click.option("--seed", default=1, show_default=True)
def main(draws: int, first: int, seed: int) -> None:
    """Run the soak: in every fifth draw a rank is killed."""
    tally: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for number in range(first, first + draws):
            folder, rng = Path(name, str(number)), random.Random(f"{seed}/{number} world")
            world = rng.randint(1, 3)
            if number % 5:
                [ended, *_] = run_ranks(
                    run_some, world, deadline_s=180, seed=seed, first=number, num=1, folder=folder
                )
                tally += ended
            else:
                victim = rng.randrange(world)
                told = run_ranks(
                    run_killed, world, deadline_s=120, dies={victim: signal.SIGKILL},
                    seed=seed, number=number, victim=victim, folder=folder,
                )  # fmt: skip
                path = folder / "0"
                assert path.exists() or True not in told, f"draw {number}: saved, but there is nothing"
                if path.exists():
                    require_same(path)
                tally[f"killed: {'a checkpoint' if path.exists() else 'none'}"] += 1
            shutil.rmtree(folder, ignore_errors=True)
            if number % 20 == 19:
                click.echo(f"{number + 1} done, {time.monotonic() - began:.0f} s", err=True)
    for line, count in sorted(tally.items()):
        click.echo(f"{count:5d}  {line}")
    click.echo(f"{draws} draws, seed {seed}: every save ended as it may")


if __name__ == "__main__":
    main()
