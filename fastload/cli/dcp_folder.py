"""``fastload convert --to dcp``: a directory that ``torch.distributed.checkpoint`` loads, saved by itself."""

from __future__ import annotations

import warnings
from contextlib import closing
from typing import Any

import fastload
from fastload.cli.shares import Shares
from fastload.cli.torch_file import local_path
from fastload.comm.group import agree
from fastload.errors import CheckpointError, CheckpointExists, OptionError
from fastload.formats.names import NAMES
from fastload.storage import locate, open_storage

__all__ = ["write_dcp_folder"]


def write_dcp_folder(shares: Shares, dst: str, *, overwrite: bool, timeout_s: float) -> fastload.Manifest:
    """Saves a directory of DCP's; all ranks of the job call it, and each writes its share.

    The checkpoint is there once its ``.metadata`` are, which DCP writes last.

    Args:
        shares: What this rank has.
        dst: Where to; a path that all ranks share.
        overwrite: Has to be False: DCP would leave what is there beside what it writes.
        timeout_s: Longest wait for other ranks, in seconds.

    Returns:
        What is there now.

    Raises:
        CheckpointExists: There is something at `dst`.
        OptionError: `dst` is no path, or the state is not a dict.
        CheckpointError: Saving failed on some ranks.
    """
    import torch.distributed.checkpoint as dcp

    path = local_path(dst)
    state = shares.state()
    what = f"looking whether {path} can be written"
    agree(None, what, lambda: _check(path, state, overwrite), timeout_s=timeout_s)
    try:
        with warnings.catch_warnings():  # of what torch deprecates of its own
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path, overwrite=False))
    except dcp.CheckpointException as error:
        failures = [f"rank {rank}: {wrapped[0]!r}" for rank, wrapped in sorted(error.failures.items())]
        raise CheckpointError(f"{path}: torch.distributed.checkpoint failed: {'; '.join(failures)}") from None
    return fastload.inspect(path)


def _check(path: str, state: Any, overwrite: bool) -> None:
    if overwrite:
        raise OptionError("--overwrite is not for --to dcp, which writes to new directories only")
    if not isinstance(state, dict):
        raise OptionError(f"the state is a {type(state).__name__}: DCP saves dicts")
    with closing(open_storage(locate(path), NAMES)) as storage:
        if storage.list() or storage.stat("") is not None:
            raise CheckpointExists(f"{path}: there is something already")
