"""The state in a file of torch's, as fastload has states: a structure of JSON, and tensors by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fastload.base.memory import uncollected
from fastload.formats.describer import CONTAINERS, Describer, leaf_node
from fastload.formats.dtypes import NAMES
from fastload.formats.refused import refused_node
from fastload.formats.stored_tensor import StoredTensor
from fastload.formats.torch_objects import Objects, Refused
from fastload.formats.unpickle import unpickle
from fastload.formats.untrusted import MemoryBudget
from fastload.formats.values import BARE_NAME, MAX_DEPTH, SCALARS, are_json, num_chars, show_path, tensor_name

__all__ = ["TorchState", "read_described", "read_state"]

_NODE_BYTES, _VALUE_BYTES = 300, 128  # of an object of JSON, of what is none
_ITEM_BYTES = 32  # of what is in a list of such values only
_NUM_TEXTS = 4  # of the structure at once, while it is sent to other ranks


class TorchState(NamedTuple):
    """What a pickle of torch's holds.

    Attributes:
        structure: As `fastload.formats.state` has it; what cannot be loaded is ``{"refused": [text]}``.
        tensors: Where they lie in their storages, by name; those that are tied once.
    """

    structure: Any
    tensors: dict[str, StoredTensor]


@uncollected
def read_state(data: bytes, where: str, name: str = "", *, budget: MemoryBudget | None = None) -> TorchState:
    """Reads what ``data.pkl`` says; nothing in it is run.

    Args:
        data: The pickle.
        where: What it is, for messages.
        name: What the state is called in a larger one: its tensors have names below that.
        budget: That of the checkpoint, if this is a part of one.

    Raises:
        ManifestError: It is malformed, or takes too much memory.
    """
    return read_described(unpickle(data, where), len(data), where, name, budget=budget)


def read_described(
    described: Any, nbytes: int, where: str, name: str = "", *, budget: MemoryBudget | None = None
) -> TorchState:
    """Reads what a pickle was said to hold; as `read_state`.

    Args:
        described: What `unpickle` returned.
        nbytes: Length of the pickle.
        where: What it is, for messages.
        name: What the state is called in a larger one.
        budget: That of the checkpoint, if this is a part of one.

    Raises:
        ManifestError: It is malformed, or takes too much memory.
    """
    budget = budget or MemoryBudget(where)
    budget.add_input(nbytes)
    reader = _Reader(budget)
    structure = reader.value(Objects(where, budget).value(described), "", name)
    return TorchState(structure, reader.stored)


class _Reader(Describer):
    """A walk through a state whose tensors are still where they were saved.

    Args:
        budget: Charged with the memory that structure and names take. What appears twice takes it twice.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        super().__init__()
        self.stored: dict[str, StoredTensor] = {}
        self._name_of: dict[StoredTensor, str] = {}
        self._budget = budget

    def value(self, value: Any, prefix: str, key: Any) -> Any:
        """As for any state; a `Refused` becomes a node that says so, and tensors are `StoredTensor`."""
        kind = type(value)
        if kind in SCALARS:
            self._budget.charge(_VALUE_BYTES + _NUM_TEXTS * num_chars(value))
        elif kind is StoredTensor or kind in CONTAINERS:
            self._budget.charge(_NODE_BYTES + 2 * (len(prefix) + num_chars(key)))
            if kind in (list, tuple) and len(self._path) < MAX_DEPTH and are_json(value):
                return self._list_of_json(value)
        else:
            self._budget.charge(_NODE_BYTES + _NUM_TEXTS * num_chars(value))
        if kind is StoredTensor:
            return self._stored(value, tensor_name(prefix, key))
        if kind is Refused:
            return self._refuse(value.what, value.why)
        return super().value(value, prefix, key)

    def _list_of_json(self, values: Sequence[Any]) -> Any:
        """Returns what `value` would, of a list or a tuple that may be very long."""
        self._budget.charge(_ITEM_BYTES * len(values))
        if values and type(values[0]) is str:
            self._budget.charge(_NUM_TEXTS * sum(map(len, values)))
        return {"tuple": list(values)} if type(values) is tuple else list(values)

    def _key(self, key: Any) -> Any:
        self._budget.charge(_VALUE_BYTES + _NUM_TEXTS * num_chars(key))
        return super()._key(key)

    def _stored(self, tensor: StoredTensor, name: str) -> Any:
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

    def _refuse(self, what: str, why: str) -> Any:
        text = f"{show_path(self._path)} is {what}: {why}"
        self._budget.charge(_NODE_BYTES + _NUM_TEXTS * num_chars(text))
        return refused_node(text)
