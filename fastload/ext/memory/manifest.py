"""Manifests of in-memory checkpoints: the shares on one host, and the byte ranges of all shares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from fastload.errors import ChecksumError, ManifestError, UnsupportedVersion
from fastload.formats.untrusted import is_plain_path, is_size
from fastload.training.retention import Lineage, Point

TABLE_NAME = "shares.json"
"""The `ShareTable`; the same on all hosts."""
_VERSION = 2  # 1 has no `incarnation` and no `origin`


@dataclass(frozen=True)
class HostManifest:
    """The part of an in-memory checkpoint that one host has.

    Attributes:
        branch: With `step`, its `point`.
        step: Its step.
        nbytes: Length of all files.
        shares: Numbers of all shares, ascending.
        held: Numbers of the shares on this host, ascending.
        table: xxh3-128 of the `ShareTable`.
        incarnation: As in its `lineage`.
        origin: Likewise.
    """

    branch: int
    step: int
    nbytes: int
    shares: tuple[int, ...]
    held: tuple[int, ...]
    table: str
    incarnation: str = ""
    origin: tuple[int, int, str] | None = None

    @property
    def point(self) -> Point:
        """Position in the history of the run."""
        return Point(self.branch, self.step)

    @property
    def lineage(self) -> Lineage:
        """Shows whether the run went on without it."""
        return Lineage(self.incarnation, self.origin)

    def to_bytes(self) -> bytes:
        """Returns JSON, after a line with its checksum."""
        text = json.dumps({"version": _VERSION, **asdict(self)}).encode()
        return b"\n".join([xxhash.xxh3_128_hexdigest(text).encode(), text])

    @classmethod
    def parse(cls, text: bytes) -> HostManifest | None:
        """Parses the result of `to_bytes`; returns None if it is damaged, or something else.

        Raises:
            UnsupportedVersion: A newer version wrote it.
        """
        digest, _, body = text.partition(b"\n")
        if xxhash.xxh3_128_hexdigest(body).encode() != digest:
            return None
        try:
            found = json.loads(body)
            if (version := found.pop("version")) not in (1, _VERSION):
                raise UnsupportedVersion(
                    f"an in-memory checkpoint has version {version}, this fastload reads {_VERSION}: update "
                    "fastload, or remove in-memory checkpoints with fastload prune --memory"
                )
            origin = found.get("origin")
            found["origin"] = None if origin is None else (int(origin[0]), int(origin[1]), str(origin[2]))
            made = cls(**{**found, "shares": tuple(found["shares"]), "held": tuple(found["held"])})
        except UnsupportedVersion:
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return None
        numbers = [made.branch, made.step, made.nbytes, *made.shares, *made.held]
        is_good = all(map(is_size, numbers)) and isinstance(made.table, str)
        is_good = is_good and isinstance(made.incarnation, str)
        return made if is_good and set(made.held) <= set(made.shares) else None


@dataclass(frozen=True)
class ShareTable:
    """The byte ranges of the shares of a checkpoint.

    Attributes:
        shares: Number → name of a file → its byte ranges [begin, end).
        whole: Names of the files that every host has completely.
    """

    shares: Mapping[int, Mapping[str, Sequence[tuple[int, int]]]]
    whole: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """Returns it as JSON."""
        shares = {str(number): files for number, files in self.shares.items()}
        return json.dumps({"shares": shares, "whole": self.whole}).encode()

    @classmethod
    def parse(cls, text: bytes, digest: str, where: str) -> ShareTable:
        """Parses the result of `to_bytes`.

        Args:
            text: The JSON.
            digest: Its xxh3-128.
            where: Its origin, for messages.

        Raises:
            ChecksumError: It is damaged.
            ManifestError: It is not a table of shares.
        """
        if xxhash.xxh3_128_hexdigest(text) != digest:
            raise ChecksumError(f"{where}: damaged")
        try:
            found: Any = json.loads(text)
            whole = tuple(found["whole"])
            shares = {
                int(number): {
                    name: [(int(begin), int(end)) for begin, end in ranges] for name, ranges in files.items()
                }
                for number, files in found["shares"].items()
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ManifestError(f"{where}: not a table of shares") from None
        names = [*whole, *(name for files in shares.values() for name in files)]
        ranges = [each for files in shares.values() for of_file in files.values() for each in of_file]
        is_good = all(isinstance(name, str) and is_plain_path(name) for name in names)
        if not is_good or not all(0 <= begin < end for begin, end in ranges):
            raise ManifestError(f"{where}: not names and sizes of files")
        return cls(shares, whole)
