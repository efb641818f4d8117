"""Modules as destinations: predicts how their ``load_state_dict`` treats a saved state.

A load reads data into a module's own tensors, and then calls its ``load_state_dict`` with these tensors,
which copies nothing, but runs hooks and ``set_extra_state``. Hooks that run before may rename or convert
saved values. They are therefore run once before the load, on tensors without data and a stand-in of the
module, to learn which saved tensor each tensor of the module takes, and what does not fit.

Buffers on the meta device that no checkpoint holds are reported, too.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_EXTRA = "_extra_state"
_FSDP2 = "torch.distributed.fsdp._fully_shard."
_FSDP1 = "torch.distributed.fsdp._state_dict_utils"
_MEMBERS = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


class TensorSlot(NamedTuple):
    """A tensor in ``into=``, and the container and key by which to replace it."""

    tensor: Tensor
    container: Any
    key: Any


@dataclass(frozen=True)
class Fit:
    """How a module takes a saved state, by names in the module.

    Attributes:
        in_place: Saved tensor → the module's tensor that it is read into.
        fresh: Saved values that only `load_state_dict` can interpret.
        derived: Tensors of the module that `load_state_dict` fills by itself.
        missing: Names that were not saved.
        unexpected: Saved names that the module lacks.
        errors: A line for each value that does not fit.
    """

    in_place: Mapping[str, str]
    fresh: Sequence[str]
    derived: Sequence[str] = ()
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    errors: Sequence[str] = ()


class Unfilled(NamedTuple):
    """A module with buffers on the meta device that no checkpoint holds.

    Attributes:
        tensors: Its parameters and persistent buffers.
        certain: Buffers that nothing fills, by full name.
        possible: Buffers that a hook or a custom `load_state_dict` may fill, which is known after the load.
    """

    tensors: Mapping[str, TensorSlot]
    certain: Mapping[str, TensorSlot]
    possible: Mapping[str, TensorSlot]

    def matters(self, filled: Collection[int], *, in_parts: bool) -> bool:
        """Whether the load completes the module, but for these buffers.

        Args:
            filled: Ids of all tensors that are loaded.
            in_parts: Whether it may be loaded in several calls.
        """
        tensors = [leaf.tensor for leaf in self.tensors.values()]
        if in_parts and any(tensor.is_meta and id(tensor) not in filled for tensor in tensors):
            return False
        return any(id(tensor) in filled for tensor in tensors)


def reshard(module: nn.Module) -> None:
    """Reshards the parts that FSDP2 has sharded, as `state_dict` does: after a forward, some are gathered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return
    for submodule in module.modules():
        if isinstance(submodule, fsdp.FSDPModule):
            submodule.reshard()
        for hook in submodule._state_dict_pre_hooks.values():  # of a part of a larger module
            if _is_of_fsdp2(hook):
                hook(submodule, "", False)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, TensorSlot]]:
    """Yields parameters and persistent buffers by their names, tied ones by each name."""
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        for name, leaf in _tensors_of(submodule):
            yield f"{prefix}.{name}" if prefix else name, leaf


def extra_names(module: nn.Module) -> list[str]:
    """Returns the names of the extra states that the module sets."""
    parts = module.named_modules(remove_duplicate=False)
    return [
        f"{prefix}.{_EXTRA}" if prefix else _EXTRA for prefix, submodule in parts if _takes_extra(submodule)
    ]


def needs_call(module: nn.Module) -> bool:
    """Whether `load_state_dict` does more than copying tensors."""
    return _is_opaque(module) or any(
        _may_fill(submodule) or _needs_fsdp_hook(submodule) for submodule in module.modules()
    )


def _may_fill(submodule: nn.Module) -> bool:
    """Whether code of a part may fill it, or its children, during `load_state_dict`."""
    is_overridden = type(submodule).load_state_dict is not nn.Module.load_state_dict
    return (
        is_overridden
        or _takes_extra(submodule)
        or _has_hooks(submodule._load_state_dict_post_hooks)
        or _is_custom(submodule)
    )


def _needs_fsdp_hook(submodule: nn.Module) -> bool:
    """Whether the hook of FSDP2 has to run, since meta parameters are replaced."""
    parameters = submodule._parameters.values() if submodule._load_state_dict_post_hooks else ()
    return any(parameter is not None and parameter.is_meta for parameter in parameters)


def fit(
    module: nn.Module,
    tensors: Mapping[str, TensorSlot],
    saved: Mapping[str, bool],
    stand_in: Callable[[str], Any],
    metadata: Mapping[str, Any],
) -> Fit:
    """Predicts how a module takes a saved state, without changing the module.

    Args:
        module: The module.
        tensors: Its tensors, from `own_tensors`.
        saved: The names of saved values, and whether each is a tensor.
        stand_in: Returns the saved value of a name, with tensors that have no data.
        metadata: The metadata of the state dict, by name of the part.
    """
    nothing_known = Fit(
        {}, fresh=list(saved), derived=list(tensors), errors=list(_wrong_state_dict_types(module))
    )
    if _is_opaque(module):
        return nothing_known
    if any(map(_is_custom, module.modules())):
        try:
            with warnings.catch_warnings(), _restored(module):
                warnings.simplefilter("ignore")
                return _rehearse(module, {name: stand_in(name) for name in saved}, metadata)
        except Exception:  # a hook needs data, or replaces tensors
            return nothing_known
    extra = set(extra_names(module))
    return Fit(
        in_place={name: name for name, is_tensor in saved.items() if is_tensor and name in tensors},
        fresh=[name for name in saved if name in extra],
        missing=[name for name in (*tensors, *extra) if name not in saved],
        unexpected=[name for name in saved if name not in tensors and name not in extra],
        errors=[
            f"{name}: into= has a tensor, the checkpoint something else"
            for name, is_tensor in saved.items()
            if not is_tensor and name in tensors
        ],
    )


def find_unfilled(module: nn.Module, prefix: str, tensors: Mapping[str, TensorSlot]) -> Unfilled | None:
    """Returns the buffers of a module that no checkpoint can fill; None without any."""
    certain: dict[str, TensorSlot] = {}
    possible: dict[str, TensorSlot] = {}
    for name, leaf, is_possible in _unsaved(module, prefix, False):
        if leaf.tensor.is_meta:
            (possible if is_possible else certain)[name] = leaf
    return Unfilled(tensors, certain, possible) if certain or possible else None


def still_unfilled(modules: Sequence[Unfilled]) -> list[str]:
    """Returns the possible buffers that are still on the meta device after the load."""
    leaves = [item for module in modules for item in module.possible.items()]
    return [
        name for name, leaf in leaves if (now := leaf.container.get(leaf.key)) is not None and now.is_meta
    ]


def _rehearse(module: nn.Module, state: dict[str, Any], metadata: Mapping[str, Any]) -> Fit:
    names = {id(value): name for name, value in state.items() if isinstance(value, Tensor)}
    rehearsal = _Rehearsal(metadata)
    rehearsal.visit(module, "", dict(state))
    in_place: dict[str, str] = {}
    derived = []
    for own_name, value in rehearsal.given.items():
        name = names.get(id(value))
        if name is None or name in in_place:
            derived.append(own_name)  # a hook made it, perhaps from several
        else:
            in_place[name] = own_name
    unexpected = [names.get(id(value), name) for name, value in rehearsal.unexpected.items()]
    known = {*in_place, *unexpected}
    return Fit(
        in_place,
        fresh=[name for name in state if name not in known],
        derived=derived,
        missing=rehearsal.missing,
        unexpected=unexpected,
        errors=rehearsal.errors if derived else (),
    )


class _Rehearsal:
    """Walks through a module as `load_state_dict` does, without touching its tensors."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.given: dict[str, Any] = {}  # the value for each tensor of the module
        self.unexpected: dict[str, Any] = {}
        self.missing: list[str] = []
        self.errors: list[str] = []
        self._metadata = metadata

    def visit(self, submodule: nn.Module, prefix: str, state: dict[str, Any]) -> None:
        """Visits a part of the module with its part of the state."""
        if _is_custom(submodule):
            missing: list[str] = []
            unexpected: list[str] = []
            own_metadata = dict(self._metadata.get(prefix[:-1], {}))
            double = _stand_in_of(submodule)
            before = _shapes_of(double)
            double._load_from_state_dict(state, prefix, own_metadata, True, missing, unexpected, self.errors)
            if _shapes_of(double) != before:
                raise RuntimeError("it gives its tensors other shapes")
            self.missing += missing
            self.unexpected |= {name: state.get(name) for name in unexpected}
        below: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        here = {prefix + name for name, _ in _tensors_of(submodule)}
        extra = {prefix + _EXTRA} if _takes_extra(submodule) else set()
        for name, value in state.items():
            head, dot, _ = name.removeprefix(prefix).partition(".")
            if name in here:
                self.given[name] = value
            elif dot and submodule._modules.get(head) is not None:
                below[head][name] = value
            elif name not in extra and not _is_custom(submodule):
                self.unexpected[name] = value
        if not _is_custom(submodule):
            self.missing += sorted((here | extra) - state.keys())
        for head, child in submodule._modules.items():
            if child is not None:
                self.visit(child, f"{prefix}{head}.", below[head])


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Undoes changes by hooks, which refer to the module itself; a stand-in shares its children.

    Raises:
        RuntimeError: Hooks have changed the module.
    """
    members = [
        (getattr(submodule, kind), copy(getattr(submodule, kind)))
        for submodule in module.modules()
        for kind in _MEMBERS
    ]
    try:
        yield
    finally:
        changed = [(now, before) for now, before in members if _ids_of(now) != _ids_of(before)]
        for now, before in changed:
            now.clear()
            now.update(before)
    if changed:
        raise RuntimeError("it replaces tensors of the module")


def _ids_of(members: Any) -> Any:
    """Returns a key to compare the members of a part by; the members before are still alive."""
    return {name: id(value) for name, value in members.items()} if isinstance(members, Mapping) else members


def _shapes_of(submodule: nn.Module) -> dict[str, Any]:
    """Returns shapes and dtypes of the parameters and buffers."""
    tensors = {**submodule._parameters, **submodule._buffers}
    return {
        name: tensor if tensor is None else (tensor.shape, tensor.dtype) for name, tensor in tensors.items()
    }


def _stand_in_of(submodule: nn.Module) -> Any:
    """Returns a module of the same type and attributes, whose tensors have no data."""
    double = object.__new__(type(submodule))
    double.__dict__ = dict(submodule.__dict__)
    double.__dict__["_parameters"] = {
        name: tensor if tensor is None else nn.Parameter(_without_data(tensor), requires_grad=False)
        for name, tensor in submodule._parameters.items()
    }
    double.__dict__["_buffers"] = {
        name: tensor if tensor is None else _without_data(tensor)
        for name, tensor in submodule._buffers.items()
    }
    double.__dict__["set_extra_state"] = lambda state: None
    return double


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _tensors_of(submodule: nn.Module) -> Iterator[tuple[str, TensorSlot]]:
    for name, parameter in submodule._parameters.items():
        if parameter is not None:
            yield name, TensorSlot(parameter, submodule._parameters, name)
    for name, buffer in submodule._buffers.items():
        if buffer is not None and name not in submodule._non_persistent_buffers_set:
            yield name, TensorSlot(buffer, submodule._buffers, name)


def _takes_extra(submodule: nn.Module) -> bool:
    return type(submodule).set_extra_state is not nn.Module.set_extra_state


def _is_custom(submodule: nn.Module) -> bool:
    """Whether code of the part may change a saved state before it is copied."""
    is_overridden = type(submodule)._load_from_state_dict is not nn.Module._load_from_state_dict
    return is_overridden or _has_hooks(submodule._load_state_dict_pre_hooks)


def _has_hooks(hooks: Mapping[int, Any]) -> bool:
    """Whether there are hooks other than those of FSDP2, which reshard and inspect parameters."""
    return any(not _is_of_fsdp2(hook) for hook in hooks.values())


def _is_of_fsdp2(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith(_FSDP2)


def _is_opaque(module: nn.Module) -> bool:
    """Whether the effect of `load_state_dict` is unknown before the data are read."""
    return type(module).load_state_dict is not nn.Module.load_state_dict or any(
        _is_of_fsdp1(submodule)
        or any(
            tensor is not None and is_lazy(tensor)
            for tensor in (*submodule._parameters.values(), *submodule._buffers.values())
        )
        for submodule in module.modules()
    )


def _is_of_fsdp1(submodule: nn.Module) -> bool:
    """Whether FSDP1 has sharded a part: its hooks gather the parameters, and shard what was loaded."""
    hooks = (getattr(hook, "hook", hook) for hook in submodule._load_state_dict_pre_hooks.values())
    return any(getattr(hook, "__module__", "") == _FSDP1 for hook in hooks)


def _wrong_state_dict_types(module: nn.Module) -> Iterator[str]:
    """Yields why the parts that FSDP1 has sharded take no complete tensors."""
    types = (
        getattr(submodule, "_state_dict_type", None)
        for submodule in module.modules()
        if _is_of_fsdp1(submodule)
    )
    kinds = {kind.name for kind in types if kind is not None} - {"FULL_STATE_DICT"}
    for kind in sorted(kinds):
        yield (
            f"an FSDP1 module with StateDictType.{kind}, which takes no complete tensors: call "
            "FullyShardedDataParallel.set_state_dict_type(module, StateDictType.FULL_STATE_DICT) first"
        )


def _unsaved(submodule: nn.Module, prefix: str, is_possible: bool) -> Iterator[tuple[str, TensorSlot, bool]]:
    is_possible = is_possible or _may_fill(submodule)
    for name in sorted(submodule._non_persistent_buffers_set):
        buffer = submodule._buffers.get(name)
        if buffer is not None:
            yield prefix + name, TensorSlot(buffer, submodule._buffers, name), is_possible
    for name, child in submodule._modules.items():
        if child is not None:
            yield from _unsaved(child, f"{prefix}{name}.", is_possible)
