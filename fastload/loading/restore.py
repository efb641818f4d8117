"""Gives values, and the states of modules and other objects in ``into=``, to their owners after a load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastload.errors import MismatchError
from fastload.formats.decoder import StateDecoder
from fastload.formats.state import SavedTensor
from fastload.loading.mismatch import FOUND_LATE, raise_mismatch
from fastload.loading.modules import TensorSlot, still_unfilled
from fastload.loading.pair import ModuleRestore, Pairs, SavedValue
from fastload.loading.targets import LoadTargets, identity


@dataclass(frozen=True)
class Restorer:
    """Restores everything in ``into=`` but its tensors.

    Attributes:
        url: The checkpoint.
        strict: Whether modules refuse unknown names.
        pairs: What is loaded into what.
        sharded: DTensors in the states of optimizers, by stored name.
    """

    url: str
    strict: bool
    pairs: Pairs
    sharded: Mapping[str, Tensor]

    def wanted(self) -> Iterator[tuple[SavedTensor, bool]]:
        """Yields the new tensors that the values take, and whether each keeps its stored dtype.

        Raises:
            ManifestError: A value without tensors is malformed.
        """
        for assignment in self.pairs.assignments:
            for value in assignment.value.values():
                yield from ((saved, saved.is_exact) for saved in _checked(value))
        for module in self.pairs.modules:
            given = (one for one in module.given.values() if isinstance(one, SavedValue))
            yield from ((saved, True) for value in given for saved in _checked(value))
        for part in self.pairs.stateful:
            yield from ((saved, True) for saved in _checked(part.value) if saved.stored not in self.sharded)

    def run(self, built: LoadTargets) -> None:
        """Restores everything, once the tensors are loaded.

        Raises:
            MismatchError: A ``load_state_dict`` refuses its state, or leaves a buffer on the meta device;
                names it.
        """
        pairs = self.pairs
        cast, as_stored = StateDecoder(built.new, built.exact), StateDecoder(built.exact)
        values = [(one.container, one.key, one.value.build(cast)) for one in pairs.assignments]
        in_shards = StateDecoder({**built.exact, **self.sharded}) if self.sharded else as_stored
        states = [(part, part.value.build(in_shards)) for part in pairs.stateful]
        with torch.no_grad():  # else each access to a DTensor turns it off and on
            loaded = {identity(_current(slot)) for _, slot in pairs.tensors} if pairs.modules else set()
        dicts = [(module, _state_dict(module, as_stored, loaded)) for module in pairs.modules]
        for module, state in dicts:
            self._load(module.where, module.module, state)
        for container, key, value in values:
            container[key] = value
        for part, state in states:
            self._load(part.where, part.target, state)
        raise_mismatch(self.url, unfilled=still_unfilled(pairs.unfilled), is_late=True)

    def _load(self, where: str, target: Any, state: Any) -> None:
        try:
            if isinstance(target, nn.Module):
                target.load_state_dict(state, strict=self.strict)
            else:
                target.load_state_dict(state)
        except Exception as error:
            line = f"{where}.load_state_dict: {type(error).__name__}: {error}"
            raise MismatchError(
                f"the checkpoint at {self.url} does not fit: {line}; {FOUND_LATE}", mismatched=(line,)
            ) from error


def _checked(value: SavedValue) -> Sequence[SavedTensor]:
    if not value.leaves:
        value.build(StateDecoder({}))
    return value.leaves


def _state_dict(module: ModuleRestore, decoder: StateDecoder, loaded: Container[object]) -> Any:
    """Returns the state dict for a module; tensors that were loaded in place are the module's own."""
    state: Any = OrderedDict()
    for name, source in module.given.items():
        state[name] = _current(source) if isinstance(source, TensorSlot) else source.build(decoder)
    filled = {
        (id(source.container), source.key)
        for source in module.given.values()
        if isinstance(source, TensorSlot)
    }
    for name, slot in module.own.items():  # under the other names of tied tensors, too
        is_given = name in state or name in module.derived or (id(slot.container), slot.key) in filled
        if not is_given and identity(_current(slot)) in loaded:
            state[name] = _current(slot)
    if module.metadata is not None:
        state._metadata = module.metadata.build(StateDecoder({}))
    return state


def _current(slot: TensorSlot) -> Any:
    return slot.container[slot.key]
