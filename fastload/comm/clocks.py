"""The clocks of all ranks, compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from fastload.comm.responses import Column, Each
from fastload.comm.world import World

_NUM_READINGS = 8


def compare_clocks(world: World, hosts: Sequence[str], clock: Callable[[], float]) -> list[float]:
    """Returns the offset of each rank's clock from rank 0's, in seconds.

    The ranks read their clocks whenever a decision has reached them, which is at about the same time.

    Args:
        world: The ranks, which all call this.
        hosts: Host of each rank; ranks of one host share a clock.
        clock: Returns the time, in seconds.

    Raises:
        PeerError: A rank did not respond.
    """
    if len(set(hosts)) == 1:
        return [0.0] * world.size
    readings: list[Column] = []
    with world.together():
        for _ in range(_NUM_READINGS + 1):
            with world.step("comparing clocks") as step:
                step.answer({"clock": Each([clock()])})
            readings += step.answers[0]["clock"]
    times = [column.values() for column in readings[1:]]  # the first reading follows no decision
    return [median(of_round[0] - of_round[rank] for of_round in times) for rank in range(world.size)]
