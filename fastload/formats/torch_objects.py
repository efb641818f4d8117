"""What the names in torch's pickles stand for: a closed list.

It is about that of ``torch.load(weights_only=True)``.
What `fastload.formats.unpickle` describes becomes plain values, containers, and `StoredTensor` in place of
tensors. A name that is not on the list becomes `Refused`, and so does what torch has and fastload has not.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fastload.errors import ManifestError
from fastload.formats.pickled import Elements, Global, Made, Pairs, Persistent
from fastload.formats.stored_tensor import DTYPES, StorageRef, StoredTensor
from fastload.formats.untrusted import MemoryBudget, is_size, show
from fastload.formats.values import FACTORIES, MAX_DEPTH, crowded

__all__ = ["Objects", "Refused"]

_NOT_LISTED = "it is not on the list of what is read without running it"
_MAX_DIMS = 64
_MAX_ARGS = 16
_MAX_KEY_PARTS = 100
_OBJECT_BYTES = 256  # of a container, with what is kept to find it again
_ITEM_BYTES, _ENTRY_BYTES = 8, 64  # of a list, of a dict
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,3})?")


class Refused(NamedTuple):
    """What cannot be loaded.

    Attributes:
        what: It.
        why: Why not.
    """

    what: str
    why: str


class _NotKnown(Exception):
    """Something in the pickle is of no kind that is known."""

    def __init__(self, what: str, why: str = _NOT_LISTED) -> None:
        super().__init__(what)
        self.refused = Refused(what, why)


class Objects:
    """Makes of the description of a pickle what it stands for; what appears twice in it becomes one object.

    Args:
        where: What it is, for messages.
        budget: Charged with the memory that it takes.
    """

    def __init__(self, where: str, budget: MemoryBudget) -> None:
        self._where = where
        self._budget = budget
        self._known: dict[int, Any] = {}
        self._storage_dtypes: dict[str, torch.dtype] = {}
        self._depth = 0

    def value(self, node: Any) -> Any:
        """Returns what a node stands for.

        Raises:
            ManifestError: A name that is known is used as nobody uses it, or it takes too much memory.
        """
        kind = type(node)
        if kind is Global:
            return DTYPES.get(node) or Refused(str(node), "it is a class or a function")
        make = _KINDS.get(kind)
        if make is None:
            return node
        if id(node) in self._known:
            return self._known[id(node)]
        if self._depth >= MAX_DEPTH + 10:  # a tensor takes a few levels more than it has in the state
            return Refused("a container", f"nested deeper than {MAX_DEPTH} levels")
        self._budget.charge(_OBJECT_BYTES)
        self._known[id(node)] = Refused("a container", "it contains itself")
        self._depth += 1
        try:
            made = make(self, node)
        except _NotKnown as error:
            made = error.refused
        except (ValueError, TypeError, IndexError, KeyError, OverflowError, RuntimeError) as error:
            if isinstance(error, ManifestError):
                raise
            raise ManifestError(f"{self._where}: {show(node)} cannot be: {str(error)[:200]}") from None
        self._depth -= 1
        self._known[id(node)] = made
        return made

    # Containers

    def _list(self, node: Sequence[Any]) -> Any:
        self._budget.charge(_ITEM_BYTES * len(node))
        if _STAND_FOR_OTHERS.isdisjoint(map(type, node)):  # in C: there may be very many
            return list(node)
        return [self.value(child) for child in node]

    def _tuple(self, node: Sequence[Any]) -> Any:
        return tuple(self._list(node))

    def _dict(self, node: Pairs) -> Any:
        return self._fill({}, node)

    def _fill(self, target: Any, node: Pairs) -> Any:
        keys = self._keys(node[::2])
        for key, child in zip(keys, node[1::2], strict=True):
            target[key] = self.value(child)
        return target

    def _set(self, node: Sequence[Any]) -> Any:
        return set(self._keys(node))

    def _keys(self, nodes: Sequence[Any]) -> list[Any]:
        """Returns keys of a dict, or members of a set: plain values and tuples of them, cheap to hash."""
        self._budget.charge(_ENTRY_BYTES * len(nodes))
        keys = [self._key(node, iter(range(_MAX_KEY_PARTS))) for node in nodes]
        if why := crowded(keys):
            raise _NotKnown("a dict or a set", why)
        return keys

    def _key(self, node: Any, parts: Iterator[int]) -> Any:
        if next(parts, None) is None:  # a tuple of tuples may have far more of them than it takes to say so
            raise _NotKnown("keyed by a tuple", f"it has more than {_MAX_KEY_PARTS} parts")
        if type(node) is tuple:
            self._budget.charge(_ENTRY_BYTES * (1 + min(len(node), _MAX_KEY_PARTS)))
            return tuple(self._key(part, parts) for part in node)
        key = node if type(node) in _PLAIN_KEYS else self.value(node)
        if type(key) not in _PLAIN_KEYS and type(key) not in (torch.dtype, torch.device, torch.Size, complex):
            raise _NotKnown(f"a dict or a set with {show(node)} as a key", "only plain values can be keys")
        return key

    # What a pickle would call

    def _made(self, made: Made) -> Any:
        make = _CALLS.get(made.what)
        if make is None:
            what = _REFUSED_TENSORS.get(made.what)
            raise _NotKnown(what, _ONLY_DENSE) if what else _NotKnown(str(made.what))
        if type(made.args) is not tuple or len(made.args) > _MAX_ARGS or made.kwargs:
            raise ValueError("arguments that are none")
        return make(self, made)

    def _ordered_dict(self, made: Made) -> Any:
        result: Any = OrderedDict()
        for pair in self._plain_list(made.args[0]) if made.args else ():
            key, value = pair
            self._fill(result, Pairs((key, value)))
        self._fill(result, made.pairs)
        state = Pairs() if made.state is None else _pairs(made.state)
        self._budget.charge(_ENTRY_BYTES * len(state))
        attributes = state.by_text(self._where)
        if attributes.keys() - {"_metadata"}:
            why = f"its attributes {show(sorted(attributes))} cannot be kept"
            raise _NotKnown("a collections.OrderedDict", why)
        if "_metadata" in attributes:
            result._metadata = self.value(attributes["_metadata"])
        return result

    def _plain_list(self, node: Any) -> Sequence[Any]:
        if type(node) not in (list, tuple):
            raise ValueError(f"{show(node)} in place of a list")
        return node  # type: ignore[no-any-return]

    def _counter(self, made: Made) -> Any:
        return self._fill(Counter(), _pairs(made.args[0]) if made.args else made.pairs)

    def _defaultdict(self, made: Made) -> Any:
        factory = made.args[0] if made.args else None
        known = factory is None or (type(factory) is Global and factory.module == "builtins")
        if not known or (factory is not None and factory.name not in FACTORIES):
            raise _NotKnown(f"a defaultdict of {show(factory)}")
        return self._fill(defaultdict(None if factory is None else FACTORIES[factory.name]), made.pairs)

    def _set_of(self, made: Made) -> Any:
        kind = frozenset if made.what.name == "frozenset" else set
        return kind(self._keys(self._plain_list(made.args[0]) if made.args else ()))

    def _bytearray(self, made: Made) -> Any:
        return bytearray(self._bytes_of(*made.args))

    def _bytes(self, made: Made) -> Any:
        return bytes(self._bytes_of(*made.args))

    def _bytes_of(self, value: Any = b"", encoding: str = "latin-1") -> bytes:
        value = self.value(value)
        if type(value) in (str, bytes, bytearray):
            self._budget.charge(2 * len(value))
        if type(value) is str and encoding in ("latin-1", "latin1", "utf-8", "utf8", "ascii"):
            return value.encode(encoding)
        if type(value) not in (bytes, bytearray):
            raise ValueError(f"{show(value)} in place of bytes")
        return value  # type: ignore[no-any-return]

    def _complex(self, made: Made) -> Any:
        real, imag = made.args
        if type(real) is not float or type(imag) is not float:
            raise ValueError("not two floats")
        return complex(real, imag)

    def _size(self, made: Made) -> Any:
        return torch.Size(_sizes(made.args[0]))

    def _device(self, made: Made) -> Any:
        text = ":".join(map(str, made.args))
        if not _DEVICE.fullmatch(text):
            raise ValueError("no device")
        try:
            return torch.device(text)
        except RuntimeError:
            raise _NotKnown(f"the device {text}", f"torch {torch.__version__} has none such") from None

    # Tensors

    def _storage(self, node: Any) -> StorageRef:
        if type(node) is not Persistent:
            raise ValueError(f"{show(node)} where a storage is to be")
        ref = StorageRef.of(node.id, self._where)
        if self._storage_dtypes.setdefault(ref.key, ref.dtype) != ref.dtype:  # which torch never writes
            raise ValueError(f"storage {show(ref.key)} is of {self._storage_dtypes[ref.key]} and {ref.dtype}")
        return ref

    def _bare_storage(self, node: Persistent) -> Any:
        self._storage(node)
        raise _NotKnown("a storage", "only tensors are kept: save one that lies in it")

    def _tensor(self, made: Made) -> StoredTensor:
        args: tuple[Any, ...] = made.args
        storage, offset, shape, strides, grad, _, metadata, *_ = (*args, None, None, None)
        ref = self._storage(storage)
        return self._view(ref, ref.dtype, ref.numel, offset, shape, strides, grad, metadata)

    def _tensor_with_dtype(self, made: Made) -> StoredTensor:
        storage, offset, shape, strides, grad, _, dtype_name, *metadata = made.args
        ref = self._storage(storage)
        dtype = DTYPES.get(dtype_name)
        if dtype is None:
            raise ValueError(f"{show(dtype_name)} is no dtype")
        numel = ref.numel * ref.dtype.itemsize // dtype.itemsize
        return self._view(ref, dtype, numel, offset, shape, strides, grad, *metadata[:1])

    def _view(
        self,
        ref: StorageRef,
        dtype: torch.dtype,
        numel: int,
        offset: Any,
        shape: Any,
        strides: Any,
        grad: Any,
        metadata: Any = None,
    ) -> StoredTensor:
        sizes, steps = _sizes(shape), _sizes(strides)
        if len(sizes) != len(steps) or not is_size(offset) or (grad is not None and type(grad) is not bool):
            raise ValueError("not offset, shape and strides of a tensor")
        if metadata is not None and any(self._dict(_pairs(metadata)).values()):
            why = "resolve_conj() and resolve_neg() it before it is saved"
            raise _NotKnown("a lazily conjugated or negated tensor", why)
        tensor = StoredTensor(ref.key, dtype, ref.offset + offset, sizes, steps, bool(grad))
        if tensor.span and offset + tensor.span > numel:
            raise ValueError(
                f"shape {list(sizes)} with strides {list(steps)} at {offset} reaches beyond its storage of "
                f"{numel} elements"
            )
        return tensor

    def _parameter(self, made: Made) -> Any:
        data, grad, *_ = made.args
        tensor = self.value(data)
        if type(grad) is not bool:
            raise ValueError(f"{show(grad)} where it is to say whether it requires a gradient")
        if type(tensor) is not StoredTensor:
            return tensor if type(tensor) is Refused else Refused(show(data), "it is no tensor")
        return tensor._replace(requires_grad=grad, is_parameter=True)

    def _typed(self, made: Made) -> Any:
        function, kind, args, _ = made.args
        if kind not in (_TENSOR, _PARAMETER):
            raise _NotKnown(f"a tensor of type {show(kind)}", _ONLY_PLAIN)
        if type(function) is not Global or function not in _REBUILDS:
            raise _NotKnown(show(function))
        return self._made(Made(function, args))

    def _subclass(self, made: Made) -> Any:
        raise _NotKnown(f"a tensor of type {show(made.args[0])}", _ONLY_PLAIN)


def _pairs(node: Any) -> Pairs:
    if type(node) is not Pairs:
        raise ValueError(f"{show(node)} in place of a dict")
    return node


def _sizes(node: Any) -> tuple[int, ...]:
    if type(node) is Made and node.what == Global("torch", "Size") and type(node.args) is tuple:
        node = node.args[0]
    if type(node) not in (tuple, list) or len(node) > _MAX_DIMS or not all(map(is_size, node)):
        raise ValueError(f"{show(node)} in place of sizes")
    return tuple(node)


_PLAIN_KEYS = frozenset({type(None), bool, int, float, str, bytes})
_TENSOR, _PARAMETER = Global("torch", "Tensor"), Global("torch.nn.parameter", "Parameter")

_KINDS: dict[type, Callable[[Objects, Any], Any]] = {
    list: Objects._list,
    tuple: Objects._tuple,
    Pairs: Objects._dict,
    Elements: Objects._set,
    Made: Objects._made,
    Persistent: Objects._bare_storage,
}

_STAND_FOR_OTHERS = frozenset({*_KINDS, Global})

_REBUILDS = {
    Global("torch._utils", name): make
    for name, make in {
        "_rebuild_tensor": Objects._tensor,
        "_rebuild_tensor_v2": Objects._tensor,
        "_rebuild_tensor_v3": Objects._tensor_with_dtype,
        "_rebuild_parameter": Objects._parameter,
        "_rebuild_parameter_with_state": Objects._parameter,
    }.items()
}
_CALLS: dict[Global, Callable[[Objects, Made], Any]] = {
    **_REBUILDS,
    Global("torch._tensor", "_rebuild_from_type_v2"): Objects._typed,
    Global("torch._utils", "_rebuild_wrapper_subclass"): Objects._subclass,
    Global("torch", "Size"): Objects._size,
    Global("torch", "device"): Objects._device,
    Global("collections", "OrderedDict"): Objects._ordered_dict,
    Global("collections", "Counter"): Objects._counter,
    Global("collections", "defaultdict"): Objects._defaultdict,
    Global("builtins", "set"): Objects._set_of,
    Global("builtins", "frozenset"): Objects._set_of,
    Global("builtins", "bytearray"): Objects._bytearray,
    Global("builtins", "bytes"): Objects._bytes,
    Global("builtins", "complex"): Objects._complex,
    Global("_codecs", "encode"): Objects._bytes,
}
_ONLY_PLAIN = "of the tensors only torch.Tensor and torch.nn.Parameter themselves are read"
_ONLY_DENSE = "only dense tensors are kept"
_REFUSED_TENSORS = {
    Global("torch._utils", name): what
    for name, what in {
        "_rebuild_qtensor": "a quantized tensor",
        "_rebuild_sparse_tensor": "a sparse tensor",
        "_rebuild_sparse_csr_tensor": "a sparse tensor",
        "_rebuild_nested_tensor": "a nested tensor",
        "_rebuild_meta_tensor_no_storage": "a tensor on the meta device",
        "_rebuild_device_tensor_from_numpy": "a tensor of another device, kept as a NumPy array",
    }.items()
}
