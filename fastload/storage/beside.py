"""What stands beside the files of a checkpoint and is none of them: kept when the checkpoint is replaced."""

from __future__ import annotations

import os
from collections.abc import Iterable

from fastload.errors import CheckpointExists, FastloadError, OptionError, StorageError
from fastload.storage import one_file
from fastload.storage.location import OBJECT_STORES, Location
from fastload.storage.names import Names

__all__ = ["MAX_LIST_BYTES", "kept_names", "put_beside", "replaced_names"]

MAX_LIST_BYTES = 1 << 30
"""Most bytes of a record or a receipt that are looked at."""

_MAX_ATTEMPT_S = 30.0


def kept_names(
    url: str, there: Iterable[str], own: set[str], written: Iterable[str], names: Names
) -> list[str]:
    """Returns the names of the files that are kept when a checkpoint is replaced.

    Args:
        url: Where it is.
        there: The names of all files there.
        own: Those that are fastload's own.
        written: The names of the files of the new checkpoint.
        names: What files of a checkpoint are called.

    Raises:
        OptionError: One of them would be replaced by a new file, or read as a part of the new checkpoint.
    """
    kept = sorted(set(there) - own)
    written = set(written)
    if bad := [name for name in kept if name in written or name.endswith(names.part_endings)]:
        raise OptionError(
            f"{url} holds files that are not the checkpoint's, and that the new one would replace or be "
            f"mixed up with: {bad[:5]}: to replace the checkpoint, move them away"
        )
    return kept


def replaced_names(
    url: str,
    there: set[str],
    record: bytes | None,
    marked: Iterable[str],
    written: Iterable[str],
    names: Names,
    *,
    overwrite: bool,
) -> set[str]:
    """Returns the names of what a new checkpoint on an object store takes the place of.

    Args:
        url: Where it will be.
        there: The names of all that is there.
        record: The commit record that is there, or None.
        marked: What a dead save's marker, if there is one, says may be there of that save.
        written: The names of the files of the new checkpoint.
        names: What files of a checkpoint are called.
        overwrite: Whether a checkpoint may be replaced.

    Raises:
        CheckpointExists: There is something, and `overwrite` is off.
        OptionError: It is no checkpoint, or as for `kept_names`.
    """
    if names.record in there and not overwrite:
        raise CheckpointExists(f"{url} exists already: to replace it, ask for overwrite=True (--overwrite)")
    own = there & {names.marker, *marked}
    is_other = overwrite and not there.isdisjoint(names.others)
    if names.record in there:
        own |= names.own(there, [record or b""])
    elif is_other:
        own |= names.own(there, [])
    foreign = sorted(there - own)
    if names.record not in there and foreign:
        if not overwrite:
            raise CheckpointExists(f"{url} holds something already: {foreign[:5]}")
        if names.marker not in there and not is_other:
            raise OptionError(
                f"{url} has no {names.record}: overwrite=True replaces checkpoints of fastload's only"
            )
    kept_names(url, there, own, written, names)
    return own


def put_beside(place: Location, name: str, content: bytes, *, timeout_s: float, retries: int) -> None:
    """Writes a small file next to those of a checkpoint; replaces one of that name.

    Args:
        place: Where the checkpoint is.
        name: Plain, without ``/``.
        content: All of it.
        timeout_s: Longest time in seconds for a request to an object store, with its retries.
        retries: Further attempts.

    Raises:
        StorageError: It cannot be written.
    """
    if not place.scheme:
        path = os.path.join(place.address, name)
        pending = one_file.make_pending(path, overwrite=True)
        try:
            with one_file.opened(pending) as descriptor:
                one_file.write_at(descriptor, 0, content)
            one_file.publish(pending, path, overwrite=True)
        finally:
            one_file.remove(pending)
        return
    from fastload.storage.bucket import Bucket, FsspecBucket, ObstoreBucket

    bucket: Bucket
    if place.scheme in OBJECT_STORES:
        attempt_s = min(_MAX_ATTEMPT_S, timeout_s)
        bucket = ObstoreBucket(place, {}, timeout_s=timeout_s, attempt_s=attempt_s, retries=retries)
    else:
        bucket = FsspecBucket(place, {})
    try:
        bucket.put(name, content)
    except FastloadError:
        raise
    except Exception as error:
        secrets = bucket.secrets
        raise StorageError(secrets.first_line(error), f"{place.url}/{name}") from secrets.clean(error)
