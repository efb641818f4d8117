"""A small GPT of Megatron Core, on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig


@contextmanager
def gpt(tp: int, pp: int, *, seed: int) -> Iterator[Any]:
    """Yields the part of a model that this rank has; its weights depend on the seed and the parallelism."""
    parallel_state.initialize_model_parallel(tp, pp)
    try:
        torch.manual_seed(seed + parallel_state.get_pipeline_model_parallel_rank())
        tensor_parallel.random.initialize_rng_tracker()
        config = TransformerConfig(
            num_layers=4,
            hidden_size=16,
            num_attention_heads=4,
            use_cpu_initialization=True,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            pipeline_dtype=torch.float32,
            gated_linear_unit=True,
            bias_activation_fusion=False,
        )
        yield GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=64,
            max_sequence_length=8,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
    finally:
        parallel_state.destroy_model_parallel()
