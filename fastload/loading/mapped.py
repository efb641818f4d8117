"""Tensors that are views of the files they lie in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fastload.formats.dtypes import torch_spec
from fastload.formats.manifest import TensorEntry
from fastload.loading.job import Opened, decide, target_device
from fastload.storage.local import Mapped

__all__ = ["MappedFiles", "map_files"]

_MAX_FILES = 256  # each keeps a descriptor


class MappedFiles:
    """Files of a checkpoint in this process's memory, as they are; each until its last tensor is let go of.

    Args:
        files: By their index in the manifest.
    """

    def __init__(self, files: Mapping[int, Mapped]) -> None:
        self._files = dict(files)
        self._at = -1
        self._bytes = torch.empty(0)

    def tensor(self, entry: TensorEntry, num_together: int = 1) -> Tensor:
        """Returns the next tensor, in the order of the files.

        Args:
            entry: The tensor.
            num_together: So many of its elements are to be taken for one, in the end.

        Raises:
            StorageError: Somebody has written to the file before.
        """
        dtype, shape = torch_spec(entry)
        if not entry.nbytes:
            return torch.empty(shape, dtype=dtype)
        if entry.file != self._at:
            self._leave()
            self._at = entry.file
            self._bytes = torch.frombuffer(self._files[entry.file].data, dtype=torch.uint8)
        raw = self._bytes[entry.offset : entry.offset + entry.nbytes]
        if entry.offset % (dtype.itemsize * num_together):
            raw = raw.clone()  # torch has no tensors at such addresses
        return raw.view(dtype).view(shape)

    def close(self) -> None:
        """Lets go of the files, after the last tensor.

        Raises:
            StorageError: Somebody has written to the last one.
        """
        self._leave()
        self._files.clear()

    def _leave(self) -> None:
        """Lets go of a file; if it has changed, tensors of it may be older in some places than in others."""
        self._bytes = torch.empty(0)
        if (file := self._files.pop(self._at, None)) is not None:
            file.check()


def map_files(opened: Opened, device: torch.device | str | None) -> MappedFiles | None:
    """Maps the files of a checkpoint, on all ranks or on none, where that is better than to read them.

    So it is where each rank takes all for itself, into host memory, from files that the page cache has. What
    is to be verified is read.

    Args:
        opened: The checkpoint.
        device: Where its tensors are wanted on this rank.
    """
    access, manifest = opened.access, opened.access.manifest
    indexes = {entry.file for entry in manifest.tensors if entry.nbytes}
    is_plain = access.holders is None and not manifest.guards and not any(e.pieces for e in manifest.tensors)
    if opened.block_bytes or not is_plain or len(indexes) > _MAX_FILES or not decide(opened).alone:
        return None
    mapped: dict[int, Mapped] = {}

    def work() -> bool:
        if target_device(device).type != "cpu":
            return False
        for index in indexes:
            file = access.storage.map(manifest.files[index].name)
            if file is None:
                return False
            mapped[index] = file
        return True

    return MappedFiles(mapped) if all(opened.world.agree(f"mapping {manifest.url}", work)) else None
