"""Small models with random weights, made from their configs, as directories that engines load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fastload

__all__ = ["KINDS", "add_tokenizer", "changed", "config_only", "damaged", "make", "saved", "without"]

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SIZES, **more))


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2))


KINDS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "tied": lambda: _llama(tie_word_embeddings=True),
    "mixtral": _mixtral,
    "w8a8": _llama,
}


def make(folder: Path, kind: str, seed: int = 0) -> Path:
    """Makes a model, that of ``w8a8`` with quantized linear layers; returns where it is."""
    torch.manual_seed(seed)
    model = KINDS[kind]().to(torch.bfloat16)
    model.save_pretrained(folder, **({"max_shard_size": "100KB"} if kind == "tied" else {}))
    if kind == "w8a8":
        _quantize(folder)
    return folder


def _quantize(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        if "_proj." not in name:
            tensors[name] = tensor
            continue
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (tensor.float() / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config))


def add_tokenizer(folder: Path) -> None:
    """Gives a model a tokenizer, whose words are the numbers of its tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(n): n for n in range(_SIZES["vocab_size"])}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(folder)


def config_only(model: Path, folder: Path) -> Path:
    """Copies what a model has beside its weights."""
    folder.mkdir()
    for file in model.glob("*.json"):
        if "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def saved(model: Path, folder: Path) -> Path:
    """Saves the weights of a model with fastload, with checksums."""
    state = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    fastload.save(state, folder)
    return folder


def changed(model: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Copies a model, with other weights."""
    config_only(model, folder)
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without(model: Path, folder: Path, name: str) -> Path:
    """Copies a model, but for one of its weights."""
    return changed(model, folder, lambda tensors: tensors.pop(name))


def damaged(checkpoint: Path, where: int) -> Path:
    """Flips bits of a checkpoint, so many bytes before its end."""
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(-where, 2)
        byte = file.read(1)
        file.seek(-where, 2)
        file.write(bytes([byte[0] ^ 255]))
    return checkpoint
