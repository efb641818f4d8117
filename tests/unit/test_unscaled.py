"""Quantised elements whose scales would not be loaded are not cast to what their values are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

import fastload
from fastload import LoadOptions, MismatchError
from fastload.integrations.dcp import Reader

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def checkpoint(folder: Path, **tensors: Tensor) -> Path:
    folder.mkdir()
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / "m.safetensors")
    (folder / "config.json").write_text(json.dumps(FP8))
    return folder


def fp8(folder: Path) -> Path:
    weight = torch.arange(16.0).reshape(2, 8).to(torch.float8_e4m3fn)
    return checkpoint(
        folder, w__weight=weight, w__weight_scale_inv=torch.full((1, 1), 0.5), w__bias=torch.ones(2)
    )


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.w = nn.Linear(8, 2, dtype=dtype)


@pytest.mark.parametrize("strict", [True, False])
def test_weights_without_their_scales(tmp_path: Path, strict: bool) -> None:
    path = fp8(tmp_path / "fp8")
    words = r"w\.weight: quantised elements \(F8_E4M3\).*w\.weight_scale_inv: LoadOptions\(dequantize=True\)"
    for arguments in ({}, {"dtype": torch.bfloat16}, {"dtype": "bfloat16", "names": ["w.weight"]}):
        model = Model()
        with pytest.raises(MismatchError, match=words) as raised:
            fastload.load(path, into=model, strict=strict, **arguments)
        assert "strict=False" not in str(raised.value)
    model = Model(torch.float32)
    fastload.load(path, into=model, options=LoadOptions(dequantize=True))
    assert torch.equal(model.w.weight, torch.arange(16.0).reshape(2, 8) / 2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_new_tensors_and_boxes(tmp_path: Path) -> None:
    path = fp8(tmp_path / "fp8")
    with pytest.raises(MismatchError, match=r"w\.weight: quantised elements"):
        fastload.load(path, names=["w.weight"], dtype=torch.bfloat16)
    both = fastload.load(path, names="w.weight*", dtype=torch.float32)  # with the scale
    assert torch.equal(both["w.weight"] * both["w.weight_scale_inv"], torch.arange(16.0).reshape(2, 8) / 2)
    assert fastload.load(path, names=["w.weight"])["w.weight"].dtype == torch.float8_e4m3fn  # as stored
    with pytest.raises(BaseException, match=r"w\.weight: quantised elements"):
        dcp.load({"w.weight": torch.zeros(2, 8)}, storage_reader=Reader(path), no_dist=True)
    raw = {"w.weight": torch.zeros(2, 8, dtype=torch.float8_e4m3fn)}
    dcp.load(raw, storage_reader=Reader(path), no_dist=True)
    assert torch.equal(raw["w.weight"].float(), torch.arange(16.0).reshape(2, 8))


def test_the_advice_for_scales_that_nothing_takes(tmp_path: Path) -> None:
    path = fp8(tmp_path / "fp8")
    into = {"w.weight": torch.zeros(2, 8, dtype=torch.float8_e4m3fn), "w.bias": torch.zeros(2)}
    with pytest.raises(
        MismatchError, match=r"scales of quantised weights: LoadOptions\(dequantize=True\)"
    ) as raised:
        fastload.load(path, into=into)
    assert "strict=False" not in str(raised.value)
    fastload.load(path, into=into, strict=False)  # as stored, nothing is cast


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        ("w.weight_packed", "w.weight_scale"),
        ("w.weight", "w.weight_scale"),
        ("experts_blocks", "experts_scales"),
        ("w.weight", "w.SCB"),
        ("w.weight", "w.scale_weight"),
        ("w.weight", "w.weight.absmax"),
        ("w.qweight", "w.scales"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.float8_e5m2])
def test_names_of_scales_and_dtypes(tmp_path: Path, weight: str, scale: str, dtype: torch.dtype) -> None:
    tensors = {weight: torch.ones(2, 4, dtype=dtype), scale: torch.ones(2), "b": torch.ones(3, dtype=dtype)}
    path = tmp_path / "m.safetensors"
    save_file(tensors, path)
    state: dict[str, Any] = {weight: torch.zeros(2, 4), "b": torch.zeros(3)}
    with pytest.raises(MismatchError, match="quantised elements") as raised:
        fastload.load(path, into=state, dtype=torch.float32, strict=False)
    assert any(scale in line for line in raised.value.mismatched)
    with fastload.open(path) as opened:
        box = fastload.Box((0, 0), (2, 4))
        with pytest.raises(MismatchError, match="dtype"):
            opened.read({weight: [(box, torch.zeros(2, 4))]})


def test_elements_without_any_scale_are_cast(tmp_path: Path) -> None:
    """Such as weights that were saved as FP8 without scales, and activations' scales next to them."""
    weight = torch.arange(8.0).to(torch.float8_e5m2)
    path = tmp_path / "m.safetensors"
    save_file({"w.weight": weight, "w.input_scale": torch.ones(1)}, path)
    loaded = fastload.load(path, names=["w.weight"], dtype=torch.float32)
    assert torch.equal(loaded["w.weight"], torch.arange(8.0))
