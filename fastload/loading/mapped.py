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
    """Files of a checkpoint in this process's memory, as they are.

    Args:
        files: By their index in the manifest.
    """

    def __init__(self, files: Mapping[int, Mapped]) -> None:
        self._files = files
        self._bytes = {index: torch.frombuffer(file.data, dtype=torch.uint8) for index, file in files.items()}

    def tensor(self, entry: TensorEntry, num_together: int = 1) -> Tensor:
        """Returns a tensor of the checkpoint, which keeps its file mapped.

        Args:
            entry: The tensor.
            num_together: So many of its elements are to be taken for one, in the end.
        """
        dtype, shape = torch_spec(entry)
        if not entry.nbytes:
            return torch.empty(shape, dtype=dtype)
        raw = self._bytes[entry.file][entry.offset : entry.offset + entry.nbytes]
        if entry.offset % (dtype.itemsize * num_together):
            raw = raw.clone()  # torch has no tensors at such addresses
        return raw.view(dtype).view(shape)

    def check(self) -> None:
        """Raises if somebody has written to a file since it was opened.

        Raises:
            StorageError: Tensors may be older in some places than in others.
        """
        for file in self._files.values():
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
