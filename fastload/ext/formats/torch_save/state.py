"""Encodes the state in a pickle of torch.save, without reading its tensors.

Names in a pickle are looked up in a closed list, similar to that of ``torch.load(weights_only=True)``. Any
other value becomes a node with the reason why it cannot be loaded.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import isfinite, prod
from typing import Any, NamedTuple

import torch

from fastload.base.memory import uncollected
from fastload.errors import ManifestError
from fastload.ext.formats.joined import refused_node
from fastload.ext.formats.torch_save.unpickle import (
    Global,
    PersistentId,
    PickledCall,
    PickledDict,
    PickledSet,
    sizes_of,
)
from fastload.formats.dtypes import NAMES
from fastload.formats.encoder import CONTAINERS, StateEncoder, leaf_node
from fastload.formats.untrusted import MemoryBudget, is_size, show
from fastload.formats.values import (
    BARE_NAME,
    FACTORIES,
    MAX_DEPTH,
    SCALARS,
    crowded,
    encode_value,
    num_chars,
    show_path,
    tensor_name,
)

_NOT_LISTED = "it is not on the list of what is read without running it"
_MAX_ARGS = 16
_EXACT_INT = 1 << 53  # as in `fastload.formats.values`
_MAX_KEY_PARTS = 100
_NODE_BYTES, _VALUE_BYTES = 550, 128  # of a container or tensor with its node of JSON, of a plain value
_ITEM_BYTES, _ENTRY_BYTES = 40, 64  # of a list of plain values, of a dict
_FIRST_ITEM_BYTES = 8  # where the list is in the pickle, with a byte or more for each item
_NUM_TEXTS = 4  # of the structure at once, while it is sent to other ranks
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,3})?")

DTYPES = {Global("torch", name): value for name, value in vars(torch).items() if type(value) is torch.dtype}
# torch names a storage after its dtype in C; "torch.storage" has the one that is nothing but bytes.
TYPED_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
_STORAGE_DTYPES = TYPED_STORAGES | {
    "UntypedStorage": torch.uint8,
    "_UntypedStorage": torch.uint8,
    "QInt8Storage": torch.qint8,  # these are refused later on, by their names
    "QUInt8Storage": torch.quint8,
    "QInt32Storage": torch.qint32,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
}
_STORAGE_MODULES = ("torch", "torch.cuda", "torch.storage")


class StorageRef(NamedTuple):
    """The storage of a tensor.

    Attributes:
        key: Key of its bytes.
        dtype: Dtype of its elements; uint8 for untyped storages.
        numel: Number of elements.
        offset: Offset of its first element from the beginning of the bytes, in elements.
    """

    key: str
    dtype: torch.dtype
    numel: int
    offset: int = 0

    @classmethod
    def of(cls, persistent_id: Any, where: str) -> StorageRef:
        """Reads the persistent id of a storage.

        Args:
            persistent_id: The persistent id in the pickle.
            where: The pickle, for messages.

        Raises:
            ManifestError: It is not of a storage.
        """
        if type(persistent_id) is tuple and len(persistent_id) in (5, 6):
            name, kind, key, _, numel, *views = persistent_id
            is_known = type(kind) is Global and kind.module in _STORAGE_MODULES
            dtype = _STORAGE_DTYPES.get(kind.name) if is_known else None
            if name == "storage" and dtype is not None and type(key) is str and is_size(numel):
                if views in ([], [None]):
                    return cls(key, dtype, numel)
                if type(views[0]) is tuple and len(views[0]) == 3 and all(map(is_size, views[0][1:])):
                    _, offset, size = views[0]  # as torch once kept storages that were parts of others
                    if offset + size <= numel:
                        return cls(key, dtype, size, offset)
        raise ManifestError(f"{where}: {show(persistent_id)} is no storage")


class StoredTensor(NamedTuple):
    """A tensor within its storage, as a pickle describes it.

    Attributes:
        storage: Key of its storage.
        dtype: Its dtype.
        offset: Offset of its first element in the storage, in elements.
        shape: Shape in elements.
        strides: Strides in elements.
        requires_grad: Whether it requires a gradient.
        is_parameter: Whether it is a Parameter.
    """

    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    is_parameter: bool = False

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are consecutive, in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return not prod(self.shape)
            expected *= size
        return True

    @property
    def span(self) -> int:
        """Number of elements from its first to its last in the storage."""
        if not prod(self.shape):
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)

    @property
    def shares_elements(self) -> bool:
        """Whether elements share memory, other than by a stride of 0."""
        reach = 0
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride:
                if stride <= reach:
                    return self.span > 0
                reach += (size - 1) * stride
        return False


class PickledState(NamedTuple):
    """The state in a pickle of torch.save.

    Attributes:
        structure: See `fastload.formats.state`; values that cannot be loaded are ``{"refused": [text]}``.
        tensors: The tensors in their storages by name, tied ones once.
    """

    structure: Any
    tensors: dict[str, StoredTensor]


@uncollected
def encode_pickle(
    value: Any,
    nbytes: int,
    where: str,
    name: str = "",
    *,
    budget: MemoryBudget | None = None,
    local_shards: bool = False,
) -> PickledState:
    """Encodes the value of a pickle such as ``data.pkl``.

    Args:
        value: As `unpickle` returns it.
        nbytes: Length of the pickle.
        where: Its place, for messages.
        name: Name of the value in a larger state, which begins the names of its tensors.
        budget: The budget of a checkpoint of several pickles.
        local_shards: Whether the local tensor stands for a DTensor; else DTensors cannot be loaded.

    Raises:
        ManifestError: It is malformed, or takes too much memory.
    """
    budget = budget or MemoryBudget(where)
    budget.add_input(nbytes)
    encoder = _PickleEncoder(where, budget, local_shards=local_shards)
    structure = encoder.value(value, "", name)
    return PickledState(structure, encoder.stored)


class _NotLoadable(Exception):
    """A value of the pickle cannot be loaded."""

    def __init__(self, what: str, why: str = _NOT_LISTED) -> None:
        super().__init__(what, why)


class _PickleEncoder(StateEncoder):
    """Encodes the values that a pickle describes, with tensors in their storages.

    Args:
        where: The pickle, for messages.
        budget: Charged with the memory of structure and names, of repeated values each time.
        local_shards: As for `encode_pickle`.
    """

    def __init__(self, where: str, budget: MemoryBudget, *, local_shards: bool) -> None:
        super().__init__()
        self._local_shards = local_shards
        self.stored: dict[str, StoredTensor] = {}
        self._name_of: dict[StoredTensor, str] = {}
        self._where = where
        self._budget = budget
        self._storage_dtypes: dict[str, torch.dtype] = {}
        self._lists: set[int] = set()  # ids of those of the pickle that were encoded
        self._is_first = False

    def value(self, value: Any, prefix: str, key: Any) -> Any:
        """Encodes a value; one that cannot be loaded becomes a node with the reason."""
        kind = type(value)
        if kind in SCALARS:
            self._budget.charge(_VALUE_BYTES + _NUM_TEXTS * num_chars(value))
            return encode_value(value)
        if id(value) in self._open:
            return self._refuse("a container", "it contains itself")
        if kind in (list, tuple):
            self._is_first = id(value) not in self._lists
            self._lists.add(id(value))
            return self._container(value, tensor_name(prefix, key))
        try:
            made = self._make(value)
        except _NotLoadable as error:
            return self._refuse(*error.args)
        except (ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:
            if isinstance(error, ManifestError):
                raise
            raise ManifestError(f"{self._where}: {show(value)} cannot be: {str(error)[:200]}") from None
        if type(made) is StoredTensor:
            return self._stored(made, tensor_name(prefix, key))
        if type(made) not in CONTAINERS:
            self._budget.charge(_NODE_BYTES + _NUM_TEXTS * num_chars(made))
            return encode_value(made)
        self._open.add(id(value))
        node = self._container(made, tensor_name(prefix, key))
        self._open.discard(id(value))
        return node

    def _container(self, value: Any, name: str) -> Any:
        is_first, self._is_first = self._is_first, False
        self._budget.charge(_NODE_BYTES + 2 * len(name))
        if type(value) not in (list, tuple) or len(self._path) >= MAX_DEPTH or not _are_json(value):
            return super()._container(value, name)
        # It may be very long, and is its own JSON.
        self._budget.charge((_FIRST_ITEM_BYTES if is_first else _ITEM_BYTES) * len(value))
        if value and type(value[0]) is str:
            self._budget.charge(_NUM_TEXTS * sum(map(len, value)))
        return {"tuple": list(value)} if type(value) is tuple else list(value)

    def _key(self, key: Any) -> Any:
        self._budget.charge(_VALUE_BYTES + _NUM_TEXTS * num_chars(key))
        return super()._key(key)

    def _refuse(self, what: str, why: str) -> Any:
        text = f"{show_path(self._path)} is {what}: {why}"
        self._budget.charge(_NODE_BYTES + _NUM_TEXTS * num_chars(text))
        return refused_node(text)

    def _stored(self, tensor: StoredTensor, name: str) -> Any:
        self._budget.charge(_NODE_BYTES + 2 * len(name))
        dtype = NAMES.get(tensor.dtype)
        is_complex128 = tensor.dtype is torch.complex128
        if dtype is None and not is_complex128:
            return self._refuse(f"a {tensor.dtype} tensor", "fastload has no such dtype")
        if dtype == "F4" and not (tensor.shape and tensor.is_contiguous):
            return self._refuse(f"a {tensor.dtype} tensor", "it is not contiguous, or has no dimensions")
        if tensor.shares_elements:
            what = "a tensor whose elements share memory (as_strided, unfold)"
            return self._refuse(what, "clone() it before it is saved")
        natural = name or BARE_NAME
        kind = "Parameter" if tensor.is_parameter else "Tensor" if tensor.requires_grad else None
        grad = "+grad" if tensor.requires_grad else ""
        bare = tensor._replace(requires_grad=False, is_parameter=False)
        if bare not in self._name_of:
            self._name_of[bare] = self._add(bare, natural)  # type: ignore[arg-type]
            self.stored[self._name_of[bare]] = bare
        stored = self._name_of[bare]
        return leaf_node(stored, natural, kind and kind + grad, "complex128" if is_complex128 else None)

    # Values that the pickle describes, one level at a time: members of containers stay descriptions

    def _make(self, node: Any) -> Any:
        kind = type(node)
        if kind is PickledDict:
            return self._fill({}, node)
        if kind is PickledSet:
            return set(self._keys(node))
        if kind is PickledCall:
            return self._called(node)
        if kind is PersistentId:
            self._storage(node)
            raise _NotLoadable("a storage", "only tensors are kept: save one that lies in it")
        if kind is not Global:
            return node
        if node not in DTYPES:
            raise _NotLoadable(str(node), "it is a class or a function")
        return DTYPES[node]

    def _fill(self, target: Any, node: PickledDict) -> Any:
        for key, child in zip(self._keys(node[::2]), node[1::2], strict=True):
            target[key] = child
        return target

    def _keys(self, nodes: Sequence[Any]) -> list[Any]:
        """Returns keys of a dict, or members of a set: plain values and tuples of them, cheap to hash."""
        self._budget.charge(_ENTRY_BYTES * len(nodes))
        keys = [self._made_key(node, iter(range(_MAX_KEY_PARTS))) for node in nodes]
        if why := crowded(keys):
            raise _NotLoadable("a dict or a set", why)
        return keys

    def _made_key(self, node: Any, parts: Iterator[int]) -> Any:
        if next(parts, None) is None:  # a tuple of tuples may have far more of them than it takes to say so
            raise _NotLoadable("keyed by a tuple", f"it has more than {_MAX_KEY_PARTS} parts")
        if type(node) in _PLAIN_KEYS:
            return node
        if type(node) is tuple:
            self._budget.charge(_ENTRY_BYTES * (1 + min(len(node), _MAX_KEY_PARTS)))
            return tuple(self._made_key(part, parts) for part in node)
        if type(node) in (Global, PickledCall):
            with suppress(_NotLoadable):
                key = self._make(node)
                if type(key) in _MADE_KEYS:
                    return key
        raise _NotLoadable(f"a dict or a set with {show(node)} as a key", "only plain values can be keys")

    def _called(self, call: PickledCall) -> Any:
        if len(call.args) > _MAX_ARGS and call.what in (_CALLS.keys() | _CONTAINERS.keys()):
            raise ValueError(f"{len(call.args)} arguments")
        if call.what in _CONTAINERS:
            return _CONTAINERS[call.what](self, call)
        if call.what in _CALLS:
            return _CALLS[call.what](self, *call.args)
        what = _REFUSED_TENSORS.get(call.what)
        raise _NotLoadable(what, _ONLY_DENSE) if what else _NotLoadable(str(call.what))

    def _ordered_dict_of(self, call: PickledCall) -> Any:
        items = PickledDict()
        for key, value in _plain_list(call.args[0]) if call.args else ():
            items[key] = value
        result: Any = self._fill(self._fill(OrderedDict(), items), call.pairs)
        state = PickledDict() if call.state is None else _pairs(call.state)
        self._budget.charge(_ENTRY_BYTES * len(state))
        attributes = state.by_text(self._where)
        if attributes.keys() - {"_metadata"}:
            why = f"its attributes {show(sorted(attributes))} cannot be kept"
            raise _NotLoadable("a collections.OrderedDict", why)
        if "_metadata" in attributes:
            result._metadata = attributes["_metadata"]
        return result

    def _counter_of(self, call: PickledCall) -> Any:
        return self._fill(Counter(), _pairs(call.args[0]) if call.args else call.pairs)

    def _defaultdict_of(self, call: PickledCall) -> Any:
        factory = call.args[0] if call.args else None
        known = factory is None or (type(factory) is Global and factory.module == "builtins")
        if not known or (factory is not None and factory.name not in FACTORIES):
            raise _NotLoadable(f"a defaultdict of {show(factory)}")
        return self._fill(defaultdict(None if factory is None else FACTORIES[factory.name]), call.pairs)

    def _bytes_of(self, value: Any = b"", encoding: str = "latin-1") -> bytes:
        value = self._make(value)
        if type(value) in (str, bytes, bytearray):
            self._budget.charge(2 * len(value))
        if type(value) is str and encoding in ("latin-1", "latin1", "utf-8", "utf8", "ascii"):
            return value.encode(encoding)
        if type(value) not in (bytes, bytearray):
            raise ValueError(f"{show(value)} in place of bytes")
        return value  # type: ignore[no-any-return]

    def _device(self, *parts: Any) -> torch.device:
        text = ":".join(map(str, parts))
        if not _DEVICE.fullmatch(text):
            raise ValueError("no device")
        try:
            return torch.device(text)
        except RuntimeError:
            raise _NotLoadable(f"the device {text}", f"torch {torch.__version__} has none such") from None

    # Tensors

    def _storage(self, node: Any) -> StorageRef:
        if type(node) is not PersistentId:
            raise ValueError(f"{show(node)} where a storage is to be")
        ref = StorageRef.of(node.id, self._where)
        if self._storage_dtypes.setdefault(ref.key, ref.dtype) != ref.dtype:  # which torch never writes
            raise ValueError(f"storage {show(ref.key)} is of {self._storage_dtypes[ref.key]} and {ref.dtype}")
        return ref

    def _tensor_of(self, storage: Any, *about: Any) -> StoredTensor:
        ref = self._storage(storage)
        return self._view(ref, ref.dtype, *about)

    def _tensor_with_dtype(self, storage: Any, *about: Any) -> StoredTensor:
        *about_view, dtype = about[:6]
        if type(dtype) is not Global or dtype not in DTYPES:
            raise ValueError(f"{show(dtype)} is no dtype")
        return self._view(self._storage(storage), DTYPES[dtype], *about_view, *about[6:])

    def _view(
        self,
        ref: StorageRef,
        dtype: torch.dtype,
        offset: Any,
        shape: Any,
        strides: Any,
        grad: Any = None,
        hooks: Any = None,
        metadata: Any = None,
        *_: Any,
    ) -> StoredTensor:
        sizes, steps = sizes_of(shape), sizes_of(strides)
        if len(sizes) != len(steps) or not is_size(offset) or (grad is not None and type(grad) is not bool):
            raise ValueError("not offset, shape and strides of a tensor")
        if metadata is not None and any(self._fill({}, _pairs(metadata)).values()):
            why = "resolve_conj() and resolve_neg() it before it is saved"
            raise _NotLoadable("a lazily conjugated or negated tensor", why)
        numel = ref.numel * ref.dtype.itemsize // dtype.itemsize
        tensor = StoredTensor(ref.key, dtype, ref.offset + offset, sizes, steps, bool(grad))
        if tensor.span and offset + tensor.span > numel:
            raise ValueError(
                f"shape {list(sizes)} with strides {list(steps)} at {offset} reaches beyond its storage of "
                f"{numel} elements"
            )
        return tensor

    def _parameter(self, data: Any, grad: Any, *_: Any) -> StoredTensor:
        tensor = self._make(data)
        if type(grad) is not bool:
            raise ValueError(f"{show(grad)} where it is to say whether it requires a gradient")
        if type(tensor) is not StoredTensor:
            raise _NotLoadable(show(data), "it is no tensor")
        return tensor._replace(requires_grad=grad, is_parameter=True)

    def _typed(self, function: Any, kind: Any, args: Any, state: Any) -> Any:
        if kind == _DTENSOR and self._local_shards:
            return self._local_tensor(state)
        if kind not in (_TENSOR, _PARAMETER):
            raise _NotLoadable(f"a tensor of type {show(kind)}", _ONLY_PLAIN)
        if type(function) is not Global or function not in _REBUILDS:
            raise _NotLoadable(show(function))
        if type(args) is not tuple:
            raise ValueError(f"{show(args)} in place of arguments")
        return self._called(PickledCall(function, args))

    def _local_tensor(self, state: Any) -> StoredTensor:
        slots = state[1] if type(state) is tuple and len(state) == 2 else None
        tensor = self._make(_pairs(slots).by_text(self._where).get("_local_tensor"))
        if type(tensor) is not StoredTensor:
            raise ValueError("a DTensor without a local tensor")
        return tensor

    def _subclass(self, kind: Any, *_: Any) -> Any:
        raise _NotLoadable(f"a tensor of type {show(kind)}", _ONLY_PLAIN)


def _pairs(node: Any) -> PickledDict:
    if type(node) is not PickledDict:
        raise ValueError(f"{show(node)} in place of a dict")
    return node


def _plain_list(node: Any) -> Sequence[Any]:
    if type(node) not in (list, tuple):
        raise ValueError(f"{show(node)} in place of a list")
    return node  # type: ignore[no-any-return]


def _float(node: Any) -> float:
    if type(node) is not float:
        raise ValueError(f"{show(node)} in place of a float")
    return node


_PLAIN_KEYS = frozenset({type(None), bool, int, float, str, bytes})
_MADE_KEYS = frozenset({*_PLAIN_KEYS, torch.dtype, torch.device, torch.Size, complex})
_TENSOR, _PARAMETER = Global("torch", "Tensor"), Global("torch.nn.parameter", "Parameter")
_DTENSOR = Global("torch.distributed.tensor", "DTensor")

_REBUILDS: dict[Global, Callable[..., Any]] = {
    Global("torch._utils", "_rebuild_tensor"): _PickleEncoder._tensor_of,
    Global("torch._utils", "_rebuild_tensor_v2"): _PickleEncoder._tensor_of,
    Global("torch._utils", "_rebuild_tensor_v3"): _PickleEncoder._tensor_with_dtype,
    Global("torch._utils", "_rebuild_parameter"): _PickleEncoder._parameter,
    Global("torch._utils", "_rebuild_parameter_with_state"): _PickleEncoder._parameter,
}
_CALLS: dict[Global, Callable[..., Any]] = {
    **_REBUILDS,
    Global("torch._tensor", "_rebuild_from_type_v2"): _PickleEncoder._typed,
    Global("torch._utils", "_rebuild_wrapper_subclass"): _PickleEncoder._subclass,
    Global("torch", "Size"): lambda _, sizes: torch.Size(sizes_of(sizes)),
    Global("torch", "device"): _PickleEncoder._device,
    Global("builtins", "set"): lambda self, members=(): set(self._keys(_plain_list(members))),
    Global("builtins", "frozenset"): lambda self, members=(): frozenset(self._keys(_plain_list(members))),
    Global("builtins", "bytearray"): lambda self, *args: bytearray(self._bytes_of(*args)),
    Global("builtins", "bytes"): lambda self, *args: bytes(self._bytes_of(*args)),
    Global("builtins", "complex"): lambda _, real, imag: complex(_float(real), _float(imag)),
    Global("_codecs", "encode"): lambda self, *args: bytes(self._bytes_of(*args)),
}
_CONTAINERS: dict[Global, Callable[[_PickleEncoder, PickledCall], Any]] = {
    Global("collections", "OrderedDict"): _PickleEncoder._ordered_dict_of,
    Global("collections", "Counter"): _PickleEncoder._counter_of,
    Global("collections", "defaultdict"): _PickleEncoder._defaultdict_of,
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


def _are_json(values: Sequence[Any]) -> bool:
    """Whether values of one type are all their own JSON; a fast check for long lists."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return bool(min(values) > -_EXACT_INT and max(values) < _EXACT_INT)
    if kinds == {float}:
        return all(map(isfinite, values))
    if kinds == {str}:
        return all(map(str.isascii, values))
    return kinds <= {type(None), bool}
