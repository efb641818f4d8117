"""Sharded state dicts with the structure of a GPT and its optimizer, cut as Megatron Core cuts them."""

from __future__ import annotations

import io
from argparse import Namespace
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import Tensor

LAYERS, HIDDEN, VOCABULARY, EXPERTS = 4, 8, 61, 8


class Parallel(NamedTuple):
    """A parallelism, and a rank in it: tensor parallel ranks are neighbours, then data parallel ones."""

    tp: int
    pp: int
    dp: int
    rank: int

    @property
    def at(self) -> tuple[int, int, int]:
        """The numbers of the rank: tensor, pipeline, data parallel."""
        return self.rank % self.tp, self.rank // (self.tp * self.dp), self.rank // self.tp % self.dp


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns the values of a complete tensor, which its name gives."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator).to(dtype)


def state_of(parallel: Parallel, *, filled: bool = True) -> dict[str, Any]:
    """Returns this rank's sharded state dict.

    Args:
        parallel: The parallelism.
        filled: Whether it has the values; else zeros, to load into.
    """
    tp, pp, dp = parallel.at
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}

    def local(full: Tensor, at: tuple[Any, ...]) -> Tensor:
        part = full[at].clone()
        return part if filled else torch.zeros_like(part)

    def rows(size: int) -> slice:
        return slice(tp * size // parallel.tp, (tp + 1) * size // parallel.tp)

    padded = -(-VOCABULARY // (4 * parallel.tp)) * 4 * parallel.tp  # differs from parallelism to parallelism
    vocabulary = torch.zeros(padded, HIDDEN)
    vocabulary[:VOCABULARY] = whole("vocabulary", (VOCABULARY, HIDDEN), torch.float32)
    last = parallel.pp - 1
    for name, stage, replica in (("embedding", 0, 0), ("output", last, 1)):
        if pp == stage and (name == "embedding" or parallel.pp > 1):
            model[f"{name}.weight"] = ShardedTensor.from_rank_offsets(
                "embedding.word_embeddings.weight",
                local(vocabulary, (rows(padded),)),
                (0, tp, parallel.tp),
                replica_id=(replica, 0, dp),
                allow_shape_mismatch=True,
            )
    for layer in range(pp * LAYERS // parallel.pp, (pp + 1) * LAYERS // parallel.pp):
        place = (0, layer, LAYERS)
        for prefix, to, dtype in (
            ("", model, torch.bfloat16),
            ("optimizer.state.exp_avg.", optimizer, torch.float32),
        ):
            key = f"{prefix}decoder.layers.self_attention.linear_qkv.weight"
            full = whole(key, (LAYERS, 3 * HIDDEN, HIDDEN), dtype)
            to[f"layers.{layer}.qkv"] = ShardedTensor.from_rank_offsets(
                key,
                local(full, (layer, rows(3 * HIDDEN))),
                place,
                (1, tp, parallel.tp),
                replica_id=(0, 0, dp),
                prepend_axis_num=1,
            )
            key = f"{prefix}decoder.layers.input_layernorm.weight"
            to[f"layers.{layer}.norm"] = ShardedTensor.from_rank_offsets(
                key,
                local(whole(key, (LAYERS, HIDDEN), dtype), (layer,)),
                place,
                replica_id=(0, tp, dp),
                prepend_axis_num=1,
            )
        key = "decoder.layers.mlp.linear_fc1.weight"
        full = whole(key, (LAYERS, 2, 4 * HIDDEN, HIDDEN), torch.bfloat16)
        halves = local(full, (layer, slice(None), rows(4 * HIDDEN))).flatten(0, 1)
        model[f"layers.{layer}.fc1"] = swiglu(key, halves, parallel, layer, (0, 0, dp))
        model[f"layers.{layer}.extra"] = ShardedObject(
            "decoder.layers.mlp.linear_fc1._extra_state",
            extra(layer) if filled else None,
            (LAYERS,),
            (layer,),
            replica_id=(0, tp, dp),
        )
    rng = {"python": (3, (1, 2, pp, tp), None), "torch": torch.tensor([pp, tp, 7], dtype=torch.uint8)}
    return {
        "model": model,
        "optimizer": {
            "state": optimizer,
            "param_groups": [{"lr": 0.5 if filled else 0.0, "params": LocalNonpersistentObject([dp])}],
        },
        "rng_state": ShardedObject(
            "rng_state", [rng] if filled else None, (parallel.pp, parallel.tp), (pp, tp), replica_id=dp
        ),
        "iteration": 70 if filled else 0,
        "args": Namespace(num_layers=LAYERS, name="gpt") if filled else None,
        "local": LocalNonpersistentObject({"rank": parallel.rank}),
    }


def experts_of(ep: int, rank: int, *, filled: bool = True) -> dict[str, Any]:
    """Returns the sharded state dict of a rank with experts; expert parallel groups are replicas."""
    at, replica = rank % ep, rank // ep
    state: dict[str, Any] = {}

    def add(name: str, full: Tensor, place: tuple[int, ...], *offsets: Any, replica_id: Any) -> None:
        data = full[place].clone() if filled else torch.zeros_like(full[place])
        key = f"decoder.layers.mlp.{name.partition(' ')[0]}"
        state[name] = ShardedTensor.from_rank_offsets(
            key, data, *offsets, replica_id=replica_id, prepend_axis_num=len(place)
        )

    router = whole("router", (LAYERS, EXPERTS, HIDDEN), torch.float32)
    weights = whole("experts", (LAYERS, EXPERTS, 4 * HIDDEN, HIDDEN), torch.bfloat16)
    for layer in range(LAYERS):
        add(f"router.weight {layer}", router, (layer,), (0, layer, LAYERS), replica_id=(0, 0, rank))
        for expert in range(at * EXPERTS // ep, (at + 1) * EXPERTS // ep):
            place = (0, layer, LAYERS), (1, expert, EXPERTS)
            name = f"experts.experts.linear_fc1.weight {layer} {expert}"
            add(name, weights, (layer, expert), *place, replica_id=(0, 0, replica))
            state[f"extra {layer} {expert}"] = ShardedObject(
                "decoder.layers.mlp.experts.experts.linear_fc1._extra_state",
                {"expert": expert} if filled else None,
                (LAYERS, EXPERTS),
                (layer, expert),
                replica_id=(0, 0, replica),
            )
    return state


def extra(layer: int) -> Any:
    """Returns extra states of layers, as Transformer Engine has them: bytes, tensors, or nothing."""
    if layer == 0:
        return io.BytesIO(b"fp8 state")
    return None if layer == 1 else {"scale": torch.full((3,), float(layer)), "history": (layer, "amax")}


def swiglu(key: str, data: Tensor, parallel: Parallel, layer: int, replica: Any) -> ShardedTensorFactory:
    """Returns the factory of two halves, each of which is sharded."""
    tp = parallel.at[0]

    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(
                key,
                half,
                (0, layer, LAYERS),
                (1, number * parallel.tp + tp, 2 * parallel.tp),
                replica_id=replica_id,
                prepend_axis_num=1,
            )
            for number, half in enumerate(tensor.chunk(2))
        ]

    return ShardedTensorFactory(key, data, build, torch.cat, replica)


def values_of(state: Any) -> Any:
    """Returns a loaded state, with what is compared in place of objects without equality."""
    if isinstance(state, dict):
        return {key: values_of(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [values_of(value) for value in state]
    if isinstance(state, Tensor):
        return str(state.dtype), state.tolist()
    if isinstance(state, io.BytesIO):
        return state.getvalue()
    return vars(state) if isinstance(state, Namespace) else state
