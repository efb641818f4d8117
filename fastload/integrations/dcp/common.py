"""What `Reader` and `Writer` share: path, group, and how plain values are stored."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from fastload.errors import OptionError, WorldError
from fastload.integrations.frameworks import lone_group

Path = str | os.PathLike[str]
Cut = tuple[Any, ...]
"""The part of a tensor that an item of a plan covers."""


class DcpStorage:
    """The arguments of a storage of dcp, and the ranks that use it.

    Args:
        path: A local path or a URL; None if dcp is given a ``checkpoint_id=``.
        process_group: The one that dcp is given.
        no_dist: Whether dcp is given ``no_dist=True``.
        storage_options: As for `fastload.load`.
    """

    _call: str

    def __init__(
        self,
        path: Path | None,
        process_group: Any,
        *,
        no_dist: bool,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self._path = path
        self._process_group = process_group
        self._no_dist = no_dist
        self._storage_options = storage_options

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Takes another path, if dcp has one."""
        self._path = checkpoint_id if checkpoint_id is not None else self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Whether it is a path. dcp asks only its own storages."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _required_path(self) -> Path:
        if self._path is None:
            raise OptionError("there is no path: give it to the storage, or dcp a checkpoint_id=")
        return self._path

    def _group(self) -> Any:
        """Returns the group of the ranks that dcp includes; None for all."""
        return (lone_group() if self._no_dist else None) or self._process_group

    def _require_size(self, num_plans: int) -> None:
        is_alone = self._no_dist or not dist.is_initialized()
        size = 1 if is_alone else dist.get_world_size(self._process_group)
        if num_plans != size:
            storage = type(self).__name__
            raise WorldError(
                f"{self._call} is made by {num_plans} ranks, its {storage} by {size}: give the {storage} the "
                "same process_group=, or no_dist=True"
            )


def done(value: Any) -> Future[Any]:
    """Returns a completed future."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def overrides(planner: object, base: type, *names: str) -> bool:
    """Whether a planner replaces one of these methods of its base class."""
    own = vars(planner)
    return any(name in own or getattr(type(planner), name) is not getattr(base, name) for name in names)


def pickled(value: Any) -> io.BytesIO:
    """Returns a plain value in the form that dcp's planners unpack."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
