"""Elements of quantised weights that must not be cast without their scales."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set

import torch

from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import Manifest, TensorEntry

# Elements that mean nothing without their scales, if a scale goes with them; and what libraries call these.
_QUANTIZED = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "I8", "U8", "I32"})
_SCALE_ENDS = ("_scale_inv", "_scale", "_scales", "_scale_2", ".absmax", ".scale")
_SCALE_NAMES = ("scale", "scales", "scale_weight", "weight_scale", "SCB")


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
