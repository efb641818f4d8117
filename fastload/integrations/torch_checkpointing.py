"""torch_checkpointing: its manager's calls, for checkpoints that all ranks save and load together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fastload import LoadOptions, SaveOptions, async_save, load, save
from fastload.integrations.frameworks import SaveFuture

__all__ = ["CheckpointManager"]


class CheckpointManager:
    """Takes the place of ``torch_checkpointing.CheckpointManager`` in a training.

    A checkpoint is a directory of safetensors, on a file system or an object store; one that
    torch_checkpointing wrote is loaded, too. All items are saved once and can be resharded, so there is no
    ``Config``: values that differ between ranks are in a `fastload.PerRank`. The next save raises the error
    of a failed one.

    Args:
        sync: Whether `save` returns when the checkpoint is durable, as with ``Config.with_sync_save()``.
        save_options: How to save; None for the defaults.
        load_options: How to load; None for the defaults.
        storage_options: As for `fastload.load`.
    """

    def __init__(
        self,
        *,
        sync: bool = False,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._sync = sync
        self._save_options = save_options
        self._load_options = load_options
        self._storage_options = storage_options
        self._last: SaveFuture | None = None

    def save(self, checkpoint_id: str, checkpoint: Mapping[str, Any]) -> Future[Any] | None:
        """Saves items by name, on all ranks.

        Returns once each rank has copied its share, so the training may go on and change them.

        Returns:
            The future of the save in the background; None if it has ended.

        Raises:
            FastloadError: See `fastload.save`.
        """
        given: dict[str, Any] = {"storage_options": self._storage_options, "options": self._save_options}
        if self._sync:
            save(dict(checkpoint), checkpoint_id, **given)
            return None
        self._last = SaveFuture(async_save(dict(checkpoint), checkpoint_id, **given))
        return self._last

    def load(
        self,
        checkpoint_id: str | os.PathLike[str],
        into: Mapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
    ) -> Mapping[str, Any]:
        """Loads items by name, on all ranks; see `fastload.load`.

        Args:
            checkpoint_id: The checkpoint.
            into: The items to load. Tensors are filled in place. None loads all items, complete.
            map_location: Device of new tensors; None for the CPU.
            strict: Whether the names have to be the same.

        Returns:
            The items.

        Raises:
            FastloadError: See `fastload.load`.
        """
        items = None if into is None else dict(into)
        given: dict[str, Any] = {"storage_options": self._storage_options, "options": self._load_options}
        state = load(checkpoint_id, into=items, device=map_location, strict=strict, **given)
        return state if items is None else items

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Does nothing: the memory of the first save's copy is kept for the next."""

    def lock(self) -> AbstractContextManager[None]:
        """Returns a context that holds nothing, since `save` returns when the copy is complete."""
        return nullcontext()

    def close(self) -> None:
        """Waits for the last save.

        Raises:
            FastloadError: It failed.
        """
        if self._last is not None:
            self._last.result()
