"""A stand-in for training: counts its steps, saves and ends when told to, goes on from there the next time.

trapper.py FOLDER NUM_STEPS [RANK]      where RANK is killed in the middle, once
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

STEP_S, SAVE_S = 0.1, 1.0
DEADLY_STEP = 7


def main() -> None:
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
    told: list[str] = []
    if begin := os.environ.get("TRAPPER_WAITS_FOR"):
        (folder / f"{rank}.deaf").touch()  # as while it imports
        while not Path(begin).exists():
            time.sleep(0.05)

    def note(number: int, frame: FrameType | None) -> None:
        told.append(signal.Signals(number).name)

    signal.signal(signal.SIGUSR1, note)
    signal.signal(signal.SIGTERM, note)
    saved, killed = folder / f"{rank}.saved", folder / f"{rank}.killed"
    step = int(saved.read_text()) if saved.exists() else 0
    with (folder / f"{rank}.log").open("a", buffering=1) as log:
        print(f"begins at {step}", file=log)
        while step < num_steps and not told:
            time.sleep(STEP_S)
            step += 1
            print(step, file=log)
            if step == DEADLY_STEP and sys.argv[3:] == [rank] and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SAVE_S)
        saved.write_text(str(step))
        print(f"ends at {step}, told {told[:1]}", file=log)


if __name__ == "__main__":
    main()
