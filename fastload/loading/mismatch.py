"""Compares a checkpoint with ``into=``, and raises the error that lists the differences and what to do.

Names may differ by one more part on one side: training loops save models below a key, and
``DistributedDataParallel`` and ``torch.compile`` add a prefix.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastload.errors import ManifestError, MismatchError
from fastload.formats.dtypes import DTYPES, torch_spec
from fastload.formats.manifest import Manifest
from fastload.formats.state import SavedTensor
from fastload.geometry.dtensors import DTensorRanks, local_of, local_parts
from fastload.loading.aliases import FOUND_LATE
from fastload.loading.targets import castable, entry_of, target_dtype

_HOW_TO_FILL = (
    "make such buffers before the load: model.to_empty(device=...), then the model's own initialization "
    '(transformers: model.init_weights()); see "DDP, FSDP and tensor parallelism" in docs/loading.md'
)

_FROM_PRETRAINED = (
    "transformers renames, splits and merges weights of some models while it loads them: load {what} with "
    "fastload.integrations.transformers.from_pretrained"
)

_PLAIN = (Tensor, nn.Parameter)
_WRAPPERS = {"module", "_orig_mod"}
_MOST_NAMES = 5_000  # compared, which takes milliseconds
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
    """Raises if there is any difference.

    Args:
        url: The checkpoint.
        missing: Names that it lacks.
        absent: Places in ``into=`` that it lacks.
        unexpected: Names that ``into=`` lacks.
        mismatched: A line for each thing that differs between the two.
        unfilled: Names of buffers on the meta device that no checkpoint holds.
        advice: What to do if only names differ.
        is_late: Whether data have moved already.

    Raises:
        MismatchError: There is one; lists all of them.
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


def advice_for_transformers(into: Any, *, guesses: bool) -> str:
    """Returns what to do if weights of a model of transformers are missing; empty if ``into=`` is none.

    Imports nothing to find out.

    Args:
        into: The argument of the load.
        guesses: Whether a dict of tensors is taken for the state of such a model, if the program has any.
    """
    module = sys.modules.get("transformers.modeling_utils")
    model_class = getattr(module, "PreTrainedModel", None)
    if model_class is None:
        return ""
    parts = into.values() if isinstance(into, Mapping) else into if isinstance(into, list | tuple) else [into]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    if any(isinstance(submodule, model_class) for module in modules for submodule in module.modules()):
        return _FROM_PRETRAINED.format(what="this one")
    is_state = (
        guesses and isinstance(into, Mapping) and all(isinstance(part, Tensor) for part in into.values())
    )
    return _FROM_PRETRAINED.format(what="one of its models") if is_state else ""


def misfit(
    manifest: Manifest, saved: SavedTensor, tensor: Tensor, dtype: torch.dtype | None, group: DTensorRanks
) -> str:
    """Returns why a saved tensor does not fit a tensor of `into`; empty if it fits."""
    entry = manifest.by_name.get(saved.stored)
    if entry is not None and dtype is None and not saved.dtype and type(tensor) in _PLAIN:
        stored = None if entry.dtype == "F4" else DTYPES[entry.dtype][1]
        is_dense = tensor.layout == torch.strided and tensor.is_contiguous()
        if tensor.dtype is stored and tensor.shape == entry.shape and is_dense:
            return ""  # the fast path, for nearly all of very many tensors
    return next(_misfits(manifest, saved, tensor, dtype, group), "")


def _misfits(
    manifest: Manifest, saved: SavedTensor, tensor: Tensor, dtype: torch.dtype | None, group: DTensorRanks
) -> Iterator[str]:
    name = saved.own_name
    try:
        stored, shape = torch_spec(entry_of(manifest, saved.stored))
    except ManifestError as error:
        yield str(error)
        return
    target = target_dtype(stored, dtype)
    if saved.is_complex128:
        if stored is not torch.float64 or shape[-1:] != (2,):
            yield f"{name}: the checkpoint has {stored} {list(shape)} where complex numbers are to be"
        stored, target, shape = torch.complex128, torch.complex128, shape[:-1]
    yield from group.misfits(name, tensor)
    if hasattr(local_of(tensor), "__tensor_flatten__"):
        yield f"{name}: into= has a {type(local_of(tensor)).__name__}, the checkpoint a plain tensor"
    if tensor.layout != torch.strided:
        yield f"{name}: into= has layout {tensor.layout}"
    if tuple(tensor.shape) != shape:
        yield f"{name}: shape {list(shape)} in the checkpoint, {list(tensor.shape)} in into="
    if tensor.dtype != target:
        cast = f" cast to {target}" if target != stored else ""
        yield f"{name}: dtype {stored}{cast} in the checkpoint, {tensor.dtype} in into= (dtype= casts)"
    if any(overlaps(part) for _, part in local_parts(tensor)):
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
    """A part that the names of one side have in addition.

    Attributes:
        part: The part, with the dot at its end.
        head: The text before it in the names.
        is_saved: Whether the checkpoint's names have it, not those of ``into=``.
        longer: An example of a name with it.
        is_everything: Whether it is the only difference between all names of the two sides.
    """

    part: str
    head: str
    is_saved: bool
    longer: str
    is_everything: bool

    @property
    def is_wrapper(self) -> bool:
        """Whether wrappers of modules add it."""
        return _WRAPPERS.issuperset(self.part.removesuffix(".").split("."))

    @property
    def is_enough(self) -> bool:
        """Whether everything fits if ``into=`` has the part, too."""
        return self.is_everything or self.is_wrapper

    def advice(self) -> str:
        """Returns how the names differ, and what to do."""
        side = "the checkpoint has" if self.is_saved else "into= has"
        path = self.part.removesuffix(".")
        if self.is_saved and not self.head:
            keys = path.split(".")
            into = "".join(f"{{{key!r}: " for key in keys) + "model" + "}" * len(keys)
            rest = "" if self.is_everything else ", strict=False"
            return f"{side} {self.part!r} in front of these names: pass into={into}{rest}"
        shorter = self.head + self.longer[len(self.head) + len(self.part) :]
        saved, present = (self.longer, shorter) if self.is_saved else (shorter, self.longer)
        rest = "" if self.is_saved else f": pass what is inside of it, such as model.{path}"
        return f"{side} {self.part!r} in its names ({saved!r} there, {present!r} in into=){rest}"


def find_renamed(saved: Sequence[str], present: Sequence[str]) -> Renamed | None:
    """Returns the part by which names of the two sides differ; None if they differ otherwise.

    Args:
        saved: Names of the checkpoint that ``into=`` lacks.
        present: Names of ``into=`` that the checkpoint lacks.
    """
    counts: Counter[tuple[bool, str, str]] = Counter()
    examples: dict[tuple[bool, str, str], str] = {}
    for is_saved, names, others in (True, saved, set(present)), (False, present, set(saved)):
        for name in names[:: 1 + len(names) // _MOST_NAMES]:
            for head, part, tail in _divisions(name):
                if head + tail in others:
                    counts[is_saved, head, part] += 1
                    examples.setdefault((is_saved, head, part), name)
    candidates = [
        Renamed(part, head, is_saved, examples[is_saved, head, part], False)
        for is_saved, head, part in counts
    ]
    if not candidates:
        return None
    best = max(candidates, key=lambda one: (one.is_wrapper, counts[one.is_saved, one.head, one.part]))
    all_names = {best.head + best.part + name.removeprefix(best.head) for name in present}
    return best._replace(is_everything=best.is_saved and all_names == set(saved))


def _divisions(name: str) -> Iterator[tuple[str, str, str]]:
    """Yields all ways to remove consecutive parts of a name, such as ``b.`` of ``a.b.c``."""
    starts = [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")][:_MOST_PARTS]
    for begin, end in combinations(starts, 2):
        yield name[:begin], name[begin:end], name[end:]
