"""Owner files on object stores: which save goes on, which one publishes, and the orphans of dead ones.

While a save lives, the parent of the checkpoint holds ``.<name>.<token>.saving/owner.json``, which says
which process saves and what it has begun. To publish takes several steps on an object store, so another
owner file (`Names.owner`) is next to the files from before the first of them until after the commit record.
It keeps other saves out, and names all files that may be there without a record if the save dies.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fastload.errors import CheckpointExists, StorageError
from fastload.storage.base import Bucket, Keys, Names, Uploads, saved_name
from fastload.storage.destination import replaced_names
from fastload.storage.process import Owner, living_saves

_REFRESH_S = 60.0
_PUBLISHING_S = 600.0  # one this old was left behind: a living save refreshes its own
_SETTLE_S = 0.5  # longer than one request takes; see `OwnerFile.acquire`
_ABANDONED_S = 24 * 3600.0  # a save of another machine that is this old is dead


@dataclass(frozen=True, slots=True)
class Lease:
    """What an owner file says.

    Attributes:
        token: The save's; empty if it is not known.
        owner: The process that saves, or None.
        files: What may be there of it without a record; only those next to published files say that.
        uploads: What it has begun, by file; only those of pending files say that.
    """

    token: str
    owner: Owner | None
    files: Sequence[str]
    uploads: Mapping[str, str]

    @classmethod
    def parse(cls, text: bytes | None, token: str = "") -> Lease:
        """Reads an owner file; whatever else is there says nothing, since it comes from storage.

        Args:
            text: What is there.
            token: The save's, where the file does not say it.
        """
        try:
            found = json.loads(text or b"{}")
        except (ValueError, RecursionError):
            found = {}
        found = found if isinstance(found, dict) else {}
        files, uploads = found.get("files"), found.get("uploads")
        return cls(
            token=token or str(found.get("token", "")),
            owner=Owner.parse(str(found.get("owner", "")).encode()),
            files=[str(file) for file in files] if isinstance(files, list) else [],
            uploads={file: str(uploads[file]) for file in uploads} if isinstance(uploads, dict) else {},
        )

    @property
    def has_ended(self) -> bool | None:
        """Whether the save has ended, in whichever way; None if that cannot be known from here."""
        if self.owner is None:
            return None
        return (self.owner == Owner.here() and self.token not in living_saves) or self.owner.is_gone


def put_owner(bucket: Bucket, keys: Keys, uploads: Mapping[str, str]) -> None:
    """Says that this process saves, and which uploads are to be ended if it does not live to do so."""
    owner = {"owner": Owner.here().to_bytes().decode(), "uploads": dict(uploads)}
    bucket.put(keys.owner, json.dumps(owner).encode())


class OwnerFile:
    """The owner file of one save, next to the files that it publishes.

    Args:
        url: Where the checkpoint will be, for messages.
        bucket: The store, at the parent of that place.
        keys: Of the save's objects.
        names: What files of a checkpoint are called.
    """

    def __init__(self, url: str, bucket: Bucket, keys: Keys, names: Names) -> None:
        self.keys = keys
        self._names = names
        self._url = url
        self._bucket = bucket
        self._key = keys.published(names.owner)
        self._files: list[str] = []  # what it names; empty if this save has put none
        self._put_at = 0.0
        self._cleared = False
        self._lock = threading.Lock()

    def check_free(self, written: Iterable[str], *, overwrite: bool) -> tuple[set[str], bool]:
        """Refuses to take the place of what is there, unless it may be replaced or a dead save left it.

        Args:
            written: The names of the files of the new checkpoint.
            overwrite: Whether a checkpoint may be replaced.

        Returns:
            The names of what is to go, and whether there is no owner file.

        Raises:
            CheckpointExists: There is something, or another save is being published there.
            OptionError: It is no checkpoint, or holds what would be lost or mixed up with the new one.
        """
        there = {*self._bucket.files(self.keys.name)}
        is_owned = self._names.owner in there
        lease = self._read() if is_owned else Lease.parse(None)
        if is_owned and not lease.has_ended:
            age_s = time.time() - self._bucket.modified_s(self._key)
            if age_s < _PUBLISHING_S:
                raise CheckpointExists(f"{self._url}: {lease.owner or 'another save'} is publishing there")
        return self._own(there, written, lease.files, overwrite=overwrite), not is_owned

    def acquire(self, names: Sequence[str], *, overwrite: bool) -> None:
        """Puts the owner file, keeps out all other saves by it, and clears the place.

        The store decides between two saves that do so at once, if it honours a condition on a put: of
        which it is asked by a second such put, which has to fail. If it does not, or if that of a dead save
        is replaced, the last one to put it wins, and each looks who that was after a while.

        Args:
            names: Of all files of the new checkpoint.
            overwrite: As for `check_free`.

        Raises:
            CheckpointExists: As for `check_free`, or another save was faster.
            OptionError: As for `check_free`.
        """
        own, is_fresh = self.check_free(names, overwrite=overwrite)
        self._files = sorted({*names, *own} - {self._names.owner})
        decided = not self._put(fresh=is_fresh) or (is_fresh and not self._put(fresh=True))
        if not decided:
            time.sleep(_SETTLE_S)
        if not self._is_ours:  # which no answer says: one may be lost, and the next attempt is refused then
            raise CheckpointExists(f"{self._url}: another save is being published there")
        there = {*self._bucket.files(self.keys.name)}
        own = self._own(there, names, self._files, overwrite=overwrite)
        if not own <= {*self._files, self._names.owner}:  # of another save, which was faster
            self._files = sorted({*self._files, *own} - {self._names.owner})
            self._put()
        self._cleared = True
        self._clear(own - {self._names.owner})

    def acquire_all(self) -> None:
        """Puts the owner file whatever is there, and clears the place: the checkpoint is to be removed."""
        self._files = sorted({*self._bucket.files(self.keys.name)} - {self._names.owner})
        self._put()
        self._clear(self._files)

    def refresh(self) -> None:
        """Puts it once more, from time to time, so that nobody takes the save for dead; from any thread."""
        with self._lock:
            if time.monotonic() > self._put_at + _REFRESH_S:
                self._require()
                self._put()

    def commit(self, record: str, content: bytes) -> None:
        """Writes the commit record, which makes the checkpoint exist: what is there is not the save's alone.

        Raises:
            StorageError: Another save took this one for dead; or as anything that fails.
        """
        self._require()
        self._bucket.put(self.keys.published(record), content)
        self._files = []

    def take_back(self) -> None:
        """Deletes what was published; else what stands there was there before, or is another save's."""
        files, self._files = self._files, []
        if files and self._is_ours:
            if self._cleared:
                self._clear(files)
            self.delete()

    def delete(self) -> None:
        """Deletes the owner file."""
        self._bucket.delete([self._key])

    def _own(
        self, there: set[str], written: Iterable[str], listed: Iterable[str], *, overwrite: bool
    ) -> set[str]:
        is_replaced = overwrite and self._names.record in there
        record = self._bucket.get(self.keys.published(self._names.record)) if is_replaced else None
        return replaced_names(self._url, there, record, listed, written, self._names, overwrite=overwrite)

    def _clear(self, names: Iterable[str]) -> None:
        """Deletes files of the checkpoint, the record first."""
        ordered = sorted(names, key=lambda name: (name != self._names.record, name))
        self._bucket.delete([self.keys.published(name) for name in ordered])

    def _put(self, *, fresh: bool = False) -> bool:
        owner = Owner.here().to_bytes().decode()
        content = {"token": self.keys.token, "owner": owner, "files": self._files}
        self._put_at = time.monotonic()
        return self._bucket.put(self._key, json.dumps(content).encode(), fresh=fresh)

    def _read(self) -> Lease:
        return Lease.parse(self._bucket.get(self._key))

    @property
    def _is_ours(self) -> bool:
        """Whether the owner file next to the files is that of this save."""
        return self._read().token == self.keys.token

    def _require(self) -> None:
        """Goes no further once another save has put its own owner file there."""
        if not self._is_ours:
            raise StorageError("another save took this one for dead and took its place")


def clean_abandoned(bucket: Bucket, uploads: Uploads, names: Names, parent: str) -> list[str]:
    """Removes what dead saves left below the root of a store, and returns the URLs of what is gone.

    Args:
        bucket: The store.
        uploads: How saves upload to it.
        names: What files of a checkpoint are called.
        parent: URL of its root.
    """
    removed, failures = [], []
    for folder in bucket.folders():
        if (name := saved_name(folder)) is None:
            continue
        keys = Keys(name, folder.split(".")[-2])
        try:
            if _is_abandoned(bucket, keys):
                _clear_published(bucket, keys, names)
                discard(bucket, uploads, keys)
                removed.append(f"{parent}/{folder}")
        except Exception as error:  # it keeps no other one from being removed
            failures.append(error)
    removed += uploads.give_up_old(_ABANDONED_S)
    if failures:
        raise failures[0]
    return removed


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
    owner = keys.published(names.owner)
    lease = Lease.parse(bucket.get(owner))
    if lease.token != keys.token:
        return
    there = bucket.files(keys.name)
    if names.record not in there:
        bucket.delete([keys.published(file) for file in sorted(there) if file in lease.files])
    bucket.delete([owner])


def discard(bucket: Bucket, uploads: Uploads, keys: Keys) -> None:
    """Removes what a save has pending; its owner goes last, so that what is left after a failure is found."""
    uploads.give_up(keys.name, Lease.parse(bucket.get(keys.owner), keys.token).uploads)
    files = [keys.pending(name) for name in bucket.files(keys.folder)]
    bucket.delete([*(file for file in files if file != keys.owner), keys.owner])
    bucket.delete_folder(keys.folder)
