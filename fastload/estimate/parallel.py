"""How a job of tensor, pipeline and data parallel ranks cuts a model, and so what each rank wants. Pure.

Ranks are numbered as Megatron-LM numbers them: tensor parallel ranks are next to each other, then come the
data parallel ones, then the stages of the pipeline.

- Tensors with two dimensions or more are cut over the tensor parallel ranks: along dimension 1 if their name
  is that of a row-parallel layer (`_ROW_PARALLEL`), along dimension 0 otherwise: column-parallel layers,
  embeddings, experts. Norms and biases are replicated.
- The first number in a name is that of a layer. Layers are dealt to the stages in order and evenly; what has
  no number is in the first stage if it is an embedding, else in the last.
- Fully sharded, data parallel ranks cut dimension 0 of what the tensor parallel ones have left of it.

A real job may cut otherwise: names say little, and whoever has the model knows better.
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
    """How many ranks share a model, and how.

    Attributes:
        tp: Tensor parallel ranks.
        pp: Stages of the pipeline.
        dp: Data parallel ranks: replicas, or parts of one.
        fsdp: Whether they are parts of one: fully sharded.
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
        """Whether any rank holds less than the whole model."""
        return self.tp * self.pp > 1 or (self.fsdp and self.dp > 1)

    def __str__(self) -> str:
        return f"TP {self.tp} × PP {self.pp} × DP {self.dp}{' (FSDP)' if self.fsdp else ''}"


class Cut(NamedTuple):
    """A tensor of a checkpoint, and how it is cut.

    Attributes:
        file: Index of the file.
        offset: First byte in the file.
        nbytes: Length in bytes.
        shape: Its shape.
        dim: The dimension that tensor parallel ranks cut; None if they all have it.
        layer: Number of the layer that it is in; -1 before the first, the number of layers after the last.
    """

    file: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dim: int | None
    layer: int


@dataclass(frozen=True)
class Model:
    """What a job loads.

    Attributes:
        tensors: In the order of their bytes.
        num_layers: How many layers they are of.
    """

    tensors: Sequence[Cut]
    num_layers: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(cut.nbytes for cut in self.tensors)


def model_of_tensors(entries: Sequence[TensorEntry]) -> Model:
    """Guesses by names how the tensors of a checkpoint are cut.

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
    """Makes up the tensors of a checkpoint: a transformer of equal layers, some 128 times as wide as deep.

    A layer has four matrices of 2-byte elements, 3h × h and h × h, about 4h × h and h × 4h, of which the
    second and the last are row-parallel; and the rest of its bytes, which is replicated. It is a file.

    Args:
        nbytes: Bytes of all of them together.
        parallel: The job: all stages get as many layers.
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
    """Returns shapes that take no more than so many bytes, and which dimension of each is cut."""
    hidden = int((nbytes / _ITEM_BYTES / 12) ** 0.5) // tp * tp
    if not hidden:
        return []
    inner = (nbytes // _ITEM_BYTES - 4 * hidden**2) // (2 * hidden) // tp * tp
    return [((3 * hidden, hidden), 0), ((hidden, hidden), 1), ((inner, hidden), 0), ((hidden, inner), 1)]


def requests_of(model: Model, parallel: Parallel) -> RankRequests:
    """Returns what the ranks of a job want of a model.

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
    """Returns the tensors of a stage, of which kind each is, and one tensor of each kind."""
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
    """Returns what a rank wants of a tensor; nothing, if there is not enough of it for all."""
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
