"""Quantised weights: finds them with their scales, and dequantises boxes of them once their bytes are there.

The arithmetic is that of the libraries that wrote the weights, bit for bit:

* ``weight_scale_inv`` (DeepSeek): as torch's ``QuantizedHuggingFaceStorageReader`` and transformers
* ``weight_scale``, ``weight_packed``: as compressed-tensors
* ``weight_scale_2`` (ModelOpt): as ModelOpt
* ``_blocks`` and ``_scales`` (gpt-oss): as transformers, which transposes the result
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from math import prod
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from fastload.base.memory import allocate, byte_view
from fastload.base.threads import one_torch_thread
from fastload.errors import ManifestError
from fastload.formats.dtypes import DTYPES, torch_spec
from fastload.formats.layers import Decoding, StoredPart
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.formats.names import CONFIG_NAME
from fastload.formats.untrusted import show
from fastload.geometry.box import Box

_METHODS = ("fp8", "compressed-tensors", "mxfp4", "modelopt")
_FORMATS = ("float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
_FP8 = ("F8_E4M3", "F8_E5M2")
_FLOATS = ("F32", "BF16", "F16")
# Of activations and of the key-value cache: weights do not depend on them.
_OTHER_SCALES = ("input_scale", "input_global_scale", "activation_scale", "k_scale", "v_scale", "q_scale")
_SCALES = ("_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_zero_point")

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXPONENT_BIAS = 127
_FLOAT16_BIAS = 1 << 8  # of the exponent, in comparison with FP8 of 4 bits
_WORD_BYTES = 8
_EACH_BYTE = 0x0101010101010101
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

    def decoding(self, tensor: Tensor, box: Box | None) -> Dequantizer:
        """Returns what dequantises a box of it."""
        return Dequantizer(self, tensor.detach(), Box.whole(tensor.shape) if box is None else box)

    @property
    def is_mxfp4(self) -> bool:
        """Whether it has 4-bit elements whose scales are powers of two, of one byte."""
        return self.is_packed and self.factor is None

    def is_direct(self, dtype: torch.dtype) -> bool:
        """Whether products become elements of a dtype without being rounded to the weight's before.

        Those who wrote the weights round to it first, except for the ones of DeepSeek.
        """
        return self.scale.name.endswith("_scale_inv") or dtype == DTYPES[self.dtype][1]


def dequantized(manifest: Manifest, config: Mapping[str, Any]) -> Manifest:
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
    blocks, is_inverse = _blocks(quantization, groups), bool(quantization.get("weight_block_size"))
    tensors = _Finder(manifest, blocks, is_inverse=is_inverse).tensors()
    return replace(manifest, tensors=tensors, decoded_from=manifest)


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
        is_inverse: Whether scales of FP8 weights are expected to be called ``_scale_inv``.
    """

    def __init__(self, manifest: Manifest, blocks: list[tuple[int, int]], *, is_inverse: bool) -> None:
        self._manifest = manifest
        self._blocks = blocks
        self._is_inverse = is_inverse
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
        inverse, plain = f"{entry.name}_scale_inv", f"{entry.name}_scale"
        there = self._manifest.by_name
        if inverse in there or (self._is_inverse and plain not in there):
            scale = self._scale(entry, inverse, (*_FLOATS, "F8_E8M0", "U8"))
        else:
            scale = self._scale(entry, plain, _FLOATS)
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


class _Arrivals:
    """Counts the bytes of a quantised box that have arrived.

    Args:
        values_bytes: Length of its elements.
        scale_bytes: Length of its scales.
    """

    def __init__(self, values_bytes: int, scale_bytes: int) -> None:
        self._values_bytes = values_bytes
        self._missing_bytes = values_bytes + scale_bytes
        self._missing_scale_bytes = scale_bytes
        self._end = 0
        self._after_gaps: dict[int, int] = {}  # first byte → end

    @property
    def usable_bytes(self) -> int:
        """Length of the first elements, without a gap, once their scales are there."""
        if not self._missing_bytes:
            return self._values_bytes
        return 0 if self._missing_scale_bytes else self._end

    def add(self, begin: int | None, nbytes: int) -> None:
        """Counts elements; without the place of the first byte, none are usable before all are there."""
        self._missing_bytes -= nbytes
        if begin is not None:
            self._after_gaps[begin] = begin + nbytes
        while self._end in self._after_gaps:
            self._end = self._after_gaps.pop(self._end)

    def add_scale(self, nbytes: int) -> None:
        """Counts scales."""
        self._missing_bytes -= nbytes
        self._missing_scale_bytes -= nbytes

    def add_rest(self) -> None:
        """Counts all that is missing."""
        self._missing_bytes = 0


class _Chunk(NamedTuple):
    """Rows of stored elements that are dequantised at once.

    Attributes:
        matrix: Their matrix, by its index in the leading dimensions.
        begin: The first row.
        end: The row after the last one.
        nbytes: Their length.
        end_byte: The byte after the last one in the memory of all elements.
    """

    matrix: tuple[int, ...]
    begin: int
    end: int
    nbytes: int
    end_byte: int


class Dequantizer(Decoding):
    """Dequantises a box of a weight in place, in chunks of rows, while its bytes arrive.

    Until then its quantised elements are at the end of the memory of the tensor. They are no longer than it,
    so a chunk is written over itself and earlier ones only. Chunks are taken from there in their order, and
    then written in any order.

    Args:
        weight: The weight.
        tensor: The tensor to fill, of the shape of the box.
        box: The box.

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
        self.parts = [  # the elements, then their scales
            _part(weight.values, values, _end_of(tensor, values.numel), tensor.device),
            _part(weight.scale, scale, None, tensor.device),
        ]
        if weight.factor is not None:
            whole = Box.whole(weight.factor.shape)
            self.parts.append(_part(weight.factor, whole, None, tensor.device))
        scale_bytes = sum(part.memory.nbytes for part in self.parts[1:])
        self._arrivals = _Arrivals(self.parts[0].memory.nbytes, scale_bytes)
        step = values.sizes[len(lead)] if weight.is_transposed else _rows_at_once(tensor)
        self._chunks = _cut(self.parts[0].memory, len(lead), step, self._row % rows_of_block, rows_of_block)
        self._next = next(self._chunks, None)
        self._taking = Lock()

    def arrived(self, entry: TensorEntry, begin: int | None, nbytes: int) -> int:
        """Notes bytes of a part; returns about how many chunks can be dequantised now.

        It does not wait for threads that dequantise.
        """
        if entry is self.parts[0].entry:
            self._arrivals.add(begin, nbytes)
        else:
            self._arrivals.add_scale(nbytes)
        chunk = self._next
        if not self._is_ready(chunk):
            return 0
        return 1 + (self._arrivals.usable_bytes - chunk.end_byte) // chunk.nbytes

    def finish(self) -> None:
        """Dequantises the rest, all of which has arrived."""
        self._arrivals.add_rest()
        self.run()

    @torch.no_grad()
    def run(self) -> None:
        """Dequantises chunks until no complete one is left. Several threads may do so at once.

        Raises:
            MemoryError: There is not enough for a chunk.
        """
        is_inference = self._tensor.is_inference()
        decoder: _ChunkDecoder | None = None
        with one_torch_thread(), torch.inference_mode() if is_inference else nullcontext():
            while True:
                with self._taking:
                    chunk = self._next
                    if not self._is_ready(chunk):
                        return
                    values = self.parts[0].memory[chunk.matrix].flatten(1)
                    decoder = decoder or self._decoder(values)
                    decoder.take(values[chunk.begin : chunk.end])
                    self._next = next(self._chunks, None)
                self._write(decoder, chunk)

    def _is_ready(self, chunk: _Chunk | None) -> TypeGuard[_Chunk]:
        return chunk is not None and chunk.end_byte <= self._arrivals.usable_bytes

    def _decoder(self, values: Tensor) -> _ChunkDecoder:
        """Returns a decoder for chunks of a matrix, or of another one of its shape."""
        if self._weight.is_transposed:
            return _TransposedFp4Decoder(values, self._weight.block[1] // 2, self._products)
        most_rows = min(len(values), _rows_at_once(self._tensor))
        if self._weight.is_packed:
            return _Fp4Decoder(values, most_rows, self._weight.block[1] // 2, self._products)
        return _Fp8Decoder(values, most_rows, self._weight, self._scales[1])

    def _write(self, decoder: _ChunkDecoder, chunk: _Chunk) -> None:
        target = self._tensor[chunk.matrix]
        if not self._weight.is_transposed:
            target = target[chunk.begin : chunk.end]
        decoder.write(target, self._scale(chunk), self._skipped)

    def _scale(self, chunk: _Chunk) -> Tensor:
        """Returns the scales of a chunk; see `_ChunkDecoder.write`."""
        scales, _ = self._scales
        if scales.dim() > 2:
            scales = scales[chunk.matrix]
        if scales.shape[0] == 1:
            return scales
        rows_of_block = self._weight.block[0]
        first = (self._row + chunk.begin) // rows_of_block - self._row // rows_of_block
        return scales[first : first + -(-(chunk.end - chunk.begin) // rows_of_block)]

    @cached_property
    def _scales(self) -> tuple[Tensor, int]:
        """All scales, and the factor of elements that those of FP8 do not include."""
        stored = self.parts[1].memory
        if stored.numel() == 1:
            stored = stored.view(1, 1)
        elif stored.dim() == 1:
            stored = stored.unsqueeze(1)
        if self._weight.is_packed:
            return stored.view(torch.uint8), 1
        if stored.element_size() == 1:
            codes = stored.view(torch.uint8).to(torch.int32).view(-1)
            stored = torch.index_select(self._every_scale, 0, codes).view(stored.shape)
        scales, factor = stored.float(), _Fp8Decoder.factor(self.parts[0].memory)
        larger = scales * factor  # exact, unless it is out of range
        return (scales, factor) if larger.isinf().any() else (larger, 1)

    @cached_property
    def _products(self) -> Tensor:
        """The table that FP4 is looked up in."""
        device = self._tensor.device
        if self._weight.is_mxfp4:
            return _mxfp4_products(device)
        return _products(torch.tensor(_FP4, dtype=torch.float32, device=device), self._every_scale)

    @cached_property
    def _every_scale(self) -> Tensor:
        """The float32 scale of each byte: a lookup is faster than the conversions of torch."""
        weight, memory = self._weight, self.parts[1].memory
        codes = torch.arange(256, dtype=torch.uint8, device=memory.device)
        if memory.dtype == torch.uint8:
            return torch.pow(2.0, codes.to(torch.int32) - _EXPONENT_BIAS).float()
        scale = codes.view(memory.dtype)
        if weight.factor is None:
            return scale.float()
        factor = self.parts[2].memory.view(-1)
        is_inverse = weight.factor.name.endswith("_global_scale")
        return (scale.to(torch.bfloat16) / factor if is_inverse else scale.float() * factor.float()).float()


def _cut(values: Tensor, num_leading: int, step: int, row: int, rows_of_block: int) -> Iterator[_Chunk]:
    """Yields all chunks in the order of their bytes, each within one row of blocks.

    Args:
        values: The elements.
        num_leading: Number of dimensions before the rows.
        step: The most rows of a chunk.
        row: The first row, counted from the first one of its blocks.
        rows_of_block: Rows of a block.
    """
    lead, num_rows = values.shape[:num_leading], values.shape[num_leading]
    row_bytes, end_byte = values.nbytes // max(1, prod(lead) * num_rows), 0
    for matrix in product(*map(range, lead)) if values.nbytes else ():
        end = 0
        while end < num_rows:
            begin, end = end, min(num_rows, end + step)
            if rows_of_block > 1:
                end = min(end, ((row + begin) // rows_of_block + 1) * rows_of_block - row)
            nbytes = (end - begin) * row_bytes
            end_byte += nbytes
            yield _Chunk(matrix, begin, end, nbytes, end_byte)


def _rows_at_once(target: Tensor) -> int:
    """Returns the rows of a chunk, at least 1."""
    num_rows, num_columns = target.shape[-2:]
    elements = _CHUNK_ELEMENTS if target.is_cpu else _DEVICE_CHUNK_ELEMENTS
    return max(1, min(num_rows, elements // max(1, num_columns)))


class _ChunkDecoder(Protocol):
    """Dequantises chunks of one shape at most, one after the other, reusing its memory."""

    def take(self, values: Tensor) -> None:
        """Copies stored rows of a matrix, in flat bytes if they are packed."""

    def write(self, target: Tensor, scale: Tensor, skipped: int) -> None:
        """Dequantises what was taken last.

        Args:
            target: The elements to fill.
            scale: Its scales, by row and column of the block: in float32, or as stored for FP4.
            skipped: Elements of the first block that the target does not have.
        """


class _Fp8Decoder:
    """Dequantises FP8, on CPUs by way of the float16 of the same sign, exponent and mantissa.

    Args:
        values: All rows of a matrix.
        most_rows: The most rows that are decoded at once.
        weight: The weight.
        factor: What to multiply the elements by, besides the scale.
    """

    def __init__(self, values: Tensor, most_rows: int, weight: QuantizedWeight, factor: int) -> None:
        shape = most_rows, values.shape[1]
        self._weight = weight
        self._factor = factor
        self._rows = allocate(shape, torch.float32, values.device)
        self._codes = allocate(shape, torch.int16, values.device) if values.is_cpu else None
        self._has_nan = False

    @staticmethod
    def factor(values: Tensor) -> int:
        """Returns the quotient of elements and the numbers that they are decoded to."""
        return _FLOAT16_BIAS if values.is_cpu and values.dtype == torch.float8_e4m3fn else 1

    def take(self, values: Tensor) -> None:
        if self._codes is None:
            self._rows[: values.shape[0]].copy_(values)
            return
        signed = values.view(torch.int8)
        self._codes[: values.shape[0]].copy_(signed)
        if values.dtype == torch.float8_e4m3fn:
            self._has_nan = signed.max().item() == 0x7F or values.view(torch.uint8).max().item() == 0xFF

    def write(self, target: Tensor, scale: Tensor, skipped: int) -> None:
        num_rows, num_columns = target.shape
        rows = self._rows[:num_rows]
        if self._codes is not None:
            self._convert(self._codes[:num_rows], rows)
        if self._factor != 1:
            rows.mul_(self._factor)
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(self._weight.block[1], 1)[:, skipped : skipped + num_columns]
        rows.mul_(scale)
        target.copy_(rows if self._weight.is_direct(target.dtype) else rows.to(DTYPES[self._weight.dtype][1]))

    def _convert(self, codes: Tensor, rows: Tensor) -> None:
        """Converts sign-extended bytes to float32, less the factor."""
        if self._weight.values.dtype == "F8_E5M2":
            rows.copy_(codes.mul_(1 << 8).view(torch.float16))
            return
        # Without the copy of the sign in the first bit of the exponent.
        rows.copy_(codes.mul_(1 << 7).bitwise_and_(~(1 << 14)).view(torch.float16))
        if self._has_nan:
            for code, nan in zip((1.875, -1.875), _e4m3_nans(), strict=True):
                rows.masked_fill_(rows == code, nan)


class _Fp4Decoder:
    """Dequantises packed FP4: the scale and a byte are looked up together, and give two elements.

    Args:
        values: All rows of a matrix, in bytes.
        most_rows: The most rows that are decoded at once.
        block_bytes: Length of a block.
        products: The table; see `_products`.
    """

    def __init__(self, values: Tensor, most_rows: int, block_bytes: int, products: Tensor) -> None:
        shape = most_rows, values.shape[1]
        self._block_bytes = block_bytes
        self._products = products
        self._codes, self._pairs = (allocate(shape, torch.int32, values.device) for _ in range(2))

    def take(self, values: Tensor) -> None:
        self._codes[: len(values)].copy_(values)

    def write(self, target: Tensor, scale: Tensor, skipped: int) -> None:
        num_rows, num_columns = target.shape
        codes, pairs = self._codes[:num_rows], self._pairs[:num_rows]
        if self._block_bytes == _WORD_BYTES:  # torch is slow for so few elements with one scale
            codes.add_(scale.to(torch.int64).mul_(_EACH_BYTE).view(torch.uint8), alpha=256)
        else:
            codes.unflatten(1, (-1, self._block_bytes)).add_(scale.to(torch.int32).unsqueeze(-1), alpha=256)
        is_complete = _has_pairs(target) and num_columns == 2 * codes.shape[1]
        if is_complete:
            pairs = target.view(torch.int32)
        torch.index_select(self._products, 0, codes.view(-1), out=pairs.view(-1))
        if not is_complete:
            target.copy_(pairs.view(torch.bfloat16)[:, skipped : skipped + num_columns])


class _TransposedFp4Decoder:
    """Dequantises packed FP4 into columns of the target, a matrix at once.

    Args:
        values: All rows of a matrix, in bytes.
        block_bytes: Length of a block.
        products: The table; see `_products`.
    """

    def __init__(self, values: Tensor, block_bytes: int, products: Tensor) -> None:
        (num_columns, num_bytes), device = values.shape, values.device
        self._products = products
        # Words of four bytes are transposed as fast as bytes.
        self._width = 1 if block_bytes % 4 or values.storage_offset() % 4 else 4
        self._words = allocate((num_bytes // self._width, num_columns), torch.int32, device)
        most_elements = _CHUNK_ELEMENTS if values.is_cpu else _DEVICE_CHUNK_ELEMENTS
        step = max(1, min(num_bytes, most_elements * self._width // (2 * num_columns)) // block_bytes)
        shape = step, block_bytes // self._width, num_columns
        self._codes, self._pairs = (allocate(shape, torch.int32, device) for _ in range(2))
        self._elements = allocate((*shape[:2], self._width, 2, num_columns), torch.int16, device)

    def take(self, values: Tensor) -> None:
        self._words.copy_(values.view(torch.uint8 if self._width == 1 else torch.int32).t())

    def write(self, target: Tensor, scale: Tensor, skipped: int) -> None:
        scales = scale.t().contiguous().to(torch.int32).mul_(256).unsqueeze(1)
        blocks, step, end = self._words.unflatten(0, (len(scales), -1)), len(self._codes), 0
        is_complete = _has_pairs(target) and len(target) == 2 * self._width * len(self._words)
        for first in range(0, len(blocks), step):
            words = blocks[first : first + step]
            codes, pairs, rows = (each[: len(words)] for each in (self._codes, self._pairs, self._elements))
            begin, end = end, min(len(target), end + rows[..., 0].numel() - (0 if first else skipped))
            if is_complete:
                rows = target[begin:end].view(torch.int16).view(rows.shape)
            for byte in range(self._width):
                torch.bitwise_right_shift(words, 8 * byte, out=codes).bitwise_and_(255)
                codes.add_(scales[first : first + step])
                torch.index_select(self._products, 0, codes.view(-1), out=pairs.view(-1))
                rows[:, :, byte, 0].copy_(pairs)
                rows[:, :, byte, 1].copy_(pairs.bitwise_right_shift_(16))
            if not is_complete:
                decoded = rows.view(torch.bfloat16).flatten(0, 3)[0 if first else skipped :]
                target[begin:end].copy_(decoded[: end - begin])


def _has_pairs(target: Tensor) -> bool:
    """Whether pairs of elements can be written to it as they are in a table of products."""
    is_plain = target.is_contiguous() and not target.is_neg()
    # Even of a dimension of size 1, whose stride makes nothing less contiguous.
    is_even = not any(start % 2 for start in (target.storage_offset(), *target.stride()[:-1]))
    return target.dtype == torch.bfloat16 and is_plain and is_even


@cache
def _e4m3_nans() -> tuple[Tensor, Tensor]:
    """Returns NaN with either sign as torch converts it."""
    nans = torch.tensor([0x7F, 0xFF], dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
    return nans[0], nans[1]


@cache
def _mxfp4_products(device: torch.device) -> Tensor:
    """Returns the table of products of MXFP4."""
    # Twice the elements and half of the scales, since the largest is out of range.
    scales = torch.pow(2.0, torch.arange(256, dtype=torch.int32, device=device) - _EXPONENT_BIAS - 1)
    return _products(torch.tensor(_FP4, dtype=torch.float32, device=device) * 2, scales.float())


def _products(elements: Tensor, scales: Tensor) -> Tensor:
    """Returns, for each scale and each byte, the products with both elements as bfloat16, in one int32."""
    each = (scales.unsqueeze(1) * elements).to(torch.bfloat16).view(torch.int16).to(torch.int32)
    return (each.bitwise_left_shift(16).unsqueeze(2) | (each & 0xFFFF).unsqueeze(1)).flatten()


def _part(entry: TensorEntry, box: Box, memory: Tensor | None, device: torch.device) -> StoredPart:
    dtype, shape = torch_spec(entry)
    if memory is None:
        memory = allocate(box.sizes, dtype, device)
    memory = memory.view(dtype).view(box.sizes)
    return StoredPart(entry, memory, None if box == Box.whole(shape) else box)


def _end_of(tensor: Tensor, nbytes: int) -> Tensor | None:
    """Returns the last bytes of a tensor as flat uint8; None if it has no such memory."""
    if not tensor.is_contiguous() or tensor.is_neg() or nbytes > tensor.nbytes:
        return None
    return byte_view(tensor)[tensor.nbytes - nbytes :]


def _box(spans: Sequence[tuple[int, int]]) -> Box:
    """Returns a box of (first element, number of elements) in each dimension."""
    return Box(tuple(first for first, _ in spans), tuple(count for _, count in spans))
