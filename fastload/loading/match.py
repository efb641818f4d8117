"""Which tensors are wanted, and where they go: the checkpoint's names × ``names=`` × ``into=``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastload.errors import OptionError
from fastload.formats.decoder import StateDecoder, decode_state
from fastload.formats.manifest import Manifest
from fastload.formats.names import OWN_STEM
from fastload.formats.state import OwnView, SavedTensor, leaves, own_view
from fastload.geometry.dtensors import Group
from fastload.loading.mismatch import Renamed, find_renamed, misfit, raise_mismatch
from fastload.loading.modules import Leaf
from fastload.loading.optimizers import optimizer_misfits, sharded_state
from fastload.loading.pair import pair
from fastload.loading.pairs import Pairs, Remade, Value
from fastload.loading.place import Destination
from fastload.loading.restore import Restorer
from fastload.loading.selection import Selection, catalogue
from fastload.loading.wants import Arrivals, Wants, identity, materialize

if TYPE_CHECKING:
    from fastload.loading.outbox import Outbox

__all__ = ["Match", "match"]

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
        outbox: What tensors are handed out of as they come; `destinations` then have no memory. None if all
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
    outbox: Outbox | None = None

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
