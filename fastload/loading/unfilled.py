"""Buffers on the meta device that no checkpoint holds: with them a model would compute with rubbish."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from fastload.loading.modules import Leaf, may_fill

__all__ = ["Unfilled", "find_unfilled", "still_unfilled"]


class Unfilled(NamedTuple):
    """A module with such buffers.

    Attributes:
        own: Its parameters and persistent buffers.
        certain: Its buffers that nothing fills, by their full names.
        possible: Those that a hook, or a `load_state_dict` of its own, may fill; known only afterwards.
    """

    own: Mapping[str, Leaf]
    certain: Mapping[str, Leaf]
    possible: Mapping[str, Leaf]

    def matters(self, filled: Collection[int], *, in_parts: bool) -> bool:
        """Whether the module is loaded, so that it would seem to be whole.

        Args:
            filled: Ids of all tensors that are loaded.
            in_parts: Whether it may be loaded in several calls, of which the last one fills all that is left.
        """
        tensors = [leaf.tensor for leaf in self.own.values()]
        if in_parts and any(tensor.is_meta and id(tensor) not in filled for tensor in tensors):
            return False
        return any(id(tensor) in filled for tensor in tensors)


def find_unfilled(module: nn.Module, prefix: str, own: Mapping[str, Leaf]) -> Unfilled | None:
    """Returns what no checkpoint can fill of a module; None if there is nothing."""
    certain: dict[str, Leaf] = {}
    possible: dict[str, Leaf] = {}
    for name, leaf, is_possible in _unsaved(module, prefix, False):
        if leaf.tensor.is_meta:
            (possible if is_possible else certain)[name] = leaf
    return Unfilled(own, certain, possible) if certain or possible else None


def still_unfilled(modules: Sequence[Unfilled]) -> list[str]:
    """Returns which of those that might have been filled have not been, after the load."""
    leaves = [item for module in modules for item in module.possible.items()]
    return [
        name for name, leaf in leaves if (now := leaf.container.get(leaf.key)) is not None and now.is_meta
    ]


def _unsaved(part: nn.Module, prefix: str, is_possible: bool) -> Iterator[tuple[str, Leaf, bool]]:
    is_possible = is_possible or may_fill(part)
    for name in sorted(part._non_persistent_buffers_set):
        buffer = part._buffers.get(name)
        if buffer is not None:
            yield prefix + name, Leaf(buffer, part._buffers, name), is_possible
    for name, child in part._modules.items():
        if child is not None:
            yield from _unsaved(child, f"{prefix}{name}.", is_possible)
