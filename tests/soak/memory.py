"""Random faults of a memory tier: jobs that are killed at any moment, on hosts that come back as they may.

    python -m tests.soak.memory --iterations 200 --seed 1 [--lives 10]

Each iteration trains a few steps, kills all ranks, some of them first, loses or damages what is in memory
of some hosts, and restores with other ranks and hosts. It has to be one step as it was saved, from memory if
that was whole. With `--lives` an iteration is so many lives of managers in a row, with both tiers, against a
model (`memory_lives`). It stops at the first wrong end and says how to repeat it.
"""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import click
import pytest

from tests.soak.memory_cases import draw, run
from tests.soak.memory_lives import Lives


@click.command()
@click.option("--iterations", default=200, show_default=True)
@click.option("--first", default=0, show_default=True, help="Iteration to begin with.")
@click.option("--seed", default=1, show_default=True)
@click.option("--lives", default=0, help="Lives of managers in each iteration, in place of one crash.")
def main(iterations: int, first: int, seed: int, lives: int) -> None:
    """Run the soak."""
    tally: Counter[str] = Counter()
    began = time.monotonic()
    for number in range(first, first + iterations):
        rng = random.Random(f"{seed}/{number}")
        with tempfile.TemporaryDirectory(prefix="fastload-soak-") as name:
            case, several = (draw(rng), None) if not lives else (None, Lives(rng, Path(name)))
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    if several is not None:
                        several.run(lives)
                        tally += several.tally
                    elif case is not None:
                        tally[run(case, Path(name))] += 1
            except (Exception, pytest.fail.Exception) as error:
                drawn = "\n".join(several.log) if several is not None else case
                raise SystemExit(
                    f"seed {seed}, iteration {number}: {drawn}\n{type(error).__name__}: {error}"
                ) from None
        if number % 20 == 19 or lives:
            click.echo(f"{number + 1} done, {time.monotonic() - began:.0f} s", err=True)
    for line, count in sorted(tally.items()):
        click.echo(f"{count:5d}  {line}")
    click.echo(f"{iterations} iterations, seed {seed}: every one ended as it may")


if __name__ == "__main__":
    main()
