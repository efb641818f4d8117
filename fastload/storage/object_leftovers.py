"""What saves to an object store left when they died, or when they ended and could not remove it."""

from __future__ import annotations

import math
import time

from fastload.storage.bucket import Bucket, Keys
from fastload.storage.marker import Lease
from fastload.storage.names import Names
from fastload.storage.target import saved_name
from fastload.storage.uploads import Uploads

__all__ = ["clean_abandoned", "discard"]

_ABANDONED_S = 24 * 3600.0  # a save of another machine that is this old is dead


def clean_abandoned(bucket: Bucket, uploads: Uploads, names: Names, parent: str) -> list[str]:
    """Removes what dead saves left below the root of a store, and returns the URLs of what is gone.

    Args:
        bucket: The store.
        uploads: How saves upload to it.
        names: What files of a checkpoint are called.
        parent: URL of its root.
    """
    removed = []
    for folder in bucket.folders():
        if (name := saved_name(folder)) is None:
            continue
        keys = Keys(name, folder.split(".")[-2])
        if _is_abandoned(bucket, keys):
            _clear_published(bucket, keys, names)
            discard(bucket, uploads, keys)
            removed.append(f"{parent}/{folder}")
    return removed + uploads.give_up_old(_ABANDONED_S)


def _is_abandoned(bucket: Bucket, keys: Keys) -> bool:
    ended = Lease.parse(bucket.get(keys.owner), keys.token).has_ended
    return time.time() - _written_s(bucket, keys) > _ABANDONED_S if ended is None else ended


def _written_s(bucket: Bucket, keys: Keys) -> float:
    """Returns when a save wrote its owner; the last of its files, if a rank wrote on after that was gone."""
    written_s = bucket.modified_s(keys.owner)
    if written_s < math.inf:
        return written_s
    pending = [keys.pending(name) for name in bucket.files(keys.folder)]
    return max(map(bucket.modified_s, pending), default=math.inf)


def _clear_published(bucket: Bucket, keys: Keys, names: Names) -> None:
    """Deletes what a dead save had published when it died, unless that was all."""
    marker = keys.published(names.marker)
    lease = Lease.parse(bucket.get(marker))
    if lease.token != keys.token:
        return
    there = bucket.files(keys.name)
    if names.record not in there:
        bucket.delete([keys.published(file) for file in sorted(there) if file in lease.files])
    bucket.delete([marker])


def discard(bucket: Bucket, uploads: Uploads, keys: Keys) -> None:
    """Removes what a save has pending; its owner goes last, so that what is left after a failure is found."""
    uploads.give_up(keys.name, Lease.parse(bucket.get(keys.owner), keys.token).uploads)
    files = [keys.pending(name) for name in bucket.files(keys.folder)]
    bucket.delete([*(file for file in files if file != keys.owner), keys.owner])
    bucket.delete_folder(keys.folder)
