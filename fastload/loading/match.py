"""Matches a request with a checkpoint: a destination for every wanted tensor, before any data move."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from operator import index
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fastload.errors import OptionError
from fastload.formats.decoder import StateDecoder, decode_state
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.state import SavedTensor, action_at, leaves, raise_refused
from fastload.geometry.box import Box, box_text
from fastload.geometry.dtensors import DTensorRanks
from fastload.loading.aliases import AliasedMemory
from fastload.loading.into import (
    Differences,
    NewTuple,
    Pairs,
    SavedValue,
    optimizer_misfits,
    pair,
    sharded_state,
)
from fastload.loading.mismatch import (
    Renamed,
    advice_for_transformers,
    find_renamed,
    misfit,
    overlaps,
    raise_mismatch,
)
from fastload.loading.modules import TensorSlot
from fastload.loading.selection import RankView, Selection
from fastload.loading.targets import (
    Destination,
    DestinationBuilder,
    TargetBuilder,
    device_of,
    identity,
    materialize,
    parse_dtype,
    target_device,
)
from fastload.options import PerRankMismatch
from fastload.transfer.buffers import Writer

# Elements that mean nothing without their scales, if a scale goes with them; and what libraries call these.
_QUANTIZED = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "I8", "U8", "I32"})
_SCALE_ENDS = ("_scale_inv", "_scale", "_scales", "_scale_2", ".absmax", ".scale")
_SCALE_NAMES = ("scale", "scales", "scale_weight", "weight_scale", "SCB")
_LEAVE_OUT = "strict=False leaves these out, and loads the rest"
_SCALE = (
    "some of these are scales of quantised weights: LoadOptions(dequantize=True) loads the weights with them"
)


@dataclass(frozen=True)
class Surplus:
    """What the checkpoint has and this rank does not want, if some rank has to want it.

    Attributes:
        names: The names.
        advice: What to do if no rank wants them.
    """

    names: tuple[str, ...] = ()
    advice: str = ""

    def raise_unwanted(self, url: str, unwanted: Sequence[str]) -> None:
        """Raises if the checkpoint has anything that no rank wants and some rank has to.

        Args:
            url: The checkpoint.
            unwanted: Names that are surplus on all ranks.

        Raises:
            MismatchError: It has; lists them.
        """
        is_all = len(unwanted) == len(self.names)
        is_valid = is_all or self.advice == _SCALE
        raise_mismatch(url, unexpected=unwanted, advice=self.advice if is_valid else _LEAVE_OUT)


@dataclass(frozen=True)
class Match:
    """The destinations of a load on one rank.

    Attributes:
        destinations: In the order of `Manifest.extents`.
        device: The first device of the destinations that is not the CPU; else the device of new tensors.
        finish: Called once all bytes are read: copies tensors that are wanted twice, puts values and new
            tensors where they belong, and returns the result of the load.
        calls: Whether `finish` may fail on this rank alone: it calls the caller's code, or compares values.
        is_in_place: Whether all is done once the destinations have their bytes: `finish` changes nothing.
        left_out: What is not loaded although it is wanted; see `LoadReport`.
        surplus: What the checkpoint has beyond that.
        writer: Takes the bytes into a buffer, if `destinations` have no memory; None for a load into tensors
            that all exist at its end.
        is_mapped: Whether tensors are views of mapped files, so that no bytes are read.
        bytes_patched: Bytes of tensors that `finish` patches; see `fastload.ext.deltas.patch`.
        aliases: Memory of several tensors of the checkpoint, with what is written there.
        detour: Why data must not go from device to device; empty if they may.
    """

    destinations: list[Destination]
    device: torch.device
    finish: Callable[[], Any]
    calls: bool = False
    is_in_place: bool = False
    left_out: tuple[str, ...] = ()
    surplus: Surplus = Surplus()
    writer: Writer | None = None
    is_mapped: bool = False
    bytes_patched: int = 0
    aliases: Sequence[AliasedMemory] = ()
    detour: str = ""

    @property
    def num_tensors(self) -> int:
        """Number of tensors of the checkpoint that are loaded, in full or in part."""
        return len({destination.entry.name for destination in self.destinations})


class Request(Protocol):
    """A request of one rank, made by one of the methods of `Checkpoint`.

    Attributes:
        dtype: The dtype that floating point tensors are cast to, or None.
        is_same: Whether all ranks have to request the same.
    """

    @property
    def dtype(self) -> torch.dtype | str | None: ...  # noqa: D102
    @property
    def is_same(self) -> bool: ...  # noqa: D102

    def match(self, manifest: Manifest, rank: int, size: int, members: Sequence[int] | None) -> Match:
        """Finds the destinations; see `LoadRequest.match`."""


@dataclass(frozen=True)
class LoadRequest:
    """The arguments of `fastload.load`."""

    into: Any = None
    device: torch.device | str | None = None
    dtype: torch.dtype | str | None = None
    names: Sequence[str] | str | None = None
    strict: bool = True
    per_rank_mismatch: PerRankMismatch = "error"

    @property
    def is_same(self) -> bool:
        """Whether all ranks have to request the same."""
        return self.into is None

    def match(
        self, manifest: Manifest, rank: int = 0, size: int = 1, members: Sequence[int] | None = None
    ) -> Match:
        """Finds a destination for every wanted tensor.

        Args:
            manifest: The checkpoint.
            rank: This rank.
            size: Number of ranks.
            members: Their ranks in torch's default group; None without torch.distributed.

        Raises:
            MismatchError: Something does not fit; lists everything. Names that are only unexpected are left
                to `Surplus.raise_unwanted`, as other ranks may want them.
            OptionError: An argument cannot be used.
            ManifestError: The checkpoint is malformed, or what is wanted of it cannot be loaded.
            MemoryError: The destinations do not fit into memory.
        """
        device, dtype = target_device(self.device), parse_dtype(self.dtype)
        on_mismatch = "error" if self.names is not None else self.per_rank_mismatch
        view = RankView.of(manifest, rank, size, on_mismatch)
        selection = None if self.names is None else view.select(self.names)
        if self.strict and selection is None:
            raise_refused(manifest.url, view.own.refused)
        targets = TargetBuilder(view.manifest, device, dtype)
        if self.into is not None:
            return _match_into(self, targets, view, selection, dtype, DTensorRanks(members), size)
        if selection is not None:
            chosen = selection.chosen
            stored = {saved.stored for saved in chosen.values()}
            lines = (
                _unscaled(view.manifest, dict.fromkeys(stored, dtype), stored) if dtype is not None else {}
            )
            raise_mismatch(manifest.url, missing=selection.absent, mismatched=list(lines.values()))
            return _match_names(chosen, targets, view)
        raise_mismatch(manifest.url, mismatched=_elsewhere(view, size, on_mismatch))
        return _match_all(targets, view, dtype)


def _elsewhere(
    view: RankView, size: int, on_mismatch: PerRankMismatch, wanted: Sequence[str] | None = None
) -> list[str]:
    """Returns a line for each value that is an error, at or below the wanted places."""
    here = f"{size} ranks" if size > 1 else "one rank"
    advice = 'LoadOptions(per_rank_mismatch="skip") leaves it out'
    lines = []
    for name, num_saved in view.own.elsewhere:
        if action_at(name, on_mismatch) == "skip":
            continue
        if wanted is None or any(f"{name}.".startswith(f"{place}.") for place in wanted):
            saved = f"each of {num_saved} ranks" if num_saved > 1 else "one rank"
            lines.append(f"{name}: saved for {saved} (fastload.PerRank), to be loaded by {here}: {advice}")
    return lines


def _unscaled(manifest: Manifest, wanted: Mapping[str, torch.dtype], loaded: Set[str]) -> dict[str, str]:
    """Returns a line for each tensor of quantised elements that would be cast without its scale, by name.

    Args:
        manifest: The checkpoint.
        wanted: By stored name, the dtypes that tensors are to have.
        loaded: The stored names of all that is loaded.
    """
    known = manifest.by_name
    lines = {
        name: unscaled(known[name], dtype, known.keys(), loaded)
        for name, dtype in wanted.items()
        if name in known
    }
    return {name: line for name, line in lines.items() if line}


def _match_names(chosen: Mapping[str, SavedTensor], targets: TargetBuilder, view: RankView) -> Match:
    """Matches names: the result is new tensors by name."""
    named = {
        name: (saved, targets.make(saved.stored, exact=saved.is_complex128)) for name, saved in chosen.items()
    }
    targets.make_together(view.own.together)
    destinations = targets.build()

    def finish() -> dict[str, Tensor]:
        targets.copy()
        return {
            name: torch.view_as_complex(tensor) if saved.is_complex128 else tensor
            for name, (saved, tensor) in named.items()
        }

    return Match(destinations, targets.device, finish)


def _match_all(targets: TargetBuilder, view: RankView, dtype: torch.dtype | None) -> Match:
    """Matches the complete checkpoint: the result is the state as it was saved, or tensors by name."""
    structure = view.manifest.structure
    if structure is not None and dtype is not None:
        for saved in leaves(structure):
            targets.make(saved.stored, exact=saved.is_exact)
        targets.make_together(view.own.together)
    else:
        targets.make_all()
    destinations = targets.build()

    def finish() -> Any:
        targets.copy()
        if structure is None:
            return targets.new
        return decode_state(structure, StateDecoder(targets.new, targets.exact))

    calls = view.own.is_regrouped
    return Match(destinations, targets.device, finish, calls=calls, left_out=view.left_out)


@torch.no_grad()  # else each access to a DTensor turns it off and on
def _match_into(
    request: LoadRequest,
    targets: TargetBuilder,
    view: RankView,
    selection: Selection | None,
    dtype: torch.dtype | None,
    group: DTensorRanks,
    size: int,
) -> Match:
    """Matches ``into=``, whose tensors are loaded in place."""
    manifest = view.manifest
    pairs, differences = pair(request.into, manifest, has_gaps=view.has_gaps)
    if selection is not None:
        _narrow(pairs, differences, selection)
    _drop_irrelevant_buffers(pairs, in_parts=selection is not None)
    sharded = {
        saved.stored: (saved, like)
        for part in pairs.stateful
        for saved, like in sharded_state(part, manifest)
    }
    if selection is None:
        differences.mismatched += _elsewhere(view, size, request.per_rank_mismatch, differences.left_out)
    cast: Mapping[str, str] = {}
    if has_quantized(manifest):
        loaded = {saved.stored for saved, _ in (*pairs.tensors, *pairs.wanted(()))}
        cast = _unscaled(manifest, {saved.stored: slot.tensor.dtype for saved, slot in pairs.tensors}, loaded)
    differences.mismatched += [
        *(line for saved, like in sharded.values() for line in group.misfits(saved.own_name, like)),
        *(line for part in pairs.stateful for line in optimizer_misfits(part)),
        *(
            line
            for saved, slot in pairs.tensors
            if (line := cast.get(saved.stored) or misfit(manifest, saved, slot.tensor, dtype, group))
        ),
    ]
    surplus = _compare_names(request.into, pairs, differences, selection, manifest, strict=request.strict)
    shards = {name: targets.make_like(saved, like) for name, (saved, like) in sharded.items()}
    is_strict = request.strict and selection is None and not differences.left_out
    for saved, exact in pairs.wanted(shards):
        targets.make(saved.stored, exact=exact)
    unmatched = [slot for _, slot in differences.unmatched]
    replaced = _replace_meta(pairs, unmatched, targets.device)
    in_place = [(saved, replaced.get(id(slot.tensor), (slot.tensor, ()))[0]) for saved, slot in pairs.tensors]
    for saved, tensor in in_place:
        targets.fill(saved, tensor)
    others = targets.make_together(view.own.together)
    destinations = targets.build()
    filled = {saved.own_name for saved, _ in in_place}
    made = [
        (name, name, tensor)
        for name, tensor in chain(targets.new.items(), shards.items())
        if name not in others and name not in view.own.together and name not in filled
    ]
    places = {entry.name: place for place, entry in enumerate(manifest.tensors)}
    by_place = sorted(
        [*made, *((saved.stored, saved.own_name, tensor) for saved, tensor in in_place)],
        key=lambda named: places[named[0]],
    )
    named = {name: tensor for _, name, tensor in by_place}
    slots = [(slot, tensor) for tensor, slots in replaced.values() for slot in slots]

    def finish() -> dict[str, Tensor]:
        targets.copy()
        for slot, tensor in slots:
            slot.container[slot.key] = tensor
        pairs.restore(manifest.url, targets, shards, strict=is_strict)
        return named

    is_plain = all(isinstance(slot.container, dict | list) for slot, _ in slots)
    calls = pairs.hold_more_than_tensors or not is_plain or targets.may_differ
    return Match(
        destinations,
        device_of(destinations, targets.device),
        finish,
        calls=calls,
        is_in_place=not (
            calls or slots or targets.copies or targets.decodings or targets.new or targets.aliases
        ),
        left_out=tuple(differences.left_out),
        surplus=surplus if request.strict else Surplus(),
        aliases=targets.aliases,
    )


def _compare_names(
    into: Any,
    pairs: Pairs,
    differences: Differences,
    selection: Selection | None,
    manifest: Manifest,
    *,
    strict: bool,
) -> Surplus:
    """Raises if `into` and the checkpoint do not fit each other; returns what this rank does not want.

    Raises:
        MismatchError: They do not fit. Names that are only unexpected, and nothing else, are no reason: other
            ranks may want them.
    """
    unmatched, missing, absent = differences.unmatched, differences.missing, differences.absent
    unexpected, values = differences.unexpected, list(differences.unexpected_values)
    if selection is not None:
        unmatched = [(name, slot) for name, slot in unmatched if selection(name)]
        missing = [name for name in missing if selection(name)]
        missing += [name for name in selection.absent if name not in {name for name, _ in unmatched}]
        absent, unexpected, values = [], [saved for saved in unexpected if selection.has(saved)], []
    loaded = {identity(slot.tensor) for _, slot in pairs.tensors} if unmatched else set()
    lacking = [name for name, slot in unmatched if identity(slot.tensor) not in loaded]
    surplus = [saved.own_name for saved in unexpected]
    renamed = find_renamed(surplus, lacking) if lacking and surplus else None
    is_elsewhere = bool(lacking and surplus and pairs.has_no_tensors) or (
        renamed is not None and renamed.is_wrapper
    )
    has_to_fit = strict or is_elsewhere
    advice = ""
    if lacking and not (renamed and renamed.is_enough):
        advice = advice_for_transformers(into, guesses=not pairs.has_no_tensors)
    advice = advice or _advice(pairs, renamed, values)
    if advice == _LEAVE_OUT and has_scales(manifest, surplus):
        advice = _SCALE
    unfilled = [name for module in pairs.unfilled for name in module.certain]
    is_unfit = bool(differences.mismatched or unfilled or (has_to_fit and (lacking or missing or absent)))
    raise_mismatch(
        manifest.url,
        missing=[*lacking, *missing] if has_to_fit else (),
        absent=absent if has_to_fit else (),
        unexpected=[*surplus, *values] if has_to_fit and is_unfit else (),
        mismatched=differences.mismatched,
        unfilled=unfilled,
        advice=advice,
    )
    return Surplus((*surplus, *values), advice)


def _advice(pairs: Pairs, renamed: Renamed | None, unexpected_values: Sequence[str]) -> str:
    if renamed is not None:
        return renamed._replace(is_everything=renamed.is_everything and not unexpected_values).advice()
    if pairs.has_no_tensors:
        return "no tensor of into= is in the checkpoint"
    return _LEAVE_OUT


def _drop_irrelevant_buffers(pairs: Pairs, *, in_parts: bool) -> None:
    """Ignores unfilled buffers of modules that this load does not complete."""
    if not pairs.unfilled:
        return
    filled = {id(slot.tensor) for _, slot in pairs.tensors}
    filled |= {id(one.tensors[name].tensor) for one in pairs.modules for name in one.derived}
    pairs.unfilled = [module for module in pairs.unfilled if module.matters(filled, in_parts=in_parts)]


def _replace_meta(
    pairs: Pairs, unmatched: Sequence[TensorSlot], device: torch.device
) -> dict[int, tuple[Tensor, list[TensorSlot]]]:
    """Returns, by id of the meta tensors that are loaded, real tensors and the slots to put them in.

    Some of the unmatched slots have one of these tensors, too, under another name.

    Raises:
        OptionError: A slot cannot be assigned.
    """
    loaded = [slot for _, slot in pairs.tensors]
    derived = [one.tensors[name] for one in pairs.modules for name in one.derived]
    real: dict[int, tuple[Tensor, list[TensorSlot]]] = {}
    for slot in (*loaded, *derived):
        if slot.tensor.is_meta and id(slot.tensor) not in real:
            real[id(slot.tensor)] = materialize(slot.tensor, device), []
    for slot in derived:
        if id(slot.tensor) in real:
            real[id(slot.tensor)][0].detach().zero_()  # a defined value, even if no hook fills it
    for slot in (*loaded, *unmatched, *derived):
        if id(slot.tensor) not in real:
            continue
        if not hasattr(slot.container, "__setitem__"):
            kind = type(slot.container).__name__
            raise OptionError(f"into= has a meta tensor in a {kind}: it cannot be replaced")
        real[id(slot.tensor)][1].append(slot)
    return real


def _narrow(pairs: Pairs, differences: Differences, selection: Selection) -> None:
    """Drops the pairs that are not selected. A value is selected with all of its tensors, or not at all."""

    def narrowed(value: SavedValue | NewTuple, where: str) -> Any:
        if isinstance(value, NewTuple):
            changes = {index: narrowed(change, where) for index, change in value.changes.items()}
            changes = {index: change for index, change in changes.items() if change is not None}
            return value._replace(changes=changes) if changes else None
        picked = [selection.has(saved) for saved in value.leaves if not saved.is_text]
        if any(picked) and not all(picked):
            differences.mismatched.append(f"{where}: names= selects some of its tensors only")
        return value if any(picked) else None

    pairs.tensors = [(saved, slot) for saved, slot in pairs.tensors if selection.has(saved)]
    pairs.stateful = [part for part in pairs.stateful if narrowed(part.value, part.where) is not None]
    assignments = [
        one._replace(value=narrowed(one.value, f"into=: {one.key!r}")) for one in pairs.assignments
    ]
    pairs.assignments = [one for one in assignments if one.value is not None]
    loaded = {id(slot) for _, slot in pairs.tensors}
    modules = []
    for module in pairs.modules:
        given = {
            name: one
            for name, one in module.given.items()
            if (
                id(one) in loaded if isinstance(one, TensorSlot) else narrowed(one, f"{module.where}: {name}")
            )
        }
        if given:
            modules.append(module._replace(given=given))
    pairs.modules = modules


# Boxes of tensors, for plugins

BoxesByName = Mapping[str, Sequence[tuple[Box, Tensor]]]

_CPU = torch.device("cpu")
_IN_BACKGROUND = "boxes arrive while the caller may start collectives of its own between the devices"


@dataclass(frozen=True)
class BoxRequest:
    """The arguments of `Checkpoint.read`.

    Attributes:
        boxes: By name of the tensor, boxes of it, each with the tensor to fill.
        cast: Whether these tensors may have other dtypes.
        in_background: Whether the caller may start collectives between devices meanwhile.
    """

    boxes: BoxesByName
    cast: bool = False
    in_background: bool = False
    dtype: ClassVar[None] = None
    is_same: ClassVar[bool] = False

    def match(
        self, manifest: Manifest, rank: int = 0, size: int = 1, members: Sequence[int] | None = None
    ) -> Match:
        """Finds the destinations; see `LoadRequest.match`.

        Raises:
            MismatchError: Something does not fit; lists everything.
            OptionError: `boxes` is of another type.
        """
        _require_pairs(self.boxes)
        boxes = {
            name: [(plain_box(name, box), tensor) for box, tensor in of_name]
            for name, of_name in self.boxes.items()
        }
        compare_boxes(manifest, boxes, cast=self.cast)
        dtypes = {name: tensor.dtype for name, of_name in boxes.items() for _, tensor in of_name}
        lines = _unscaled(manifest, dtypes, boxes.keys()) if self.cast else {}
        raise_mismatch(manifest.url, mismatched=list(lines.values()))
        wanted = {
            name: sorted((pair for pair in of_name if pair[0].numel), key=lambda pair: pair[0].offsets)
            for name, of_name in boxes.items()
        }
        builder = DestinationBuilder(manifest)
        for entry in manifest.tensors:
            of_entry = wanted.get(entry.name, ())
            for box, tensor in of_entry:
                stored, shape = torch_spec(entry)
                # A complete tensor is one range. If all ranks want complete ones, the load is a common one.
                is_all = len(of_entry) == 1 and box == Box.whole(shape)
                builder.add(entry, stored, tensor, None if is_all else box)
        destinations = builder.build()
        return Match(
            destinations,
            device_of(destinations, _CPU),
            builder.copy,
            calls=builder.may_differ,
            aliases=builder.aliases,
            detour=_IN_BACKGROUND if self.in_background else "",
        )


def compare_boxes(
    manifest: Manifest, boxes: Mapping[str, Sequence[tuple[Box, Tensor | None]]], *, cast: bool = False
) -> None:
    """Raises if boxes, with the tensors to fill if these exist, do not fit the checkpoint."""
    known = manifest.by_name
    raise_mismatch(
        manifest.url,
        missing=[name for name in boxes if name not in known],
        mismatched=[
            f"{name}: {problem}"
            for name, of_name in boxes.items()
            if name in known
            for box, tensor in of_name
            if (problem := next(_problems(known[name], box, tensor, cast), ""))
        ],
    )


def _require_pairs(boxes: BoxesByName) -> None:
    for of_name in boxes.values() if isinstance(boxes, Mapping) else [None]:
        if not (isinstance(of_name, list | tuple) and all(map(_is_pair, of_name))):
            raise OptionError("boxes= has to be a dict of lists of (Box, tensor), by name of the tensor")


def plain_box(name: str, box: Box) -> Box:
    """Returns a box of Python integers."""
    try:
        return Box(tuple(map(index, box.offsets)), tuple(map(index, box.sizes)))
    except TypeError:
        raise OptionError(f"boxes= has a box of {name} that is not made of integers: {box}") from None


def _is_pair(pair: object) -> bool:
    if not (isinstance(pair, tuple) and len(pair) == 2):
        return False
    return isinstance(pair[0], Box) and isinstance(pair[1], Tensor)


def _problems(entry: TensorEntry, box: Box, tensor: Tensor | None, cast: bool) -> Iterator[str]:
    stored, shape = torch_spec(entry)
    if not box.is_within(shape):
        yield f"{box_text(box)} is out of bounds for a tensor of shape {list(shape)}"
    if tensor is None:
        return
    if tuple(tensor.shape) != tuple(box.sizes):
        yield f"{box_text(box)} is to go into a tensor of shape {list(tensor.shape)}"
    if hasattr(tensor, "to_local") or tensor.layout != torch.strided or tensor.is_meta:
        yield f"{box_text(box)} is to go into a tensor that has no strided memory of its own"
    elif tensor.dtype != stored and not cast:
        yield f"dtype {stored} in the checkpoint, {tensor.dtype} in boxes="
    elif overlaps(tensor):
        yield "boxes= has a tensor whose elements share memory (expand, as_strided, unfold)"


def unscaled(entry: TensorEntry, target: torch.dtype, names: Collection[str], loaded: Set[str]) -> str:
    """Returns why quantised elements are not cast: their scales are not loaded. Empty if they may be.

    Args:
        entry: The tensor in the checkpoint.
        target: The dtype that it is to have.
        names: Names of all tensors of the checkpoint.
        loaded: Those that are loaded, too.
    """
    if entry.dtype not in _QUANTIZED or not target.is_floating_point:
        return ""
    if target == torch_spec(entry)[0]:
        return ""
    scales = [name for name in scales_of(entry.name) if name in names]
    if not scales or not loaded.isdisjoint(scales):
        return ""
    return (
        f"{entry.name}: quantised elements ({entry.dtype}), which {target} would have without their scale "
        f"{scales[0]}: LoadOptions(dequantize=True) scales them"
    )


def scales_of(name: str) -> Iterator[str]:
    """Yields the names that a scale of quantised elements may have."""
    base = name.removesuffix("_packed").removesuffix("_blocks")
    head, dot, last = base.rpartition(".")
    yield from (base + end for end in _SCALE_ENDS)
    if last in ("weight", "qweight"):
        yield from (f"{head}{dot}{word}" for word in _SCALE_NAMES)


def has_quantized(manifest: Manifest) -> bool:
    """Whether a checkpoint has elements that may need scales."""
    return any(entry.dtype in _QUANTIZED for entry in manifest.tensors)


def has_scales(manifest: Manifest, names: Sequence[str]) -> bool:
    """Whether some names are those of scales of quantised elements of a checkpoint."""
    quantized = (entry.name for entry in manifest.tensors if entry.dtype in _QUANTIZED) if names else ()
    return not {scale for name in quantized for scale in scales_of(name)}.isdisjoint(names)
