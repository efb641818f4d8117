"""Files next to the weights of a checkpoint, such as ``config.json`` and those of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from fastload.formats.names import INDEX_SUFFIX, NAMES, SUFFIX, TORCH_ENDINGS, metadata_names
from fastload.options import LoadOptions
from fastload.storage import PatientStorage, locate, open_storage, put_beside

__all__ = ["companions_of", "copy_companions"]

_WEIGHTS = (
    SUFFIX,
    INDEX_SUFFIX,
    *TORCH_ENDINGS,
    *(f"{ending}.index.json" for ending in TORCH_ENDINGS),
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)
_MAX_BYTES = 256 << 20


def companions_of(src: str) -> list[str]:
    """Returns the names of the files next to the weights of a checkpoint; none if it is a single file.

    Weights of other kinds are none, nor are hidden files and those of fastload and DCP.

    Raises:
        StorageError: Storage failed.
    """
    with closing(_open(src)) as storage:
        names = storage.list() or []
    if metadata_names(names):
        return []
    own = NAMES.own(names, [])
    return [name for name in names if not name.endswith(_WEIGHTS) and name[0] != "." and name not in own]


def copy_companions(src: str, dst: str, names: Sequence[str]) -> list[str]:
    """Copies files from one checkpoint to another, where it replaces those of the same names.

    Args:
        src: The directory that they are in.
        dst: The directory that they go to, which exists.
        names: Their names.

    Returns:
        The names of those that were copied: none above 256 MiB is.

    Raises:
        StorageError: Storage failed.
    """
    options, place, copied = LoadOptions(), locate(dst), []
    with closing(_open(src)) as storage:
        for name in names:
            stat = storage.stat(name)
            if stat is not None and stat.nbytes <= _MAX_BYTES:
                content = bytearray(stat.nbytes)
                storage.read_into(name, 0, [memoryview(content)], stat.version)
                put_beside(place, name, bytes(content), timeout_s=options.timeout_s, retries=options.retries)
                copied.append(name)
    return copied


def _open(src: str) -> PatientStorage:
    options = LoadOptions()
    return PatientStorage(open_storage(src, NAMES), retries=options.retries, timeout_s=options.timeout_s)
