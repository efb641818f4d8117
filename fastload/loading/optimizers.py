"""Optimizers as destinations: the reasons why one cannot take a state, and the DTensors in its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest
from fastload.formats.state import SavedTensor, children, leaf
from fastload.geometry.dtensors import is_dtensor
from fastload.loading.pair import StatefulRestore


def optimizer_misfits(part: StatefulRestore) -> Iterator[str]:
    """Yields the reasons why an object cannot take its saved state, if it is an optimizer."""
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


def sharded_state(part: StatefulRestore, manifest: Manifest) -> Iterator[tuple[SavedTensor, Tensor]]:
    """Yields the DTensors in the state of an optimizer, each with a DTensor of the same placements.

    An optimizer makes its state at its first step. Before, a tensor of the shape of its parameter is assumed
    to have the placements of the parameter.
    """
    parameters = _parameters_by_key(part)
    if not any(map(is_dtensor, parameters.values())):
        return
    held = getattr(part.target, "state", None)
    prefix = f"{part.value.name}." if part.value.name else ""
    state_ending, state = (children(part.value.node) or {}).get("state", ("", None))
    for key, (ending, node) in (children(state) or {}).items():
        parameter = parameters.get(key)
        if parameter is None or not is_dtensor(parameter):
            continue
        own = held.get(parameter) if isinstance(held, Mapping) else None
        for what, (name, child) in (children(node) or {}).items():
            saved = leaf(child, f"{prefix}{state_ending}.{ending}.{name}")
            if saved is None or saved.is_text or saved.kind == "ndarray":
                continue
            like = _like(parameter, own[what] if own and what in own else None, what)
            if like is not None and tuple(like.shape) == _shape(manifest, saved):
                yield saved, like


def _parameters_by_key(part: StatefulRestore) -> dict[Any, Any]:
    """Returns the parameters of an optimizer by their keys in its saved state."""
    own = [parameter for group in _parameters_of(part.target) for parameter in group]
    groups = _below(part.value.node, "param_groups").values() if own else ()
    keys = [key for _, group in groups for _, key in _below(group, "params").values()]
    if len(keys) != len(own) or not all(isinstance(key, int | str) for key in keys):
        return {}
    return dict(zip(keys, own, strict=True))


def _like(parameter: Tensor, own: Any, what: Any) -> Tensor | None:
    """Returns a tensor with the placements of a part of the state: the existing one, or the parameter."""
    if isinstance(own, Tensor):
        return own if is_dtensor(own) else None
    return None if what == "step" else parameter  # replicated, one per parameter


def _shape(manifest: Manifest, saved: SavedTensor) -> tuple[int, ...] | None:
    entry = manifest.by_name.get(saved.stored)
    if entry is None:
        return None
    shape = torch_spec(entry)[1]
    return tuple(shape[:-1] if saved.is_complex128 else shape)


def _parameters_of(target: Any) -> list[list[Any]]:
    groups = getattr(target, "param_groups", None)
    if not isinstance(groups, list):
        return []
    return [list(group["params"]) for group in groups if isinstance(group, dict) and "params" in group]


def _compares_groups(target: Any) -> bool:
    """Whether only torch's `load_state_dict` takes the state, which refuses other parameter groups."""
    method = getattr(target.load_state_dict, "__func__", None)
    is_plain = isinstance(target, torch.optim.Optimizer) and method is torch.optim.Optimizer.load_state_dict
    return is_plain and not target._optimizer_load_state_dict_pre_hooks


def _below(node: Any, key: str) -> dict[Any, tuple[str, Any]]:
    """Returns the children of a key of a node; nothing without the key."""
    _, child = (children(node) or {}).get(key, ("", None))
    return children(child) or {}
