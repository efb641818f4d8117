"""Saves under random faults: the checkpoint is always one complete state, and nothing is left behind.

    python -m tests.soak.save --iterations 300 --seed 1

All saves go to one directory, so each one finds the remains of the previous one. A separate reader process
loads all the time. It stops at the first unexpected outcome and prints how to repeat it.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import click
import pytest

from tests.crash.saves import save, state
from tests.soak.save_cases import draw, run


@click.command()
@click.option("--iterations", default=300, show_default=True)
@click.option("--first", default=0, show_default=True, help="Iteration to begin with.")
@click.option("--seed", default=1, show_default=True)
@click.option("--sharded", is_flag=True, help="Only sharded states.")
@click.option("--root", default=None, help="Where to save; a temporary directory if not given.")
def main(iterations: int, first: int, seed: int, sharded: bool, root: str | None) -> None:
    """Run the soak."""
    tally: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=root) as name:
        folder, stop, version = Path(name, "root"), Path(name, "stop"), 1
        save(state(version), folder / "one", background=False)
        program = "import sys; from pathlib import Path; from tests.soak.save_cases import watch; "
        program += "watch(Path(sys.argv[1]), Path(sys.argv[2]))"
        command = [sys.executable, "-c", program, str(folder / "one"), str(stop)]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            for number in range(first, first + iterations):
                case = draw(random.Random(f"{seed}/{number}"), sharded=sharded)
                try:
                    ended, version = run(case, folder, version)
                    tally[ended] += 1
                    assert reader.poll() is None, "the reader did not see one complete state"
                except (Exception, pytest.fail.Exception) as error:
                    raise SystemExit(
                        f"seed {seed}, iteration {number}: {case}\n{type(error).__name__}: {error}"
                    ) from None
                if number % 20 == 19:
                    click.echo(f"{number + 1} done, {time.monotonic() - began:.0f} s", err=True)
            stop.touch()
            seen = reader.communicate(timeout=60)[0]
        finally:
            reader.kill()
    for line, count in sorted(tally.items()):
        click.echo(f"{count:5d}  {line}")
    click.echo(seen.rstrip())
    click.echo(f"{iterations} iterations, seed {seed}: all outcomes as expected")


if __name__ == "__main__":
    main()
