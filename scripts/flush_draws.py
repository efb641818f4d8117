#!/usr/bin/env python3
"""Kills trainings with a memory tier, and flushes of what they left: the newest step is written, or named.

python scripts/flush_draws.py --draws 200
"""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.dist.flush_draws import run_draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="Seed of the first draw.")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    outcomes: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for seed in range(chosen.first, chosen.first + chosen.draws):
            what = run_draw(seed, Path(folder, "draw"))
            outcomes[what.rpartition(": ")[2]] += 1
            print(what, flush=True)
    print(f"{chosen.draws} draws: {dict(outcomes)}")


if __name__ == "__main__":
    main()
