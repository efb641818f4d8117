"""The layer of quantised weights: finds them in the configuration of a model of Hugging Face."""

from __future__ import annotations

from dataclasses import replace

from fastload.errors import OptionError
from fastload.ext.quantized.weights import dequantized
from fastload.formats.layers import Layer
from fastload.formats.names import CONFIG_NAME
from fastload.formats.reading import read_limited
from fastload.formats.untrusted import parse_json
from fastload.loading.access import Access, OpenCall

_MAX_CONFIG_BYTES = 16 << 20


class DequantizeLayer(Layer):
    """Gives a checkpoint floating point tensors in place of quantised elements and their scales."""

    def open(self, access: Access, call: OpenCall) -> Access:
        """Finds the quantised weights; one rank reads their configuration, for all.

        Raises:
            OptionError: The checkpoint is none of Hugging Face.
            ManifestError: It is not quantised, or in a way that is not known.
            FastloadError: A rank failed.
        """
        stored, storage = access.logical, access.storage
        with call.world.step(f"reading the quantization of {stored.url}") as step:
            if call.world.rank == access.readers[0]:
                if stored.structure is not None:
                    raise OptionError(f"{stored.url}: dequantize= is for Hugging Face's checkpoints only")
                text = read_limited(storage, CONFIG_NAME, "configuration", _MAX_CONFIG_BYTES)
                dequantized(stored, parse_json(text, storage.label(CONFIG_NAME)))
                step.answer(attach=text)
        return replace(access, logical=dequantized(stored, parse_json(step.attachment, CONFIG_NAME)))


layer = DequantizeLayer()
