"""Values of extensions: encoded as JSON and as parts that a state may hold, such as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fastload.base.registry import extension, extensions
from fastload.formats.values import list_of


class ValueCodec(Protocol):
    """A kind of value; an extension of the kind ``codecs``. The name is stored in checkpoints."""

    def encode(self, value: Any) -> tuple[Any, Mapping[str, Any]] | None:
        """Returns a value as JSON and its parts by name; None for values of other kinds.

        Raises:
            NotPlain: It is of this kind and cannot be saved.
        """
        ...

    def decode(self, header: Any, parts: Mapping[str, Any]) -> Any:
        """Returns the value.

        Args:
            header: The JSON; untrusted.
            parts: The parts, with tensors that may be on the meta device; with DTensors as `shards` gives.

        Raises:
            ValueError: It is malformed (also `TypeError`), or `Unknown`.
        """
        ...

    def shards(self, header: Any, shapes: Mapping[str, Sequence[int]], like: Tensor) -> Mapping[str, Tensor]:
        """Returns a DTensor, of any dtype, for each part that is sharded if the value is sharded as another.

        Args:
            header: The JSON; untrusted.
            shapes: The shapes of the parts that are tensors.
            like: A DTensor, whose placements the value is to have.
        """
        ...

    def parts(self, value: Any, header: Any) -> Mapping[str, Any] | None:
        """Returns the parts of an existing value, to be loaded in place; None if the JSON does not fit it."""
        ...


class CodedNode(NamedTuple):
    """The node of a value of an extension.

    Attributes:
        codec: Name of the extension.
        header: The value as JSON.
        items: Names and nodes of the parts.
    """

    codec: str
    header: Any
    items: list[Any]

    @classmethod
    def of(cls, payload: Any) -> CodedNode:
        """Returns the node, given its payload.

        Raises:
            ValueError: It is malformed.
        """
        codec, header, items = list_of(payload)
        if type(codec) is not str:
            raise ValueError("not the name of an extension")
        return cls(codec, header, list_of(items))

    @property
    def extension(self) -> ValueCodec:
        """The extension.

        Raises:
            OptionError: It is not installed.
        """
        found: ValueCodec = extension("codecs", self.codec, "a value of the checkpoint")
        return found


def has_coded(node: Any) -> bool:
    """Whether a structure has values of extensions."""
    if type(node) is list:
        return any(map(has_coded, node))
    return type(node) is dict and ("coded" in node or any(map(has_coded, node.values())))


@cache
def _codecs() -> Mapping[str, ValueCodec]:
    return {name: found.load() for name, found in extensions("codecs").items()}


def encode_with_extensions(value: Any) -> tuple[str, Any, Mapping[str, Any]] | None:
    """Returns the name of the extension for a value, the value as JSON and its parts; None without one.

    Raises:
        NotPlain: It cannot be saved.
    """
    for name, codec in _codecs().items():
        if (encoded := codec.encode(value)) is not None:
            return name, *encoded
    return None
