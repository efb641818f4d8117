"""Parses and writes headers of safetensors files, and writes the Hugging Face index of several. Pure.

Checkpoints are untrusted. `parse_header` accepts a header only if the reference library accepts it, too, and
the tensors tile the data area exactly. It refuses others with a `ManifestError` that names the place and the
reason, before it allocates anything of a claimed size.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from fastload.base.memory import uncollected
from fastload.errors import ManifestError
from fastload.formats.dtypes import DTYPES
from fastload.formats.manifest import TensorEntry
from fastload.formats.untrusted import MAX_INT, are_sizes, is_unicode, parse_json, parse_metadata, show

MAX_HEADER_BYTES = 100_000_000  # the reference library's limit
LENGTH_BYTES = 8  # the little-endian u64 before the header
ALIGN_BYTES = 8  # alignment of the data in fastload's files, and size of the largest element

_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}

_quote = json.encoder.encode_basestring  # a JSON text as UTF-8, not escaped to ASCII


@uncollected
def parse_header(
    header: bytes, file_nbytes: int, url: str, file: int = 0
) -> tuple[list[TensorEntry], dict[str, str]]:
    """Parses the header of one safetensors file.

    Args:
        header: The JSON text, without the 8 bytes of its length.
        file_nbytes: Size of the file in bytes.
        url: The file, for messages.
        file: Index of the file in the manifest.

    Returns:
        The tensors in the order of their bytes (offset from the start of the file, length, name), and
        the ``__metadata__``, empty where there is none.

    Raises:
        ManifestError: The header is malformed, or does not describe exactly the bytes of the file.
    """
    if not header.startswith(b"{"):
        raise ManifestError(f"{url}: header starts with {header[:8]!r}, not with '{{'")
    raw = parse_json(header, f"{url}: header")
    about = raw.pop("__metadata__", None)  # as in the safetensors library, null is none
    metadata = parse_metadata({} if about is None else about, f"{url}: __metadata__")
    data_offset = LENGTH_BYTES + len(header)
    tensors = []
    for name in list(raw):
        try:
            # pop, so that both forms of a large header never exist at once
            tensors.append(_parse_entry(name, raw.pop(name), file, data_offset))
        except ValueError as error:
            raise ManifestError(f"{url}: tensor {show(name)}: {error}") from None
    tensors.sort(key=attrgetter("offset", "nbytes", "name"))
    _check_tiling(tensors, data_offset, file_nbytes, url)
    return tensors, metadata


# Parsing. A ValueError has the reason; the caller adds the place.


def _parse_entry(name: str, fields: Any, file: int, data_offset: int) -> TensorEntry:
    if not is_unicode(name):
        raise ValueError("its name is not valid Unicode")
    if not isinstance(fields, dict) or fields.keys() != _ENTRY_KEYS:
        raise ValueError(f"needs exactly the keys {sorted(_ENTRY_KEYS)}, got {show(fields)}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {show(dtype)}")
    if not are_sizes(shape):
        raise ValueError(f"shape is not a list of integers from 0 to 2**63-1: {show(shape)}")
    if not are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets are not two integers, begin <= end: {show(offsets)}")
    begin, end = offsets
    nbytes = _count_bytes(dtype, shape)
    if nbytes != end - begin:
        described = f"{dtype} of shape {show(shape)}"
        raise ValueError(f"{described} takes {nbytes} bytes, data_offsets {offsets} hold {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), file, data_offset + begin, nbytes)


def _count_bytes(dtype: str, shape: list[int]) -> int:
    """Returns the bytes of a tensor. Strides have to fit 63 bits, also those of an empty tensor."""
    num_bits = DTYPES[dtype][0]
    for size in shape:
        num_bits *= size or 1
        if num_bits > MAX_INT:
            raise ValueError(f"{dtype} of shape {show(shape)} overflows: more than 2**63-1 bits")
    if 0 in shape:
        return 0
    if num_bits % 8:
        raise ValueError(f"{dtype} of shape {show(shape)} takes {num_bits} bits and ends inside a byte")
    return num_bits // 8


def _check_tiling(tensors: Sequence[TensorEntry], data_offset: int, file_nbytes: int, url: str) -> None:
    """Refuses overlaps, holes, and a data area that does not end with the file."""
    end = data_offset
    for entry in tensors:
        if entry.offset != end:
            problem = "overlaps the tensor before it" if entry.offset < end else "leaves a hole before it"
            raise ManifestError(
                f"{url}: tensor {show(entry.name)} {problem}: it begins at data offset"
                f" {entry.offset - data_offset}, not at {end - data_offset}"
            )
        end += entry.nbytes
    sizes = f"the file has {file_nbytes} bytes, its header describes {end}"
    if end > file_nbytes:
        raise ManifestError(f"{url}: truncated, {end - file_nbytes} bytes are missing: {sizes}")
    if end < file_nbytes:
        raise ManifestError(f"{url}: {file_nbytes - end} trailing bytes: {sizes}")


# Writing


def entry_text(name: str, dtype: str, shape: Sequence[int]) -> str:
    """Returns a tensor's entry in the header, up to its offsets."""
    return f'{_quote(name)}:{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":'


def offsets_text(begin: int, end: int) -> str:
    """Returns the rest of a tensor's entry."""
    return f"[{begin},{end}]}}"


def build_header(entries: Sequence[str], metadata: Mapping[str, str]) -> bytes:
    """Returns the bytes before the first tensor: the length, the entries, blanks up to `ALIGN_BYTES`."""
    if metadata:
        text = json.dumps(dict(metadata), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        entries = [f'"__metadata__":{text}', *entries]
    header = f"{{{','.join(entries)}}}".encode()
    header += b" " * (-len(header) % ALIGN_BYTES)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def build_index(files: Mapping[str, Sequence[TensorEntry]]) -> bytes:
    """Returns the index of some files: name → its tensors."""
    total_bytes = sum(entry.nbytes for tensors in files.values() for entry in tensors)
    owners = ((entry.name, file) for file, tensors in files.items() for entry in tensors)
    rows = sorted(f'    {_quote(name)}: "{file}"' for name, file in owners)
    head = f'{{\n  "metadata": {{\n    "total_size": {total_bytes}\n  }},\n  "weight_map": {{\n'
    return (head + ",\n".join(rows) + "\n  }\n}\n").encode()
