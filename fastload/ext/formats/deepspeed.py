"""Reads directories of DeepSpeed's ZeRO: the partitions of all ranks, as complete tensors by name.

Each rank's ``…_optim_states.pt`` has its partitions of flat fp32 vectors, one for each group of parameters.
In stages 1 and 2 a vector is the concatenation of the parameters of its group, cut into equal partitions. In
stage 3 each parameter is cut into equal partitions, and those of a rank are concatenated.
``…_model_states.pt`` have the names and shapes (``param_shapes``, as ``zero_to_fp32`` reads them), buffers,
frozen parameters, and the rest of the state.

The result is the state of rank 0, with the fp32 weights in ``module``, and in ``optimizer`` the state of each
parameter by its name. Without ``param_shapes``, stages 1 and 2 have the weights of ``module`` as they are.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import prod
from typing import Any, NamedTuple

import torch

from fastload.base.memory import uncollected
from fastload.base.threads import in_threads
from fastload.errors import ManifestError
from fastload.ext.formats.joined import dict_node, join_manifests, join_pieces, numbered
from fastload.ext.formats.torch_save import zip_file
from fastload.ext.formats.torch_save.unpickle import sizes_of
from fastload.formats.dtypes import DTYPES
from fastload.formats.manifest import Manifest, Piece, TensorEntry
from fastload.formats.open import file_digest
from fastload.formats.reading import reads_at_once, stat_all
from fastload.formats.state import children, leaf_of, leaves
from fastload.formats.untrusted import MemoryBudget, is_size, show
from fastload.formats.values import decode_value
from fastload.geometry.box import boxes_of_range
from fastload.storage.base import Storage

record = ""
digest = file_digest

_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,7})_)?mp_rank_(?P<slice>\d{1,5})_(?P<kind>model|optim)_states\.pt"
)
_PIECE_BYTES = 1000  # of a box with all that is made of it
_STAGE_2, _STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_OTHER_FILE = re.compile(r"(layer_\d+(_expert_|-model)|expp_rank_).*_states\.pt")
_LEFT_OUT = frozenset(
    {"param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "optimizer"}
)


Vectors = list[list[TensorEntry]]
"""The flat vectors of each rank, one for each group."""


class Slice(NamedTuple):
    """A contiguous part of a parameter in the partition of a rank.

    Attributes:
        begin: Its first element in the flattened parameter.
        numel: Number of elements.
        rank: The rank.
        group: Number of the flat vector.
        offset: Its first element in the rank's partition of that vector.
    """

    begin: int
    numel: int
    rank: int
    group: int
    offset: int


@dataclass(frozen=True)
class Zero:
    """The partitions of a checkpoint.

    Attributes:
        stage: 1, 2 or 3.
        shapes: The shapes of the parameters by name, one dict for each group.
        paddings: Elements after each parameter in its vector; empty if there are none.
        numels: For each rank, the elements of its partitions.
    """

    stage: int
    shapes: list[dict[str, tuple[int, ...]]]
    paddings: list[list[int]]
    numels: list[list[int]]

    def slices(self) -> Iterator[tuple[str, tuple[int, ...], list[Slice]]]:
        """Yields each parameter with its shape and its slices.

        Raises:
            ValueError: The partitions are too short, or differ.
        """
        return self._of_parameters() if self.stage == 3 else self._of_groups()

    def _of_groups(self) -> Iterator[tuple[str, tuple[int, ...], list[Slice]]]:
        for group, shapes in enumerate(self.shapes):
            starts = list(accumulate((numels[group] for numels in self.numels), initial=0))
            at = 0
            for number, (name, shape) in enumerate(shapes.items()):
                numel = prod(shape)
                yield name, shape, [one._replace(group=group) for one in _cut(starts, at, numel, name)]
                at += numel + (self.paddings[group][number] if self.paddings else 0)

    def _of_parameters(self) -> Iterator[tuple[str, tuple[int, ...], list[Slice]]]:
        if any(numels != self.numels[0] for numels in self.numels):
            raise ValueError("the partitions of the ranks have different lengths")
        starts, num_ranks, at = list(accumulate(self.numels[0], initial=0)), len(self.numels), 0
        for name, shape in chain.from_iterable(shapes.items() for shapes in self.shapes):
            numel = prod(shape)
            part = -(-numel // num_ranks)
            found = []
            for rank in range(min(num_ranks, -(-numel // part) if part else 0)):
                begin = rank * part
                for one in _cut(starts, at, min(part, numel - begin), name):
                    found.append(Slice(begin + one.begin, one.numel, rank, one.rank, one.offset))
            yield name, shape, found
            at += part


def _cut(starts: Sequence[int], at: int, numel: int, name: str) -> Iterator[Slice]:
    """Yields the parts of a range of elements in several ranges that are laid end to end, as if of ranks."""
    if at + numel > starts[-1]:
        raise ValueError(f"{show(name)} ends at {at + numel} of {starts[-1]} elements")
    number = bisect_right(starts, at) - 1
    begin = at
    while begin < at + numel:
        end = min(starts[number + 1], at + numel)
        if end > begin:
            yield Slice(begin - at, end - begin, number, 0, begin - starts[number])
        begin, number = end, number + 1


def recognises(files: Sequence[str] | None, head: bytes) -> bool:
    """Whether a path is a directory of a step; see `Format`."""
    return any(map(_FILE.fullmatch, files or ()))


@uncollected
def read(storage: Storage, files: Sequence[str] | None, *, exact: bool) -> Manifest:
    """Reads the directory of a step; see `Format`.

    Raises:
        ManifestError: A file is malformed, they contradict each other, or some are missing.
        StorageError: Storage failed.
    """
    assert files is not None, "recognised"
    places = _places(storage.url, files)
    names = sorted(places)
    stats = stat_all(storage, names)
    budget = MemoryBudget(storage.url)

    def read_one(name: str) -> Manifest:
        return zip_file.read_file(storage, name, stats[name], exact=exact, budget=budget)

    parts = in_threads(read_one, names, reads_at_once(storage))
    by_place = {
        places[name]: numbered(part, number)
        for number, (name, part) in enumerate(zip(names, parts, strict=True))
    }
    try:
        tensors, structure = _PartitionReader(by_place, budget).read()
    except ValueError as error:
        raise (
            error if isinstance(error, ManifestError) else ManifestError(f"{storage.url}: {error}")
        ) from None
    return join_manifests(storage.url, parts, tensors, structure, format="deepspeed")


def _places(url: str, listing: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Returns the kind and the rank of each file.

    Raises:
        ManifestError: The model was cut by tensor, expert or pipeline parallelism, or ranks are missing.
    """
    if other := next(filter(_OTHER_FILE.fullmatch, listing), None):
        raise ManifestError(
            f"{url}: {show(other)}: checkpoints of expert or pipeline parallelism are not read"
        )
    found: dict[str, tuple[str, int]] = {}
    for match in filter(None, map(_FILE.fullmatch, listing)):
        if int(match["slice"]):
            raise ManifestError(f"{url}: {show(match[0])}: checkpoints of tensor parallelism are not read")
        found[match[0]] = match["kind"], int(match["rank"] or 0)
    for kind in ("model", "optim"):
        ranks = sorted(rank for of_kind, rank in found.values() if of_kind == kind)
        if ranks != list(range(len(ranks))):
            raise ManifestError(f"{url}: the *_{kind}_states.pt are of the ranks {show(ranks)}")
    if ("model", 0) not in found.values():
        raise ManifestError(f"{url}: no *mp_rank_00_model_states.pt")
    is_stage_3 = any(name.endswith("model_states.pt") and "zero_pp_rank_" in name for name in found)
    if is_stage_3 and ("optim", 0) not in found.values():
        raise ManifestError(f"{url}: no *_optim_states.pt, which have the weights of stage 3")
    return found


class _PartitionReader:
    """Joins the tensors of all files.

    Args:
        files: The files by kind and rank; tensors with the indexes of their files.
        budget: Charged with the memory of pieces.
    """

    def __init__(self, files: Mapping[tuple[str, int], Manifest], budget: MemoryBudget) -> None:
        self._files = files
        self._budget = budget
        self._model = files["model", 0]
        self._num_ranks = sum(kind == "optim" for kind, _ in files)
        self._tensors: dict[str, TensorEntry] = {}

    def read(self) -> tuple[Iterable[TensorEntry], Any]:
        """Returns the tensors, and the structure of the state.

        Raises:
            ValueError: Something is malformed.
        """
        state = _children(self._model.structure, "its state")
        shapes = self._shapes("param_shapes")
        stage = self._stage()
        left_out = _LEFT_OUT if stage else ()
        kept = {key: node for key, node in state.items() if key not in left_out}
        if shapes is None and stage == 3:
            raise ValueError("it has no param_shapes, without which the partitions of stage 3 have no shapes")
        zero = None
        if stage and shapes is not None:
            key = _STAGE_3 if stage == 3 else _STAGE_2
            masters = self._vectors("optim", ["optimizer_state_dict", key])
            zero = self._zero(stage, shapes, masters)
            kept["module"] = self._module(zero, masters, state.get("module"))
        for saved in leaves(dict_node(kept)):
            if saved.stored not in self._tensors:
                self._tensors[saved.stored] = self._entry(("model", 0), saved.stored)
        if zero is not None:
            kept["optimizer"] = self._optimizer(zero)
        return self._tensors.values(), dict_node(kept)

    def _stage(self) -> int:
        """Returns 3, 2 for stages 1 and 2, and 0 without partitions."""
        if ("optim", 0) not in self._files:
            return 0
        found = _at(self._files["optim", 0].structure, "optimizer_state_dict")
        keys = _children(found, "optimizer_state_dict")
        if _STAGE_2 not in keys and _STAGE_3 not in keys:
            raise ValueError("its *_optim_states.pt have no partitions of fp32 weights")
        counts = keys.get("partition_count")
        counts = counts if type(counts) is list else [counts]
        if any(is_size(count) and count != self._num_ranks for count in counts):
            raise ValueError(
                f"it has the *_optim_states.pt of {self._num_ranks} ranks, and was saved by {show(counts)}: "
                "files are missing, or of another save"
            )
        return 3 if _STAGE_3 in keys else 2

    def _shapes(self, key: str) -> list[dict[str, tuple[int, ...]]] | None:
        node = _at(self._model.structure, key)
        if node is None:
            return None
        groups = node if type(node) is list else [node]
        return [
            {_text(name): _sizes(size) for name, size in _children(group, key).items()} for group in groups
        ]

    def _zero(self, stage: int, shapes: list[dict[str, tuple[int, ...]]], masters: Vectors) -> Zero:
        numels = _numels(masters)
        paddings = []
        if stage == 2:
            if any(len(each) != len(shapes) for each in numels):
                raise ValueError(
                    f"{show([*map(len, numels)])} groups on the ranks, and the shapes of {len(shapes)}"
                )
            found = _at(self._files["optim", 0].structure, "optimizer_state_dict", "param_alignment_paddings")
            paddings = found if type(found) is list else []
            fits = [len(each) for each in paddings if type(each) is list and all(map(is_size, each))]
            if paddings and fits != [*map(len, shapes)]:
                raise ValueError(f"param_alignment_paddings are {show(paddings)}")
        return Zero(stage, shapes, paddings, numels)

    def _module(self, zero: Zero, masters: Vectors, module: Any) -> Any:
        """Adds the weights; returns the node of the module."""
        own = _children(module, "module")
        for name, shape, slices in zero.slices():
            self._join(f"module.{name}", shape, slices, masters)
            own[name] = {}
        if zero.stage == 3:
            self._add_frozen(own)
        shared = _at(self._model.structure, "shared_params")
        for name, target in _children(shared, "shared_params").items() if shared is not None else ():
            if target in own:
                own[name] = {"tensor": [f"module.{target}"]}
        kept = {}
        for name, node in own.items():
            saved = leaf_of(node, f"module.{name}")
            if saved is not None and saved.stored not in self._tensors:
                entry = self._entry(("model", 0), saved.stored)
                if zero.stage == 3 and entry.shape == (0,):
                    continue  # a parameter whose place another one has, to which it is tied
                self._tensors[saved.stored] = entry
            kept[name] = node
        return dict_node(kept)

    def _add_frozen(self, own: dict[Any, Any]) -> None:
        shapes = self._shapes("frozen_param_shapes") or []
        num_ranks = sum(kind == "model" for kind, _ in self._files)
        if shapes and num_ranks != self._num_ranks:
            raise ValueError(
                f"it has {num_ranks} *_model_states.pt and {self._num_ranks} *_optim_states.pt: files are "
                "missing, or of another save"
            )
        frozen = list(chain.from_iterable(group.items() for group in shapes))
        keys = [(name,) for name, _ in frozen]
        found = self._vectors("model", ["frozen_param_fragments"], keys) if frozen else []
        for number, (name, shape) in enumerate(frozen):
            parts = [[of_rank[number]] for of_rank in found]
            for _, _, slices in Zero(3, [{name: shape}], [], _numels(parts)).slices():
                self._join(f"module.{name}", shape, slices, parts)
            own[name] = {}

    def _optimizer(self, zero: Zero) -> Any:
        """Adds the optimizer's state of each parameter; returns the node of the optimizer."""
        path = ["optimizer_state_dict"]
        path.append("optimizer_state_dict" if zero.stage == 3 else "base_optimizer_state")
        found = _at(self._files["optim", 0].structure, *path)
        if type(found) is dict:
            path.append("state")
            found = _at(found, "state")
        if found is None:
            return None
        prefix = ".".join(path)
        kinds = {
            group: {_text(kind): value for kind, value in _children(node, prefix).items()}
            for group, node in _children(found, prefix).items()
        }
        vectors: dict[str, Vectors] = {}  # of each kind of state
        nodes: dict[str, Any] = {}
        for name, shape, slices in zero.slices():
            group = self._group_of(zero, name, slices)
            own: dict[str, Any] = {}
            for kind, value in kinds.get(group, {}).items():
                place = f"{prefix}.{group}.{kind}"
                saved = leaf_of(value, place)
                if saved is None:
                    own[kind] = value
                    continue
                entry = self._entry(("optim", 0), saved.stored)
                if len(entry.shape) != 1:
                    self._tensors.setdefault(place, replace(entry, name=place))
                    own[kind] = {"tensor": [place]}
                    continue
                if kind not in vectors:
                    keys = [(number, kind) for number in range(len(zero.numels[0]))]
                    vectors[kind] = self._vectors("optim", path, keys)
                self._join(f"optimizer.state.{name}.{kind}", shape, slices, vectors[kind])
                own[kind] = {}
            nodes[name] = dict_node(own)
        return dict_node({"state": dict_node(nodes)})

    def _group_of(self, zero: Zero, name: str, slices: Sequence[Slice]) -> int:
        if slices:
            return slices[0].group
        return next(number for number, shapes in enumerate(zero.shapes) if name in shapes)

    def _join(self, name: str, shape: tuple[int, ...], slices: Sequence[Slice], vectors: Vectors) -> None:
        """Adds a tensor, given its slices of flat vectors."""
        pieces, dtype = [], "F32"
        for one in slices:
            entry = vectors[one.rank][one.group]
            itemsize, dtype = DTYPES[entry.dtype][0] // 8, entry.dtype
            if one.offset + one.numel > entry.shape[0]:
                raise ValueError(
                    f"{show(name)}: rank {one.rank} has {entry.shape[0]} elements of a partition"
                )
            at = entry.offset + one.offset * itemsize
            for box in boxes_of_range(shape, one.begin, one.begin + one.numel):
                self._budget.charge(_PIECE_BYTES)
                nbytes = box.numel * itemsize
                pieces.append(Piece(box, entry.file, at, nbytes))
                at += nbytes
        if name in self._tensors:
            raise ValueError(f"two tensors are called {show(name)}")
        self._tensors[name] = join_pieces(name, dtype, shape, pieces)

    def _vectors(
        self, kind: str, path: Sequence[str], keys: Sequence[tuple[Any, ...]] | None = None
    ) -> Vectors:
        """Returns the flat tensors in a part of the state of each rank: those under some keys, or all."""
        prefix = ".".join(path)
        found: Vectors = []
        while (place := (kind, len(found))) in self._files:
            if (nodes := children(part := _at(self._files[place].structure, *path))) is None:
                raise ValueError(f"rank {place[1]} has {show(part)} in place of {prefix}")
            of_rank = []
            for first, *others in [(key,) for key in nodes] if keys is None else keys:
                node, name = (
                    _at(nodes.get(first, (None, None))[1], *others),
                    ".".join(map(str, (prefix, first, *others))),
                )
                if (saved := leaf_of(node, name)) is None:
                    raise ValueError(f"{show(name)} is no tensor but {show(node)}")
                entry = self._entry(place, saved.stored)
                if len(entry.shape) != 1 or entry.pieces:
                    what = f"the shape {list(entry.shape)}: it is not flat"
                    raise ValueError(f"{show(saved.stored)} of rank {place[1]} has {what}")
                of_rank.append(entry)
            found.append(of_rank)
        return found

    def _entry(self, place: tuple[str, int], stored: str) -> TensorEntry:
        entry = self._files[place].by_name.get(stored)
        if entry is None:
            raise ValueError(f"{show(stored)} of rank {place[1]} is no tensor that can be loaded")
        return entry


def _numels(vectors: Vectors) -> list[list[int]]:
    return [[entry.shape[0] for entry in of_rank] for of_rank in vectors]


def _children(node: Any, what: str) -> dict[Any, Any]:
    found = children(node)
    if found is None:
        raise ValueError(f"{show(what)} is {show(node)}, which has no keys")
    return {key: child for key, (_, child) in found.items()}


def _at(node: Any, *path: Any) -> Any:
    """Returns the node at some keys; None without one."""
    for key in path:
        found = children(node) or {}
        _, node = found.get(key, (None, None))
    return node


def _sizes(node: Any) -> tuple[int, ...]:
    sizes = decode_value(node) if type(node) is dict and node.keys() == {"Size"} else None
    if not isinstance(sizes, torch.Size):
        raise ValueError(f"{show(node)} in place of the sizes of a parameter")
    return sizes_of(tuple(sizes))


def _text(key: Any) -> str:
    if type(key) is not str:
        raise ValueError(f"{show(key)} in place of a name")
    return key
