"""All errors that fastload raises, and how they are sent to other ranks."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterable, Sequence
from typing import Any

_WIRE_BYTES = 1 << 20
_NUM_LINES = 20


class FastloadError(Exception):
    """Base class of all errors that fastload raises.

    Attributes:
        is_partial: Whether a load failed after it had begun to fill the tensors of ``into=``. They may then
            be a mixture. If it is False, they are as they were.
    """

    is_partial = False


class OptionError(FastloadError, ValueError):
    """An option, argument or ``FASTLOAD_*`` variable has a value that cannot be used."""


class CheckpointError(FastloadError):
    """The checkpoint on storage cannot be used for this call."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """No rank of the group sees a checkpoint at the path."""


class CheckpointExists(CheckpointError, FileExistsError):
    """Something exists at the path, and the call may not replace it."""


class IncompleteCheckpoint(CheckpointError):
    """Parts of the checkpoint are missing: its commit record, as its save never finished, or files."""


class ManifestError(CheckpointError, ValueError):
    """A header, index or size is malformed; nothing of the claimed size was allocated.

    Attributes:
        is_damage: Whether it proves damage after the save, such as a file that is shorter than recorded. If
            not, a newer program may have written it so.
    """

    def __init__(self, message: str, *, is_damage: bool = False) -> None:
        super().__init__(message)
        self.is_damage = is_damage


class UnsupportedVersion(ManifestError):
    """A newer fastload wrote the checkpoint, or it needs a newer torch. It is not damaged."""


class ChecksumError(CheckpointError):
    """Bytes do not have the checksum that was recorded when they were written.

    Attributes:
        blocks: A line for each damaged block: file, block, byte range and tensor.
    """

    def __init__(self, message: str, blocks: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.blocks = tuple(blocks)


class MismatchError(CheckpointError):
    """The checkpoint does not fit the destination.

    Attributes:
        missing: Names that the checkpoint lacks.
        unexpected: Names that the destination lacks.
        mismatched: A line for each tensor whose shape or dtype differs.
    """

    def __init__(
        self,
        message: str,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        mismatched: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = tuple(mismatched)


class StorageError(FastloadError, OSError):
    """Storage failed to read or write.

    Attributes:
        url: The file.
        offset: First byte of the range, or None for a whole-file operation.
        nbytes: Length of the range in bytes, or None.
        attempts: Number of attempts.
        transient: Whether another attempt may succeed.
        retry_after_s: Seconds to wait before it, as the server asks; 0 if it does not.
    """

    def __init__(
        self,
        message: str,
        url: str = "",
        offset: int | None = None,
        nbytes: int | None = None,
        attempts: int = 1,
        transient: bool = False,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.url = url
        self.offset = offset
        self.nbytes = nbytes
        self.attempts = attempts
        self.transient = transient
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        span = ""
        if self.offset is not None and self.nbytes is not None:
            span = f" [bytes {self.offset}-{self.offset + self.nbytes}]"
        tries = f" after {self.attempts} attempts" if self.attempts > 1 else ""
        return f"{self.url}{span}: {self.args[0]}{tries}"


class WorldError(FastloadError):
    """The ranks could not work together."""


class PlanMismatch(WorldError):
    """The ranks of the group made different calls."""


class ReplicaMismatch(WorldError):
    """Replicated tensors differ between ranks; nothing was saved."""


class StateChanged(FastloadError):
    """The state changed while it was copied in the background; nothing was saved.

    Attributes:
        tensors: Names of tensors that changed.
    """

    def __init__(self, message: str, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)


class PeerError(WorldError):
    """At least one rank failed; all living ranks raise this error with every cause.

    Attributes:
        failures: By rank, the exception that stopped it.
    """

    def __init__(self, message: str, failures: dict[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.failures: dict[int, BaseException] = dict(failures or {})


class DeadlineExceeded(WorldError, TimeoutError):
    """A step made no progress within ``timeout_s``."""


class Interrupted(WorldError):
    """This rank stopped because another one failed; never the cause."""


def proves_damage(error: BaseException) -> bool:
    """Whether an error proves that the files on storage are damaged or missing."""
    if isinstance(error, ManifestError):
        return error.is_damage
    return isinstance(error, ChecksumError | IncompleteCheckpoint | CheckpointNotFound)


def may_be_gone(error: BaseException) -> bool:
    """Whether the files of a checkpoint may be damaged or missing."""
    if isinstance(error, PeerError):
        return bool(error.failures) and all(map(may_be_gone, error.failures.values()))
    return proves_damage(error) or isinstance(error, StorageError)


def blames_checkpoint(error: BaseException) -> bool:
    """Whether the checkpoint causes an error, whichever rank reads it."""
    return isinstance(error, CheckpointError) and not isinstance(error, MismatchError)


def to_wire(error: BaseException, limit: int = _WIRE_BYTES) -> dict[str, Any]:
    """Encodes an error in JSON types, to be raised on another rank.

    Args:
        error: Any exception.
        limit: Most characters; longer texts and lists are cut.
    """
    fields, left = {}, limit // 2
    for name, value in vars(error).items():
        if isinstance(value, str | int | float | bool | tuple | type(None)):
            size = len(repr(value))
            if size > left and isinstance(value, tuple):
                value = (*value[: max(1, len(value) * left // (2 * size))], "...")
                size = len(repr(value))
            if size <= left and _is_json(value):
                fields[name] = value
                left -= size
    return {"type": type(error).__name__, "message": _cut(_text(error), limit // 2), "fields": fields}


def _text(error: BaseException) -> str:
    """Returns the message that makes an equal error."""
    try:
        is_text = len(error.args) == 1 and not isinstance(error, OSError)
        if error.args and (is_text or isinstance(error, FastloadError)):
            return str(error.args[0])
        return str(error)
    except Exception as odd:
        return f"its text cannot be shown: {type(odd).__name__}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} characters more)"


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def from_wire(wire: dict[str, Any]) -> BaseException:
    """Decodes an error that `to_wire` encoded.

    Errors of fastload and of Python keep their type. Any other becomes a `FastloadError` whose text starts
    with the name of its type.
    """
    name, message, fields = wire["type"], wire["message"], wire["fields"]
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, FastloadError):
        error: BaseException = kind(message)
        for key, value in fields.items():
            setattr(error, key, tuple(value) if isinstance(value, list) else value)
        return error
    builtin = getattr(builtins, name, None)
    if isinstance(builtin, type) and issubclass(builtin, Exception) and builtin is not Exception:
        try:
            return builtin(message)
        except Exception:
            pass  # it wants other arguments
    return FastloadError(f"{name}: {message}")


def first_lines(problems: Sequence[str]) -> list[str]:
    """Returns the first twenty of some problems, and how many more there are."""
    more = len(problems) - _NUM_LINES
    return [*problems[:_NUM_LINES], *([f"and {more} more"] if more > 0 else [])]


def some_of(names: Iterable[str]) -> str:
    """Returns the first four of some names, and how many more there are."""
    shown = list(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
