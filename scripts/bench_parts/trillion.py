"""The state of a GPT with a trillion parameters, as ranks of Megatron Core hold it, without its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from fastload import Box, Shard

OPTIMIZERS = "fully_reshardable", "dp_reshardable"
_HIDDEN, _VOCABULARY, _POSITIONS = 25600, 51200, 2048
_LAYERS_OF_A_STAGE = 2
_STATES = "param", "exp_avg", "exp_avg_sq"
_BUCKET = 40_000_000  # elements: Megatron's default
_PADDING = 128  # elements to which it rounds a bucket for each rank
_WORDS = 625  # of the state of Python's random numbers, in each rank's objects


@dataclass(frozen=True)
class Job:
    """A parallelism; tensor parallel ranks are neighbours, then data parallel ones, as in Megatron.

    Attributes:
        tp: Tensor parallel ranks.
        pp: Stages of the pipeline, of two layers each.
        dp: Data parallel ranks.
    """

    tp: int
    pp: int
    dp: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"TP {self.tp} × PP {self.pp} × DP {self.dp}"

    def at(self, rank: int) -> tuple[int, int, int]:
        """Returns the tensor, pipeline and data parallel number of a rank."""
        return rank % self.tp, rank // (self.tp * self.dp), rank // self.tp % self.dp


@dataclass(frozen=True)
class _Parameter:
    key: str
    shape: tuple[int, ...]  # global
    boxes: tuple[Box, ...]  # on this rank


def state_of(job: Job, rank: int, optimizer: str) -> dict[str, Any]:
    """Returns the state of a rank, as the integration of Megatron Core gives it to a save.

    Args:
        job: The parallelism.
        rank: The rank.
        optimizer: One of `OPTIMIZERS`: parameters and moments in the shapes of the model, on every replica;
            or flat buckets, of which each data parallel rank holds a part.
    """
    tp, pp, dp = job.at(rank)
    parameters = list(_parameters(job, tp, pp))
    state: dict[str, Any] = {each.key: _shard(each, torch.bfloat16) for each in parameters}
    if optimizer == "dp_reshardable":
        state |= dict(_buckets(job, pp * job.tp + tp, dp, parameters))
    else:
        for name in _STATES:
            state |= {
                f"optimizer.state.{name}.{each.key}": _shard(each, torch.float32) for each in parameters
            }
    if dp == 0:
        state["megatron.objects"] = dict(_objects(job, tp, pp))
    if rank == 0:
        state["megatron.common"] = torch.zeros(20_000, dtype=torch.uint8)
    return state


def _parameters(job: Job, tp: int, pp: int) -> Iterator[_Parameter]:
    num_layers, hidden = job.pp * _LAYERS_OF_A_STAGE, _HIDDEN
    if pp == 0:
        yield _cut("embedding.word_embeddings.weight", (_VOCABULARY, hidden), 0, job, tp)
        yield _cut("embedding.position_embeddings.weight", (_POSITIONS, hidden), None, job, tp)
    layers = range(pp * _LAYERS_OF_A_STAGE, (pp + 1) * _LAYERS_OF_A_STAGE)
    for name, shape, dim in (
        ("input_layernorm.weight", (hidden,), None),
        ("input_layernorm.bias", (hidden,), None),
        ("self_attention.linear_proj.weight", (hidden, hidden), 1),
        ("self_attention.linear_proj.bias", (hidden,), None),
        ("self_attention.linear_qkv.weight", (3 * hidden, hidden), 0),
        ("self_attention.linear_qkv.bias", (3 * hidden,), 0),
        ("pre_mlp_layernorm.weight", (hidden,), None),
        ("pre_mlp_layernorm.bias", (hidden,), None),
        ("mlp.linear_fc1.weight", (4 * hidden, hidden), 0),
        ("mlp.linear_fc1.bias", (4 * hidden,), 0),
        ("mlp.linear_fc2.weight", (hidden, 4 * hidden), 1),
        ("mlp.linear_fc2.bias", (hidden,), None),
    ):
        one = _cut(f"decoder.layers.{name}", shape, dim, job, tp)
        boxes = tuple(Box((layer, *box.offsets), (1, *box.sizes)) for layer in layers for box in one.boxes)
        yield _Parameter(one.key, (num_layers, *shape), boxes)
    if pp == job.pp - 1:
        yield _cut("decoder.final_layernorm.weight", (hidden,), None, job, tp)
        yield _cut("decoder.final_layernorm.bias", (hidden,), None, job, tp)
        yield _cut("output_layer.weight", (_VOCABULARY, hidden), 0, job, tp)


def _cut(key: str, shape: tuple[int, ...], dim: int | None, job: Job, tp: int) -> _Parameter:
    offsets, sizes = [0] * len(shape), list(shape)
    if dim is not None:
        sizes[dim] = shape[dim] // job.tp
        offsets[dim] = tp * sizes[dim]
    return _Parameter(key, shape, (Box(tuple(offsets), tuple(sizes)),))


def _buckets(job: Job, group: int, dp: int, parameters: Sequence[_Parameter]) -> Iterator[tuple[str, Shard]]:
    """Yields the part of a data parallel rank of each flat bucket: pieces of parameters, and padding."""
    lengths = [box.numel for each in reversed(parameters) for box in each.boxes]
    buckets: list[list[int]] = [[]]
    for length in lengths:
        if sum(buckets[-1]) >= _BUCKET:
            buckets.append([])
        buckets[-1].append(length)
    for number, members in enumerate(buckets):
        unit = _PADDING * job.dp
        padded = -(-sum(members) // unit) * unit
        first, end = dp * padded // job.dp, (dp + 1) * padded // job.dp
        edges, position = {first, end}, 0
        for length in members:
            position += length
            edges |= {position} if first < position < end else set()
        cuts = sorted(edges)
        boxes = [
            (Box((begin,), (stop - begin,)), _memory((stop - begin,), torch.float32))
            for begin, stop in pairwise(cuts)
        ]
        place = f"optimizer.distributed.dp_group_idx_{group}.gbuf_idx_0.dtype_bf16.bucket_idx_{number}"
        for name in _STATES:
            yield f"{place}.{name}", Shard.of_boxes(boxes, (padded,))


def _objects(job: Job, tp: int, pp: int) -> Iterator[tuple[str, Any]]:
    """Yields the sharded objects whose main replica is on a rank: random states, extra states of layers."""
    words = tuple((7919 * word + 31 * pp + tp) % (1 << 32) for word in range(_WORDS))
    random_state = {"python": (3, words, None), "torch": torch.zeros(5056, dtype=torch.uint8)}
    yield f"rng_state/shard_{pp}.{tp}_{job.pp}.{job.tp}", [random_state]
    num_layers = job.pp * _LAYERS_OF_A_STAGE
    for layer in range(pp * _LAYERS_OF_A_STAGE, (pp + 1) * _LAYERS_OF_A_STAGE) if tp == 0 else ():
        for name in (
            "self_attention.linear_proj",
            "self_attention.linear_qkv",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        ):
            yield f"decoder.layers.{name}._extra_state/shard_{layer}_{num_layers}", ("BytesIO", b"")


def _shard(parameter: _Parameter, dtype: torch.dtype) -> Shard:
    boxes = [(box, _memory(box.sizes, dtype)) for box in parameter.boxes]
    return Shard.of_boxes(boxes, parameter.shape)


def _memory(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor whose elements are all the same one in memory."""
    return torch.zeros((), dtype=dtype).expand(tuple(sizes))


def nbytes_of(job: Job) -> int:
    """Returns the bytes of the parameters, each with two bytes of weight and twelve of the optimizer."""
    return 14 * sum(
        prod(each.shape) // (job.pp if "layers" in each.key else 1)
        for pp in range(job.pp)
        for each in _parameters(job, 0, pp)
    )
