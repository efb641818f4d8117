"""The random states of a process, saved with a checkpoint and restored from it."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from fastload.base.devices import random_states, set_random_states
from fastload.formats.state import PerRank


class RandomState:
    """The random states of this process, whenever it is asked; see `random_state`."""

    def state_dict(self) -> PerRank[dict[str, Any]]:
        """Returns the states: plain values, and tensors in host memory."""
        states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if (numpy := sys.modules.get("numpy")) is not None:  # else nothing has been drawn
            name, keys, *rest = numpy.random.get_state()
            states["numpy"] = (name, keys.tolist(), *rest)
        if devices := random_states():
            states[str(torch.accelerator.current_accelerator())] = devices
        return PerRank(states)

    def load_state_dict(self, state: PerRank[dict[str, Any]] | Mapping[str, Any]) -> None:
        """Sets the states, except for those of libraries and devices that this process lacks.

        Args:
            state: What `state_dict` returned, on this rank.
        """
        states = state.value if isinstance(state, PerRank) else state
        random.setstate(states["python"])
        torch.set_rng_state(states["torch"].cpu())
        if "numpy" in states:
            with suppress(ImportError):
                importlib.import_module("numpy").random.set_state(states["numpy"])
        devices = states.get(str(torch.accelerator.current_accelerator()), ())
        set_random_states([each.cpu() for each in devices])


def random_state() -> RandomState:
    """Returns an object that saves and restores the random states of each rank.

    These are the default generators of Python, NumPy (if it is installed), torch on the CPU and torch on
    every device. Stands in a state that is saved and restored::

        state = {"model": model, "random": fastload.random_state(), "step": 0}

    Each rank has states of its own, so they are saved as a `PerRank`: another number of ranks restores them
    only with ``LoadOptions(per_rank_mismatch="skip")``, which leaves the generators as they are. Without
    ``into=``, ``fastload.random_state().load_state_dict(loaded["random"])`` sets what was loaded. The
    generators of data loader workers are not among them.
    """
    return RandomState()
