"""The index that Hugging Face libraries write beside several files: which tensor is in which."""

from __future__ import annotations

from fastload.errors import ManifestError
from fastload.formats.reading import read_bytes, stat_all, url_of
from fastload.formats.untrusted import is_plain_path, parse_json, show
from fastload.storage.base import Storage

__all__ = ["read_index"]

_MAX_INDEX_BYTES = 100_000_000


def read_index(storage: Storage, index: str) -> dict[str, str]:
    """Returns the ``weight_map`` of an index: tensor name → file name, safe to look up below the root.

    Raises:
        ManifestError: It is malformed, or there is none.
    """
    url = url_of(storage, index)
    stat = stat_all(storage, [index])[index]
    if stat.nbytes > _MAX_INDEX_BYTES:
        raise ManifestError(f"{url}: index of {stat.nbytes} bytes is over the limit of {_MAX_INDEX_BYTES}")
    weight_map = parse_json(read_bytes(storage, index, 0, stat.nbytes), f"{url}: index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ManifestError(f"{url}: weight_map is not an object that names files but {show(weight_map)}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_plain_path(file):
            raise ManifestError(f"{url}: tensor {show(name)}: not a plain relative file name: {show(file)}")
    return weight_map
