"""Many random draws on devices: python -m tests.gpu --draws 200 --ranks 4."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from tests.accelerator import MODES, NAME
from tests.dist.harness import run_ranks
from tests.gpu.test_draws import test_draws

_AT_ONCE = 20


@click.command()
@click.option("--draws", default=200, show_default=True)
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option("--ranks", default=4, show_default=True)
@click.option("--cuda", is_flag=True, help="On CUDA devices instead of emulated ones.")
@click.option(
    "--mode", type=click.Choice([*MODES]), default="plain", show_default=True, help="Of emulated ones."
)
def main(draws: int, first: int, ranks: int, cuda: bool, mode: str) -> None:
    """Runs draws, and stops at the first that goes wrong."""
    for begin in range(first, first + draws, _AT_ONCE):
        count = min(_AT_ONCE, first + draws - begin)
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(
                test_draws,
                ranks,
                deadline_s=600,
                ranks_per_host=2,
                kind="cuda" if cuda else NAME,
                device_mode=mode,
                tmp_path=Path(folder),
                first=begin,
                count=count,
            )
        where = f"on {ranks} ranks" + ("" if cuda else f", {mode}")
        print(f"draws {begin} to {begin + count - 1} {where}: right bytes, no fault", flush=True)


if __name__ == "__main__":
    main()
