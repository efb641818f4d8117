"""Loads under random faults: each ends with the right state on all ranks, or with one error on all.

    python -m tests.soak --iterations 200 --seed 1 [--sharded]

Root only, since each rank gets its own disk. It stops at the first unexpected outcome and prints how to
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

from tests.dist.flaky_server import serve
from tests.soak.cases import draw, run


@click.command()
@click.option("--iterations", default=200, show_default=True)
@click.option("--first", default=0, show_default=True, help="Iteration to begin with.")
@click.option("--seed", default=1, show_default=True)
@click.option("--sharded", is_flag=True, help="Load into shards, on meshes that are drawn, too.")
def main(iterations: int, first: int, seed: int, sharded: bool) -> None:
    """Run the soak."""
    ends: Counter[tuple[str, str]] = Counter()
    transient: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name, serve(Path(name)) as server:
        for number in range(first, first + iterations):
            case = draw(random.Random(f"{seed}/{number}"), sharded=sharded)
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # the logs of failing ranks
                    how = run(case, server, Path(name))
            except (Exception, pytest.fail.Exception) as error:
                raise SystemExit(
                    f"seed {seed}, iteration {number}: {case}\n{type(error).__name__}: {error}"
                ) from None
            ends[case.label, how] += 1
            transient.update(case.transient)
            if number % 20 == 19:
                click.echo(f"{number + 1} done, {time.monotonic() - began:.0f} s", err=True)
    for label in sorted({label for label, _ in ends}):
        loaded, raised = ends[label, "loaded"], ends[label, "raised"]
        click.echo(f"{label:30} {loaded:5d} loaded {raised:5d} raised")
    survived = ", ".join(f"{fault} {count}" for fault, count in sorted(transient.items()))
    click.echo(f"transient faults of the server: {survived}")
    click.echo(f"{iterations} iterations, seed {seed}: all outcomes as expected")


if __name__ == "__main__":
    main()
