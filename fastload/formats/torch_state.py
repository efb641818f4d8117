"""The state in a file of torch's, as fastload has states: a structure of JSON, and tensors by name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fastload.base.memory import uncollected
from fastload.errors import ManifestError
from fastload.formats.describer import Describer, leaf_node
from fastload.formats.dtypes import NAMES
from fastload.formats.refused import refused_node
from fastload.formats.stored_tensor import StoredTensor
from fastload.formats.torch_objects import Objects, Refused
from fastload.formats.unpickle import unpickle
from fastload.formats.values import BARE_NAME, show_path, tensor_name

__all__ = ["TorchState", "describe_objects", "read_state"]

_MOST_PARTS_ANYWAY = 100_000


class TorchState(NamedTuple):
    """What a pickle of torch's holds.

    Attributes:
        structure: As `fastload.formats.state` has it; what cannot be loaded is ``{"refused": [text]}``.
        tensors: Where they lie in their storages, by name; those that are tied once.
    """

    structure: Any
    tensors: dict[str, StoredTensor]


@uncollected
def read_state(data: bytes, where: str, name: str = "") -> TorchState:
    """Reads what ``data.pkl`` says; nothing in it is run.

    Args:
        data: The pickle.
        where: What it is, for messages.
        name: What the state is called in a larger one: its tensors have names below that.

    Raises:
        ManifestError: It is malformed.
    """
    return describe_objects(Objects(where).value(unpickle(data, where)), where, len(data), name)


def describe_objects(state: Any, where: str, max_parts: int, name: str = "") -> TorchState:
    """Takes apart what `Objects` made.

    Args:
        state: What it made.
        where: What it is, for messages.
        max_parts: How many containers and values it can have: what appears twice is counted twice, and a
            small pickle may have very much of that.
        name: What the state is called in a larger one.

    Raises:
        ManifestError: It has more.
    """
    reader = _Reader(where, max(max_parts, _MOST_PARTS_ANYWAY))
    structure = reader.value(state, "", name)
    return TorchState(structure, reader.stored)


class _Reader(Describer):
    """A walk through a state whose tensors are still where they were saved."""

    def __init__(self, where: str, max_parts: int) -> None:
        super().__init__()
        self.stored: dict[str, StoredTensor] = {}
        self._name_of: dict[StoredTensor, str] = {}
        self._where = where
        self._max_parts = self._parts_left = max_parts

    def value(self, value: Any, prefix: str, key: Any) -> Any:
        self._parts_left -= 1
        if self._parts_left < 0:
            raise ManifestError(f"{self._where}: more than {self._max_parts} values, most of them repeated")
        if type(value) is StoredTensor:
            return self._stored(value, tensor_name(prefix, key))
        if type(value) is Refused:
            return self._refuse(value.what, value.why)
        return super().value(value, prefix, key)

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
        return refused_node(f"{show_path(self._path)} is {what}: {why}")
