"""The walk that puts a state together again; `fastload.formats.state` says from what. Trusts nothing."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fastload.formats.values import (
    BARE_NAME,
    FACTORIES,
    MAX_DEPTH,
    NUMPY_DTYPES,
    SCALARS,
    Attribute,
    decode_value,
    import_numpy,
    key_text,
    show_key,
    tensor_name,
)

__all__ = ["Rebuilder", "children_of"]

_KINDS = frozenset({None, "Tensor+grad", "Parameter", "Parameter+grad", "ndarray"})
_MISSING: Any = object()


class Rebuilder:
    """One walk through a structure.

    Attributes:
        path: The keys that lead to where the walk is; after an error, to where it failed.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.path: list[Any] = []
        self._tensors = tensors
        self._made: dict[tuple[str, str | None, str | None], Any] = {}

    def value(self, node: Any, prefix: str, key: Any) -> Any:
        """Returns what a node of the structure stands for."""
        if type(node) in SCALARS:
            return node
        if node == {}:
            return self._tensor(tensor_name(prefix, key) or BARE_NAME)
        if type(node) is list:
            return self._container(Rebuilder._elements, node, tensor_name(prefix, key))
        if type(node) is dict and len(node) == 1:
            ((tag, payload),) = node.items()
            if tag == "tensor":
                return self._leaf(payload, tensor_name(prefix, key) or BARE_NAME)
            if tag in _CONTAINERS:
                return self._container(_CONTAINERS[tag], payload, tensor_name(prefix, key))
        return decode_value(node)

    def _container(self, make: Callable[[Rebuilder, Any, str], Any], payload: Any, name: str) -> Any:
        if len(self.path) >= MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        self.path.append(None)
        made = make(self, payload, f"{name}." if name else "")
        self.path.pop()
        return made

    def _elements(self, payload: Any, prefix: str) -> list[Any]:
        elements = []
        for index, node in enumerate(_list(payload)):
            self.path[-1] = index
            elements.append(self.value(node, prefix, index))
        return elements

    def _fill(self, target: Any, payload: Any, prefix: str) -> Any:
        nodes = iter(_list(payload))
        for node in nodes:
            key = self.path[-1] = _key(node)
            target[key] = self.value(next(nodes, _MISSING), prefix, key)
        if 2 * len(target) != len(payload):
            raise ValueError("a key without a value, or twice")
        return target

    def _state_dict(self, payload: Any, prefix: str) -> Any:
        items, metadata = _list(payload)
        state_dict: Any = self._fill(OrderedDict(), items, prefix)
        self.path[-1] = Attribute("_metadata")
        state_dict._metadata = self.value(metadata, prefix, "_metadata")
        return state_dict

    def _defaultdict(self, payload: Any, prefix: str) -> Any:
        factory, items = _list(payload)
        if factory is not None and factory not in FACTORIES:
            raise ValueError("unknown default_factory")
        return self._fill(defaultdict(None if factory is None else FACTORIES[factory]), items, prefix)

    def _tensor(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise ValueError(f"there is no tensor {show_key(name)}") from None

    def _leaf(self, payload: Any, natural: str) -> Any:
        name, kind, dtype = (*_list(payload), None, None)[: max(3, len(payload))]
        if (
            not all(field is None or type(field) is str for field in (name, kind, dtype))
            or kind not in _KINDS
        ):
            raise ValueError("not a tensor's name, kind and dtype")
        leaf = (natural if name is None else name, kind, dtype)
        if leaf not in self._made:
            self._made[leaf] = _make(self._tensor(leaf[0]), kind, dtype)
        return self._made[leaf]


_CONTAINERS: dict[str, Callable[[Rebuilder, Any, str], Any]] = {
    "dict": lambda self, payload, prefix: self._fill({}, payload, prefix),
    "OrderedDict": lambda self, payload, prefix: self._fill(OrderedDict(), payload, prefix),
    "Counter": lambda self, payload, prefix: self._fill(Counter(), payload, prefix),
    "state_dict": Rebuilder._state_dict,
    "defaultdict": Rebuilder._defaultdict,
    "tuple": lambda self, payload, prefix: tuple(self._elements(payload, prefix)),
    "set": lambda self, payload, _: set(map(_key, _list(payload))),
    "frozenset": lambda self, payload, _: frozenset(map(_key, _list(payload))),
}


def children_of(node: Any) -> dict[Any, tuple[str, Any]] | None:
    """Returns the nodes below one by their keys, each with the end of its name; None if it has none."""
    if type(node) is list:
        return {index: (str(index), child) for index, child in enumerate(node)}
    if type(node) is not dict or len(node) != 1:
        return None
    ((tag, payload),) = node.items()
    if tag == "tuple":
        return children_of(_list(payload))
    if tag in ("state_dict", "defaultdict"):
        payload = _list(payload)[tag == "defaultdict"]
    elif tag not in ("dict", "OrderedDict", "Counter"):
        return None
    keys = list(map(_key, _list(payload)[::2]))
    return {key: (key_text(key), child) for key, child in zip(keys, payload[1::2], strict=True)}


def _key(node: Any) -> Any:
    if type(node) is dict and node.keys() == {"tuple"}:
        return tuple(map(_key, _list(node["tuple"])))
    return decode_value(node)


def _list(payload: Any) -> list[Any]:
    if type(payload) is not list:
        raise ValueError("not a list")
    return payload


def _make(tensor: Tensor, kind: str | None, dtype: str | None) -> Any:
    """Makes what was described of what was stored; shares its memory where it can."""
    if kind == "ndarray":
        return _make_array(tensor, dtype)
    if dtype is not None:
        if dtype != "complex128" or tensor.dtype is not torch.float64:
            raise ValueError(f"{tensor.dtype} cannot stand for this dtype")
        tensor = torch.view_as_complex(tensor)
    if kind is None:
        return tensor
    grad = kind.endswith("+grad")
    if kind.startswith("Parameter"):
        return Parameter(tensor, requires_grad=grad)
    return tensor.detach().requires_grad_(grad)


def _make_array(tensor: Tensor, dtype: str | None) -> Any:
    if dtype not in NUMPY_DTYPES:
        raise ValueError("not a dtype of NumPy")
    numpy = import_numpy()
    wanted = numpy.dtype(dtype)
    if wanted.str[1:] == "c16":
        tensor = torch.view_as_complex(tensor)
    array = tensor.cpu().numpy()
    if array.dtype != wanted.newbyteorder("="):
        raise ValueError(f"{tensor.dtype} cannot stand for an array of {dtype}")
    return array.astype(wanted, copy=False)
