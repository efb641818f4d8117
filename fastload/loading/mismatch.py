"""What of a checkpoint does not fit ``into=``, tensors and names, and the error that says what to do.

Names may differ only in that one side has a prefix, or a part, more. Trainings save models below a key,
``DistributedDataParallel`` and ``torch.compile`` put a name of theirs in front of all others.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastload.errors import ManifestError, MismatchError
from fastload.formats.dtypes import DTYPES, torch_spec
from fastload.formats.manifest import Manifest
from fastload.formats.state import OWN_PREFIX, SavedTensor, leaves
from fastload.geometry.dtensors import Group, local_of
from fastload.loading.place import castable, entry_of, target_dtype

_GLOB = re.compile(r"[*?\[]")


def catalogue(manifest: Manifest) -> dict[str, SavedTensor]:
    """Returns what was saved by all of its names: those of tied tensors, too, each name once."""
    catalogue = {entry.name: SavedTensor(entry.name, entry.name) for entry in manifest.tensors}
    if manifest.structure is not None:
        seen: set[str] = set()
        for saved in (saved for saved in leaves(manifest.structure) if not saved.is_text):
            if saved.stored not in seen:  # the first one it is stored for: it may be stored as name~2
                catalogue[saved.stored] = saved
            seen.add(saved.stored)
            catalogue.setdefault(saved.name, saved)
    return catalogue


def _pattern(glob: str, has_own: bool) -> re.Pattern[str]:
    """Compiles a pattern; it matches names of the ranks' own tensors only if it begins like these."""
    leaves_out_own = has_own and not glob.startswith(OWN_PREFIX)
    return re.compile((f"(?!{OWN_PREFIX})" if leaves_out_own else "") + fnmatch.translate(glob))


class Selection:
    """What ``names=`` selects; see `fastload.load`."""

    def __init__(
        self, names: Sequence[str] | str, catalogue: Mapping[str, SavedTensor], has_own: bool
    ) -> None:
        wanted = [names] if isinstance(names, str) else list(names)
        known = catalogue.keys()
        # What looks like a pattern is a name first.
        self._exact = {name for name in wanted if name in known or not _GLOB.search(name)}
        self._patterns = {name: _pattern(name, has_own).match for name in wanted if name not in self._exact}
        self.chosen = {name: saved for name, saved in catalogue.items() if self(name)}
        self.absent = [
            name
            for name in dict.fromkeys(wanted)
            if not (name in known or (name in self._patterns and any(map(self._patterns[name], known))))
        ]

    def __call__(self, name: str) -> bool:
        """Whether it selects a name."""
        return name in self._exact or any(fits(name) for fits in self._patterns.values())

    def has(self, saved: SavedTensor) -> bool:
        """Whether it selects a tensor, by either of its names."""
        return self(saved.own_name) or self(saved.name)


FOUND_LATE = "found after its tensors were loaded: into= is undefined"
_HOW_TO_FILL = (
    "make such buffers before the load: model.to_empty(device=...), then the model's own initialization "
    '(transformers: model.init_weights()); see "DDP, FSDP and tensor parallelism" in docs/loading.md'
)

_PLAIN = (Tensor, nn.Parameter)
_WRAPPERS = {"module", "_orig_mod"}
_MOST_NAMES = 5_000  # that are looked at: enough to tell, and milliseconds
_MOST_PARTS = 12


def raise_mismatch(
    url: str,
    *,
    missing: Sequence[str] = (),
    absent: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    mismatched: Sequence[str] = (),
    unfilled: Sequence[str] = (),
    advice: str = "",
    is_late: bool = False,
) -> None:
    """Raises if there is anything that does not fit.

    Args:
        url: Of the checkpoint.
        missing: Names that it lacks.
        absent: Places in ``into=`` that it has nothing for.
        unexpected: Names that ``into=`` lacks.
        mismatched: A line for each of those that are different on the two sides.
        unfilled: Names of buffers on the meta device that it cannot fill.
        advice: What to do if only names do not fit.
        is_late: Whether data have moved already.

    Raises:
        MismatchError: There is.
    """
    if not (missing or absent or unexpected or mismatched or unfilled):
        return
    lines = [f"the checkpoint at {url} does not fit:"]
    lines += [f"  missing in the checkpoint: {name}" for name in missing]
    lines += [f"  {place} is missing in the checkpoint" for place in absent]
    lines += [f"  unexpected in the checkpoint: {name}" for name in unexpected]
    lines += [f"  {line}" for line in mismatched]
    lines += [f"  {name} is on the meta device, and no checkpoint holds it" for name in unfilled]
    if advice and not mismatched and (missing or absent or unexpected):
        lines.append(advice)
    if unfilled:
        lines.append(_HOW_TO_FILL)
    if is_late:
        lines.append(FOUND_LATE)
    raise MismatchError(
        "\n".join(lines), (*missing, *absent, *unfilled), tuple(unexpected), tuple(mismatched)
    )


def misfit(
    manifest: Manifest, saved: SavedTensor, tensor: Tensor, dtype: torch.dtype | None, group: Group
) -> str:
    """Says why a tensor cannot take one that was saved; empty if it can."""
    entry = manifest.by_name.get(saved.stored)
    if entry is not None and dtype is None and not saved.dtype and type(tensor) in _PLAIN:
        stored = None if entry.dtype == "F4" else DTYPES[entry.dtype][1]
        is_dense = tensor.layout == torch.strided and tensor.is_contiguous()
        if tensor.dtype is stored and tensor.shape == entry.shape and is_dense:
            return ""  # said here, too, since it is so of nearly all of very many
    return next(_misfits(manifest, saved, tensor, dtype, group), "")


def _misfits(
    manifest: Manifest, saved: SavedTensor, tensor: Tensor, dtype: torch.dtype | None, group: Group
) -> Iterator[str]:
    name = saved.own_name
    try:
        stored, shape = torch_spec(entry_of(manifest, saved))
    except ManifestError as error:
        yield str(error)
        return
    target = target_dtype(stored, dtype)
    if saved.is_complex128:
        if stored is not torch.float64 or shape[-1:] != (2,):
            yield f"{name}: the checkpoint has {stored} {list(shape)} where complex numbers are to be"
        stored, target, shape = torch.complex128, torch.complex128, shape[:-1]
    yield from group.misfits(name, tensor)
    if tensor.layout != torch.strided:
        yield f"{name}: into= has layout {tensor.layout}"
    if tuple(tensor.shape) != shape:
        yield f"{name}: shape {list(shape)} in the checkpoint, {list(tensor.shape)} in into="
    if tensor.dtype != target:
        cast = f" cast to {target}" if target != stored else ""
        yield f"{name}: dtype {stored}{cast} in the checkpoint, {tensor.dtype} in into= (dtype= casts)"
    if overlaps(local_of(tensor)):
        yield f"{name}: into= has a tensor whose elements share memory (expand, as_strided, unfold)"
    if not castable(stored, target):
        yield f"{name}: torch cannot cast {stored} to {target}"


def overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory: a dimension does not step over all that the smaller ones span."""
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= span:
                return tensor.numel() > 0
            span += (size - 1) * stride
    return False


class Renamed(NamedTuple):
    """What one side has more in its names.

    Attributes:
        part: Which ends with a dot.
        head: What is in front of it.
        is_saved: Whether it is the checkpoint's names that have it.
        longer: A name that has it.
        is_everything: Whether all names of the one side are those of the other with it.
    """

    part: str
    head: str
    is_saved: bool
    longer: str
    is_everything: bool

    @property
    def is_wrapper(self) -> bool:
        """Whether it is nothing but what wrappers of modules put there."""
        return _WRAPPERS.issuperset(self.part.removesuffix(".").split("."))

    def advice(self) -> str:
        """Says how the names differ, and what to do."""
        side = "the checkpoint has" if self.is_saved else "into= has"
        path = self.part.removesuffix(".")
        if self.is_saved and not self.head:
            keys = path.split(".")
            into = "".join(f"{{{key!r}: " for key in keys) + "model" + "}" * len(keys)
            rest = "" if self.is_everything else ", strict=False"
            return f"{side} {self.part!r} in front of these names: pass into={into}{rest}"
        shorter = self.head + self.longer[len(self.head) + len(self.part) :]
        saved, own = (self.longer, shorter) if self.is_saved else (shorter, self.longer)
        what = f"{side} {self.part!r} in its names ({saved!r} there, {own!r} in into=)"
        return what if self.is_saved else f"{what}: pass what is inside of it, such as model.{path}"


def find_renamed(saved: Sequence[str], own: Sequence[str]) -> Renamed | None:
    """Returns how names that only one side has differ from those that only the other has; None if otherwise.

    Args:
        saved: Of the checkpoint, and not in ``into=``.
        own: The other way round.
    """
    counts: Counter[tuple[bool, str, str]] = Counter()
    examples: dict[tuple[bool, str, str], str] = {}
    for is_saved, names, others in (True, saved, set(own)), (False, own, set(saved)):
        for name in names[:: 1 + len(names) // _MOST_NAMES]:
            for head, part, tail in _divisions(name):
                if head + tail in others:
                    counts[is_saved, head, part] += 1
                    examples.setdefault((is_saved, head, part), name)
    found = [
        Renamed(part, head, is_saved, examples[is_saved, head, part], False)
        for is_saved, head, part in counts
    ]
    if not found:
        return None
    best = max(found, key=lambda one: (one.is_wrapper, counts[one.is_saved, one.head, one.part]))
    all_names = {best.head + best.part + name.removeprefix(best.head) for name in own}
    return best._replace(is_everything=best.is_saved and all_names == set(saved))


def _divisions(name: str) -> Iterator[tuple[str, str, str]]:
    """Yields all ways to take some parts out of a name, such as ``b.`` out of ``a.b.c``."""
    starts = [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")][:_MOST_PARTS]
    for begin, end in combinations(starts, 2):
        yield name[:begin], name[begin:end], name[end:]
