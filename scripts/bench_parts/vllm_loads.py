"""Loads of a model in the workers of vLLM, by its own loader and by others."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench_parts.job import forget_peak, peak_bytes
from tests.engines.engine import apart, engine

__all__ = ["ARMS", "load", "make_model", "measure"]

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("auto", {}),
    "runai_streamer": ("runai_streamer", {}),
    "fastload": ("fastload", {}),
}
_HIDDEN, _INNER = 2048, 5632
_SPINNING_S = 1.1  # for which vLLM's own process polls after a call; it does not while workers start


def make_model(folder: Path, num_bytes: int) -> None:
    """Writes a Llama of about so many bytes, with random weights in bf16, in two files."""
    vocabulary = num_bytes // 51_200  # a sixth of the bytes
    layer = {f"self_attn.{name}_proj": (_HIDDEN, _HIDDEN) for name in "qkvo"}
    layer |= {
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
    }
    layer |= {"input_layernorm": (_HIDDEN,), "post_attention_layernorm": (_HIDDEN,)}
    layer_bytes = sum(2 * torch.Size(shape).numel() for shape in layer.values())
    num_layers = max(2, round((num_bytes - 4 * vocabulary * _HIDDEN) / layer_bytes))
    shapes = {
        "model.embed_tokens": (vocabulary, _HIDDEN),
        "lm_head": (vocabulary, _HIDDEN),
        "model.norm": (_HIDDEN,),
    }
    shapes |= {f"model.layers.{n}.{name}": shape for n in range(num_layers) for name, shape in layer.items()}
    names, half = list(shapes), len(shapes) // 2
    for number, part in enumerate((names[:half], names[half:]), start=1):
        tensors = {
            f"{name}.weight": torch.empty(shapes[name], dtype=torch.bfloat16).uniform_(-0.02, 0.02)
            for name in part
        }
        save_file(tensors, folder / f"model-{number:05}-of-00002.safetensors", metadata={"format": "pt"})
    index = {
        f"{name}.weight": f"model-{1 + (at >= half):05}-of-00002.safetensors" for at, name in enumerate(names)
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": _HIDDEN,
        "intermediate_size": _INNER, "num_hidden_layers": num_layers, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": vocabulary, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


@apart
def measure(folder: Path, tp: int, repeats: int, arms: list[str], cold: bool) -> list[dict[str, Any]]:
    """Measures loads in the workers of one engine, all arms in turn; the first of each does not count."""
    rows: dict[str, list[Any]] = {arm: [] for arm in arms}
    with engine(folder, "dummy", tp) as started:
        for turn in range(1 + repeats):
            for arm in arms:
                if cold:
                    _drop_cache(folder)
                ranks = started.llm.collective_rpc(load, args=ARMS[arm])
                if turn:
                    rows[arm].append(ranks)
    return [_summary(arm, tp, cold, runs) for arm, runs in rows.items()]


def _summary(arm: str, tp: int, cold: bool, runs: list[list[tuple[float, float, int]]]) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    return {
        "arm": arm,
        "tp": tp,
        "cold": cold,
        "seconds": median([max(wall for wall, _, _ in run) for run in runs]),
        "cpu_s": median([sum(cpu for _, cpu, _ in run) for run in runs]),
        "least_cpu_s": min(sum(cpu for _, cpu, _ in run) for run in runs),
        "peak_bytes": median([max(peak for _, _, peak in run) for run in runs]),
    }


def _drop_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(worker: Any, load_format: str, extra: dict[str, Any], path: str = "") -> tuple[float, float, int]:
    """Loads into a new model, in a worker; returns seconds, those of its CPUs, and bytes at the peak.

    Args:
        worker: The worker.
        load_format: Which loader of vLLM loads.
        extra: The loader's extra config.
        path: Where the weights are, if not with the config.
    """
    from copy import copy
    from dataclasses import replace

    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import get_world_group
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = worker.vllm_config
    config.compilation_config.static_forward_context.clear()  # which has the layers of the last model
    loader = get_model_loader(
        replace(
            config.load_config,
            load_format=load_format,
            model_loader_extra_config=extra,
            use_tqdm_on_load=False,
        )
    )
    model_config = copy(config.model_config)
    model_config.model = path or model_config.model
    with set_current_vllm_config(config), set_default_torch_dtype(model_config.dtype):
        model = initialize_model(vllm_config=config)
        time.sleep(_SPINNING_S)
        get_world_group().barrier()
        before, began, cpu = forget_peak(), time.perf_counter(), time.process_time()
        loader.load_weights(model, model_config)
        return time.perf_counter() - began, time.process_time() - cpu, peak_bytes() - before
