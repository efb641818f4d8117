"""Writes a checkpoint of random bf16 weights, shaped like a transformer, in Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
from safetensors.torch import save_file

from fastload.options import parse_bytes

_INDEX = "model.safetensors.index.json"


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--size", type=parse_bytes, default="512MB", show_default=True, help="Bytes of all tensors together."
)
@click.option("--files", "num_files", default=8, show_default=True, help="Number of safetensors files.")
@click.option(
    "--big", type=parse_bytes, default="0", help="Bytes of one extra tensor, as a part of the size."
)
def main(directory: Path, size: int, num_files: int, big: int) -> None:
    """Write a checkpoint into DIRECTORY."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for index in range(num_files):
        name = f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
        tensors = _layer(index, (size - big) // num_files, generator)
        if index == 0 and big:
            tensors["model.embed_tokens.weight"] = _random((big // 128, 64), generator)
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index_text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2)
    (directory / _INDEX).write_text(index_text)
    print(f"{len(weight_map)} tensors in {num_files} files")


def _layer(index: int, nbytes: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Makes one layer's tensors: four attention projections, three of the MLP, two norms."""
    hidden = max(8, int((nbytes / 2 / 12) ** 0.5) // 8 * 8)
    wide = (nbytes // 2 - 4 * hidden * hidden - 2 * hidden) // (3 * hidden)
    shapes = {f"self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
    shapes |= {f"mlp.{part}_proj.weight": (wide, hidden) for part in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (hidden, wide)
    shapes |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    return {f"model.layers.{index}.{name}": _random(shape, generator) for name, shape in shapes.items()}


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    # Random bits make every bf16 there is, NaN included; loading has to keep them all.
    return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)


if __name__ == "__main__":
    main()
