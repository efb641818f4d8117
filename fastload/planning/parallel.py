"""The requests of ranks in a job with tensor, pipeline and data parallelism. Pure.

Ranks are numbered as in Megatron-LM: tensor-parallel ranks are adjacent, then data-parallel ranks, then
pipeline stages.

- Tensors with two or more dimensions are cut over the tensor-parallel ranks: along dimension 1 if their name
  is that of a row-parallel layer (`_ROW_PARALLEL`), along dimension 0 otherwise (column-parallel layers,
  embeddings, experts). Norms and biases are replicated.
- The first number in a name is that of a layer. Layers are dealt to the stages evenly and in order. A tensor
  without a number is in the first stage if it is an embedding, otherwise in the last.
- With full sharding, data-parallel ranks cut dimension 0 of the tensor-parallel part.

A real job may cut differently: names are only hints.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from fastload.errors import OptionError
from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import TensorEntry
from fastload.geometry.box import Box, runs_of
from fastload.transfer.demand import Part, RankRequest, RankRequests

_ROW_PARALLEL = re.compile(
    r"(^|[._])(o_proj|down_proj|out_proj|c_proj|wo|w2|fc2|dense_4h_to_h|linear_fc2|linear_proj"
    r"|(self_attention|attention)\.dense|attention\.output\.dense|output\.dense)([._]|$)"
)
_EMBEDDING = re.compile(r"embed|wte|wpe")
_LAYER = re.compile(r"(?:^|[._])(\d+)(?=[._]|$)")
_ITEM_BYTES = 2
_ASPECT = 128  # hidden size ÷ layers, as in GPT-3


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The parallelism of a job.

    Attributes:
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        dp: Data-parallel ranks: replicas, or shards of one.
        fsdp: Whether data-parallel ranks are shards of one replica.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    fsdp: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.tp * self.pp * self.dp

    @property
    def cuts(self) -> bool:
        """Whether some rank holds less than the complete model."""
        return self.tp * self.pp > 1 or (self.fsdp and self.dp > 1)

    def __str__(self) -> str:
        return f"TP {self.tp} × PP {self.pp} × DP {self.dp}{' (FSDP)' if self.fsdp else ''}"


class Cut(NamedTuple):
    """A tensor of a checkpoint with its cut.

    Attributes:
        file: Index of the file.
        offset: First byte in the file.
        nbytes: Length in bytes.
        shape: Shape of the tensor.
        dim: The dimension that tensor-parallel ranks cut; None if it is replicated.
        layer: Number of its layer; -1 before the first, the number of layers after the last.
    """

    file: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dim: int | None
    layer: int


@dataclass(frozen=True)
class Model:
    """The model that a job loads.

    Attributes:
        tensors: Its tensors, in the order of their bytes.
        num_layers: Number of layers.
    """

    tensors: Sequence[Cut]
    num_layers: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(cut.nbytes for cut in self.tensors)


def model_of_tensors(entries: Sequence[TensorEntry]) -> Model:
    """Guesses the cuts of a checkpoint's tensors by their names.

    Raises:
        ManifestError: A tensor has a dtype that torch lacks.
    """
    numbers = [_LAYER.search(entry.name) for entry in entries]
    layers = {number: at for at, number in enumerate(sorted({int(found[1]) for found in numbers if found}))}
    tensors = []
    for entry, found in zip(entries, numbers, strict=True):
        _, shape = torch_spec(entry)
        dim = None if len(shape) < 2 else 1 if _ROW_PARALLEL.search(entry.name) else 0
        outside = -1 if _EMBEDDING.search(entry.name) else len(layers)
        layer = layers[int(found[1])] if found else outside
        tensors.append(Cut(entry.file, entry.offset, entry.nbytes, shape, dim, layer))
    return Model(tensors, len(layers))


def model_of_size(nbytes: int, parallel: Parallel) -> Model:
    """Returns a transformer of a given size with equal layers, some 128 times as wide as deep.

    A layer has four matrices of 2-byte elements: 3h × h and h × h, about 4h × h and h × 4h. The second and
    the last are row-parallel. The rest of its bytes is replicated. Each layer is a file.

    Args:
        nbytes: Bytes of all tensors.
        parallel: The job; all stages get equally many layers.
    """
    depth = round((nbytes / _ITEM_BYTES / (12 * _ASPECT**2)) ** (1 / 3))
    num_layers = parallel.pp * max(1, -(-depth // parallel.pp))
    tensors = []
    for layer in range(num_layers):
        end = nbytes * (layer + 1) // num_layers - nbytes * layer // num_layers
        offset = 0
        for shape, dim in _matrices(end, parallel.tp):
            length = _ITEM_BYTES * shape[0] * shape[1]
            tensors.append(Cut(layer, offset, length, shape, dim, layer))
            offset += length
        tensors.append(Cut(layer, offset, end - offset, (end - offset,), None, layer))
    return Model([cut for cut in tensors if cut.nbytes], num_layers)


def _matrices(nbytes: int, tp: int) -> list[tuple[tuple[int, int], int]]:
    """Returns shapes of at most `nbytes` bytes, each with the dimension that is cut."""
    hidden = int((nbytes / _ITEM_BYTES / 12) ** 0.5) // tp * tp
    if not hidden:
        return []
    inner = (nbytes // _ITEM_BYTES - 4 * hidden**2) // (2 * hidden) // tp * tp
    return [((3 * hidden, hidden), 0), ((hidden, hidden), 1), ((inner, hidden), 0), ((hidden, inner), 1)]


def requests_of(model: Model, parallel: Parallel) -> RankRequests:
    """Returns the requests of the ranks of a job.

    Raises:
        OptionError: The pipeline has more stages than the model has layers.
    """
    if parallel.pp > max(1, model.num_layers):
        raise OptionError(f"{parallel.pp} stages of a pipeline: the checkpoint has {model.num_layers} layers")
    first: dict[int, tuple[array[int], array[int], list[Cut]]] = {}
    requests: list[RankRequest] = []
    for rank in range(parallel.num_ranks):
        others, column = divmod(rank, parallel.tp)
        stage, replica = divmod(others, parallel.dp)
        if stage not in first:
            first[stage] = _stage(model, stage, parallel.pp)
        if replica and not parallel.fsdp:
            requests.append(requests[rank - parallel.tp])
            continue
        tensors, codes, kinds = first[stage]
        parts = tuple(_part(cut, column, replica, parallel) for cut in kinds)
        requests.append(RankRequest(tensors, codes, parts))
    return RankRequests.join(requests)


def _stage(model: Model, stage: int, num_stages: int) -> tuple[array[int], array[int], list[Cut]]:
    """Returns the tensors of a stage, the kind of each, and one tensor of each kind."""
    tensors, codes = array("I"), array("I")
    kinds: dict[tuple[object, ...], int] = {}
    examples: list[Cut] = []
    for index, cut in enumerate(model.tensors):
        layer = min(max(cut.layer, 0), model.num_layers - 1)
        if layer * num_stages // max(1, model.num_layers) == stage and cut.nbytes:
            tensors.append(index)
            kind = kinds.setdefault((cut.shape, cut.nbytes, cut.dim), len(kinds))
            codes.append(kind)
            if kind == len(examples):
                examples.append(cut)
    return tensors, codes, examples


def _part(cut: Cut, column: int, replica: int, parallel: Parallel) -> Part:
    """Returns a rank's part of a tensor; empty if there are fewer elements than ranks."""
    offsets, sizes = [0] * len(cut.shape), list(cut.shape)
    for dim, index, count in (
        (cut.dim, column, parallel.tp),
        (0 if cut.shape and parallel.fsdp else None, replica, parallel.dp),
    ):
        if dim is not None:
            length = -(-sizes[dim] // count)
            begin = min(index * length, sizes[dim])
            offsets[dim] += begin
            sizes[dim] = min(length, sizes[dim] - begin)
    box = Box(tuple(offsets), tuple(sizes))
    if not box.numel:
        return ()
    return (runs_of(box, cut.shape).scaled(cut.nbytes // prod(cut.shape)),)
