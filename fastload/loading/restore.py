"""What is done once the data are there: whatever of ``into=`` is more than tensors gets what was saved."""

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
from fastload.loading.modules import Leaf, still_unfilled
from fastload.loading.pairs import Handover, Pairs, Value
from fastload.loading.wants import Arrivals, identity

__all__ = ["Restorer"]


@dataclass(frozen=True)
class Restorer:
    """Puts in place what is no tensor of ``into=``.

    Attributes:
        url: Of the checkpoint.
        strict: Whether modules are to refuse what they do not know.
        pairs: What gets what.
        sharded: DTensors that the state of optimizers takes, by stored name.
    """

    url: str
    strict: bool
    pairs: Pairs
    sharded: Mapping[str, Tensor]

    def wanted(self) -> Iterator[tuple[SavedTensor, bool]]:
        """Yields the new tensors that this takes, and whether they have to be as they were stored.

        Raises:
            ManifestError: Something of the checkpoint that takes no tensors is malformed.
        """
        for put in self.pairs.puts:
            yield from ((saved, saved.is_exact) for value in put.value.values() for saved in _checked(value))
        for handover in self.pairs.handovers:
            values = (one for one in handover.given.values() if isinstance(one, Value))
            yield from ((saved, True) for value in values for saved in _checked(value))
        for part in self.pairs.parts:
            taken = (saved for saved in _checked(part.value) if saved.stored not in self.sharded)
            yield from ((saved, True) for saved in taken)

    def run(self, arrivals: Arrivals) -> None:
        """Does it, once all has arrived.

        Raises:
            MismatchError: A ``load_state_dict`` does not take what was saved, or leaves a buffer on the meta
                device; names it.
        """
        pairs = self.pairs
        cast, as_stored = StateDecoder(arrivals.new, arrivals.exact), StateDecoder(arrivals.exact)
        puts = [(put.container, put.key, put.value.made(cast)) for put in pairs.puts]
        in_shards = StateDecoder({**arrivals.exact, **self.sharded}) if self.sharded else as_stored
        states = [(part, part.value.made(in_shards)) for part in pairs.parts]
        with torch.no_grad():  # else each look at a DTensor turns it off and on
            loaded = {identity(_now(leaf)) for _, leaf in pairs.tensors} if pairs.handovers else set()
        dicts = [(handover, _state_dict(handover, as_stored, loaded)) for handover in pairs.handovers]
        for handover, state in dicts:
            self._hand_over(handover.where, handover.module, state)
        for container, key, value in puts:
            container[key] = value
        for part, state in states:
            self._hand_over(part.where, part.target, state)
        raise_mismatch(self.url, unfilled=still_unfilled(pairs.unfilled), is_late=True)

    def _hand_over(self, where: str, target: Any, state: Any) -> None:
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


def _checked(value: Value) -> Sequence[SavedTensor]:
    if not value.leaves:
        value.made(StateDecoder({}))
    return value.leaves


def _state_dict(handover: Handover, decoder: StateDecoder, loaded: Container[object]) -> Any:
    """Returns what was saved of a module; what was read in place is the module's own tensor."""
    state: Any = OrderedDict()
    for name, source in handover.given.items():
        state[name] = _now(source) if isinstance(source, Leaf) else source.made(decoder)
    filled = {
        (id(source.container), source.key) for source in handover.given.values() if isinstance(source, Leaf)
    }
    for name, leaf in handover.own.items():  # under the other names of tied tensors, too
        is_given = name in state or name in handover.derived or (id(leaf.container), leaf.key) in filled
        if not is_given and identity(_now(leaf)) in loaded:
            state[name] = _now(leaf)
    if handover.metadata is not None:
        state._metadata = handover.metadata.made(StateDecoder({}))
    return state


def _now(leaf: Leaf) -> Any:
    return leaf.container[leaf.key]
