"""Deadlines that ranks which live have to keep: on a busy machine they wait for a core, and take longer."""

from __future__ import annotations

import os

from tests.gpu import one_gpu

__all__ = ["CROWD", "crowd", "patient", "stretch"]

CROWD = "TESTS_CROWD"
"""Variable in which the ranks of a test find `crowd` as it was when the test began: the same for all."""

_USUAL_LOAD = 4.0  # of each core, while tests run on all of them
_MOST = 6.0
_ONE_GPU = 3.0  # processes that share a GPU take turns of milliseconds on it


def stretch() -> float:
    """Returns how many times as long as elsewhere everything may take where ranks share one GPU; else 1."""
    return _ONE_GPU if one_gpu.is_on() else 1.0


def crowd() -> float:
    """Returns how many times as long as in a usual run of the tests who lives may wait for a core."""
    load_of_each = os.getloadavg()[0] / (os.cpu_count() or 1)
    return stretch() * min(_MOST, max(1.0, load_of_each / _USUAL_LOAD))


def patient(seconds: float) -> float:
    """Returns that many seconds, and more on a busy machine."""
    return seconds * float(os.environ.get(CROWD, "1"))
