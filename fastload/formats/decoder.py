"""Decodes a state: its structure, as in `fastload.formats.state`, and tensors by name → the state."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fastload.base.memory import host_view, uncollected
from fastload.formats.codecs import coded_of
from fastload.formats.state import NO_VALUE, RegroupedNode, SavedTensor, leaf_of, read_keys, structure_error
from fastload.formats.untrusted import parse_value
from fastload.formats.values import (
    FACTORIES,
    MAX_DEPTH,
    NUMPY_DTYPES,
    SCALARS,
    Attribute,
    Unknown,
    decode_value,
    import_numpy,
    list_of,
    show_key,
    tensor_name,
)

_MISSING: Any = object()


@uncollected
def decode_state(structure: Any, tensors: Mapping[str, Tensor] | StateDecoder, name: str = "") -> Any:
    """Decodes a state.

    Args:
        structure: The structure; untrusted.
        tensors: The tensors by name, which become part of the state without a copy. Or the decoder of another
            part of the state, so that tied tensors are tied across both parts.
        name: The name of a part of a state; empty for a complete state.

    Raises:
        ManifestError: The structure is malformed or does not fit the tensors; names the place.
        UnsupportedVersion: It may be of a newer version.
        CheckpointError: It needs NumPy, which is not installed.
    """
    decoder = tensors if isinstance(tensors, StateDecoder) else StateDecoder(tensors)
    decoder.path.clear()
    try:
        return decoder.value(structure, "", name)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise structure_error(error, decoder.path) from None


class StateDecoder:
    """Decodes the parts of one state, with tied tensors tied across them.

    Args:
        tensors: The tensors by name.
        exact: The tensors of arrays and complex numbers by name, with their stored dtypes.
        gap: The value for places without one.

    Attributes:
        path: The keys of the current place; after an error, of the place of the error.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], exact: Mapping[str, Tensor] | None = None, *, gap: Any = None
    ) -> None:
        self.path: list[Any] = []
        self._gap = gap
        self._tensors = tensors
        self._exact = tensors if exact is None else exact
        self._made: dict[tuple[str, str | None, str | None], Any] = {}

    def value(self, node: Any, prefix: str, key: Any) -> Any:
        """Returns the value of a node."""
        if type(node) in SCALARS:
            return node
        name = tensor_name(prefix, key)
        saved = leaf_of(node, name)
        if saved is not None:
            return self._leaf(saved)
        if type(node) is RegroupedNode:
            return node.value([self.value(of_rank, prefix, key) for of_rank in node.nodes])
        if (coded := coded_of(node)) is not None:
            parts = self._container(_CONTAINERS["dict"], coded.items, name)
            return coded.extension.decode(coded.header, parts)
        if type(node) is list:
            return self._container(StateDecoder._elements, node, name)
        if type(node) is dict and len(node) == 1:
            if node == NO_VALUE:
                return self._gap
            ((tag, payload),) = node.items()
            if tag in _CONTAINERS:
                return self._container(_CONTAINERS[tag], payload, name)
        return decode_value(node)

    def _container(self, make: Callable[[StateDecoder, Any, str], Any], payload: Any, name: str) -> Any:
        if len(self.path) >= MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        self.path.append(None)
        made = make(self, payload, f"{name}." if name else "")
        self.path.pop()
        return made

    def _elements(self, payload: Any, prefix: str) -> list[Any]:
        elements = []
        for index, node in enumerate(list_of(payload)):
            self.path[-1] = index
            elements.append(self.value(node, prefix, index))
        return elements

    def _fill(self, target: Any, payload: Any, prefix: str) -> Any:
        for key, node in zip_longest(read_keys(list_of(payload)[::2]), payload[1::2], fillvalue=_MISSING):
            self.path[-1] = key
            target[key] = self.value(node, prefix, key)
        if 2 * len(target) != len(payload):
            raise ValueError("a key without a value, or twice")
        return target

    def _state_dict(self, payload: Any, prefix: str) -> Any:
        items, metadata = list_of(payload)
        state_dict: Any = self._fill(OrderedDict(), items, prefix)
        self.path[-1] = Attribute("_metadata")
        state_dict._metadata = self.value(metadata, prefix, "_metadata")
        return state_dict

    def _defaultdict(self, payload: Any, prefix: str) -> Any:
        factory, items = list_of(payload)
        if factory is not None and factory not in FACTORIES:
            raise Unknown("unknown default_factory: update fastload")
        return self._fill(defaultdict(None if factory is None else FACTORIES[factory]), items, prefix)

    def _tensor(self, saved: SavedTensor) -> Tensor:
        try:
            return (self._exact if saved.is_exact else self._tensors)[saved.stored]
        except KeyError:
            raise ValueError(f"there is no tensor {show_key(saved.stored)}") from None

    def _leaf(self, saved: SavedTensor) -> Any:
        key = saved[1:]
        if key not in self._made:
            tensor = self._tensor(saved)
            self._made[key] = tensor if key[1:] == (None, None) else _make(tensor, saved.kind, saved.dtype)
        return self._made[key]


_CONTAINERS: dict[str, Callable[[StateDecoder, Any, str], Any]] = {
    "dict": lambda self, payload, prefix: self._fill({}, payload, prefix),
    "OrderedDict": lambda self, payload, prefix: self._fill(OrderedDict(), payload, prefix),
    "Counter": lambda self, payload, prefix: self._fill(Counter(), payload, prefix),
    "state_dict": StateDecoder._state_dict,
    "defaultdict": StateDecoder._defaultdict,
    "tuple": lambda self, payload, prefix: tuple(self._elements(payload, prefix)),
    "set": lambda self, payload, _: set(read_keys(list_of(payload))),
    "frozenset": lambda self, payload, _: frozenset(read_keys(list_of(payload))),
}


def _make(tensor: Tensor, kind: str | None, dtype: str | None) -> Any:
    """Returns the value of a stored tensor, without a copy if possible."""
    if kind == "ndarray":
        return _make_array(tensor, dtype)
    if kind == "json":
        return _read_text(tensor)
    if dtype is not None:
        if dtype != "complex128" or tensor.dtype not in (torch.float64, torch.complex128):
            raise ValueError(f"{tensor.dtype} cannot stand for this dtype")
        if tensor.dtype is torch.float64:
            tensor = torch.view_as_complex(tensor)
    if kind is None:
        return tensor
    grad = kind.endswith("+grad")
    if kind.startswith("Parameter"):
        return Parameter(tensor, requires_grad=grad)
    return tensor.detach().requires_grad_(grad)


def _read_text(tensor: Tensor) -> Any:
    if tensor.dtype is not torch.uint8 or tensor.dim() != 1:
        raise ValueError(f"a {tensor.dtype} tensor is no text")
    text = bytes(host_view(tensor.cpu().contiguous()))
    return StateDecoder({}).value(parse_value(text), "", "")


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
