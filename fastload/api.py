"""The public functions: `fastload.load`, `fastload.save` and others."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fastload.comm.group import meet
from fastload.errors import OptionError
from fastload.formats.manifest import Manifest
from fastload.formats.names import NAMES
from fastload.formats.open import read_manifest
from fastload.loading.access import open_access
from fastload.loading.checkpoint import Checkpoint
from fastload.options import SETTINGS, LoadOptions, SaveOptions, StageOptions
from fastload.report import SaveReport, StageReport, VerifyReport
from fastload.storage import Location, PatientStorage, locate, name_of, open_storage

if TYPE_CHECKING:  # loads do not import saving
    from fastload.saving.handle import SaveHandle

__all__ = ["async_save", "inspect", "load", "open", "save", "stage", "verify"]

Path = str | os.PathLike[str]


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

    Every rank of the group has to call it, with the same arguments (`device` and `into` may differ).
    Either all ranks return, with what each of them wants, or all ranks raise.

    Args:
        path: A ``.safetensors`` file or one of ``torch.save``, or a directory with an index or with several
            such files; a local path or a URL.
        into: A module or nested dicts, lists and tuples of tensors and modules, to be loaded in place. Each
            rank may have its own; of a DTensor it gets what it holds. Meta tensors are replaced by real ones
            on `device`, but buffers there that no checkpoint holds (``persistent=False``) are an error; tied
            tensors stay tied. Modules get what their
            ``load_state_dict`` would have given them, extra state and hooks included (those that run before
            are called twice, first without data). From what has a state as it was saved, objects with
            ``load_state_dict``, such as optimizers, get their state (an optimizer of parameters that are on
            the meta device is an error: make it after the load), and plain values, NumPy arrays and
            containers with nothing to be loaded in place are replaced as a whole. If the load fails while
            data moves, the contents of its tensors are undefined; if storage has not answered a read by
            then (the error and a warning say so), that read may still write to them.
        device: Where new tensors live; the CPU if None.
        dtype: Casts floating point tensors to this dtype, or the one of this name, neither complex ones nor
            NumPy arrays nor what objects with ``load_state_dict`` get; None keeps what is stored.
        process_group: A group this rank is a member of, or a one-dimensional ``DeviceMesh``; None for
            the default group, or for this process alone if torch.distributed is not initialized.
        names: Names or glob patterns of the tensors to load; only their bytes are read. Tied tensors have
            all of their names. With `into`, plain values stay as they are.
        strict: With `into`, whether its names, those of all ranks together, and the checkpoint's have to be
            the same. If not, what only one of them has is left alone; what is of another kind, shape or
            dtype is an error all the same,
            and so is a checkpoint that has no tensor of `into`, or has it under names that differ by the
            ``module.`` or ``_orig_mod.`` of a wrapper. Also, whether `PerRank` values have to be of as many
            ranks as load them; if not, they stay as they are in `into`, or are None, and a warning says so.
        storage_options: Passed on to obstore (object stores, HTTP) or fsspec (other URLs), in addition
            to what the environment says of credentials and endpoints.
        options: How to load; None for the defaults.

    Returns:
        The state as it was saved, if `fastload.save` or ``torch.save`` wrote the checkpoint and neither
        `names` nor `into` is given; in place of a `PerRank`, the value of this rank. Else tensors by name,
        each with a storage of its own; with `into`, those of its tensors that were loaded.

    Raises:
        CheckpointNotFound: No rank sees a checkpoint there.
        IncompleteCheckpoint: Its save never finished, or files that it should have are not there.
        ManifestError: It is malformed.
        ChecksumError: Bytes of it are not as they were written.
        MismatchError: Names, shapes or dtypes do not fit, an optimizer has other parameter groups, or buffers
            of a module would stay on the meta device. Nothing was loaded; but what a hook or a
            ``load_state_dict`` of their own refuse, or leave on the meta device, is found only after the
            tensors were loaded: then the message says so, and the contents of `into` are undefined.
        PlanMismatch: The ranks did not ask for the same.
        PeerError: Some ranks failed, or were killed, or did not answer in time; with every cause.
        StorageError: With one rank only: storage did not deliver.
        OptionError: An option or argument cannot be used.
    """
    with _open(path, process_group, storage_options, options) as checkpoint:
        return checkpoint.load(into=into, device=device, dtype=dtype, names=names, strict=strict)


def open(
    path: Path,
    *,
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> Checkpoint:
    """Opens a checkpoint on all ranks of a group; use it as a context manager.

    Args and errors are those of `load`, as far as they go.
    """
    return _open(path, process_group, storage_options, options, ends_call=True)


def _open(
    path: Path,
    process_group: Any,
    storage_options: Mapping[str, Any] | None,
    options: LoadOptions | None,
    *,
    ends_call: bool = False,
) -> Checkpoint:
    def prepare() -> tuple[Location, LoadOptions]:
        return locate(path), options if options is not None else LoadOptions()

    world, (location, chosen) = meet(
        process_group,
        f"opening {name_of(path)}",
        prepare,
        timeout_s=lambda ready: ready[1].timeout_s,
        default_s=getattr(options, "timeout_s", SETTINGS["timeout_s"].default),
    )
    access = open_access(world, location, storage_options, chosen, {"path": location.given})
    if ends_call:
        world.acknowledge()
    return Checkpoint(world, access, chosen)


def stage(
    src: Path,
    dst: Path,
    *,
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    options: StageOptions | None = None,
) -> StageReport:
    """Copies a checkpoint to a disk of each host, byte for byte; together the hosts read every byte once.

    Every rank of the group has to call it; one of each host writes. All files directly below `src` are
    copied, and checked on every host: against the commit record where there is one, and against what the
    other hosts received. On each host the copy appears whole, in one step.

    What is there already is not read again. A whole copy is left as it is, and feeds the hosts that have
    none. After a failure, or a kill, the next call goes on where the last one ended.

    Args:
        src: A directory, or one file, such as one of torch.save; a local path or a URL.
        dst: The directory to make, on a file system that each host has for itself; ``/dev/shm`` will do.
        process_group: As for `load`.
        storage_options: As for `load`; for `src`.
        options: How to stage; None for the defaults.

    Raises:
        CheckpointNotFound: No rank sees a checkpoint at `src`.
        IncompleteCheckpoint: Its save never finished, or files that it should have are not there.
        ManifestError: It is malformed.
        ChecksumError: Bytes of it are not as they were written.
        PeerError: Some ranks failed, such as one whose disk is full or has something else at `dst`
            (`CheckpointExists`); with every cause.
        StorageError: With one rank only: storage failed.
        OptionError: An option or argument cannot be used.
    """
    from fastload.staging.stage import Stage

    began = time.perf_counter()

    def prepare() -> tuple[Location, str, StageOptions]:
        return locate(src), _local(dst), options if options is not None else StageOptions()

    world, (location, path, chosen) = meet(
        process_group,
        f"staging {name_of(src)}",
        prepare,
        timeout_s=lambda ready: ready[2].timeout_s,
        default_s=getattr(options, "timeout_s", SETTINGS["timeout_s"].default),
    )
    call = {"call": "stage", "src": location.given, "dst": path}
    access = open_access(world, location, storage_options, chosen, call)
    report = Stage(world, access, path, chosen, began=began).run()
    if chosen.on_report is not None:
        chosen.on_report(report)
    return report


def _local(path: Path) -> str:
    location = locate(path)
    if location.scheme:
        raise OptionError(f"cannot stage to {location}: name a directory on a disk of each host")
    return location.address


def verify(
    path: Path,
    *,
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> VerifyReport:
    """Checks every byte of a checkpoint that fastload saved; the ranks of a group share the work.

    The data go no further than the rank that reads them, and into no more memory than `staging_bytes`.
    Where hosts have disks of their own, the ranks of each host check that host's copy.

    Args are those of `load`.

    Raises:
        ChecksumError: On all ranks, with a line for each bad block (the first 20 in the message, all that
            were noted in its `blocks`).
        IncompleteCheckpoint: It has no commit record, and so no checksums.
        PeerError: A rank could not read its part.
    """
    with _open(path, process_group, storage_options, options) as checkpoint:
        return checkpoint.verify()


def save(
    state: Any,
    path: Path,
    *,
    process_group: Any = None,
    metadata: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
) -> SaveReport:
    """Saves a state that all ranks of a group hold alike, or parts of; together they write every byte once.

    Every rank of the group has to call it, with an equal state, or, of DTensors, with its shards. Where some
    rank has DTensors, or with `SaveOptions.parts`, ranks may have different parts of the state, which are
    merged by key. When it returns the checkpoint exists and is durable. When it raises, it does so on all
    ranks, and whatever was at `path` is still there; only if a rank dies in the very last step, after
    publishing, may the new checkpoint be there all the same.

    Args:
        state: Nested dicts, lists, tuples and sets of tensors, NumPy arrays and plain values, such as
            state dicts of models, optimizers and schedulers, random states and counters. Tied tensors are
            stored once and come back tied. What each rank has of its own is in a `PerRank`.
        path: The directory to make; a local path or a URL.
        process_group: As for `load`.
        metadata: Text to keep with it, that of rank 0; see `Checkpoint.metadata`.
        storage_options: As for `load`.
        options: How to save; None for the defaults.

    Raises:
        OptionError: Something in the state cannot be kept (it names the keys), or an argument cannot be used.
        PlanMismatch: The ranks hold different plain values or shapes, or did not ask for the same; or some
            part of a tensor is on no rank.
        ReplicaMismatch: They hold different tensors, as far as `SaveOptions.check_replicas` looks.
        CheckpointExists: There is something at `path`, and `SaveOptions.overwrite` is off.
        PeerError: Some ranks failed, or were killed, or did not answer in time; with every cause.
        StorageError: With one rank only: storage failed.
    """
    from fastload.saving import save as saving
    from fastload.saving.call import make_call
    from fastload.saving.handle import SaveHandle

    call = make_call(
        path,
        process_group,
        metadata,
        storage_options,
        options,
        raise_earlier=SaveHandle.raise_unseen,
    )
    report = saving.save(call, state)
    call.tell(report)
    return report


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

    Args and errors are those of `save`. What cannot be saved is an error here; what goes wrong later is
    raised by `SaveHandle.wait`, or by the next save if nobody waits; wait for the last one, since the exit
    status of a program that has come to its end tells nothing of it. The memory of the copy, a rank's share
    of the state, is kept for the next time.
    """
    from fastload.saving.save import save_in_background

    return save_in_background(
        state,
        path,
        process_group=process_group,
        metadata=metadata,
        storage_options=storage_options,
        options=options,
    )


def inspect(path: Path, *, storage_options: Mapping[str, Any] | None = None) -> Manifest:
    """Reads what is in a checkpoint, without its data and without a process group.

    Args:
        path: As for `load`.
        storage_options: As for `load`.

    Raises:
        CheckpointNotFound: There is none.
        IncompleteCheckpoint: Its save never finished, or files that it should have are not there.
        ManifestError: It is malformed.
        StorageError: Storage did not deliver the headers.
    """
    options = LoadOptions()
    connected = open_storage(path, NAMES, storage_options)
    storage = PatientStorage(connected, retries=options.retries, timeout_s=options.timeout_s)
    try:
        return read_manifest(storage)
    finally:
        storage.close()
