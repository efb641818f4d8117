"""The host manifest: which shares of an in-memory checkpoint one host has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from fastload.errors import ChecksumError, ManifestError, UnsupportedVersion
from fastload.formats.untrusted import is_plain_path, is_size

TABLE_NAME = "shares.json"
"""Which ranges of the files each share has; the same on all hosts."""
_VERSION = 1


@dataclass(frozen=True)
class HostManifest:
    """The part of an in-memory checkpoint that one host has.

    Attributes:
        branch: With `step` its place in the history of the run, see `training.retention.Point`.
        step: Its step.
        nbytes: Length of all files.
        shares: Numbers of the shares that it consists of, ascending.
        held: Those of them that are on this host, ascending.
        table: xxh3-128 of the `ShareTable`.
    """

    branch: int
    step: int
    nbytes: int
    shares: tuple[int, ...]
    held: tuple[int, ...]
    table: str

    def to_bytes(self) -> bytes:
        """Returns it as JSON, behind a line with the checksum of that."""
        text = json.dumps({"version": _VERSION, **asdict(self)}).encode()
        return b"\n".join([xxhash.xxh3_128_hexdigest(text).encode(), text])

    @classmethod
    def parse(cls, text: bytes) -> HostManifest | None:
        """Reads what `to_bytes` wrote; None for what is no such text, or is damaged.

        Raises:
            UnsupportedVersion: A newer version wrote it.
        """
        digest, _, body = text.partition(b"\n")
        if xxhash.xxh3_128_hexdigest(body).encode() != digest:
            return None
        try:
            found = json.loads(body)
            if (version := found.pop("version")) != _VERSION:
                raise UnsupportedVersion(
                    f"a step in memory is of version {version}, this fastload reads {_VERSION}: update "
                    "fastload, or remove what is in memory: fastload prune --memory"
                )
            made = cls(**{**found, "shares": tuple(found["shares"]), "held": tuple(found["held"])})
        except UnsupportedVersion:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        numbers = [made.branch, made.step, made.nbytes, *made.shares, *made.held]
        is_good = all(map(is_size, numbers)) and isinstance(made.table, str)
        return made if is_good and set(made.held) <= set(made.shares) else None


@dataclass(frozen=True)
class ShareTable:
    """The byte ranges of the shares of a checkpoint.

    Attributes:
        shares: By number: name of a file → ranges [begin, end) of it.
        whole: Names of files that every host has.
    """

    shares: Mapping[int, Mapping[str, Sequence[tuple[int, int]]]]
    whole: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """Returns it as JSON."""
        shares = {str(number): files for number, files in self.shares.items()}
        return json.dumps({"shares": shares, "whole": self.whole}).encode()

    @classmethod
    def parse(cls, text: bytes, digest: str, where: str) -> ShareTable:
        """Reads what `to_bytes` wrote.

        Args:
            text: That.
            digest: Its xxh3-128.
            where: It is from, for messages.

        Raises:
            ChecksumError: It is not as it was written.
            ManifestError: It is something else.
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
