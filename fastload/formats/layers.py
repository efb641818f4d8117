"""Layers: what the stored bytes of a checkpoint stand for.

They act in a fixed order:

1. ``seal`` adds the checksums of a seal to the manifest.
2. ``delta`` puts the changes of a delta into its base.
3. Codecs decode tensors. The metadata of the checkpoint name them, separated by commas, under `LAYERS_KEY`.
4. ``dequantize`` makes floating point tensors of quantised weights, if the options say so.

A layer has the name of its entry point in the group ``fastload.layers``. It is imported when a checkpoint or
an option needs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from fastload.base.registry import find, not_installed
from fastload.errors import ManifestError, UnsupportedVersion
from fastload.formats.untrusted import show

if TYPE_CHECKING:
    from torch import Tensor

    from fastload.formats.manifest import Manifest, TensorEntry
    from fastload.geometry.box import Box
    from fastload.loading.access import Access, OpenCall
    from fastload.loading.match import Match, Request
    from fastload.loading.session import Session
    from fastload.options import LoadOptions
    from fastload.storage import CheckpointReader, Location, Storage

LAYERS_KEY = "fastload.layers"
SEAL = "seal"
_DELTA = "delta"
_DEQUANTIZE = "dequantize"


class StoredPart(NamedTuple):
    """Stored bytes that a box of a tensor is decoded from.

    Attributes:
        entry: The tensor in the checkpoint, as stored.
        memory: What it is loaded into, of its dtype.
        box: The box of it; None for all of it.
    """

    entry: TensorEntry
    memory: Tensor
    box: Box | None


class Decoding(ABC):
    """Decodes a box of a tensor during a load; made by `TensorEntry.decoding`.

    Attributes:
        parts: What has to be loaded.
    """

    parts: Sequence[StoredPart]

    def arrived(self, entry: TensorEntry, begin: int | None, nbytes: int) -> int:
        """Notes bytes of a part; returns how many threads could `run` now. One thread at a time calls it.

        Args:
            entry: The tensor of the part.
            begin: The first byte in the memory of the part; None if they are not adjacent there.
            nbytes: Length in bytes.
        """
        return 0

    def run(self) -> None:  # noqa: B027 (most decode in the end)
        """Decodes some of what has arrived. Several threads may do so at once."""

    @abstractmethod
    def finish(self) -> None:
        """Decodes the rest, all of which has arrived."""


class Layer:
    """What stored bytes stand for. Derive from it: a method that is left out changes nothing."""

    def read(self, storage: Storage, stored: Manifest, read_exactly: Callable[[], Manifest]) -> Manifest:
        """Returns the manifest with what the layer adds to it, on the rank that reads the headers.

        Only the seal has this part: no other layer is known before the manifest is.

        Args:
            storage: Reads the checkpoint.
            stored: Its manifest.
            read_exactly: Reads it again, without a layout that is inferred.
        """
        return stored

    def inspect(
        self,
        stored: Manifest,
        location: Location,
        connect: Callable[[Location], CheckpointReader],
        options: LoadOptions,
    ) -> Manifest:
        """Returns what a manifest stands for, without other ranks; see `fastload.inspect`.

        Args:
            stored: The manifest as stored.
            location: The checkpoint.
            connect: Opens a storage.
            options: How to load.
        """
        return stored

    def open(self, access: Access, call: OpenCall) -> Access:
        """Returns the open checkpoint with another `logical` manifest, or other readers. A call of all ranks.

        Args:
            access: The checkpoint, as the layers before have opened it.
            call: The call that opens it.

        Raises:
            FastloadError: It cannot be opened; `access` is closed by the caller.
        """
        return access

    def serve(self, session: Session, request: Request) -> Match | None:
        """Returns what is left to load of a request, before a load on all ranks; None if it is not its own.

        Called if `Access.layers` has the layer.

        Args:
            session: The open checkpoint.
            request: The request of this rank.

        Raises:
            FastloadError: A rank failed; nothing has changed.
        """
        return None


def layer(name: str, url: str) -> Layer:
    """Imports a layer.

    Args:
        name: Its name.
        url: The checkpoint that needs it, for messages.

    Raises:
        UnsupportedVersion: It is not installed.
        OptionError: It cannot be imported.
    """
    known = find("layers", name)
    if known is None:
        raise UnsupportedVersion(f"{url}: needs the layer {show(name)}, {not_installed('layers', name)}")
    loaded: Layer = known.load()
    return loaded


def layers_of(manifest: Manifest, *, dequantize: bool = False) -> list[Layer]:
    """Returns the layers after the seal that a checkpoint needs, in order; imports no others.

    Args:
        manifest: The checkpoint, as stored.
        dequantize: Whether quantised weights are wanted as floating point tensors.

    Raises:
        UnsupportedVersion: One is not installed.
        ManifestError: The metadata name a layer that acts for another reason.
    """
    codecs = [name for name in manifest.metadata.get(LAYERS_KEY, "").split(",") if name]
    for name in (SEAL, _DELTA, _DEQUANTIZE):
        if name in codecs:
            raise ManifestError(f"{manifest.url}: {LAYERS_KEY} in its metadata names the layer {name!r}")
    names = [_DELTA] if manifest.delta is not None else []
    names += codecs
    names += [_DEQUANTIZE] if dequantize else []
    return [layer(name, manifest.url) for name in names]


def decoded(manifest: Manifest) -> Manifest:
    """Returns a manifest without the names of its layers, once they have acted: a new save needs none."""
    if LAYERS_KEY not in manifest.metadata:
        return manifest
    metadata = {key: text for key, text in manifest.metadata.items() if key != LAYERS_KEY}
    return replace(manifest, metadata=metadata)
