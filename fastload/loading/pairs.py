"""What belongs together: what ``into=`` holds, and what was saved of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from fastload.errors import OptionError
from fastload.formats.decoder import StateDecoder, decode_state
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest
from fastload.formats.state import SavedTensor
from fastload.loading.modules import Leaf, Unfilled


class Value(NamedTuple):
    """What is to be made anew of what was saved: its structure, its name, and the tensors it takes."""

    node: Any
    name: str
    leaves: Sequence[SavedTensor]

    @classmethod
    def of(cls, saved: SavedTensor | Value) -> Value:
        """Returns how to make a tensor, or anything, anew."""
        if isinstance(saved, Value):
            return saved
        return cls({"tensor": list(saved[1:])}, saved.name, (saved,))

    def made(self, decoder: StateDecoder) -> Any:
        """Makes it."""
        return decode_state(self.node, decoder, self.name)

    def made_of_nothing(self, manifest: Manifest) -> Any:
        """Makes it with tensors on the meta device; None if it has what has to have data."""
        if any(saved.kind == "ndarray" or saved.is_text for saved in self.leaves):
            return None
        specs = {saved.stored: torch_spec(manifest.by_name[saved.stored]) for saved in self.leaves}
        tensors = {
            name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in specs.items()
        }
        return self.made(StateDecoder(tensors))

    def values(self) -> Iterator[Value]:
        """Yields itself."""
        yield self

    def is_already(self, value: Any) -> bool:
        """Whether a value is what was saved, types included."""
        if self.leaves:
            return False
        self.made(StateDecoder({}))  # which says if it is malformed
        try:
            from fastload.formats.encoder import encode_state  # which few loads need

            structure = encode_state(value).structure
        except OptionError:
            return False
        return json.dumps(structure) == json.dumps(self.node)


class Remade(NamedTuple):
    """A tuple of which some members are to be replaced."""

    members: tuple[Any, ...]
    changes: Mapping[int, Value | Remade]

    def made(self, decoder: StateDecoder) -> Any:
        """Makes it."""
        members = list(self.members)
        for index, change in self.changes.items():
            members[index] = change.made(decoder)
        kind = type(self.members)
        return kind(*members) if hasattr(kind, "_fields") else kind(members)

    def values(self) -> Iterator[Value]:
        """Yields what is made anew."""
        for change in self.changes.values():
            yield from change.values()

    def is_already(self, value: Any) -> bool:
        """Whether a value is what was saved, types included."""
        return all(change.is_already(value[index]) for index, change in self.changes.items())


class Put(NamedTuple):
    """A place in ``into=``, and what is to be there."""

    container: Any
    key: Any
    value: Value | Remade


class Part(NamedTuple):
    """What takes its state as a whole, such as an optimizer."""

    where: str
    target: Any
    value: Value


class Handover(NamedTuple):
    """What the ``load_state_dict`` of a module is to be given, by names in the module.

    Attributes:
        where: Where in ``into=``.
        module: The module.
        own: Its tensors.
        given: What was saved: read into a tensor of the module, or to be made anew.
        derived: Names of its tensors that `load_state_dict` fills by itself.
        metadata: Of the state dict.
    """

    where: str
    module: nn.Module
    own: Mapping[str, Leaf]
    given: Mapping[str, Leaf | Value]
    derived: Sequence[str]
    metadata: Value | None


@dataclass
class Pairs:
    """What belongs together, and what has no counterpart.

    Attributes:
        tensors: Tensors that were saved, each with one of `into`.
        handovers, parts, puts: The others.
        lonely: Tensors of `into` that were not saved, by name.
        missing: Names of other things in modules that were not saved.
        absent: Places of all else in `into` that was not saved.
        left: Tensors that were saved and that `into` has not.
        left_values: Other such things, by name.
        unfilled: Modules with buffers on the meta device that no checkpoint holds.
        wrong: What is one thing in `into` and quite another in the checkpoint.
        elsewhere: Names of what `into` has and what was saved for other ranks only.
    """

    tensors: list[tuple[SavedTensor, Leaf]] = field(default_factory=list)
    handovers: list[Handover] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    lonely: list[tuple[str, Leaf]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    left: list[SavedTensor] = field(default_factory=list)
    left_values: dict[str, Any] = field(default_factory=dict)
    unfilled: list[Unfilled] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    @property
    def hold_more_than_tensors(self) -> bool:
        """Whether anything is done once the tensors are there: calls into what is the caller's, or puts."""
        return bool(self.handovers or self.parts or self.puts or self.unfilled)

    @property
    def has_no_tensors(self) -> bool:
        """Whether nothing belongs together but plain values."""
        given = any(handover.given for handover in self.handovers)
        made = any(value.leaves for put in self.puts for value in put.value.values())
        return not (self.tensors or self.parts or given or made)
