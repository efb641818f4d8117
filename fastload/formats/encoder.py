"""Encodes a state: its tensors by name, and its structure, see `fastload.formats.state`."""

from __future__ import annotations

import json
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from fastload.errors import OptionError, first_lines
from fastload.formats.codecs import encode_with_extensions
from fastload.formats.dtypes import NAMES
from fastload.formats.state import OWN_PREFIX, PerRank, leaves, own_prefix
from fastload.formats.values import (
    BARE_NAME,
    FACTORIES,
    MAX_DEPTH,
    NUMPY_DTYPES,
    Attribute,
    NotPlain,
    crowded,
    encode_value,
    is_stateful,
    show_path,
    tensor_name,
)
from fastload.geometry.box import dense_strides, row_major
from fastload.geometry.dtensors import BoxedTensor, is_dtensor, is_sharded, local_of, with_local

_RESERVED = "__metadata__"  # has another meaning in a safetensors header
_MAX_SHORT_TEXT = 100  # about the cost of a tensor in header and structure


@dataclass(frozen=True)
class StateEncoding:
    """A state as tensors and structure.

    Attributes:
        tensors: The tensors to store by name, each once, in the order of the state. They share memory with
            the state if possible, and are dense, of a dtype of safetensors, on any device.
        structure: Everything else in JSON types; the same on all ranks with an equal state.
        own_tensors: The tensors of this rank's own values.
        own_values: The structures of these values, one for each place in `structure`.
        starts: For each entry of the state, the number of `tensors` before it.
        uncounted: Names of those `tensors` that may change without torch counting it: buffers of modules, and
            NumPy arrays.
        shards: Address → local tensor of the sharded parameters of modules. They have version counters of
            their own, which those in `tensors` do not share.
    """

    tensors: dict[str, Tensor]
    structure: Any
    own_tensors: dict[str, Tensor]
    own_values: list[Any]
    starts: list[int]
    uncounted: frozenset[str]
    shards: Mapping[int, Tensor]


def encode_state(state: Any, rank: int = 0) -> StateEncoding:
    """Encodes a nested state.

    Args:
        state: Dicts (also OrderedDict, defaultdict, Counter), lists, tuples and sets of tensors,
            Parameters, NumPy arrays and scalars, plain values, and objects with ``state_dict`` and
            ``load_state_dict``; any of it in a `PerRank`.
        rank: This rank.

    Raises:
        OptionError: Values cannot be saved; lists their keys.
    """
    encoder = StateEncoder(rank)
    try:
        structure = encoder.value(state, "", "")
    except RecursionError:
        raise OptionError("the state cannot be saved: it is nested too deeply") from None
    if encoder.problems:
        raise OptionError("the state cannot be saved: " + "\n  ".join(first_lines(encoder.problems)))
    own, changes = encoder.own, encoder.changes()
    if own is None:
        return StateEncoding(encoder.tensors, structure, {}, [], encoder.starts, *changes)
    for name in encoder.tensors:
        if name.startswith(OWN_PREFIX):
            raise OptionError(
                f"the state cannot be saved: tensor {name[:200]!r}: with a PerRank in the state, no name may "
                f"begin with {OWN_PREFIX!r}"
            )
    return StateEncoding(encoder.tensors, structure, own.tensors, own.values, encoder.starts, *changes)


def strides_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Returns the strides of tensors for which they matter, in elements, as if without gaps.

    Empty if the elements of all are in row-major order. Else also strides that differ from row-major ones
    in dimensions of size 1 only, by which torch recognises memory formats.

    Args:
        tensors: Tensors by name. Of a DTensor, the strides that torch gives the complete tensor.
    """
    if all(tensor.is_contiguous() for tensor in tensors.values()):
        return {}
    usual = lru_cache(row_major)  # layers are alike
    dense_by_name: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        shape, strides = tensor.shape, tensor.stride()
        if strides == usual(shape) or not tensor.numel() or NAMES[tensor.dtype] == "F4":
            continue  # torch stores F4 in another shape
        if (dense := dense_strides(shape, strides)) != usual(shape):
            dense_by_name[name] = dense
    is_any = any(_is_permuted(tensors[name].shape, strides) for name, strides in dense_by_name.items())
    return dense_by_name if is_any else {}


def _is_permuted(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of a tensor without gaps are not in row-major order."""
    pairs = zip(shape, strides, row_major(shape), strict=True)
    return any(size > 1 and stride != wanted for size, stride, wanted in pairs)


class _StateObjects:
    """The objects of a state that have a state dict.

    Attributes:
        uncounted: Addresses of tensors that may change without torch counting it.
        shards: See `StateEncoding`.
    """

    def __init__(self) -> None:
        self.uncounted: set[int] = set()
        self.shards: dict[int, Tensor] = {}
        self._state_dicts: list[Any] = []  # kept alive, since tensors are known by address and id

    def state_dict_of(self, value: Any) -> Any:
        if isinstance(value, Module):
            self.uncounted.update(_address(local_of(buffer)) for buffer in value.buffers())
            shards = [local_of(parameter) for parameter in value.parameters() if is_dtensor(parameter)]
            self.shards.update((_address(local), local) for local in shards)
        self._state_dicts.append(value.state_dict())
        return self._state_dicts[-1]


class StateEncoder:
    """Encodes one state; `problems` has a line for each value that cannot be saved.

    Args:
        rank: This rank; needed only for a state with values of its own.
    """

    def __init__(self, rank: int = 0) -> None:
        self.own: PerRankEncoder | None = None
        self.starts: list[int] = []  # number of tensors before each entry of the state
        self.tensors: dict[str, Tensor] = {}
        self.problems: list[str] = []
        self._path: list[Any] = []
        self._open: set[int] = set()  # containers on the path
        self._first: dict[int, str] = {}  # address → the first name at it
        self._others: dict[tuple[Any, ...], str] = {}  # the names of other views of the address
        self._converted: dict[int, Tensor] = {}  # by id, the tensor made from an array or a lazy tensor
        self._num_of: dict[str, int] = {}  # number of tensors that wanted a name
        self._objects = _StateObjects()
        self._rank = rank

    def value(self, value: Any, prefix: str, key: Any) -> Any:
        """Returns the node of the value under a key, and collects its tensors."""
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            return self._tensor(value, tensor_name(prefix, key))
        if kind in CONTAINERS:
            return self._container(value, tensor_name(prefix, key))
        if isinstance(value, Tensor) and is_sharded(value):
            return self._tensor(value, tensor_name(prefix, key))
        try:
            return encode_value(value)
        except NotPlain:
            if _is_array(value):
                return self._array(value, tensor_name(prefix, key))
            if kind is PerRank:
                return self._per_rank(value, prefix, key)
            if is_stateful(value):
                return self.value(self._objects.state_dict_of(value), prefix, key)
            return self._coded(value, tensor_name(prefix, key))

    def changes(self) -> tuple[frozenset[str], Mapping[int, Tensor]]:
        """Returns `StateEncoding.uncounted` and `StateEncoding.shards`."""
        uncounted = self._objects.uncounted
        names = {self._first[address] for address in uncounted if address in self._first}
        return frozenset(names.union(name for key, name in self._others.items() if key[0] in uncounted)), (
            self._objects.shards
        )

    def _refuse(self, what: str, why: str) -> None:
        self.problems.append(f"{show_path(self._path)} is {what}: {why}")

    def _per_rank(self, value: PerRank[Any], prefix: str, key: Any) -> Any:
        if self.own is None:
            self.own = PerRankEncoder(self._rank, self.problems, self._path, self._open)
        return self.own.place(value.value, prefix, key)

    def _coded(self, value: Any, name: str) -> Any:
        local = local_of(value) if isinstance(value, Tensor) else value
        kind = _name(value) if local is value else f"a DTensor whose local tensor is {_name(local)}"
        try:
            encoded = encode_with_extensions(value)
        except NotPlain as error:
            return self._refuse(kind, str(error))
        if encoded is None:
            return self._refuse(kind, _why_not_kept(local))
        codec, header, parts = encoded
        tensors = (local_of(part) for part in parts.values() if isinstance(part, Tensor))
        self._objects.uncounted.update(map(_address, tensors))  # torch counts changes of the value only
        return {"coded": [codec, header, self._container(dict(parts), name)["dict"]]}

    # Containers

    def _container(self, value: Any, name: str) -> Any:
        if id(value) in self._open:
            return self._refuse(_name(value), "it contains itself")
        if len(self._path) >= MAX_DEPTH:
            return self._refuse(_name(value), f"nested deeper than {MAX_DEPTH} levels")
        if type(value) not in (list, tuple) and (why := crowded(value)):
            return self._refuse(_name(value), why)
        self._open.add(id(value))
        self._path.append(None)
        node = CONTAINERS[type(value)](self, value, f"{name}." if name else "")
        self._path.pop()
        self._open.discard(id(value))
        return node

    def _dict(self, value: Any, prefix: str) -> Any:
        return {"dict": self._items(value, prefix)}

    def _tuple(self, value: Any, prefix: str) -> Any:
        return {"tuple": self._elements(value, prefix)}

    def _set(self, value: Any, prefix: str) -> Any:
        nodes = []
        for member in value:
            self._path[-1] = member
            nodes.append(self._key(member))
        return {type(value).__name__: sorted(nodes, key=json.dumps)}  # its own order depends on the process

    def _items(self, items: Mapping[Any, Any], prefix: str) -> list[Any]:
        nodes: list[Any] = []
        for key, value in items.items():
            if not prefix:
                self.starts.append(len(self.tensors))
            self._path[-1] = key
            nodes += (self._key(key), self.value(value, prefix, key))
        return nodes

    def _elements(self, elements: Iterable[Any], prefix: str) -> list[Any]:
        nodes = []
        for index, value in enumerate(elements):
            if not prefix:
                self.starts.append(len(self.tensors))
            self._path[-1] = index
            nodes.append(self.value(value, prefix, index))
        return nodes

    def _key(self, key: Any) -> Any:
        """Returns the node of a key or a member of a set: a plain value, or a tuple of plain values."""
        if type(key) is str and key.isascii():
            return key
        if type(key) is tuple:
            return {"tuple": [self._key(part) for part in key]}
        try:
            return encode_value(key)
        except NotPlain:
            return self._refuse(f"keyed by {_name(key)}", "only plain values and tuples of them can be keys")

    def _ordered_dict(self, value: Any, prefix: str) -> Any:
        items = self._items(value, prefix)
        self._check_attributes(value, {"_metadata"})
        if not hasattr(value, "_metadata"):
            return {"OrderedDict": items}
        self._path[-1] = Attribute("_metadata")
        return {"state_dict": [items, self.value(value._metadata, prefix, "_metadata")]}

    def _counter(self, value: Any, prefix: str) -> Any:
        self._check_attributes(value, set())
        return {"Counter": self._items(value, prefix)}

    def _defaultdict(self, value: Any, prefix: str) -> Any:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and FACTORIES.get(name) is not factory:
            self._path[-1] = Attribute("default_factory")
            self._refuse(_name(factory), f"only None, {', '.join(FACTORIES)} are kept")
        return {"defaultdict": [name, self._items(value, prefix)]}

    def _check_attributes(self, value: Any, kept: set[str]) -> None:
        for name in sorted(vars(value).keys() - kept):
            self._path[-1] = Attribute(name)
            self._refuse("an attribute of a dict", "it cannot be kept")

    # Tensors

    def _tensor(self, tensor: Tensor, name: str) -> Any:
        if isinstance(tensor, BoxedTensor):
            return self._shard(tensor, name)
        local = local_of(tensor)
        if type(local) not in (Tensor, Parameter):
            return self._coded(tensor, name)
        why = _why_not_stored(tensor, local)
        if why is not None:
            return self._refuse(f"a {tensor.dtype} tensor", why)
        grad = "+grad" if tensor.requires_grad else ""
        is_parameter = type(tensor) is not Tensor and isinstance(tensor, Parameter)
        kind = f"{'Parameter' if is_parameter else 'Tensor'}{grad}" if grad or is_parameter else None
        plain = tensor.detach() if kind else tensor
        if local.is_neg() or local.is_conj():  # torch negates when it reads the bytes
            resolved = with_local(plain, local_of(plain).resolve_conj().resolve_neg(), plain.shape)
            plain = self._converted.setdefault(id(tensor), resolved)
            local = local_of(plain)
        if plain.dtype is torch.complex128:
            real = with_local(plain, torch.view_as_real(local_of(plain)), (*plain.shape, 2))
            return self._leaf(real, local, name, kind, "complex128")
        return self._leaf(plain, local, name, kind, None)

    def _shard(self, shard: BoxedTensor, name: str) -> Any:
        for _, tensor in shard.boxes:
            if (why := _why_not_stored(tensor, tensor)) is not None:
                return self._refuse(f"a fastload.Shard of {shard.dtype}", why)
        if shard.dtype is not torch.complex128:
            return self._leaf(shard, shard, name, None, None)
        pairs = self._converted.setdefault(id(shard), shard.as_real())
        return self._leaf(pairs, shard, name, None, "complex128")

    def _array(self, array: Any, name: str) -> Any:
        dtype = array.dtype
        if dtype.str not in NUMPY_DTYPES:
            return self._refuse(f"a NumPy array of {dtype}", "only plain numbers are kept")
        if id(array) not in self._converted:
            native = array.astype(dtype.newbyteorder("="), copy=False)
            flags = native.flags
            if not (flags.writeable and flags.aligned and (flags.c_contiguous or flags.f_contiguous)):
                native = native.copy(order="K")  # torch cannot view it
            self._converted[id(array)] = torch.from_numpy(native)
        tensor = self._converted[id(array)]
        if tensor.dtype is torch.complex128:
            tensor = torch.view_as_real(tensor)
        self._objects.uncounted.add(_address(tensor))
        return self._leaf(tensor, tensor, name, "ndarray", dtype.str)

    def _leaf(self, tensor: Tensor, local: Tensor, name: str, kind: str | None, dtype: str | None) -> Any:
        natural = name or BARE_NAME
        return leaf_node(self._store(tensor, _address(local), natural), natural, kind, dtype)

    def _store(self, tensor: Tensor, address: int, name: str) -> str:
        """Returns the name a tensor is stored under: its own, or that of a tensor it is tied to."""
        first = self._first.get(address)
        if first is None:
            self._first[address] = stored = self._add(tensor, name)
            return stored
        spec = _spec(tensor)
        if _spec(self.tensors[first]) == spec:
            return first
        key = (address, *spec)
        if key not in self._others:
            self._others[key] = self._add(tensor, name)
        return self._others[key]

    def _add(self, tensor: Tensor, name: str) -> str:
        free = name
        while free in self.tensors or free == _RESERVED:
            self._num_of[name] = self._num_of.get(name, 1) + 1
            free = f"{name}~{self._num_of[name]}"
        self.tensors[free] = tensor
        return free


class PerRankEncoder(StateEncoder):
    """Encodes the `PerRank` values of this rank, as part of the encoder of the state.

    Attributes:
        values: A node for each place.
    """

    def __init__(self, rank: int, problems: list[str], path: list[Any], opened: set[int]) -> None:
        super().__init__(rank)
        self.values: list[Any] = []
        self.problems, self._path, self._open = problems, path, opened
        self._is_in_text = False

    def place(self, value: Any, prefix: str, key: Any) -> Any:
        """Collects a value; returns the node of its place."""
        name = tensor_name(prefix, key)
        # No ties between places, so that all ranks can want the same places, whatever is tied on each.
        self._first.clear()
        self._others.clear()
        node = self.value(value, prefix, key)
        self.values.append(node if leaves(node, name) else self._text(node, name))
        return {"PerRank": [name or BARE_NAME, len(self.values) - 1]}

    def value(self, value: Any, prefix: str, key: Any) -> Any:
        """Encodes a value; a long one without tensors becomes a tensor of its text."""
        if self._is_in_text or _may_hold_tensors(value):
            return super().value(value, prefix, key)
        self._is_in_text = True
        node = super().value(value, prefix, key)
        self._is_in_text = False
        is_metadata = bool(self._path) and type(self._path[-1]) is Attribute
        if is_metadata or len(json.dumps(node)) <= _MAX_SHORT_TEXT:
            return node  # metadata of a state dict are needed before tensors are loaded
        return self._text(node, tensor_name(prefix, key))

    def _text(self, node: Any, name: str) -> Any:
        text = bytearray(json.dumps(node, separators=(",", ":")).encode())
        tensor = torch.frombuffer(text, dtype=torch.uint8)
        return self._leaf(tensor, tensor, name, "json", None)

    def _per_rank(self, value: PerRank[Any], prefix: str, key: Any) -> Any:
        return self._refuse("a fastload.PerRank", "it is inside of another one")

    def _tensor(self, tensor: Tensor, name: str) -> Any:
        if is_sharded(tensor):
            return self._refuse(f"a {type(tensor).__name__}", "it is inside of a fastload.PerRank")
        return super()._tensor(tensor, name)

    def _add(self, tensor: Tensor, name: str) -> str:
        return super()._add(tensor, own_prefix(self._rank) + name)


CONTAINERS: dict[type, Callable[[StateEncoder, Any, str], Any]] = {
    dict: StateEncoder._dict,
    OrderedDict: StateEncoder._ordered_dict,
    defaultdict: StateEncoder._defaultdict,
    Counter: StateEncoder._counter,
    list: StateEncoder._elements,
    tuple: StateEncoder._tuple,
    set: StateEncoder._set,
    frozenset: StateEncoder._set,
}


def leaf_node(stored: str, natural: str | None, kind: str | None, dtype: str | None) -> Any:
    """Returns the node of a tensor; `natural` is the name of its path."""
    if stored == natural and kind is None and dtype is None:
        return {}
    fields = [None if stored == natural else stored, kind, dtype]
    while fields[-1] is None:
        fields.pop()
    return {"tensor": fields}


def _address(local: Tensor) -> int:
    """Returns the address of a tensor; empty ones have none, but may share a storage.

    Shards are tied if they are one object: the same memory may be in two boxes.
    """
    if isinstance(local, BoxedTensor):
        return id(local)
    return local.data_ptr() or local.untyped_storage()._cdata


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _may_hold_tensors(value: Any) -> bool:
    if is_stateful(value):
        return True
    if isinstance(value, Mapping):
        return any(map(_may_hold_tensors, (*value.values(), getattr(value, "_metadata", None))))
    if isinstance(value, list | tuple):
        return any(map(_may_hold_tensors, value))
    return isinstance(value, Tensor) or _is_array(value)


def _spec(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _why_not_stored(tensor: Tensor, local: Tensor) -> str | None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "only dense tensors are kept"
    if tensor.is_meta:
        return "a tensor on the meta device has no values"
    name = NAMES.get(tensor.dtype)
    if name is None and tensor.dtype is not torch.complex128:
        return "safetensors has no such dtype"
    if name == "F4" and not tensor.dim():
        return "safetensors has none without dimensions"
    if not local.data_ptr() and local.numel():
        return "its storage has been freed"
    return None


def _name(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _why_not_kept(value: Any) -> str:
    if is_lazy(value):
        return "it has no shape yet: call its module once, with an example"
    if isinstance(value, Tensor):
        if hasattr(value, "to_local") or hasattr(value, "local_shards"):
            how = 'see "DDP, FSDP and tensor parallelism" in docs/loading.md'
            return f"of sharded tensors only DTensors are kept, as fully_shard (FSDP2) makes them; {how}"
        return "of the tensors only torch.Tensor and torch.nn.Parameter themselves are kept"
    if isinstance(value, (dict, list, tuple, set, frozenset, str, int, float)):
        return "of a subclass nothing but its plain form can be kept: convert it"
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return "it has no load_state_dict(): save its state_dict()"
    return "only tensors, NumPy arrays, containers and plain values are kept, nothing is pickled"
