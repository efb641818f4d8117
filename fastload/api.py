"""The public functions: `fastload.load`, `fastload.save` and others."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from fastload.base.tracebacks import short_tracebacks
from fastload.comm.group import Meeting
from fastload.comm.observers import notifying_of_failure
from fastload.formats.layers import decoded, layers_of
from fastload.formats.manifest import Manifest
from fastload.formats.names import NAMES
from fastload.formats.open import read_manifest
from fastload.loading.access import open_access
from fastload.loading.checkpoint import Checkpoint
from fastload.options import LoadOptions, SaveOptions, chosen_options
from fastload.report import SaveReport, VerifyReport
from fastload.storage import (
    Location,
    PatientStorage,
    locate,
    name_of,
    open_patiently,
)

if TYPE_CHECKING:  # loads do not import saving
    from fastload.saving.background import SaveHandle

Path = str | os.PathLike[str]


@short_tracebacks
def load(
    path: Path,
    *,
    into: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    process_group: Any = None,
    names: Sequence[str] | str | None = None,
    strict: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> Any:
    """Loads a checkpoint on all ranks of a group; together they read every byte once.

    A call of all ranks, with the same arguments; `device` and `into` may differ. Either all ranks return with
    their tensors, or all ranks raise.

    Args:
        path: A ``.safetensors`` file, a file of ``torch.save``, or a directory of `save`, ``dcp.save`` or
            several such files, with or without an index; a local path or a URL.
        into: The state to restore, such as the dict that `save` was given: nested dicts, lists and tuples of
            tensors, modules, optimizers, other objects with ``load_state_dict``, and plain values. Each rank
            may have its own.

            Tensors, and those of modules, are filled in place as bytes arrive; a DTensor or `Shard` gets its
            part, and tied tensors stay tied. Meta tensors are replaced by real ones on `device`; buffers on
            the meta device that no checkpoint holds (``persistent=False``) are an error. If the load fails
            while data move, the contents of the tensors are undefined (see `LoadOptions.atomic`). A read that
            storage has not answered by then, which the error and a warning report, may still write to them.

            Everything else is untouched until all ranks have all bytes, verified. Then modules get extra
            state and hooks as by their ``load_state_dict`` (hooks before it have run once already, without
            data), other objects get their state by it, and plain values, NumPy arrays and containers of
            nothing else are replaced in their dict or list, as by ``dcp.load``. An optimizer of parameters on
            the meta device is an error: make it after the load.
        device: Device of new tensors; the CPU if None.
        dtype: The floating point dtype, or its name, that such tensors are cast to; None for no cast. Complex
            tensors, NumPy arrays and the states of objects with ``load_state_dict`` are not cast.
        process_group: A group of which this rank is a member, or a one-dimensional ``DeviceMesh``; None for
            the default group, or for this process alone if torch.distributed is not initialized.
        names: Names or glob patterns of the tensors to load; only their bytes are read. A tied tensor has
            several names. With `into`, plain values are left as they are.
        strict: With `into`, whether its keys, over all ranks, and those of the checkpoint have to be the
            same. If not, names that only one side has are ignored. Another kind, shape or dtype remains an
            error, and so does a checkpoint without any tensor of `into`, or with names that differ by the
            ``module.`` or ``_orig_mod.`` of a wrapper.
        storage_options: Passed on to obstore (object stores, HTTP), fsspec (other URLs) or a registered
            `Storage`, in addition to credentials and endpoints from the environment.
        options: How to load; None for the defaults.

    Returns:
        The state as `save` (with this rank's value of each `PerRank`), ``torch.save`` or ``dcp.save`` was
        given it; a dict of tensors by name, in the order of the checkpoint, for other safetensors files,
        which have no structure, and for all formats with `names` or `into`.

    Raises:
        CheckpointNotFound: No rank sees a checkpoint there.
        IncompleteCheckpoint: Its save never finished, or files are missing.
        ManifestError: It is malformed.
        ChecksumError: Bytes differ from those that were written.
        MismatchError: Names, shapes or dtypes do not fit, an optimizer has other parameter groups, or buffers
            of a module would stay on the meta device. Nothing was loaded, with one exception: if a hook or a
            custom ``load_state_dict`` refuses the state, or leaves a buffer on the meta device, the tensors
            have been loaded. The message then says so, and the contents of `into` are undefined.
        PlanMismatch: The arguments of the ranks differ.
        PeerError: Ranks failed, were killed, or did not respond in time; with every cause.
        StorageError: Storage failed, in a group of one rank.
        OptionError: An option or argument cannot be used.
    """
    with _open(path, process_group, storage_options, options) as checkpoint:
        return checkpoint.load(into=into, device=device, dtype=dtype, names=names, strict=strict)


@short_tracebacks
def open(
    path: Path,
    *,
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> Checkpoint:
    """Opens a checkpoint on all ranks of a group; use it as a context manager.

    Args and errors are those of `load`.
    """
    return _open(path, process_group, storage_options, options, ends_call=True)


@short_tracebacks
def prefetch(
    path: Path,
    *,
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> Checkpoint:
    """Opens a checkpoint and begins to read it into host memory, in the background.

    A call of all ranks, which returns once the headers are read. Then each rank reads and verifies an equal
    share, or as much of it as fits into `LoadOptions.prefetch_bytes`. `Checkpoint.wait` waits for that.
    `Checkpoint.load` also does, and then needs no byte of it from storage::

        with fastload.prefetch("/checkpoints/llama") as checkpoint:
            model = build_model()
            checkpoint.load(into=model)

    The memory is released when the checkpoint is closed. If a read fails, or bytes are damaged, `wait` and
    `load` raise the same error on all ranks, and nothing is loaded. The load has the bytes of the checkpoint
    as it was opened; files that change before they are read are an error.

    Args and errors are those of `load`.
    """
    checkpoint = open(path, process_group=process_group, storage_options=storage_options, options=options)
    try:
        checkpoint.prefetch()
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _open(
    path: Path,
    process_group: Any,
    storage_options: Mapping[str, Any] | None,
    options: LoadOptions | None,
    *,
    ends_call: bool = False,
) -> Checkpoint:
    with Meeting(process_group, f"opening {name_of(path)}") as meeting:
        chosen, location = meeting.choose(options, LoadOptions), locate(path)
    world = meeting.world
    with notifying_of_failure(world, "load", time.perf_counter(), tier="storage"):
        access = open_access(world, location, storage_options, chosen, {"path": location.given})
    if ends_call:
        world.acknowledge()
    return Checkpoint(world, access, chosen)


@short_tracebacks
def verify(
    path: Path,
    *,
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> VerifyReport:
    """Checks every byte of a checkpoint that has checksums; the ranks of a group share the work.

    Checksums are those of a commit record or a seal. Without either, files of the Hugging Face hub, or of its
    cache, are compared with their SHA-256, each on one rank.

    Data move to no other rank, and take no more memory than `staging_bytes`. If hosts have their own disks,
    the ranks of each host check its copy.

    Args are those of `load`.

    Raises:
        ChecksumError: Blocks are damaged; on all ranks. It has a line for each damaged block, the first 20 of
            them in the message.
        CheckpointError: It has no checksums; `seal` makes them.
        PeerError: A rank could not read its part.
    """
    with _open(path, process_group, storage_options, options) as checkpoint:
        return checkpoint.verify()


@short_tracebacks
def save(
    state: Any,
    path: Path,
    *,
    process_group: Any = None,
    metadata: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
) -> SaveReport:
    """Saves the replicated or sharded state of all ranks of a group; together they write every byte once.

    A call of all ranks, with equal states and each rank's shards of DTensors. If any rank has DTensors or a
    `Shard`, or with `SaveOptions.parts`, ranks may have different parts of the state, which are merged by
    key. When it returns, the checkpoint exists and is durable. When it raises, it raises on all ranks, and
    `path` is unchanged; only if a rank dies in the last step, after publishing, the new checkpoint may exist.

    Args:
        state: Nested dicts, lists, tuples and sets of tensors, NumPy arrays, plain values, and objects with
            ``state_dict`` and ``load_state_dict`` (modules, optimizers, schedulers, scalers, samplers), which
            are saved as their ``state_dict()``; ``load(path, into=state)`` restores them. Tied tensors are
            stored once and come back tied. Values that differ between the ranks are in a `PerRank`.
        path: The directory to make; a local path or a URL.
        process_group: As for `load`.
        metadata: Text to attach, of rank 0; see `Checkpoint.metadata`.
        storage_options: As for `load`.
        options: How to save; None for the defaults.

    Raises:
        OptionError: Something in the state cannot be saved (lists the keys), or an argument cannot be used.
        PlanMismatch: The arguments, plain values or shapes of the ranks differ, or no rank has some shard.
        ReplicaMismatch: Tensors of the ranks differ, as far as `SaveOptions.check_replicas` compares them.
        CheckpointExists: Something is at `path`, and `SaveOptions.overwrite` is off.
        PeerError: Ranks failed, were killed, or did not respond in time; with every cause.
        StorageError: Storage failed, in a group of one rank.
    """
    from fastload.saving import save as saving
    from fastload.saving.call import make_call

    call = make_call(path, process_group, metadata, storage_options, options)
    return saving.save(call, state)


@short_tracebacks
def async_save(
    state: Any,
    path: Path,
    *,
    process_group: Any = None,
    metadata: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
) -> SaveHandle:
    """Saves in the background: returns as soon as each rank has copied its share of the state.

    Args and errors are those of `save`. A state that cannot be saved is an error here. Later errors are
    raised by `SaveHandle.wait`, or else by the next save. Wait for the last save: the exit status of the
    program does not report it. The memory of the copy, a rank's share of the state, is reused by the next
    save.
    """
    from fastload.saving.call import make_call
    from fastload.saving.save import save_in_background

    call = make_call(path, process_group, metadata, storage_options, options, in_background=True)
    return save_in_background(call, state)


@short_tracebacks
def inspect(
    path: Path, *, storage_options: Mapping[str, Any] | None = None, options: LoadOptions | None = None
) -> Manifest:
    """Reads the manifest of a checkpoint, without data and process group; that of a delta is of its result.

    Args:
        path: As for `load`.
        storage_options: As for `load`.
        options: As for `load`.

    Raises:
        CheckpointNotFound: There is none.
        IncompleteCheckpoint: Its save never finished, or files are missing.
        ManifestError: It is malformed.
        StorageError: The headers could not be read.
    """
    chosen, place = chosen_options(options, LoadOptions), locate(path)

    def connect(location: Location) -> PatientStorage:
        return open_patiently(location, NAMES, storage_options, patience=chosen.patience)

    with closing(connect(place)) as storage:
        manifest = read_manifest(storage)
    for layer in layers_of(manifest):
        manifest = layer.inspect(manifest, place, connect, chosen)
    return decoded(manifest)
