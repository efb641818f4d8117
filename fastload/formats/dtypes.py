"""The dtypes of safetensors and their counterparts in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fastload.errors import ManifestError, UnsupportedVersion
from fastload.formats.manifest import TensorEntry

# safetensors name -> (bits of one element, torch dtype or None).
# torch 2.6 lacks the dtypes that are looked up by name; no torch has 6-bit floats.
DTYPES: dict[str, tuple[int, torch.dtype | None]] = {
    "BOOL": (8, torch.bool),
    "U8": (8, torch.uint8),
    "I8": (8, torch.int8),
    "F8_E5M2": (8, torch.float8_e5m2),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E8M0": (8, getattr(torch, "float8_e8m0fnu", None)),
    "F8_E4M3FNUZ": (8, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": (8, torch.float8_e5m2fnuz),
    "I16": (16, torch.int16),
    "U16": (16, torch.uint16),
    "F16": (16, torch.float16),
    "BF16": (16, torch.bfloat16),
    "I32": (32, torch.int32),
    "U32": (32, torch.uint32),
    "F32": (32, torch.float32),
    "C64": (64, torch.complex64),
    "F64": (64, torch.float64),
    "I64": (64, torch.int64),
    "U64": (64, torch.uint64),
    "F4": (4, getattr(torch, "float4_e2m1fn_x2", None)),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
}

# torch dtype -> safetensors name.
NAMES: dict[torch.dtype, str] = {dtype: name for name, (_, dtype) in DTYPES.items() if dtype is not None}


def torch_spec(entry: TensorEntry) -> tuple[torch.dtype, tuple[int, ...]]:
    """Returns the dtype and shape of a tensor in torch.

    The shape differs from that in the header for F4 only: torch packs two elements into one, along the last
    dimension.

    Raises:
        UnsupportedVersion: This torch has no such dtype.
        ManifestError: An F4 tensor does not pack along its last dimension.
    """
    dtype = DTYPES[entry.dtype][1]
    where = f"tensor {entry.name[:200]!r}: dtype {entry.dtype}"
    if dtype is None:
        lack = f"{where} has no equivalent in torch {torch.__version__}"
        raise UnsupportedVersion(f"{lack}: it needs a newer torch, or names= without it")
    if entry.dtype != "F4":
        return dtype, entry.shape
    if not entry.shape or entry.shape[-1] % 2:
        raise ManifestError(f"{where} needs an even last dimension in torch, has shape {list(entry.shape)}")
    return dtype, (*entry.shape[:-1], entry.shape[-1] // 2)


def safetensors_spec(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and shape of a tensor in a safetensors header; the inverse of `torch_spec`.

    Raises:
        ValueError: The format lacks the dtype, or the tensor is F4 without dimensions.
    """
    name = NAMES.get(tensor.dtype)
    if name is None:
        raise ValueError(f"safetensors has no {tensor.dtype}")
    if name != "F4":
        return name, tuple(tensor.shape)
    if not tensor.dim():
        raise ValueError(f"safetensors has no {tensor.dtype} without dimensions")
    return name, (*tensor.shape[:-1], 2 * tensor.shape[-1])
