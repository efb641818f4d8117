"""A layer outside of fastload: tensors that are compressed by zlib, each stored in a tensor of bytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastload.base.memory import host_bytes
from fastload.formats.dtypes import torch_spec
from fastload.formats.layers import Decoding, Layer, StoredPart
from fastload.formats.manifest import Manifest, TensorEntry
from fastload.geometry.box import Box
from fastload.geometry.dtensors import narrowed
from fastload.loading.access import Access, OpenCall
from fastload.options import LoadOptions
from fastload.storage import CheckpointReader, Location


@dataclass(frozen=True, slots=True, kw_only=True)
class Deflated(TensorEntry):
    compressed: TensorEntry

    def decoding(self, tensor: Tensor, box: Box | None) -> Inflating:
        return Inflating(self, tensor.detach(), box)


class Inflating(Decoding):
    def __init__(self, entry: Deflated, tensor: Tensor, box: Box | None) -> None:
        self._entry, self._tensor, self._box = entry, tensor, box
        memory = torch.empty(entry.compressed.nbytes, dtype=torch.uint8)
        self.parts = [StoredPart(entry.compressed, memory, None)]

    def finish(self) -> None:
        dtype, shape = torch_spec(self._entry)
        data = bytearray(zlib.decompress(host_bytes(self.parts[0].memory)))
        values = torch.frombuffer(data, dtype=dtype).view(shape)
        self._tensor.copy_(values if self._box is None else narrowed(values, self._box))


class DeflateLayer(Layer):
    def open(self, access: Access, call: OpenCall) -> Access:
        return replace(access, logical=inflated(access.logical))

    def inspect(
        self,
        stored: Manifest,
        location: Location,
        connect: Callable[[Location], CheckpointReader],
        options: LoadOptions,
    ) -> Manifest:
        return inflated(stored)


def inflated(stored: Manifest) -> Manifest:
    tensors = [
        Deflated(name, dtype, tuple(shape), entry.file, entry.offset, nbytes, compressed=entry)
        for name, (dtype, shape, nbytes) in json.loads(stored.metadata["deflate"]).items()
        for entry in [stored.by_name[name]]
    ]
    return replace(stored, tensors=tuple(tensors), decoded_from=stored)


layer = DeflateLayer()
