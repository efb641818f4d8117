"""States made of odd things: each comes back as it was, or is refused with the reason; nothing is silent.

    python -m tests.soak.odd --states 500 --seed 1

Strides, tied and aliased tensors, replicas that have drifted apart, missing and stale files, weights without
their scales, other programs. It stops at the first unexpected outcome and prints the draw.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

import click
import pytest

from tests.dist.harness import run_ranks
from tests.soak import odd_cases

_WORLDS = (1, 2, 3, 4)
_NUM_IN_A_ROW = 10  # draws on the same processes


def soak(num_states: int, seed: int, folder: Path, first: int = 0) -> Counter[str]:
    """Runs draws; returns how often each outcome came."""
    tally: Counter[str] = Counter()
    for begin in range(first, first + num_states, _NUM_IN_A_ROW):
        numbers = list(range(begin, min(begin + _NUM_IN_A_ROW, first + num_states)))
        world = _WORLDS[begin // _NUM_IN_A_ROW % len(_WORLDS)]
        here = folder / str(begin)
        here.mkdir()
        given = {"folder": here, "seed": seed, "numbers": numbers}
        outcomes = run_ranks(odd_cases.draws, world, deadline_s=300, **given)
        assert all(each == outcomes[0] for each in outcomes), f"the ranks saw different ends: {outcomes}"
        tally.update(outcomes[0])
    return tally


@click.command()
@click.option("--states", default=500, show_default=True)
@click.option("--first", default=0, show_default=True, help="Draw to begin with; a multiple of ten.")
@click.option("--seed", default=1, show_default=True)
@click.option("--root", default=None, help="Where to save; a temporary directory if not given.")
def main(states: int, first: int, seed: int, root: str | None) -> None:
    """Run the soak."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=root) as name:
        try:
            tally = soak(states, seed, Path(name), first)
        except (AssertionError, pytest.fail.Exception) as error:
            raise SystemExit(f"seed {seed}: {error}") from None
    for line, count in sorted(tally.items()):
        click.echo(f"{count:5d}  {line}")
    click.echo(f"{states} states, seed {seed}, {time.monotonic() - began:.0f} s: all outcomes as expected")


if __name__ == "__main__":
    main()
