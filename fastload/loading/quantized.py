"""Quantised weights: finds them with their scales, and dequantises boxes of them once their bytes are there.

The arithmetic is that of the libraries that wrote the weights, bit for bit:

* ``weight_scale_inv`` (DeepSeek): as torch's ``QuantizedHuggingFaceStorageReader`` and transformers
* ``weight_scale``, ``weight_packed``: as compressed-tensors
* ``weight_scale_2`` (ModelOpt): as ModelOpt
* ``_blocks`` and ``_scales`` (gpt-oss): as transformers, which transposes the result
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastload.base.memory import allocate, byte_view
from fastload.base.threads import one_torch_thread
from fastload.errors import ManifestError
from fastload.formats.dtypes import DTYPES, torch_spec
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.untrusted import show
from fastload.geometry.box import Box

CONFIG_NAME = "config.json"

_METHODS = ("fp8", "compressed-tensors", "mxfp4", "modelopt")
_FORMATS = ("float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
_FP8 = ("F8_E4M3", "F8_E5M2")
_FLOATS = ("F32", "BF16", "F16")
# Of activations and of the key-value cache: weights do not depend on them.
_OTHER_SCALES = ("input_scale", "input_global_scale", "activation_scale", "k_scale", "v_scale", "q_scale")
_SCALES = ("_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_zero_point")

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXPONENT_BIAS = 127
_CHUNK_ELEMENTS = 1 << 19  # on CPUs: many elements a call, yet in the last level of the cache
_DEVICE_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight(TensorEntry):
    """A weight as it is once it is dequantised.

    Attributes:
        values: Its quantised elements.
        scale: A scale for each block of them.
        factor: A scale of the scales, of one element, or None.
        block: Rows and columns of a block.
        is_packed: Whether a byte has two elements (FP4).
        is_transposed: Whether the last two dimensions of `values` are swapped.
    """

    values: TensorEntry
    scale: TensorEntry
    factor: TensorEntry | None = None
    block: tuple[int, int]
    is_packed: bool = False
    is_transposed: bool = False

    @property
    def is_mxfp4(self) -> bool:
        """Whether it has 4-bit elements whose scales are powers of two, of one byte."""
        return self.is_packed and self.factor is None


@dataclass(frozen=True)
class DequantizedManifest(Manifest):
    """A manifest with `QuantizedWeight` in place of quantised elements and scales.

    Attributes:
        stored: The manifest as stored.
    """

    stored: Manifest | None = None

    @property
    def extents(self) -> Any:
        """The byte ranges in the files."""
        assert self.stored is not None
        return self.stored.extents


def dequantized(manifest: Manifest, config: Mapping[str, Any]) -> DequantizedManifest:
    """Returns the manifest of a checkpoint with its weights dequantised.

    Args:
        manifest: The checkpoint.
        config: Its ``config.json``.

    Raises:
        ManifestError: It is not quantised, or in a way that is not known; a weight has no scale, a scale no
            weight, or their shapes do not fit.
    """
    url = manifest.url
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        raise ManifestError(f"{url}: {CONFIG_NAME} has no quantization_config: load it without dequantize")
    method = quantization.get("quant_method")
    if method not in _METHODS:
        raise ManifestError(
            f"{url}: weights of quant_method {show(method)} cannot be dequantised; fastload knows "
            f"{', '.join(_METHODS)}"
        )
    groups = _groups(quantization)
    for name in {each.get("format") for each in (quantization, *groups)} - {None, "mixed-precision"}:
        if method == "compressed-tensors" and name not in _FORMATS:
            raise ManifestError(
                f"{url}: weights of the format {show(name)} of compressed-tensors cannot be dequantised; "
                f"fastload knows {', '.join(_FORMATS)}"
            )
    tensors = _Finder(manifest, _blocks(quantization, groups)).tensors()
    columns = {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}
    return DequantizedManifest(**columns | {"tensors": tensors}, stored=manifest)


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = quantization.get("config_groups")
    return (
        [each for each in groups.values() if isinstance(each, Mapping)] if isinstance(groups, Mapping) else []
    )


def _blocks(quantization: Mapping[str, Any], groups: list[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Returns the sizes of two-dimensional blocks in a configuration."""
    weights = [each.get("weights") for each in groups]
    given = [quantization.get("weight_block_size")]
    given += [each.get("block_structure") for each in weights if isinstance(each, Mapping)]
    return [
        (each[0], each[1])
        for each in given
        if isinstance(each, list | tuple)
        and len(each) == 2
        and all(isinstance(size, int) and size > 0 for size in each)
    ]


class _Finder:
    """Finds the scales of weights.

    Args:
        manifest: The checkpoint.
        blocks: Sizes of two-dimensional blocks.
    """

    def __init__(self, manifest: Manifest, blocks: list[tuple[int, int]]) -> None:
        self._manifest = manifest
        self._blocks = blocks
        self._used: set[str] = set()

    def tensors(self) -> tuple[TensorEntry, ...]:
        """Returns the weights in place of their quantised elements and scales, and all other tensors.

        Raises:
            ManifestError: The scale of a weight is missing or does not fit, or there is one without a weight.
        """
        found = [self._weight(entry) or entry for entry in self._manifest.tensors]
        kept = []
        for entry in found:
            suffix = entry.name.rpartition(".")[2]
            if entry.name in self._used or suffix in _OTHER_SCALES:
                continue
            if suffix == "weight_zero_point":
                raise self._error(entry.name, "weights with zero points (asymmetric) cannot be dequantised")
            if suffix.endswith(_SCALES) or (suffix.endswith("_scales") and entry.dtype == "U8"):
                raise self._error(entry.name, "a scale, but there is no quantised weight for it")
            kept.append(entry)
        return tuple(kept)

    def _weight(self, entry: TensorEntry) -> QuantizedWeight | None:
        """Returns the weight of quantised elements; None for any other tensor."""
        name = entry.name
        if name.endswith("_blocks") and entry.dtype == "U8":
            scale = self._scale(entry, f"{name.removesuffix('_blocks')}_scales", ("U8",))
            return self._gpt_oss(entry, scale)
        if name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            scale = self._scale(entry, f"{base}_scale", ("F8_E4M3", "U8"))
            is_nvfp4 = scale.dtype == "F8_E4M3"
            factor = self._scale(entry, f"{base}_global_scale", _FLOATS) if is_nvfp4 else None
            return self._fp4(entry, base, scale, factor)
        if entry.dtype == "U8" and name.endswith(".weight"):
            scale = self._scale(entry, f"{name}_scale", ("F8_E4M3",))
            return self._fp4(entry, name, scale, self._scale(entry, f"{name}_scale_2", _FLOATS))
        if entry.dtype in _FP8 and not name.endswith(_SCALES):
            return self._fp8(entry)
        return None

    def _scale(self, entry: TensorEntry, name: str, dtypes: tuple[str, ...]) -> TensorEntry:
        """Returns a scale of a weight, and marks it as used."""
        scale = self._manifest.by_name.get(name)
        if scale is None:
            raise self._error(entry.name, f"a quantised weight, but its scale {show(name)} is missing")
        if scale.dtype not in dtypes:
            raise self._error(name, f"a scale of dtype {scale.dtype}, not {' or '.join(dtypes)}")
        self._used.add(name)
        return scale

    def _fp8(self, entry: TensorEntry) -> QuantizedWeight:
        inverse = f"{entry.name}_scale_inv"
        if inverse in self._manifest.by_name:
            scale = self._scale(entry, inverse, (*_FLOATS, "F8_E8M0", "U8"))
        else:
            scale = self._scale(entry, f"{entry.name}_scale", _FLOATS)
        dtype = scale.dtype if scale.dtype in _FLOATS else "BF16"
        block = self._block(entry, scale, entry.shape)
        return _weight(entry, entry.name, dtype, entry.shape, scale=scale, block=block)

    def _fp4(
        self, entry: TensorEntry, name: str, scale: TensorEntry, factor: TensorEntry | None
    ) -> QuantizedWeight:
        if factor is not None and prod(factor.shape) != 1:
            raise self._error(factor.name, f"a scale of scales of shape {list(factor.shape)}, not of one")
        shape = (*entry.shape[:-1], 2 * entry.shape[-1]) if entry.shape else ()
        block = self._block(entry, scale, shape)
        if block[0] != 1 or block[1] % 2:
            raise self._error(scale.name, f"{list(scale.shape)} does not fit {list(shape)} of 4-bit elements")
        return _weight(entry, name, "BF16", shape, scale=scale, factor=factor, block=block, is_packed=True)

    def _gpt_oss(self, entry: TensorEntry, scale: TensorEntry) -> QuantizedWeight:
        if entry.shape[:-1] != scale.shape or len(entry.shape) < 3 or not prod(entry.shape):
            raise self._error(
                scale.name, f"scales of shape {list(scale.shape)} for blocks of {list(entry.shape)}"
            )
        *lead, rows, groups, nbytes = entry.shape
        shape = (*lead, 2 * groups * nbytes, rows)
        name = entry.name.removesuffix("_blocks")
        return _weight(
            entry, name, "BF16", shape, scale=scale, block=(1, 2 * nbytes), is_packed=True, is_transposed=True
        )

    def _block(self, entry: TensorEntry, scale: TensorEntry, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns rows and columns of the block of each scale."""
        if len(shape) >= 2:
            *lead, rows, columns = shape
            if prod(scale.shape) == 1:
                return max(rows, 1), max(columns, 1)
            *scale_lead, num_rows, num_columns = (*scale.shape, 1) if len(scale.shape) == 1 else scale.shape
            grid = num_rows, num_columns
            candidates = [(rows, columns), *self._blocks, (1, columns)]
            if num_columns and not columns % num_columns:
                candidates.append((1, columns // num_columns))
            for block in candidates:
                if lead == scale_lead and grid == (-(-rows // block[0]), -(-columns // block[1])):
                    return block
        blocks = ", ".join(f"{rows} x {columns}" for rows, columns in self._blocks) or "none"
        raise self._error(
            scale.name,
            f"scales of shape {list(scale.shape)} do not fit {show(entry.name)} of shape {list(shape)} "
            f"(blocks in {CONFIG_NAME}: {blocks})",
        )

    def _error(self, name: str, problem: str) -> ManifestError:
        return ManifestError(f"{self._manifest.url}: tensor {show(name)}: {problem}")


def _weight(
    entry: TensorEntry, name: str, dtype: str, shape: tuple[int, ...], **parts: Any
) -> QuantizedWeight:
    nbytes = prod(shape) * DTYPES[dtype][0] // 8
    return QuantizedWeight(
        name=name, dtype=dtype, shape=shape, file=entry.file, offset=entry.offset, nbytes=nbytes,
        values=entry, **parts,
    )  # fmt: skip


class PackedPart(NamedTuple):
    """Stored bytes of a box of a weight.

    Attributes:
        entry: The tensor in the checkpoint.
        memory: What it is loaded into.
        box: The box of it; None for all of it.
    """

    entry: TensorEntry
    memory: Tensor
    box: Box | None


class Dequantizer:
    """Dequantises a box of a weight in place, once its bytes have arrived.

    Until then its quantised elements are at the end of the memory of the tensor. Rows are dequantised in
    order, and none is written over elements that are still to be read, since they are no longer than it.

    Args:
        weight: The weight.
        tensor: The tensor to fill, of the shape of the box.
        box: The box.

    Attributes:
        parts: What has to be loaded.

    Raises:
        MemoryError: The scales do not fit into memory.
    """

    def __init__(self, weight: QuantizedWeight, tensor: Tensor, box: Box) -> None:
        self._weight = weight
        self._tensor = tensor
        offsets, sizes = box
        if weight.is_transposed:
            offsets, sizes = (*offsets[:-2], *offsets[:-3:-1]), (*sizes[:-2], *sizes[:-3:-1])
        *lead, (self._row, num_rows), (column, num_columns) = zip(offsets, sizes, strict=True)
        rows_of_block, columns_of_block = weight.block
        rows = self._row // rows_of_block, -(-(self._row + num_rows) // rows_of_block)
        columns = column // columns_of_block, -(-(column + num_columns) // columns_of_block)
        self._skipped = column - columns[0] * columns_of_block
        values = Box(offsets, sizes)
        if weight.is_packed:  # complete groups, in bytes
            group_bytes = columns_of_block // 2
            last = [(columns[0], columns[1] - columns[0]), (0, group_bytes)]
            if not weight.is_transposed:
                last = [(columns[0] * group_bytes, (columns[1] - columns[0]) * group_bytes)]
            values = _box([*lead, (self._row, num_rows), *last])
        scale = _box([*lead, *((first, end - first) for first, end in (rows, columns))])
        if prod(weight.scale.shape) == 1:
            scale = Box.whole(weight.scale.shape)
        elif len(weight.scale.shape) == 1:
            scale = Box(scale.offsets[:1], scale.sizes[:1])
        dtype = DTYPES[weight.dtype][1]
        # Those who wrote the weights round to it first, except for the ones of DeepSeek.
        is_direct = weight.scale.name.endswith("_scale_inv") or tensor.dtype == dtype
        self._dtype = None if is_direct else dtype
        self.parts = [
            _part(weight.values, values, _end_of(tensor, values.numel), tensor.device),
            _part(weight.scale, scale, None, tensor.device),
        ]
        if weight.factor is not None:
            whole = Box.whole(weight.factor.shape)
            self.parts.append(_part(weight.factor, whole, None, tensor.device))
        self._left_bytes = sum(part.memory.nbytes for part in self.parts)
        self._is_done = False

    def count(self, nbytes: int) -> bool:
        """Notes bytes that have arrived; returns whether they were the last ones."""
        self._left_bytes -= nbytes
        return not self._left_bytes

    def finish(self) -> None:
        """Dequantises the box, unless it is done."""
        if not self._is_done:
            self._is_done = True
            self._run()

    @torch.no_grad()
    def _run(self) -> None:
        is_inference = self._tensor.is_inference()
        with one_torch_thread(), torch.inference_mode() if is_inference else nullcontext():
            scales = self._scales()
            for index in product(*map(range, self._tensor.shape[:-2])):
                target, values = self._tensor[index], self.parts[0].memory[index].flatten(1)
                blocks = scales[index] if scales.dim() > 2 else scales
                if self._weight.is_transposed:
                    self._unpack_transposed(values, blocks, target)
                else:
                    self._dequantize(values, blocks, target)

    def _unpack_transposed(self, values: Tensor, scales: Tensor, target: Tensor) -> None:
        """Dequantises rows of bytes into columns of the target, some complete blocks at a time."""
        block_bytes, num_columns = self._weight.block[1] // 2, len(values)
        # Bytes are transposed rather than elements, which are four times as long. It is a copy, since the
        # result is written over any of them.
        columns = values.t().clone(memory_format=torch.contiguous_format)
        blocks = columns.unflatten(0, (len(columns) // block_bytes, block_bytes))
        scales = scales.t().contiguous().unsqueeze(1)
        step = max(1, _rows_at_once(target) // (2 * block_bytes))
        shape = step, block_bytes, num_columns
        codes, pairs = (allocate(shape, torch.int32, target.device) for _ in range(2))
        elements = allocate((step, block_bytes, 2, num_columns), torch.int16, target.device)
        table, end = _mxfp4_table(target.device), 0
        for first in range(0, len(blocks), step):
            num_blocks = min(step, len(blocks) - first)
            found, both, rows = codes[:num_blocks], pairs[:num_blocks], elements[:num_blocks]
            found.copy_(blocks[first : first + step]).add_(scales[first : first + step])
            torch.index_select(table, 0, found.view(-1), out=both.view(-1))
            rows[:, :, 0].copy_(both)
            rows[:, :, 1].copy_(both.bitwise_right_shift_(16))
            decoded = rows.view(torch.bfloat16).flatten(0, 2)[0 if first else self._skipped :]
            begin, end = end, min(len(target), end + len(decoded))
            target[begin:end].copy_(decoded[: end - begin])

    def _scales(self) -> Tensor:
        """Returns the scales of the blocks as the decoder takes them, by row and column of the block."""
        stored = self.parts[1].memory
        if self._weight.is_mxfp4:
            scale = stored.to(torch.int32).mul_(256)
        elif stored.element_size() > 1:
            scale = stored.float()
        else:  # all 256 scales are computed: a lookup is faster than the conversions of torch
            every = self._every_scale(torch.arange(256, dtype=torch.uint8, device=stored.device))
            codes = stored.view(torch.uint8).to(torch.int32).view(-1)
            scale = torch.index_select(every, 0, codes).view(stored.shape)
        if scale.numel() == 1:
            return scale.view(1, 1)
        return scale.unsqueeze(1) if scale.dim() == 1 else scale

    def _every_scale(self, codes: Tensor) -> Tensor:
        """Returns the scales of one byte in float32."""
        weight, dtype = self._weight, self.parts[1].memory.dtype
        if dtype == torch.uint8:
            return torch.pow(2.0, codes.to(torch.int32) - _EXPONENT_BIAS).float()
        scale = codes.view(dtype)
        if weight.factor is None:
            return scale.float()
        factor = self.parts[2].memory.view(-1)
        is_inverse = weight.factor.name.endswith("_global_scale")
        return (scale.to(torch.bfloat16) / factor if is_inverse else scale.float() * factor.float()).float()

    def _dequantize(self, values: Tensor, scales: Tensor, target: Tensor) -> None:
        """Dequantises rows of elements in chunks, each within one row of blocks."""
        (rows_of_block, columns_of_block), (num_rows, num_columns) = self._weight.block, target.shape
        needed = slice(self._skipped, self._skipped + num_columns)
        is_packed = self._weight.is_packed
        step, end = _rows_at_once(target), 0
        decoder = _ElementDecoder(values, step, self._weight)

        def by_column(scale: Tensor) -> Tensor:
            if is_packed or scale.shape[1] == 1:
                return scale
            return scale.repeat_interleave(columns_of_block, 1)[:, needed]

        scale, last_block = scales, -1
        while end < num_rows:
            begin, end = end, min(num_rows, end + step)
            if rows_of_block > 1:
                block = (self._row + begin) // rows_of_block
                end = min(end, (block + 1) * rows_of_block - self._row)
                if block != last_block:
                    scale, last_block = by_column(scales[[block - self._row // rows_of_block]]), block
            else:
                scale = by_column(scales[begin:end])
            rows = decoder.decode(begin, end, scale)
            if is_packed:
                rows = rows[:, needed]
            target[begin:end].copy_(rows if self._dtype is None else rows.to(self._dtype))


def _rows_at_once(target: Tensor) -> int:
    """Returns the rows of a chunk, at least 1."""
    num_rows, num_columns = target.shape
    elements = _CHUNK_ELEMENTS if target.is_cpu else _DEVICE_CHUNK_ELEMENTS
    return max(1, min(num_rows, elements // max(1, num_columns)))


class _ElementDecoder:
    """Dequantises FP8 and packed FP4 by table, one or two bytes at once, reusing its memory.

    The result is float32; of MXFP4 bfloat16, since its table has the products with all scales.

    Args:
        values: All rows; contiguous if they are not packed.
        step: The most rows that are decoded at once.
        weight: The weight.
    """

    def __init__(self, values: Tensor, step: int, weight: QuantizedWeight) -> None:
        (_, num_columns), device, is_packed = values.shape, values.device, weight.is_packed
        self._values, self._table, self._weight = values, None, weight
        dtype = torch.bfloat16 if weight.is_mxfp4 else torch.float32
        self._rows = allocate((step, num_columns * (1 + is_packed)), dtype, device)
        if device.type != "cpu" and not is_packed:
            return
        width = 1
        if is_packed:
            self._table = _mxfp4_table(device) if weight.is_mxfp4 else _fp4_table(device)
        elif num_columns % 2 or values.storage_offset() % 2:
            self._table = _fp8_table(values.dtype, 1)
        else:
            self._table, width = _fp8_table(values.dtype, 2), 2
        self._values = values.view(torch.uint8 if width == 1 else torch.uint16)
        self._codes = allocate((step, num_columns // width), torch.int32, device)

    def decode(self, begin: int, end: int, scale: Tensor) -> Tensor:
        """Returns the elements of rows; they are overwritten by the next call."""
        values, rows = self._values[begin:end], self._rows[: end - begin]
        columns_of_block = self._weight.block[1]
        if self._table is None:
            return rows.copy_(values).mul_(scale)
        codes = self._codes[: end - begin].copy_(values)
        if self._weight.is_mxfp4:
            codes.unflatten(1, (-1, columns_of_block // 2)).add_(scale.unsqueeze(-1))
        torch.index_select(self._table, 0, codes.view(-1), out=rows.view(self._table.dtype).view(-1))
        if not self._weight.is_packed:
            rows.mul_(scale)
        elif not self._weight.is_mxfp4:
            rows.unflatten(1, (-1, columns_of_block)).mul_(scale.unsqueeze(-1))
        return rows


@cache
def _fp8_table(dtype: torch.dtype, num_codes: int) -> Tensor:
    """Returns the float32 elements of one byte, or those of two in one int64; the first byte is the lower."""
    every = torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()
    return every if num_codes == 1 else _pairs(every)


def _fp4_table(device: torch.device) -> Tensor:
    """Returns, for each byte of two 4-bit elements, both as float32, in one int64; the lower bits first."""
    return _pairs(torch.tensor(_FP4, dtype=torch.float32, device=device))


@cache
def _mxfp4_table(device: torch.device) -> Tensor:
    """Returns, for each scale and each byte, the products with both elements as bfloat16, in one int32."""
    # Twice the elements and half of the scales, since the largest is out of range.
    scales = torch.pow(2.0, torch.arange(256, dtype=torch.int32, device=device) - _EXPONENT_BIAS - 1)
    elements = torch.tensor(_FP4, dtype=torch.float32, device=device) * 2
    products = _pairs(elements).view(torch.float32) * scales.float().unsqueeze(1)
    return products.to(torch.bfloat16).view(torch.int32).flatten()


def _pairs(every: Tensor) -> Tensor:
    first, second = every.repeat(len(every)), every.repeat_interleave(len(every))
    return torch.stack([first, second], 1).view(torch.int64).flatten()


def _part(entry: TensorEntry, box: Box, memory: Tensor | None, device: torch.device) -> PackedPart:
    dtype, shape = torch_spec(entry)
    if memory is None:
        memory = allocate(box.sizes, dtype, device)
    memory = memory.view(dtype).view(box.sizes)
    return PackedPart(entry, memory, None if box == Box.whole(shape) else box)


def _end_of(tensor: Tensor, nbytes: int) -> Tensor | None:
    """Returns the last bytes of a tensor as flat uint8; None if it has no such memory."""
    if not tensor.is_contiguous() or tensor.is_neg() or nbytes > tensor.nbytes:
        return None
    return byte_view(tensor)[tensor.nbytes - nbytes :]


def _box(spans: Sequence[tuple[int, int]]) -> Box:
    """Returns a box of (first element, number of elements) in each dimension."""
    return Box(tuple(first for first, _ in spans), tuple(count for _, count in spans))
