"""One walk that pairs what ``into=`` holds with what was saved: by keys, and what keys leave over by names.

Tensors are paired with tensors, modules with their state dicts, and what has a ``load_state_dict`` with its
state. Plain values, NumPy arrays and containers without any of those are to be replaced as a whole. What
fastload did not save has names only, and no plain values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fastload.errors import OptionError
from fastload.formats.decoder import StateDecoder
from fastload.formats.manifest import Manifest
from fastload.formats.state import NO_VALUE, PerRank, SavedTensor, children, has_gap, leaf, leaves
from fastload.formats.values import MAX_DEPTH, tensor_name
from fastload.loading.modules import Leaf, extra_names, find_unfilled, fit, needs_call, own_tensors, reshard
from fastload.loading.pairs import Handover, Pairs, Part, Put, Remade, Value

_ABSENT: Any = object()


def pair(into: Any, manifest: Manifest, *, has_gaps: bool = False) -> Pairs:
    """Pairs what a module, or a container, holds with what was saved.

    Args:
        into: The module, or the container.
        manifest: What was saved, as this rank is to see it.
        has_gaps: Whether some of it was saved for other ranks only.

    Raises:
        OptionError: `into` is neither, two of its tensors would have the same name, or it takes more than
            tensors, which is all that a checkpoint has that fastload did not save.
        ManifestError: The structure of the checkpoint is malformed.
    """
    if isinstance(into, PerRank):
        into = into.value
    if not isinstance(into, nn.Module | Mapping | list | tuple):
        raise OptionError(f"into= is a {type(into).__name__}: pass a module, or a dict of tensors")
    walk = _Walk(manifest, has_gaps)
    if walk.is_named:
        walk.pairs.left = [SavedTensor(entry.name, entry.name) for entry in manifest.tensors]
    try:
        walk.root(into, _ABSENT if walk.is_named else manifest.structure)
    except RecursionError:
        raise OptionError("into= is nested too deeply, or contains itself") from None
    if walk.is_named and (names := sorted(part.where for part in walk.pairs.parts)):
        raise OptionError(
            f"into= has {', '.join(names)}, but {manifest.url} holds tensors only: fastload did not save it"
        )
    walk.pair_names()
    return walk.pairs


def _items_of(node: Any) -> Iterable[tuple[Any, Any]]:
    """Returns keys and values of a dict, a list or a tuple; nothing of anything else."""
    if isinstance(node, Mapping):
        return node.items()
    return enumerate(node) if isinstance(node, list | tuple) else ()


class _Walk:
    """Goes down both sides at once."""

    def __init__(self, manifest: Manifest, has_gaps: bool) -> None:
        self.pairs = Pairs()
        self.is_named = manifest.structure is None
        self._manifest = manifest
        self._unpaired_modules: list[tuple[str, str, nn.Module]] = []
        self._holds: dict[int, bool] = {}
        self._depth = 0
        self._has_gaps = has_gaps

    def root(self, into: Any, node: Any) -> None:
        """Pairs the whole of both sides."""
        node = self._unless_elsewhere(node, "the state")
        if isinstance(into, nn.Module):
            self._module(into, node, "", "into")
            return
        below = self._below(node)
        if below is None:
            self._leave_all(node, "")
        change = self._container(into, below or {}, "", "into")
        if change is not None:
            self._refuse_change(into, change, "into")

    # By keys

    def _below(self, node: Any) -> dict[Any, tuple[str, Any]] | None:
        return {} if node is _ABSENT else children(node)

    def _container(
        self, target: Any, below: dict[Any, tuple[str, Any]], name: str, where: str
    ) -> Remade | None:
        """Pairs what is in a dict, a list or a tuple; returns what is to stand in for a tuple."""
        if self._depth >= MAX_DEPTH:
            raise OptionError(f"{where} is nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        prefix = f"{name}." if name else ""
        is_mutable = hasattr(target, "__setitem__")
        changes: dict[Any, Value | Remade] = {}
        for key, value in _items_of(target):
            # Named as it was saved: 1 finds 1.0, whose tensor is not that of "1".
            ending, child = below.pop(key) if key in below else (tensor_name("", key), _ABSENT)
            holder, slot = target, key
            if isinstance(value, PerRank):
                holder, slot, value = vars(value), "value", value.value
            if isinstance(value, Tensor):
                self._tensor(Leaf(value, holder, slot), child, prefix + ending)
                continue
            change = self._slot(value, child, prefix + ending, f"{where}[{key!r}]")
            if change is None:
                continue
            if is_mutable or holder is not target:
                self.pairs.puts.append(Put(holder, slot, change))
            elif isinstance(target, tuple):
                changes[key] = change
            else:
                self._refuse_change(value, change, f"{where}[{key!r}]")
        for ending, child in below.values():
            self._leave_all(child, prefix + ending)
        self._depth -= 1
        return Remade(target, changes) if changes else None

    def _slot(self, value: Any, node: Any, name: str, where: str) -> Value | Remade | None:
        """Pairs what is no tensor; returns what is to be put in its place, if it cannot be filled itself."""
        node = self._unless_elsewhere(node, name)
        if isinstance(value, nn.Module):
            self._module(value, node, name, where)
        elif hasattr(value, "load_state_dict"):
            node = self._unless_elsewhere(node, name, whole=True)
            if node is _ABSENT and not self.is_named:
                self.pairs.absent.append(where)
            else:
                known = () if node is _ABSENT else leaves(node, name)
                self.pairs.parts.append(
                    Part(name if self.is_named else where, value, Value(node, name, known))
                )
        elif isinstance(value, Mapping | list | tuple) and self._holds_some(value):
            below = self._below(node)
            if below is not None:
                return self._container(value, below, name, where)
            kind = type(value).__name__
            self.pairs.wrong.append(f"{where}: into= has a {kind}, the checkpoint {_what(node)}")
        elif (node := self._unless_elsewhere(node, name, whole=True)) is not _ABSENT:
            return Value(node, name, leaves(node, name))
        elif not self.is_named:
            self.pairs.absent.append(where)
        return None

    def _tensor(self, target: Leaf, node: Any, name: str) -> None:
        if is_lazy(target.tensor):
            advice = "load into its module, or call that once with an example"
            self.pairs.wrong.append(f"{name}: into= has a tensor without a shape yet: {advice}")
            return
        node = self._unless_elsewhere(node, name)
        if node is _ABSENT:
            self.pairs.lonely.append((name, target))
            return
        saved = leaf(node, name)
        if saved is None or saved.is_text:
            self.pairs.wrong.append(f"{name}: into= has a tensor, the checkpoint {_what(node)}")
        else:
            self.pairs.tensors.append((saved, target))

    def _module(self, module: nn.Module, node: Any, name: str, where: str) -> None:
        if node is _ABSENT:
            self._unpaired_modules.append((where, name, module))
            return
        below = children(node)
        if below is None:
            self.pairs.wrong.append(f"{where}: into= has a module, the checkpoint {_what(node)}")
            return
        prefix = f"{name}." if name else ""
        saved: dict[str, SavedTensor | Value] = {}
        self._flatten(node, prefix, "", frozenset(extra_names(module)), saved)
        metadata = None
        if type(node) is dict and "state_dict" in node:
            metadata = Value(node["state_dict"][1], f"{prefix}_metadata", ())
        self._fit(where, prefix, module, saved, metadata)

    def _fit(
        self,
        where: str,
        prefix: str,
        module: nn.Module,
        saved: Mapping[str, SavedTensor | Value],
        metadata: Value | None,
    ) -> None:
        """Pairs a module with what was saved of it, by the names in it."""
        reshard(module)
        own = dict(own_tensors(module))
        found = fit(
            module,
            own,
            {local: isinstance(one, SavedTensor) for local, one in saved.items()},
            lambda local: Value.of(saved[local]).made_of_nothing(self._manifest),
            {} if metadata is None else metadata.made(StateDecoder({})),
        )
        given: dict[str, Leaf | Value] = {}
        for local, target in found.in_place.items():
            self.pairs.tensors.append((saved[local], own[target]))  # type: ignore[arg-type]
            given[local] = own[target]
        for local in found.fresh:
            given[local] = Value.of(saved[local])
        for local in found.missing:
            if local in own:
                self.pairs.lonely.append((prefix + local, own[local]))
            else:
                self.pairs.missing.append(prefix + local)
        for local in found.unexpected:
            one = saved[local]
            if isinstance(one, SavedTensor):
                self.pairs.left.append(one)
            else:
                self._leave_all(one.node, one.name)
        self.pairs.wrong += [f"{where}: {line}" for line in found.errors]
        unfilled = find_unfilled(module, prefix, own)
        if unfilled is not None:
            self.pairs.unfilled.append(unfilled)
        if needs_call(module):
            handover = Handover(where, module, own, given, found.derived, metadata)
            self.pairs.handovers.append(handover)

    def _flatten(
        self, node: Any, prefix: str, inner: str, extra: frozenset[str], saved: dict[str, SavedTensor | Value]
    ) -> None:
        """Collects what was saved of a module by its names there."""
        for ending, child in (children(node) or {}).values():
            local = inner + ending
            found = None if local in extra else leaf(child, prefix + local)
            if self._unless_elsewhere(child, prefix + local, whole=local in extra) is _ABSENT:
                continue
            if local in saved:
                self._leave_all(child, prefix + local)
            elif found is not None and not found.is_text:
                saved[local] = found
            elif local not in extra and children(child):
                self._flatten(child, prefix, f"{local}.", extra, saved)
            else:
                saved[local] = Value(child, prefix + local, leaves(child, prefix + local))

    def _unless_elsewhere(self, node: Any, name: str, *, whole: bool = False) -> Any:
        """Returns a node; not one that has nothing for this rank, nor, as a `whole`, has in part."""
        if node == NO_VALUE or (whole and self._has_gaps and has_gap(node)):
            self.pairs.elsewhere.append(name)
            return _ABSENT
        return node

    def _leave_all(self, node: Any, name: str) -> None:
        found = leaves(node, name)
        self.pairs.left += found
        if not found:
            self.pairs.left_values[name] = node

    def _holds_some(self, value: Any) -> bool:
        """Whether a container holds anything that is to be filled rather than replaced."""
        known = self._holds.get(id(value))
        if known is None:
            self._holds[id(value)] = False
            known = any(
                self._holds_some(member)
                if isinstance(member, Mapping | list | tuple) and not hasattr(member, "load_state_dict")
                else isinstance(member, Tensor | nn.Module | PerRank) or hasattr(member, "load_state_dict")
                for _, member in _items_of(value)
            )
            self._holds[id(value)] = known
        return known

    def _refuse_change(self, value: Any, change: Value | Remade, where: str) -> None:
        """Notes that nothing can be put there, unless it is there already."""
        if not change.is_already(value):
            self.pairs.wrong.append(f"{where}: into= has another value, in what cannot be changed")

    # By names

    def pair_names(self) -> None:
        """Pairs by name what no key leads to."""
        index: dict[str, SavedTensor] = {}
        for saved in (saved for saved in self.pairs.left if not saved.is_text):
            index.setdefault(saved.name, saved)
            index.setdefault(saved.own_name, saved)
        left, self.pairs.left = self.pairs.left, []
        lonely, self.pairs.lonely = self.pairs.lonely, []
        taken: set[SavedTensor] = set()
        wanted: set[str] = set()
        names = sorted(index) if self._unpaired_modules else []
        for where, name, module in self._unpaired_modules:
            prefix = f"{name}." if name else ""
            begin, end = bisect_left(names, prefix), bisect_left(names, f"{name}/") if name else len(names)
            here = [index[full] for full in names[begin:end] if index[full].name == full]
            taken.update(here)
            found: dict[str, SavedTensor | Value] = {one.name.removeprefix(prefix): one for one in here}
            for local in extra_names(module):
                if local in found:
                    found[local] = Value.of(found[local])
                elif prefix + local in self.pairs.left_values:
                    found[local] = Value(self.pairs.left_values.pop(prefix + local), prefix + local, ())
            self._take(wanted, [prefix + local for local, _ in own_tensors(module)])
            self._fit(where, prefix, module, found, None)
        for name, target in lonely:
            self._take(wanted, [name])
            if name in index and index[name] not in taken:
                taken.add(index[name])
                self.pairs.tensors.append((index[name], target))
            else:
                self.pairs.lonely.append((name, target))
        self.pairs.left += [saved for saved in left if saved not in taken]

    def _take(self, wanted: set[str], names: Sequence[str]) -> None:
        for name in names:
            if name in wanted:
                raise OptionError(f"into= has two tensors that would both be called {name!r}")
            wanted.add(name)


def _what(node: Any) -> str:
    if (saved := leaf(node, "tensor")) is not None and not saved.is_text:
        return "a tensor"
    return "none" if children(node) is None else "a container"
