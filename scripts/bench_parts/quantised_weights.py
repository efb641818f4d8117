"""Loads of quantised weights: as stored, dequantised, and of the result that was stored before."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

import fastload
from bench_parts.tables import print_table
from fastload import LoadOptions

Made = tuple[dict[str, Tensor], dict[str, Any]]
_ARMS = "as stored", "result", "dequantised"
_ELEMENTS = 4096, 4096


def _fp8(rows: int) -> Tensor:
    return torch.randn(rows, _ELEMENTS[1]).to(torch.float8_e4m3fn)


def _blocks(number: int) -> Made:
    weight, scale = _fp8(_ELEMENTS[0]), torch.rand(32, 32)
    name = f"{number}.weight"
    return {name: weight, f"{name}_scale_inv": scale}, {"quant_method": "fp8", "weight_block_size": [128] * 2}


def _channels(number: int) -> Made:
    weight, scale = _fp8(_ELEMENTS[0]), torch.rand(_ELEMENTS[0], 1).bfloat16()
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {f"{number}.weight": weight, f"{number}.weight_scale": scale}, config


def _nvfp4(number: int) -> Made:
    rows = 2 * _ELEMENTS[0]
    tensors = {
        f"{number}.weight": torch.randint(0, 256, (rows, 2048), dtype=torch.uint8),
        f"{number}.weight_scale": torch.rand(rows, 256).to(torch.float8_e4m3fn),
        f"{number}.weight_scale_2": torch.tensor(0.01),
    }
    return tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def _mxfp4(number: int) -> Made:
    name = f"{number}.mlp.experts.down_proj"
    tensors = {
        f"{name}_blocks": torch.randint(0, 256, (4, 2048, 128, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(110, 130, (4, 2048, 128), dtype=torch.uint8),
    }
    return tensors, {"quant_method": "mxfp4"}


KINDS: dict[str, Callable[[int], Made]] = {
    "FP8, blocks of 128 × 128": _blocks,
    "FP8, channels": _channels,
    "NVFP4": _nvfp4,
    "MXFP4 (gpt-oss)": _mxfp4,
}


def write(kind: str, folder: Path, size: int, num_files: int = 1) -> dict[str, Tensor]:
    """Writes a quantised checkpoint of about some bytes; returns its tensors as they are stored."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    stored, config, weight_map = {}, {}, {}
    numbers = range(max(1, size >> 24))
    for file in range(min(num_files, len(numbers))):
        tensors, name = {}, f"model-{file}.safetensors"
        for number in numbers[file::num_files]:
            of_weight, config = KINDS[kind](number)
            tensors |= of_weight
        save_file(tensors, folder / name)
        stored |= tensors
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return stored


def load_alone(folder: Path) -> dict[str, Tensor]:
    """Returns the dequantised weights of a checkpoint, which this rank reads alone."""
    options = LoadOptions(dequantize=True, strategy="direct")
    return fastload.load(folder, dtype="bfloat16", options=options)


def measure(kind: str, folder: Path, size: int, repeats: int) -> list[dict[str, Any]]:
    """Returns seconds and CPU seconds of each arm, which run by turns, from the page cache and the disk."""
    stored = write(kind, folder / "quantised", size)
    dequantise = LoadOptions(dequantize=True)
    weights = fastload.load(folder / "quantised", dtype="bfloat16", options=dequantise)
    save_file(weights, folder / "result.safetensors")
    os.sync()
    rows = []
    for storage, io in (("page cache", "buffered"), ("disk", "direct")):
        options = LoadOptions(io=io)
        arms = {
            "as stored": partial(fastload.load, folder / "quantised", into=stored, options=options),
            "result": partial(fastload.load, folder / "result.safetensors", into=weights, options=options),
            "dequantised": partial(
                fastload.load,
                folder / "quantised",
                into=weights,
                dtype="bfloat16",
                options=replace(options, dequantize=True),
            ),
        }
        row: dict[str, Any] = {"kind": kind, "storage": storage}
        row |= {name: {"seconds": [], "cpu_s": []} for name in arms}
        for number in range(repeats + 1):
            for name in _ARMS if number % 2 else reversed(_ARMS):
                cpu, began = sum(os.times()[:2]), time.perf_counter()
                arms[name]()
                if number:  # the first one is warming up
                    row[name]["seconds"].append(time.perf_counter() - began)
                    row[name]["cpu_s"].append(sum(os.times()[:2]) - cpu)
        rows.append(row)
    return rows


def print_rows(rows: list[dict[str, Any]], title: str) -> None:
    """Prints medians and ratios."""
    table = Table(title=title)
    for head in ("weights", "from", *(f"{name}, s (CPU)" for name in _ARMS), "÷ stored", "÷ result"):
        table.add_column(head, justify="left" if head in ("weights", "from") else "right")
    for row in rows:
        wall, cpu = ({name: median(row[name][what]) for name in _ARMS} for what in ("seconds", "cpu_s"))
        ratios = (
            f"{wall['dequantised'] / wall[name]:.2f} ({cpu['dequantised'] / cpu[name]:.2f})"
            for name in _ARMS[:2]
        )
        times = (f"{wall[name]:.2f} ({cpu[name]:.2f})" for name in _ARMS)
        table.add_row(row["kind"], row["storage"], *times, *ratios)
    print_table(table)
