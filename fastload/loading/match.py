"""Which tensors are wanted, and where they go: the checkpoint's names × ``names=`` × ``into=``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastload.errors import MismatchError, OptionError
from fastload.formats.decoder import StateDecoder, decode_state
from fastload.formats.manifest import Manifest
from fastload.formats.names import OWN_STEM
from fastload.formats.state import OwnView, SavedTensor, leaves, own_view
from fastload.geometry.dtensors import Group
from fastload.loading.mismatch import (
    FOUND_LATE,
    Renamed,
    Selection,
    catalogue,
    find_renamed,
    misfit,
    raise_mismatch,
)
from fastload.loading.modules import Leaf, still_unfilled
from fastload.loading.optimizers import optimizer_misfits, sharded_state
from fastload.loading.pair import pair
from fastload.loading.pairs import Handover, Pairs, Remade, Value
from fastload.loading.place import Arrivals, Destination, Wants, identity, materialize

if TYPE_CHECKING:
    from fastload.loading.stream_buffer import StreamBuffer

_LEAVE_OUT = "strict=False leaves these out, and loads the rest"


@dataclass(frozen=True)
class Match:
    """The destinations of a load.

    Attributes:
        destinations: In manifest order.
        loaded: What is loaded, by name.
        attach: To be called when all has been read: copies what is wanted twice, and puts materialized
            tensors into the caller's module or dict.
        restore: Puts everything else where it belongs, after that, and returns the result of the load.
        left_out: Names of what would have been loaded, had it not been saved for another number of ranks.
        calls: Whether `attach` or `restore` may call what is the caller's own, and fail on this rank alone.
        surplus: Names of what the checkpoint has and this rank does not want, if some rank has to.
        advice: What to do if no other rank wants it either.
        url: Of the checkpoint.
        stream_buffer: Hands tensors out as they come; `destinations` then have no memory. None if all
            of them are to be there in the end.
    """

    destinations: list[Destination]
    loaded: dict[str, Tensor]
    attach: Callable[[], None]
    restore: Callable[[], Any]
    left_out: tuple[str, ...] = ()
    calls: bool = False
    surplus: tuple[str, ...] = ()
    advice: str = ""
    url: str = ""
    stream_buffer: StreamBuffer | None = None

    def raise_unexpected(self, unwanted: Sequence[str]) -> None:
        """Raises if there is anything in the checkpoint that is to be wanted, and is not.

        Args:
            unwanted: Names that are in the `surplus` of all ranks.

        Raises:
            MismatchError: There is; it lists them.
        """
        is_all = len(unwanted) == len(self.surplus)
        raise_mismatch(self.url, unexpected=unwanted, advice=self.advice if is_all else _LEAVE_OUT)

    @property
    def num_tensors(self) -> int:
        """How many tensors of the checkpoint are wanted, as a whole or in part."""
        return len({destination.entry.name for destination in self.destinations})

    @property
    def device(self) -> torch.device | None:
        """A device that destinations live on: the first that is not the CPU; None if there is none."""
        return next((d.tensor.device for d in self.destinations if not d.tensor.is_cpu), None)

    def tensors(self) -> dict[str, Tensor]:
        """Returns what is loaded, by name."""
        return dict(self.loaded)


def match(
    manifest: Manifest,
    *,
    names: Sequence[str] | str | None,
    into: Any,
    device: torch.device,
    dtype: torch.dtype | None,
    strict: bool,
    rank: int = 0,
    size: int = 1,
    group: Sequence[int] | None = None,
) -> Match:
    """Finds a destination for every wanted tensor, before any data moves.

    Args:
        manifest: The checkpoint.
        names: Names or glob patterns, or None for all.
        into: A module, or nested dicts, lists and tuples, to be loaded in place; None for new tensors.
        device: Where new tensors and those that replace meta tensors live.
        dtype: Cast of floating point tensors, or None for none.
        strict: Whether the names of the checkpoint and of `into` have to be the same, and the number of ranks
            that of those whose own values were saved.
        rank: Whose own values are wanted.
        size: Number of ranks.
        group: Their numbers in torch's default group; None if there is no torch.distributed.

    Raises:
        MismatchError: Something does not fit; it lists all that does not. What is only unexpected is left
            to `Match.raise_unexpected`, as other ranks may want it.
        OptionError: `into` is no destination.
        ManifestError: The checkpoint is malformed, or holds what cannot be loaded and is wanted.
        MemoryError: The destinations do not fit into memory.
    """
    view = OwnView(manifest.structure)
    has_own = manifest.structure is not None and any(f.name.startswith(OWN_STEM) for f in manifest.files)
    if has_own:
        view = own_view(manifest.structure, rank, size)
        manifest = replace(manifest, structure=view.structure)
    refused: list[str] = []
    if manifest.format != "fastload" and manifest.structure is not None:
        from fastload.formats.state import raise_refused, without_refused

        manifest = replace(manifest, structure=without_refused(manifest.structure, refused))
        if strict and names is None:
            raise_refused(manifest.url, refused)
    selection = None if names is None else Selection(names, catalogue(manifest), has_own)
    wants = Wants(manifest, device, dtype)
    if strict and selection is None and view.elsewhere:
        raise_mismatch(manifest.url, mismatched=[_elsewhere(name, num, size) for name, num in view.elsewhere])
    if into is not None:
        pairs = pair(into, manifest, has_gaps=bool(view.elsewhere or refused))
        return _match_into(manifest, pairs, selection, wants, device, dtype, strict, view, Group(group))
    if selection is not None:
        raise_mismatch(manifest.url, missing=selection.absent)
        return _match_names(selection.chosen, wants, view)
    if manifest.structure is not None and dtype is not None:
        for saved in leaves(manifest.structure):
            wants.make(saved, exact=saved.is_exact)
        wants.make_together(view.together)
    else:
        wants.make_all()
    left_out = (*(name for name, _ in view.elsewhere), *refused)
    return _match_all(manifest, wants.arrivals(), left_out)


def _elsewhere(name: str, num_saved: int, size: int) -> str:
    saved = f"each of {num_saved} ranks" if num_saved > 1 else "one rank"
    here = f"{size} ranks" if size > 1 else "one rank"
    return f"{name}: saved for {saved} (fastload.PerRank), to be loaded by {here}: strict=False leaves it out"


def _match_names(chosen: Mapping[str, SavedTensor], wants: Wants, view: OwnView) -> Match:
    """New tensors by name."""
    named = {name: (saved, wants.make(saved, exact=saved.is_complex128)) for name, saved in chosen.items()}
    result = {
        name: torch.view_as_complex(tensor) if saved.is_complex128 else tensor
        for name, (saved, tensor) in named.items()
    }
    wants.make_together(view.together)
    arrivals = wants.arrivals()
    return Match(arrivals.destinations, result, arrivals.copy, lambda: result)


def _match_all(manifest: Manifest, arrivals: Arrivals, left_out: tuple[str, ...]) -> Match:
    """All there is: the state as it was saved, if fastload saved it."""

    def restore() -> Any:
        if manifest.structure is None:
            return arrivals.new
        return decode_state(manifest.structure, StateDecoder(arrivals.new, arrivals.exact))

    return Match(arrivals.destinations, arrivals.new, arrivals.copy, restore, left_out)


@torch.no_grad()  # else each look at a DTensor turns it off and on
def _match_into(
    manifest: Manifest,
    pairs: Pairs,
    selection: Selection | None,
    wants: Wants,
    device: torch.device,
    dtype: torch.dtype | None,
    strict: bool,
    view: OwnView,
    group: Group,
) -> Match:
    """What there is already, filled."""
    lonely, left = pairs.lonely, pairs.left
    missing, absent, unexpected = pairs.missing, pairs.absent, list(pairs.left_values)
    if selection is not None:
        _narrow(pairs, selection)
        lonely = [(name, leaf) for name, leaf in lonely if selection(name)]
        left = [saved for saved in left if selection.has(saved)]
        missing, absent, unexpected = [name for name in missing if selection(name)], [], []
        missing += [name for name in selection.absent if name not in {name for name, _ in lonely}]
    _keep_unfilled_that_matter(pairs, in_parts=selection is not None)
    loaded = {identity(leaf.tensor) for _, leaf in pairs.tensors} if lonely else set()
    lacking = [name for name, leaf in lonely if identity(leaf.tensor) not in loaded]
    surplus = [saved.own_name for saved in left]
    renamed = find_renamed(surplus, lacking) if lacking and surplus else None
    is_elsewhere = bool(lacking and surplus and pairs.has_no_tensors) or (
        renamed is not None and renamed.is_wrapper
    )
    has_to_fit = strict or is_elsewhere
    advice = _advice(pairs, renamed, unexpected)
    sharded = {
        saved.stored: (saved, like) for part in pairs.parts for saved, like in sharded_state(part, manifest)
    }
    mismatched = [
        *pairs.wrong,
        *(line for saved, like in sharded.values() for line in group.misfits(saved.own_name, like)),
        *(line for part in pairs.parts for line in optimizer_misfits(part)),
        *(
            line
            for saved, leaf in pairs.tensors
            if (line := misfit(manifest, saved, leaf.tensor, dtype, group))
        ),
    ]
    unfilled = [name for module in pairs.unfilled for name in module.certain]
    # What is unexpected, and nothing else, may be what other ranks want.
    is_unfit = bool(mismatched or unfilled or (has_to_fit and (lacking or missing or absent)))
    raise_mismatch(
        manifest.url,
        missing=[*lacking, *missing] if has_to_fit else (),
        absent=absent if has_to_fit else (),
        unexpected=[*surplus, *unexpected] if has_to_fit and is_unfit else (),
        mismatched=mismatched,
        unfilled=unfilled,
        advice=advice,
    )
    shards = {name: wants.make_like(saved, like) for name, (saved, like) in sharded.items()}
    restorer = Restorer(manifest.url, strict and selection is None, pairs, shards)
    for saved, exact in restorer.wanted():
        wants.make(saved, exact=exact)
    replaced = _replace_meta(pairs, device)
    named: dict[str, Tensor] = {}
    for saved, leaf in pairs.tensors:
        tensor = replaced.get(id(leaf.tensor), (leaf.tensor, ()))[0]
        wants.fill(saved, tensor)
        named[saved.own_name] = tensor
    others = wants.make_together(view.together)
    arrivals = wants.arrivals()
    for name, tensor in chain(arrivals.new.items(), shards.items()):
        if name not in others and name not in view.together:
            named.setdefault(name, tensor)

    places = [(place, tensor) for tensor, leaves in replaced.values() for place in leaves]

    def attach() -> None:
        arrivals.copy()
        for place, tensor in places:
            place.container[place.key] = tensor

    def restore() -> dict[str, Tensor]:
        restorer.run(arrivals)
        return named

    return Match(
        arrivals.destinations,
        named,
        attach,
        restore,
        left_out=tuple(pairs.elsewhere),
        calls=pairs.hold_more_than_tensors
        or not all(isinstance(place.container, dict | list) for place, _ in places),
        surplus=(*surplus, *unexpected) if strict else (),
        advice=advice,
        url=manifest.url,
    )


def _advice(pairs: Pairs, renamed: Renamed | None, unexpected: Sequence[str]) -> str:
    """Says what to do if names do not fit."""
    if renamed is not None:
        return renamed._replace(is_everything=renamed.is_everything and not unexpected).advice()
    if pairs.has_no_tensors:
        return "no tensor of into= is in the checkpoint"
    return _LEAVE_OUT


def _keep_unfilled_that_matter(pairs: Pairs, *, in_parts: bool) -> None:
    if not pairs.unfilled:
        return
    filled = {id(leaf.tensor) for _, leaf in pairs.tensors}
    filled |= {id(one.own[name].tensor) for one in pairs.handovers for name in one.derived}
    pairs.unfilled = [module for module in pairs.unfilled if module.matters(filled, in_parts=in_parts)]


def _replace_meta(pairs: Pairs, device: torch.device) -> dict[int, tuple[Tensor, list[Leaf]]]:
    """Returns real tensors for the meta tensors that are to be filled, and where they belong.

    Raises:
        OptionError: Nothing can be put there.
    """
    derived = [handover.own[name] for handover in pairs.handovers for name in handover.derived]
    real: dict[int, tuple[Tensor, list[Leaf]]] = {}
    for leaf in (*(leaf for _, leaf in pairs.tensors), *derived):
        if leaf.tensor.is_meta and id(leaf.tensor) not in real:
            real[id(leaf.tensor)] = materialize(leaf.tensor, device), []
    for leaf in derived:
        if id(leaf.tensor) in real:
            real[id(leaf.tensor)][0].detach().zero_()  # what no hook fills is not to be just anything
    for leaf in (*(leaf for _, leaf in pairs.tensors), *(leaf for _, leaf in pairs.lonely), *derived):
        if id(leaf.tensor) not in real:
            continue
        if not hasattr(leaf.container, "__setitem__"):
            kind = type(leaf.container).__name__
            raise OptionError(f"into= has a meta tensor in a {kind}: it cannot be replaced")
        real[id(leaf.tensor)][1].append(leaf)
    return real


def _narrow(pairs: Pairs, selection: Selection) -> None:
    """Leaves out what is not selected. Whatever takes several tensors gets all of them, or none."""

    def narrowed(value: Value | Remade, where: str) -> Any:
        if isinstance(value, Remade):
            changes = {index: narrowed(change, where) for index, change in value.changes.items()}
            changes = {index: change for index, change in changes.items() if change is not None}
            return value._replace(changes=changes) if changes else None
        picked = [selection.has(saved) for saved in value.leaves if not saved.is_text]
        if any(picked) and not all(picked):
            pairs.wrong.append(f"{where}: names= selects some of its tensors only")
        return value if any(picked) else None

    pairs.tensors = [(saved, leaf) for saved, leaf in pairs.tensors if selection.has(saved)]
    pairs.parts = [part for part in pairs.parts if narrowed(part.value, part.where) is not None]
    puts = [put._replace(value=narrowed(put.value, f"into=: {put.key!r}")) for put in pairs.puts]
    pairs.puts = [put for put in puts if put.value is not None]
    kept = {id(leaf) for _, leaf in pairs.tensors}
    handovers = []
    for handover in pairs.handovers:
        given = {
            name: one
            for name, one in handover.given.items()
            if (id(one) in kept if isinstance(one, Leaf) else narrowed(one, f"{handover.where}: {name}"))
        }
        if given:
            handovers.append(handover._replace(given=given))
    pairs.handovers = handovers


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
