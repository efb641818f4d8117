"""Values of extensions: encoded as JSON and as parts that a state may hold, such as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fastload.base.registry import extension, extensions
from fastload.errors import ManifestError


class ValueCodec(Protocol):
    """A kind of value; an extension of the kind ``codecs``, whose name is stored in checkpoints.

    Headers are JSON, and untrusted when they come from a checkpoint.
    """

    def encode(self, value: Any) -> tuple[Any, Mapping[str, Any]] | None:
        """Returns the header and the parts by name; None for values of other kinds.

        Raises:
            NotPlain: It is of this kind and cannot be saved.
        """

    def decode(self, header: Any, parts: Mapping[str, Any]) -> Any:
        """Returns the value; its tensors may be on the meta device, or DTensors as `shards` gives.

        Raises:
            ValueError: It is malformed (also `TypeError`), or `Unknown`.
        """

    def parts(self, value: Any, header: Any) -> Mapping[str, Any] | None:
        """Returns the parts of an existing value, to be loaded in place; None if the header does not fit."""

    def shards(self, header: Any, shapes: Mapping[str, Sequence[int]], like: Tensor) -> Mapping[str, Tensor]:
        """Returns a DTensor, of any dtype, for each part that is sharded if the value is as `like` is.

        Args:
            header: The header.
            shapes: The shapes of the parts that are tensors.
            like: A DTensor.
        """


class CodedNode(NamedTuple):
    """The node of a value of an extension: its name, the header, names and nodes of the parts."""

    codec: str
    header: Any
    items: list[Any]

    @property
    def extension(self) -> ValueCodec:
        """The extension.

        Raises:
            OptionError: It is not installed.
        """
        codec: ValueCodec = extension("codecs", self.codec, "a value of the checkpoint")
        return codec


def coded_of(node: Any) -> CodedNode | None:
    """Returns the node of a value of an extension; None for other nodes.

    Raises:
        ManifestError: It is malformed.
    """
    if type(node) is not dict or node.keys() != {"coded"}:
        return None
    payload = node["coded"]
    if type(payload) is list and len(payload) == 3 and type(payload[0]) is str and type(payload[2]) is list:
        return CodedNode(*payload)
    raise ManifestError("the structure of the state: not the name of an extension, a header and parts")


@cache
def _codecs() -> Mapping[str, ValueCodec]:
    return {name: known.load() for name, known in extensions("codecs").items()}


def encode_with_extensions(value: Any) -> tuple[str, Any, Mapping[str, Any]] | None:
    """Returns name of the extension, header and parts of a value; None if it is of no extension.

    Raises:
        NotPlain: It cannot be saved.
    """
    for name, codec in _codecs().items():
        if (encoded := codec.encode(value)) is not None:
            return name, *encoded
    return None
