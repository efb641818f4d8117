"""Which tensors are wanted, and where they go: the checkpoint's names × ``names=`` × ``into=``."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastload.errors import ManifestError, MismatchError, OptionError
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.loading.place import Destination
from fastload.memory import allocate

__all__ = ["Match", "flatten", "holders", "items_of", "match"]

_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Leaf:
    """A tensor inside of ``into=``, and the container and key to put another in its place."""

    tensor: Tensor
    container: Any
    key: Any


@dataclass(frozen=True)
class Match:
    """The destinations of a load.

    Attributes:
        destinations: In manifest order.
        attach: Puts materialized tensors into the caller's module or dict; to be called when all is loaded.
    """

    destinations: list[Destination]
    attach: Callable[[], None]

    @property
    def device(self) -> torch.device | None:
        """A device that destinations live on: the first that is not the CPU; None if there is none."""
        return next((d.tensor.device for d in self.destinations if d.tensor.device.type != "cpu"), None)

    def tensors(self) -> dict[str, Tensor]:
        """Returns what was loaded, by name."""
        return {d.entry.name: d.tensor for d in self.destinations}


def match(
    manifest: Manifest,
    *,
    names: Sequence[str] | str | None,
    into: Any,
    device: torch.device,
    dtype: torch.dtype | None,
    strict: bool,
) -> Match:
    """Finds a destination for every wanted tensor, before any data moves.

    Args:
        manifest: The checkpoint.
        names: Names or glob patterns, or None for all.
        into: A module, or nested dicts and lists of tensors and modules, to be loaded in place; what takes
            its state as a whole gets new tensors; None for new tensors throughout.
        device: Where new tensors and those that replace meta tensors live.
        dtype: Cast of floating point tensors, or None for none.
        strict: Whether the names of the checkpoint and of `into` have to be the same.

    Raises:
        MismatchError: Names, shapes or dtypes do not fit; it lists all that do not.
        OptionError: `into` is no destination.
        MemoryError: The destinations do not fit into memory.
    """
    picked, absent = _select(manifest, names)
    if into is None:
        _raise_unfit(manifest, missing=absent)
        return Match([_fresh(entry, device, dtype) for entry in picked], lambda: None)

    leaves = flatten(into)
    owned = [entry for entry in picked if entry.name not in leaves and _owned(entry.name, holders(into))]
    apart = {entry.name for entry in owned}
    pairs = [(entry, leaves[entry.name]) for entry in picked if entry.name in leaves]
    loaded = {_identity(leaf.tensor) for _, leaf in pairs}
    chosen = leaves if names is None else {n: leaf for n, leaf in leaves.items() if _chosen(n, names)}
    known = manifest.by_name
    missing = [n for n, leaf in chosen.items() if n not in known and _identity(leaf.tensor) not in loaded]
    unexpected = [entry.name for entry in picked if entry.name not in leaves and entry.name not in apart]
    _raise_unfit(
        manifest,
        missing=missing + [n for n in absent if n not in missing] if strict else [],
        unexpected=unexpected if strict else [],
        mismatched=[line for entry, leaf in pairs if (line := _misfit(entry, leaf.tensor, dtype))],
    )
    match = _in_place(pairs, leaves, device)
    destinations = match.destinations + [_fresh(entry, device, None) for entry in owned]
    places = {entry.name: place for place, entry in enumerate(manifest.tensors)}
    return replace(match, destinations=sorted(destinations, key=lambda d: places[d.entry.name]))


def holders(into: Any, prefix: str = "") -> dict[str, Any]:
    """Returns what takes its state as a whole (``load_state_dict``), such as optimizers, by its name."""
    found: dict[str, Any] = {}
    for key, value in items_of(into):
        name = f"{prefix}{key}"
        if hasattr(value, "load_state_dict") and not isinstance(value, nn.Module):
            found[name] = value
        elif isinstance(value, Mapping | list | tuple):
            found.update(holders(value, f"{name}."))
    return found


def items_of(node: Any) -> Iterable[tuple[Any, Any]]:
    """Returns keys and values of a dict, a list or a tuple; nothing of anything else."""
    if isinstance(node, Mapping):
        return node.items()
    return enumerate(node) if isinstance(node, list | tuple) else ()


def _owned(name: str, holders: Mapping[str, Any]) -> bool:
    return any(name.startswith(f"{prefix}.") for prefix in holders)


def flatten(into: Any) -> dict[str, Leaf]:
    """Names every tensor of a module or of nested dicts, lists and tuples; other values are left out.

    Raises:
        OptionError: It is neither, or two tensors would have the same name.
    """
    leaves: dict[str, Leaf] = {}
    pairs = _module_leaves(into) if isinstance(into, nn.Module) else _nested_leaves(into, "")
    for name, leaf in pairs:
        if name in leaves:
            raise OptionError(f"into= has two tensors that would both be called {name!r}")
        leaves[name] = leaf
    return leaves


def _module_leaves(module: nn.Module) -> Iterator[tuple[str, Leaf]]:
    for prefix, part in module.named_modules(remove_duplicate=False):
        tensors = [(part._parameters, name) for name in part._parameters]
        tensors += [
            (part._buffers, name) for name in part._buffers if name not in part._non_persistent_buffers_set
        ]
        for registry, name in tensors:
            tensor = registry[name]
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, Leaf(tensor, registry, name)


def _nested_leaves(node: Any, prefix: str) -> Iterator[tuple[str, Leaf]]:
    if not prefix and not isinstance(node, Mapping | list | tuple):
        raise OptionError(f"into= is a {type(node).__name__}: pass a module, or a dict of tensors")
    for key, value in items_of(node):
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Tensor):
            yield name, Leaf(value, node, key)
        elif isinstance(value, nn.Module):
            yield from ((f"{name}.{inner}", leaf) for inner, leaf in _module_leaves(value))
        elif isinstance(value, Mapping | list | tuple):
            yield from _nested_leaves(value, name)


def _select(manifest: Manifest, names: Sequence[str] | str | None) -> tuple[list[TensorEntry], list[str]]:
    """Returns the entries that are asked for, and the names and patterns that select nothing."""
    if names is None:
        return list(manifest.tensors), []
    asked = [names] if isinstance(names, str) else list(names)
    chosen: set[str] = set()
    absent: list[str] = []
    for name in asked:
        found = [name] if name in manifest.by_name else _matching(manifest.by_name, name)
        chosen.update(found)
        if not found:
            absent.append(name)
    return [entry for entry in manifest.tensors if entry.name in chosen], absent


def _matching(names: Mapping[str, object], pattern: str) -> list[str]:
    if not _GLOB.search(pattern):
        return []
    fits = re.compile(fnmatch.translate(pattern)).match
    return [name for name in names if fits(name)]


def _chosen(name: str, names: Sequence[str] | str) -> bool:
    return any(
        name == ask or fnmatch.fnmatchcase(name, ask)
        for ask in ([names] if isinstance(names, str) else names)
    )


def _identity(tensor: Tensor) -> object:
    """Tells tied tensors: the same object, or the same bytes."""
    if tensor.is_meta or tensor.numel() == 0 or tensor.layout != torch.strided or hasattr(tensor, "to_local"):
        return id(tensor)
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
    )


def _target_dtype(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and stored.is_floating_point else stored


def _fresh(entry: TensorEntry, device: torch.device, dtype: torch.dtype | None) -> Destination:
    stored, shape = torch_spec(entry)
    target = _target_dtype(stored, dtype)
    if not _castable(stored, target):
        _raise_cast(entry, stored, target)
    return Destination(entry, stored, allocate(shape, target, device))


def _misfit(entry: TensorEntry, tensor: Tensor, dtype: torch.dtype | None) -> str:
    """Says why a tensor cannot take an entry; empty if it can."""
    try:
        stored, shape = torch_spec(entry)
    except ManifestError as error:
        return str(error)
    target = _target_dtype(stored, dtype)
    if hasattr(tensor, "to_local"):
        return f"{entry.name}: into= has a sharded tensor ({type(tensor).__name__}), not a replicated one"
    if tensor.layout != torch.strided:
        return f"{entry.name}: into= has layout {tensor.layout}"
    if tuple(tensor.shape) != shape:
        return f"{entry.name}: shape {list(shape)} in the checkpoint, {list(tensor.shape)} in into="
    if tensor.dtype != target:
        cast = f" cast to {target}" if target != stored else ""
        return f"{entry.name}: dtype {stored}{cast} in the checkpoint, {tensor.dtype} in into= (dtype= casts)"
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return f"{entry.name}: into= has an expanded tensor, whose elements share memory"
    if not _castable(stored, target):
        return f"{entry.name}: torch cannot cast {stored} to {target}"
    return ""


def _castable(stored: torch.dtype, target: torch.dtype) -> bool:
    if stored == target:
        return True
    try:
        torch.zeros(1, dtype=torch.uint8).expand(stored.itemsize).clone().view(stored).to(target)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _raise_cast(entry: TensorEntry, stored: torch.dtype, target: torch.dtype) -> None:
    line = f"{entry.name}: torch cannot cast {stored} to {target}"
    raise MismatchError(line, mismatched=(line,))


def _in_place(
    pairs: list[tuple[TensorEntry, Leaf]], leaves: Mapping[str, Leaf], device: torch.device
) -> Match:
    """Loads into the tensors there are; meta tensors get real ones, tied ones the same."""
    unloaded = {id(leaf.tensor) for _, leaf in pairs if leaf.tensor.is_meta}
    replaced = [leaf for leaf in leaves.values() if id(leaf.tensor) in unloaded]
    for leaf in replaced:
        if not hasattr(leaf.container, "__setitem__"):
            kind = type(leaf.container).__name__
            raise OptionError(f"into= has a meta tensor in a {kind}: it cannot be replaced")
    real: dict[int, Tensor] = {}
    for _, leaf in pairs:
        if leaf.tensor.is_meta and id(leaf.tensor) not in real:
            real[id(leaf.tensor)] = _materialize(leaf.tensor, device)
    destinations = [
        Destination(entry, torch_spec(entry)[0], real.get(id(leaf.tensor), leaf.tensor))
        for entry, leaf in pairs
    ]

    def attach() -> None:
        for leaf in replaced:
            leaf.container[leaf.key] = real[id(leaf.tensor)]

    return Match(destinations, attach)


def _materialize(meta: Tensor, device: torch.device) -> Tensor:
    tensor = allocate(meta.shape, meta.dtype, device)
    if not isinstance(meta, nn.Parameter):
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=meta.requires_grad)
    parameter.__dict__.update(meta.__dict__)
    return parameter


def _raise_unfit(
    manifest: Manifest,
    *,
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    mismatched: Sequence[str] = (),
) -> None:
    if not (missing or unexpected or mismatched):
        return
    lines = [f"the checkpoint at {manifest.url} does not fit:"]
    lines += [f"  missing in the checkpoint: {name}" for name in missing]
    lines += [f"  unexpected in the checkpoint: {name}" for name in unexpected]
    lines += [f"  {line}" for line in mismatched]
    raise MismatchError("\n".join(lines), tuple(missing), tuple(unexpected), tuple(mismatched))
