"""The random states of a process, saved with a checkpoint and restored from it."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fastload.formats.state import PerRank


class RandomState:
    """The random states of this process, whenever it is asked; see `random_state`."""

    def state_dict(self) -> PerRank[dict[str, Any]]:
        """Returns the states: plain values, and tensors in host memory."""
        states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if (numpy := sys.modules.get("numpy")) is not None:  # else nothing has been drawn
            name, keys, *rest = numpy.random.get_state()
            states["numpy"] = (name, keys.tolist(), *rest)
        if devices := _device_states():
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
        _set_device_states([device_state.cpu() for device_state in devices])


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


def _device_states() -> list[Tensor]:
    """Returns the states of the accelerator's random number generators, in the order of its devices.

    They are empty before its first use: then nothing has been drawn, and asking would start it.
    """
    served = torch.accelerator.current_accelerator()
    module = torch.get_device_module(served) if served is not None else None
    if module is None or not getattr(module, "is_initialized", torch.accelerator.is_available)():
        return []
    return [module.get_rng_state(number) for number in range(torch.accelerator.device_count())]


def _set_device_states(states: Sequence[Tensor]) -> None:
    """Sets the states of the generators of the first devices; ignores those of devices that are not here."""
    served = torch.accelerator.current_accelerator()
    for number, state in enumerate(states[: torch.accelerator.device_count()]):
        torch.get_device_module(served).set_rng_state(state, number)
