"""What ``into=`` holds: pairs it with what was saved, and restores it once the data are there.

Tensors are paired with tensors, modules with their state dicts, objects that have a ``load_state_dict`` with
their state. Plain values, NumPy arrays, and containers of nothing else are replaced. Checkpoints without a
structure have names only, and no plain values.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fastload.errors import MismatchError, OptionError
from fastload.formats.codecs import CodedNode, coded_of
from fastload.formats.decoder import StateDecoder, decode_state
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest
from fastload.formats.state import (
    NO_VALUE,
    PerRank,
    RegroupedNode,
    SavedTensor,
    children,
    has_gap,
    leaf,
    leaves,
)
from fastload.formats.untrusted import show
from fastload.formats.values import BARE_NAME, MAX_DEPTH, tensor_name
from fastload.geometry.dtensors import is_dtensor
from fastload.loading.aliases import FOUND_LATE, any_differ, differing_line, raise_differing
from fastload.loading.mismatch import raise_mismatch
from fastload.loading.modules import (
    TensorSlot,
    Unfilled,
    extra_names,
    find_unfilled,
    fit,
    needs_call,
    own_tensors,
    reshard,
    still_unfilled,
)
from fastload.loading.targets import TargetBuilder, identity

_ABSENT: Any = object()


class SavedValue(NamedTuple):
    """A saved value that a load builds.

    Attributes:
        node: Its structure.
        name: Its name in the checkpoint.
        leaves: The tensors that it takes.
    """

    node: Any
    name: str
    leaves: Sequence[SavedTensor]

    @classmethod
    def of(cls, saved: SavedTensor | SavedValue) -> SavedValue:
        """Returns the value that a saved tensor is, or the value itself."""
        if isinstance(saved, SavedValue):
            return saved
        return cls({"tensor": list(saved[1:])}, saved.name, (saved,))

    def build(self, decoder: StateDecoder) -> Any:
        """Builds the value."""
        return decode_state(self.node, decoder, self.name)

    def build_on_meta(self, manifest: Manifest) -> Any:
        """Builds the value with tensors on the meta device; None for arrays and texts, which need data."""
        if any(saved.kind == "ndarray" or saved.is_text for saved in self.leaves):
            return None
        specs = {saved.stored: torch_spec(manifest.by_name[saved.stored]) for saved in self.leaves}
        tensors = {
            name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in specs.items()
        }
        return self.build(StateDecoder(tensors))

    def values(self) -> Iterator[SavedValue]:
        """Yields the value itself."""
        yield self

    def is_already(self, value: Any) -> bool:
        """Whether another value equals it, types included."""
        if self.leaves:
            return False
        self.build(StateDecoder({}))  # raises if it is malformed
        try:
            from fastload.formats.encoder import encode_state  # which few loads need

            structure = encode_state(value).structure
        except OptionError:
            return False
        return json.dumps(structure) == json.dumps(self.node)


class NewTuple(NamedTuple):
    """A tuple of `into`, and the members to replace in it."""

    members: tuple[Any, ...]
    changes: Mapping[int, SavedValue | NewTuple]

    def build(self, decoder: StateDecoder) -> Any:
        """Builds the new tuple."""
        members = list(self.members)
        for index, change in self.changes.items():
            members[index] = change.build(decoder)
        kind = type(self.members)
        return kind(*members) if hasattr(kind, "_fields") else kind(members)

    def values(self) -> Iterator[SavedValue]:
        """Yields the new members."""
        for change in self.changes.values():
            yield from change.values()

    def is_already(self, value: Any) -> bool:
        """Whether a tuple has these members already, types included."""
        return all(change.is_already(value[index]) for index, change in self.changes.items())


class Assignment(NamedTuple):
    """A value to assign in a container of ``into=``."""

    container: Any
    key: Any
    value: SavedValue | NewTuple


class StatefulRestore(NamedTuple):
    """An object of ``into=``, such as an optimizer, and the state for its ``load_state_dict``."""

    where: str
    target: Any
    value: SavedValue


class ModuleRestore(NamedTuple):
    """A module of ``into=``, and the state dict for its ``load_state_dict``.

    Attributes:
        where: Its place in ``into=``.
        module: The module.
        tensors: Its tensors by name.
        given: The state dict: tensors of the module, once they are loaded, and saved values.
        derived: Names of its tensors that `load_state_dict` fills by itself.
        metadata: ``_metadata`` of the state dict.
    """

    where: str
    module: nn.Module
    tensors: Mapping[str, TensorSlot]
    given: Mapping[str, TensorSlot | SavedValue]
    derived: Sequence[str]
    metadata: SavedValue | None


@dataclass
class Differences:
    """What ``into=`` and a checkpoint do not have in common.

    Attributes:
        unmatched: Tensors of `into` that were not saved, by name.
        missing: Names in modules of other things that were not saved.
        absent: Places in `into` of anything else that was not saved.
        unexpected: Saved tensors that `into` lacks.
        unexpected_values: Saved values that `into` lacks, by name.
        mismatched: A line for each thing that is of another kind in the checkpoint.
        left_out: Names of things in `into` that were saved for other ranks only.
    """

    unmatched: list[tuple[str, TensorSlot]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    unexpected: list[SavedTensor] = field(default_factory=list)
    unexpected_values: dict[str, Any] = field(default_factory=dict)
    mismatched: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass
class Pairs:
    """What of a checkpoint goes where in ``into=``.

    Attributes:
        tensors: Saved tensors, each with one of `into`.
        modules: Modules that need a call of ``load_state_dict``.
        stateful: Other objects that have a ``load_state_dict``.
        assignments: Values to replace.
        unfilled: Modules with buffers on the meta device that no checkpoint holds.
    """

    tensors: list[tuple[SavedTensor, TensorSlot]] = field(default_factory=list)
    modules: list[ModuleRestore] = field(default_factory=list)
    stateful: list[StatefulRestore] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    unfilled: list[Unfilled] = field(default_factory=list)

    @property
    def hold_more_than_tensors(self) -> bool:
        """Whether a load calls the caller's code, or assigns values, after the tensors are read."""
        return bool(self.modules or self.stateful or self.assignments or self.unfilled)

    @property
    def has_no_tensors(self) -> bool:
        """Whether no tensor of the checkpoint is loaded."""
        given = any(restore.given for restore in self.modules)
        assigned = any(value.leaves for one in self.assignments for value in one.value.values())
        return not (self.tensors or self.stateful or given or assigned)

    def wanted(self, sharded: Container[str]) -> Iterator[tuple[SavedTensor, bool]]:
        """Yields the new tensors that the values take, and whether each keeps its stored dtype.

        Args:
            sharded: Stored names of the tensors that are DTensors in the states of optimizers.

        Raises:
            ManifestError: A value without tensors is malformed.
        """
        for assignment in self.assignments:
            for value in assignment.value.values():
                yield from ((saved, saved.is_exact) for saved in _checked(value))
        for module in self.modules:
            given = (one for one in module.given.values() if isinstance(one, SavedValue))
            yield from ((saved, True) for value in given for saved in _checked(value))
        for restored in self.stateful:
            yield from ((saved, True) for saved in _checked(restored.value) if saved.stored not in sharded)

    def restore(
        self, url: str, targets: TargetBuilder, sharded: Mapping[str, Tensor], *, strict: bool
    ) -> None:
        """Restores everything in ``into=`` but its tensors, once these are loaded.

        Args:
            url: The checkpoint.
            targets: The loaded tensors.
            sharded: DTensors in the states of optimizers, by stored name.
            strict: Whether modules refuse unknown names.

        Raises:
            MismatchError: A ``load_state_dict`` refuses its state, or leaves a buffer on the meta device;
                names it.
        """
        cast, as_stored = StateDecoder(targets.new, targets.exact), StateDecoder(targets.exact)
        values = [(one.container, one.key, one.value.build(cast)) for one in self.assignments]
        in_shards = StateDecoder({**targets.exact, **sharded}) if sharded else as_stored
        states = [(restored, restored.value.build(in_shards)) for restored in self.stateful]
        with torch.no_grad():  # else each access to a DTensor turns it off and on
            loaded = {identity(_current(slot)) for _, slot in self.tensors} if self.modules else set()
        dicts = [(module, _state_dict(module, as_stored, loaded)) for module in self.modules]
        lost: list[str] = []
        for module, state in dicts:
            given, copies = dict(state), _copies_of_tied(module)
            with _naming(url, module.where):
                module.module.load_state_dict(state, strict=strict)
            lost += _lost(module, given)
            lost += [
                differing_line(one, other)
                for one, other, slot, copy in copies
                if any_differ(_current(slot).detach(), copy)
            ]
        for container, key, value in values:
            container[key] = value
        for restored, state in states:
            with _naming(url, restored.where):
                restored.target.load_state_dict(state)
        raise_differing(url, lost)
        raise_mismatch(url, unfilled=still_unfilled(self.unfilled), is_late=True)


@contextmanager
def _naming(url: str, where: str) -> Iterator[None]:
    """Names a place in ``into=`` in the errors of its ``load_state_dict``."""
    try:
        yield
    except Exception as error:
        line = f"{where}.load_state_dict: {type(error).__name__}: {error}"
        raise MismatchError(
            f"the checkpoint at {url} does not fit: {line}; {FOUND_LATE}", mismatched=(line,)
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
    for name, slot in module.tensors.items():  # under the other names of tied tensors, too
        is_given = name in state or name in module.derived or (id(slot.container), slot.key) in filled
        if not is_given and identity(_current(slot)) in loaded:
            state[name] = _current(slot)
    if module.metadata is not None:
        state._metadata = module.metadata.build(StateDecoder({}))
    return state


def _copies_of_tied(module: ModuleRestore) -> list[tuple[str, str, TensorSlot, Tensor]]:
    """Returns copies of tensors that were loaded in place, and that `load_state_dict` may overwrite.

    It does if it makes the value of another name of their memory by itself.

    Returns:
        Name, the other name, the place of the tensor, and its copy.
    """
    in_place = {name: source for name, source in module.given.items() if isinstance(source, TensorSlot)}
    if not in_place or not module.derived:
        return []
    others = {identity(_current(module.tensors[name])): name for name in module.derived}
    tied = [
        (name, others[key], slot, _current(slot).detach())
        for name, slot in in_place.items()
        if (key := identity(_current(slot))) in others
    ]
    return [
        (name, other, slot, tensor.clone())
        for name, other, slot, tensor in tied
        if not (tensor.is_meta or is_dtensor(tensor))
    ]


def _lost(module: ModuleRestore, given: Mapping[str, Any]) -> list[str]:
    """Returns a line for each value that the module's `load_state_dict` has replaced with another one."""
    tied: dict[object, dict[str, Any]] = {}
    for name, slot in module.tensors.items():
        if isinstance(module.given.get(name), SavedValue):
            tied.setdefault(identity(_current(slot)), {})[name] = _current(slot).detach()
    lines = []
    for tensors in tied.values():
        if len(tensors) < 2 or any(is_dtensor(tensor) for tensor in tensors.values()):
            continue
        kept = [name for name, tensor in tensors.items() if not any_differ(tensor, given[name])]
        lines += [differing_line(kept[0], name) for name in tensors if kept and name not in kept]
    return lines


def _current(slot: TensorSlot) -> Any:
    return slot.container[slot.key]


def pair(into: Any, manifest: Manifest, *, has_gaps: bool) -> tuple[Pairs, Differences]:
    """Pairs a container, or an object with ``load_state_dict``, with what was saved.

    Args:
        into: The container, or the object.
        manifest: The checkpoint, as this rank sees it.
        has_gaps: Whether its structure has gaps.

    Raises:
        OptionError: `into` is something else, two of its tensors would have the same name, or it takes more
            than tensors from a checkpoint that has nothing else.
        ManifestError: The structure of the checkpoint is malformed.
    """
    if isinstance(into, PerRank):
        into = into.value
    if not (isinstance(into, Mapping | list | tuple) or hasattr(into, "load_state_dict")):
        raise OptionError(
            f"into= is a {type(into).__name__}: pass a module, or a dict of tensors, modules, optimizers, …"
        )
    walk = _Walk(manifest, has_gaps)
    if walk.is_named:
        walk.differences.unexpected = [SavedTensor(entry.name, entry.name) for entry in manifest.tensors]
    try:
        walk.root(into, _ABSENT if walk.is_named else manifest.structure)
    except RecursionError:
        raise OptionError("into= is nested too deeply, or contains itself") from None
    if walk.is_named and (names := sorted(restored.where for restored in walk.pairs.stateful)):
        raise OptionError(
            f"into= has {', '.join(names)}, but {manifest.url} holds tensors only: fastload did not save it"
        )
    walk.pair_names()
    return walk.pairs, walk.differences


def _items_of(node: Any) -> Iterable[tuple[Any, Any]]:
    """Returns the keys and values of a dict, a list or a tuple; nothing for other objects."""
    if isinstance(node, Mapping):
        return node.items()
    return enumerate(node) if isinstance(node, list | tuple) else ()


class _Walk:
    """Walks through `into` and the structure of the checkpoint at the same time."""

    def __init__(self, manifest: Manifest, has_gaps: bool) -> None:
        self.pairs = Pairs()
        self.differences = Differences()
        self.is_named = manifest.structure is None
        self._manifest = manifest
        self._modules_left: list[tuple[str, str, nn.Module]] = []
        self._holds: dict[int, bool] = {}
        self._depth = 0
        self._has_gaps = has_gaps

    def root(self, into: Any, node: Any) -> None:
        """Pairs both sides from their roots."""
        if self._is_left_out(node, BARE_NAME):
            return
        if hasattr(into, "load_state_dict"):
            self._slot(into, node, "", "into")
            return
        below = self._below(node)
        if below is None:
            self._add_unexpected(node, "")
        change = self._container(into, below or {}, "", "into")
        if change is not None:
            self._refuse_change(into, change, "into")

    # By keys

    def _below(self, node: Any) -> dict[Any, tuple[str, Any]] | None:
        return {} if node is _ABSENT else children(node)

    def _container(
        self, target: Any, below: dict[Any, tuple[str, Any]], name: str, where: str
    ) -> NewTuple | None:
        """Pairs the members of a dict, a list or a tuple; returns the tuple that replaces a tuple, if any."""
        if self._depth >= MAX_DEPTH:
            raise OptionError(f"{where} is nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        prefix = f"{name}." if name else ""
        is_mutable = hasattr(target, "__setitem__")
        changes: dict[Any, SavedValue | NewTuple] = {}
        for key, value in _items_of(target):
            # Named as it was saved: 1 finds 1.0, whose tensor is not that of "1".
            ending, child = below.pop(key) if key in below else (tensor_name("", key), _ABSENT)
            holder, slot = target, key
            if isinstance(value, PerRank):
                holder, slot, value = vars(value), "value", value.value
            if isinstance(value, Tensor) and type(child) is not RegroupedNode:
                self._tensor(TensorSlot(value, holder, slot), child, prefix + ending)
                continue
            change = self._slot(value, child, prefix + ending, f"{where}[{key!r}]")
            if change is None:
                continue
            if is_mutable or holder is not target:
                self.pairs.assignments.append(Assignment(holder, slot, change))
            elif isinstance(target, tuple):
                changes[key] = change
            else:
                self._refuse_change(value, change, f"{where}[{key!r}]")
        for ending, child in below.values():
            self._add_unexpected(child, prefix + ending)
        self._depth -= 1
        return NewTuple(target, changes) if changes else None

    def _slot(self, value: Any, node: Any, name: str, where: str) -> SavedValue | NewTuple | None:
        """Pairs anything but a tensor; returns the value to replace it with, if it is not loaded in place."""
        if self._is_left_out(node, name):
            return None
        if isinstance(value, nn.Module):
            self._module(value, node, name, where)
        elif hasattr(value, "load_state_dict"):
            if self._is_left_out(node, name, complete=True):
                return None
            if node is _ABSENT and not self.is_named:
                self.differences.absent.append(where)
            else:
                known = () if node is _ABSENT else leaves(node, name)
                place = (self.is_named and name) or where
                self.pairs.stateful.append(StatefulRestore(place, value, SavedValue(node, name, known)))
        elif self._holds_some(value) and type(node) is not RegroupedNode:
            below = self._below(node)
            if below is not None:
                return self._container(value, below, name, where)
            kind = type(value).__name__
            self.differences.mismatched.append(f"{where}: into= has a {kind}, the checkpoint {_what(node)}")
        elif node is _ABSENT:
            if not self.is_named:
                self.differences.absent.append(where)
        elif not self._is_left_out(node, name, complete=True):
            return SavedValue(node, name, leaves(node, name))
        return None

    def _tensor(self, target: TensorSlot, node: Any, name: str) -> None:
        if is_lazy(target.tensor):
            advice = "load into its module, or call that once with an example"
            self.differences.mismatched.append(f"{name}: into= has a tensor without a shape yet: {advice}")
            return
        if self._is_left_out(node, name):
            return
        if node is _ABSENT:
            self.differences.unmatched.append((name, target))
            return
        if (coded := coded_of(node)) is not None:
            self._coded(target, coded, name)
            return
        saved = leaf(node, name)
        if saved is None or saved.is_text:
            self.differences.mismatched.append(f"{name}: into= has a tensor, the checkpoint {_what(node)}")
        else:
            self.pairs.tensors.append((saved, target))

    def _coded(self, target: TensorSlot, coded: CodedNode, name: str) -> None:
        parts = coded.extension.parts(target.tensor, coded.header)
        if parts is None or target.tensor.is_meta:
            kind = f"{type(target.tensor).__name__} on {target.tensor.device.type}"
            self.differences.mismatched.append(
                f"{name}: into= has a {kind}, the checkpoint {show(coded.header)}"
            )
        else:
            self._container(parts, children({"dict": coded.items}) or {}, name, name)

    def _module(self, module: nn.Module, node: Any, name: str, where: str) -> None:
        if node is _ABSENT:
            self._modules_left.append((where, name, module))
            return
        below = children(node)
        if below is None:
            self.differences.mismatched.append(f"{where}: into= has a module, the checkpoint {_what(node)}")
            return
        prefix = f"{name}." if name else ""
        saved: dict[str, SavedTensor | SavedValue] = {}
        self._flatten(node, prefix, "", frozenset(extra_names(module)), saved)
        metadata = None
        if type(node) is dict and "state_dict" in node:
            metadata = SavedValue(node["state_dict"][1], f"{prefix}_metadata", ())
        self._fit(where, prefix, module, saved, metadata)

    def _fit(
        self,
        where: str,
        prefix: str,
        module: nn.Module,
        saved: Mapping[str, SavedTensor | SavedValue],
        metadata: SavedValue | None,
    ) -> None:
        """Pairs a module with its saved state, by the names in the module."""
        reshard(module)
        tensors = dict(own_tensors(module))
        predicted = fit(
            module,
            tensors,
            {local: isinstance(one, SavedTensor) or bool(coded_of(one.node)) for local, one in saved.items()},
            lambda local: SavedValue.of(saved[local]).build_on_meta(self._manifest),
            {} if metadata is None else metadata.build(StateDecoder({})),
        )
        given: dict[str, TensorSlot | SavedValue] = {}
        for local, target in predicted.in_place.items():
            if isinstance(one := saved[local], SavedTensor):
                self.pairs.tensors.append((one, tensors[target]))
            elif (coded := coded_of(one.node)) is not None:
                self._coded(tensors[target], coded, one.name)
            given[local] = tensors[target]
        for local in predicted.fresh:
            given[local] = SavedValue.of(saved[local])
        left_out = set(self.differences.left_out)
        for local in predicted.missing:
            if prefix + local in left_out:
                continue
            if local in tensors:
                self.differences.unmatched.append((prefix + local, tensors[local]))
            else:
                self.differences.missing.append(prefix + local)
        for local in predicted.unexpected:
            one = saved[local]
            if isinstance(one, SavedTensor):
                self.differences.unexpected.append(one)
            else:
                self._add_unexpected(one.node, one.name)
        self.differences.mismatched += [f"{where}: {line}" for line in predicted.errors]
        unfilled = find_unfilled(module, prefix, tensors)
        if unfilled is not None:
            self.pairs.unfilled.append(unfilled)
        if needs_call(module):
            restore = ModuleRestore(where, module, tensors, given, predicted.derived, metadata)
            self.pairs.modules.append(restore)

    def _flatten(
        self,
        node: Any,
        prefix: str,
        inner: str,
        extra: frozenset[str],
        saved: dict[str, SavedTensor | SavedValue],
    ) -> None:
        """Collects the saved state of a module, by the names in the module."""
        for ending, child in (children(node) or {}).values():
            local = inner + ending
            saved_leaf = None if local in extra else leaf(child, prefix + local)
            if self._is_left_out(child, prefix + local, complete=local in extra):
                continue
            if local in saved:
                self._add_unexpected(child, prefix + local)
            elif saved_leaf is not None and not saved_leaf.is_text:
                saved[local] = saved_leaf
            elif local not in extra and coded_of(child) is None and children(child):
                self._flatten(child, prefix, f"{local}.", extra, saved)
            else:
                saved[local] = SavedValue(child, prefix + local, leaves(child, prefix + local))

    def _is_left_out(self, node: Any, name: str, *, complete: bool = False) -> bool:
        """Notes and returns whether a node, or with `complete` any part of it, has no value for this rank."""
        is_left_out = node == NO_VALUE or (complete and self._has_gaps and has_gap(node))
        if is_left_out:
            self.differences.left_out.append(name)
        return is_left_out

    def _add_unexpected(self, node: Any, name: str) -> None:
        unexpected = leaves(node, name)
        self.differences.unexpected += unexpected
        if not unexpected:
            self.differences.unexpected_values[name] = node

    def _holds_some(self, value: Any) -> bool:
        """Whether a value is a container that holds anything that is loaded in place."""
        if not isinstance(value, Mapping | list | tuple):
            return False
        known = self._holds.get(id(value))
        if known is None:
            self._holds[id(value)] = False
            known = any(
                isinstance(member, Tensor | nn.Module | PerRank)
                or hasattr(member, "load_state_dict")
                or self._holds_some(member)
                for _, member in _items_of(value)
            )
            self._holds[id(value)] = known
        return known

    def _refuse_change(self, value: Any, change: SavedValue | NewTuple, where: str) -> None:
        """Reports a value that cannot be replaced, unless it is equal."""
        if not change.is_already(value):
            self.differences.mismatched.append(f"{where}: into= has another value, in what cannot be changed")

    # By names

    def pair_names(self) -> None:
        """Pairs by name whatever is not paired by keys."""
        index: dict[str, SavedTensor] = {}
        for tensor in (tensor for tensor in self.differences.unexpected if not tensor.is_text):
            index.setdefault(tensor.name, tensor)
            index.setdefault(tensor.own_name, tensor)
        left, self.differences.unexpected = self.differences.unexpected, []
        unmatched, self.differences.unmatched = self.differences.unmatched, []
        taken: set[SavedTensor] = set()
        wanted: set[str] = set()
        names = sorted(index) if self._modules_left else []
        for where, name, module in self._modules_left:
            prefix = f"{name}." if name else ""
            begin, end = bisect_left(names, prefix), bisect_left(names, f"{name}/") if name else len(names)
            here = [index[full] for full in names[begin:end] if index[full].name == full]
            taken.update(here)
            saved: dict[str, SavedTensor | SavedValue] = {one.name.removeprefix(prefix): one for one in here}
            for local in extra_names(module):
                if local in saved:
                    saved[local] = SavedValue.of(saved[local])
                elif prefix + local in self.differences.unexpected_values:
                    saved[local] = SavedValue(
                        self.differences.unexpected_values.pop(prefix + local), prefix + local, ()
                    )
            self._check_names(wanted, [prefix + local for local, _ in own_tensors(module)])
            self._fit(where, prefix, module, saved, None)
        for name, target in unmatched:
            self._check_names(wanted, [name])
            if name in index and index[name] not in taken:
                taken.add(index[name])
                self.pairs.tensors.append((index[name], target))
            else:
                self.differences.unmatched.append((name, target))
        self.differences.unexpected += [saved for saved in left if saved not in taken]

    def _check_names(self, wanted: set[str], names: Sequence[str]) -> None:
        for name in names:
            if name in wanted:
                raise OptionError(f"into= has two tensors that would both be called {name!r}")
            wanted.add(name)


def _what(node: Any) -> str:
    if type(node) is RegroupedNode:
        return "values of other ranks"
    if (saved := leaf(node, "tensor")) is not None and not saved.is_text:
        return "a tensor"
    return "none" if children(node) is None else "a container"


# Optimizers


def optimizer_misfits(restored: StatefulRestore) -> Iterator[str]:
    """Yields the reasons why an object cannot take its saved state, if it is an optimizer."""
    groups = _parameters_of(restored.target)
    if any(isinstance(parameter, Tensor) and parameter.is_meta for group in groups for parameter in group):
        yield (
            f"{restored.where}: it has parameters on the meta device, which a load replaces in the "
            "model only: make it after the model has been loaded, or after model.to_empty(device=...)"
        )
    if groups and _compares_groups(restored.target):
        here = [len(group) for group in groups]
        saved = [
            len(_below(group, "params")) for _, group in _below(restored.value.node, "param_groups").values()
        ]
        if len(here) != len(saved):
            yield f"{restored.where}: parameter groups: {len(saved)} in the checkpoint, {len(here)} in into="
            return
        for number, (there, wanted) in enumerate(zip(saved, here, strict=True)):
            if there != wanted:
                counts = f"{there} in the checkpoint, {wanted} in into="
                yield f"{restored.where}: parameters in group {number}: {counts}"


def sharded_state(restored: StatefulRestore, manifest: Manifest) -> Iterator[tuple[SavedTensor, Tensor]]:
    """Yields the DTensors in the state of an optimizer, each with a DTensor of the same placements.

    An optimizer makes its state at its first step. Before, a tensor of the shape of its parameter is assumed
    to have the placements of the parameter.
    """
    parameters = _parameters_by_key(restored)
    if not any(map(is_dtensor, parameters.values())):
        return
    states = getattr(restored.target, "state", None)
    prefix = f"{restored.value.name}." if restored.value.name else ""
    state_ending, state = (children(restored.value.node) or {}).get("state", ("", None))
    for key, (ending, node) in (children(state) or {}).items():
        parameter = parameters.get(key)
        if parameter is None or not is_dtensor(parameter):
            continue
        existing = states.get(parameter) if isinstance(states, Mapping) else None
        for part, (name, child) in (children(node) or {}).items():
            full = f"{prefix}{state_ending}.{ending}.{name}"
            like = _like(parameter, existing[part] if existing and part in existing else None, part)
            if like is not None and (coded := coded_of(child)) is not None:
                yield from _sharded_parts(coded, full, like, manifest)
                continue
            saved = leaf(child, full)
            if saved is None or saved.is_text or saved.kind == "ndarray":
                continue
            if like is not None and tuple(like.shape) == _shape(manifest, saved):
                yield saved, like


def _sharded_parts(
    coded: CodedNode, name: str, like: Tensor, manifest: Manifest
) -> Iterator[tuple[SavedTensor, Tensor]]:
    parts = {part.name.removeprefix(f"{name}."): part for part in leaves({"dict": coded.items}, name)}
    shapes = {
        ending: shape for ending, part in parts.items() if (shape := _shape(manifest, part)) is not None
    }
    for ending, sharded in coded.extension.shards(coded.header, shapes, like).items():
        yield parts[ending], sharded


def _parameters_by_key(restored: StatefulRestore) -> dict[Any, Any]:
    """Returns the parameters of an optimizer by their keys in its saved state."""
    parameters = [parameter for group in _parameters_of(restored.target) for parameter in group]
    groups = _below(restored.value.node, "param_groups").values() if parameters else ()
    keys = [key for _, group in groups for _, key in _below(group, "params").values()]
    if len(keys) != len(parameters) or not all(isinstance(key, int | str) for key in keys):
        return {}
    return dict(zip(keys, parameters, strict=True))


def _like(parameter: Tensor, existing: Any, part: Any) -> Tensor | None:
    """Returns a tensor with the placements of a part of the state: the existing one, or the parameter."""
    if isinstance(existing, Tensor):
        return existing if is_dtensor(existing) else None
    return None if part == "step" else parameter  # replicated, one per parameter


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
