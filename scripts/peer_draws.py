#!/usr/bin/env python3
"""Loads and copies checkpoints from random peers with random faults: no wrong byte, no hang, nothing left.

python scripts/peer_draws.py --draws 300
"""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fastload.ext.serve import pool
from tests.dist.peer_draws import make_checkpoint, run_draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="Seed of the first draw.")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    pool._LATE_S = pool._LEAST_LATE_S = 2.0
    outcomes: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        state = make_checkpoint(Path(folder))
        for seed in range(chosen.first, chosen.first + chosen.draws):
            what = run_draw(seed, Path(folder), state)
            outcomes[what.rpartition(": ")[2]] += 1
            print(what, flush=True)
    print(f"{chosen.draws} draws: {dict(outcomes)}")


if __name__ == "__main__":
    main()
