"""What ``into=`` holds besides tensors: optimizers and their like, counters and other plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fastload.errors import MismatchError, OptionError
from fastload.formats.manifest import Manifest
from fastload.formats.state import children, rebuild
from fastload.loading.match import holders, items_of

__all__ = ["check", "restore"]


def check(manifest: Manifest, into: Any) -> None:
    """Checks, before data moves, that the checkpoint has what is wanted of it besides tensors.

    Raises:
        MismatchError: A key is missing in the checkpoint.
        OptionError: It holds tensors only, and `into` has what takes its state as a whole.
    """
    if manifest.structure is not None:
        for _ in _walk(into, manifest.structure, "", "into"):
            pass
    elif names := sorted(holders(into)):
        raise OptionError(
            f"into= has {', '.join(names)}, but {manifest.url} holds tensors only: fastload did not save it"
        )


def restore(manifest: Manifest, into: Any, tensors: Mapping[str, Tensor]) -> None:
    """Gives plain values, and what takes its state as a whole, what they had when they were saved.

    Args:
        manifest: Of a checkpoint that fastload saved.
        into: Its tensors and modules have been loaded in place.
        tensors: What was loaded, by name.
    """
    for target, key, name, structure in _walk(into, manifest.structure, "", "into"):
        found = rebuild(structure, tensors, name)
        if hasattr(target[key], "load_state_dict"):
            target[key].load_state_dict(found)
        elif hasattr(target, "__setitem__"):
            target[key] = found


def _walk(target: Any, structure: Any, prefix: str, path: str) -> Iterator[tuple[Any, Any, str, Any]]:
    """Yields container, key, name and structure of all that is to be restored."""
    saved = children(structure)
    for key, value in items_of(target):
        where = f"{path}[{key!r}]"
        if isinstance(value, Tensor | nn.Module):
            continue
        if saved is None or key not in saved:
            raise MismatchError(f"{where} is missing in the checkpoint", missing=(where,))
        ending, child = saved[key]
        if isinstance(value, Mapping | list | tuple) and children(child) is not None:
            yield from _walk(value, child, f"{prefix}{ending}.", where)
        else:
            yield target, key, f"{prefix}{ending}", child
