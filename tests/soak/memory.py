"""The memory tier under random faults: jobs killed at any moment, hosts that lose or damage their memory.

    python -m tests.soak.memory --iterations 200 --seed 1 [--lives 10]

Each iteration trains a few steps, kills all ranks, some before the others, loses or damages the memory of
some hosts, and restores with other ranks and hosts. The result has to be one step as it was saved, and to
come from memory if that was complete. With `--lives N`, an iteration is N managers in a row that use both
tiers, compared with a model (`memory_lives`). It stops at the first unexpected outcome and prints how to
repeat it.
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
@click.option("--lives", default=0, help="Managers in a row in each iteration, in place of one crash.")
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
    click.echo(f"{iterations} iterations, seed {seed}: all outcomes as expected")


if __name__ == "__main__":
    main()
