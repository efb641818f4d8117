"""Why an optimizer cannot take its state, as far as that can be told before data move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastload.formats.state import children
from fastload.loading.pairs import Part

__all__ = ["optimizer_misfits"]


def optimizer_misfits(part: Part) -> Iterator[str]:
    """Says why what takes its state as a whole cannot be given what was saved, if it is an optimizer."""
    own = _parameters_of(part.target)
    if any(isinstance(parameter, Tensor) and parameter.is_meta for group in own for parameter in group):
        yield (
            f"{part.where}: it has parameters on the meta device, which a load replaces in the model only: "
            "make it after the model has been loaded, or after model.to_empty(device=...)"
        )
    if own and _compares_groups(part.target):
        here = [len(group) for group in own]
        saved = [
            len(_below(group, "params")) for _, group in _below(part.value.node, "param_groups").values()
        ]
        if len(here) != len(saved):
            yield f"{part.where}: parameter groups: {len(saved)} in the checkpoint, {len(here)} in into="
            return
        for number, (there, wanted) in enumerate(zip(saved, here, strict=True)):
            if there != wanted:
                counts = f"{there} in the checkpoint, {wanted} in into="
                yield f"{part.where}: parameters in group {number}: {counts}"


def _parameters_of(target: Any) -> list[list[Any]]:
    groups = getattr(target, "param_groups", None)
    if not isinstance(groups, list):
        return []
    return [list(group["params"]) for group in groups if isinstance(group, dict) and "params" in group]


def _compares_groups(target: Any) -> bool:
    """Whether nothing but torch's own `load_state_dict` sees the state, which refuses other groups."""
    method = getattr(target.load_state_dict, "__func__", None)
    is_plain = isinstance(target, torch.optim.Optimizer) and method is torch.optim.Optimizer.load_state_dict
    return is_plain and not target._optimizer_load_state_dict_pre_hooks


def _below(node: Any, key: str) -> dict[Any, tuple[str, Any]]:
    """Returns what is below a key of what was saved; nothing if there is none."""
    _, child = (children(node) or {}).get(key, ("", None))
    return children(child) or {}
