"""Random states into random targets: all is restored, or it is refused and nothing was changed.

    python -m tests.soak.state --draws 2000 --seed 1

It stops at the first wrong end, makes it as small as it can, and shows it.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import click
import hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.soak.state_cases import draw, run

__all__ = ["soak"]


def soak(num_draws: int, seed: int, folder: Path) -> Counter[str]:
    """Runs so many draws; returns how they ended."""
    tally: Counter[str] = Counter()

    # Seeds spread evenly; what hypothesis draws by itself it can make smaller when it fails.
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


@click.command()
@click.option("--draws", default=2000, show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(draws: int, seed: int) -> None:
    """Run the soak."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        tally = soak(draws, seed, Path(name))
    for line, count in sorted(tally.items()):
        click.echo(f"{count:5d}  {line}")
    seconds = time.monotonic() - began
    click.echo(f"{tally.total()} draws, seed {seed}: every one ended as it may ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
