"""Options, and the environment variables that give their defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from fastload.errors import OptionError

if TYPE_CHECKING:
    from fastload.report import LoadReport

__all__ = ["SETTINGS", "LoadOptions", "Setting", "parse_bytes"]

STRATEGIES = ("auto", "allgather", "broadcast", "direct")
IO_MODES = ("auto", "buffered", "direct")

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_bytes(text: str) -> int:
    """Reads a size such as ``1048576``, ``64MiB`` or ``5GB`` into bytes.

    Raises:
        ValueError: The text is not a whole number with an optional unit.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]I?)?B?\s*", text.upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 1048576, 64MiB or 5GB")
    return int(match[1]) * _UNITS[match[2] or ""]


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table of options.

    Attributes:
        default: Value where neither an argument nor the environment says otherwise.
        parse: Turns the environment variable's text into a value; `ValueError` if it cannot.
        help: What it does, in one line.
    """

    default: Any
    parse: Callable[[str], Any]
    help: str


SETTINGS = {
    "strategy": Setting(
        "auto", str, "auto, allgather (each rank reads 1/N), broadcast (one reads), direct (each reads all)"
    ),
    "chunk_bytes": Setting(
        None, parse_bytes, "unit of reading and of exchange; chosen from size, readers and staging if not set"
    ),
    "staging_bytes": Setting(256 << 20, parse_bytes, "most memory a rank uses beyond the state itself"),
    "timeout_s": Setting(300.0, float, "seconds without progress after which a step fails on all ranks"),
    "io": Setting("auto", str, "local files: auto, buffered, direct (O_DIRECT)"),
    "read_threads": Setting(
        None, int, "reads in flight on each rank; chosen from the cores of the host if not set"
    ),
    "retries": Setting(4, int, "further attempts at a chunk after a transient storage error"),
    "trace": Setting(None, str, "file that rank 0 writes a Chrome/Perfetto trace of all ranks to"),
}


def _default(name: str) -> Any:
    setting = SETTINGS[name]
    text = os.environ.get(f"FASTLOAD_{name.upper()}")
    if text is None:
        return setting.default
    try:
        return setting.parse(text)
    except ValueError as error:
        raise OptionError(f"FASTLOAD_{name.upper()}={text!r}: {error}") from None


def _setting(name: str) -> Any:
    return field(default_factory=partial(_default, name))


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to load. An argument beats ``FASTLOAD_<NAME>``, which beats the default.

    All ranks of a group must use the same values, except for `on_report` and `progress`.

    Attributes:
        strategy: ``auto``, ``allgather`` (each rank reads 1/N), ``broadcast`` (one rank reads) or
            ``direct`` (each rank reads all; no network).
        chunk_bytes: Unit of reading and of exchange in bytes; None chooses.
        staging_bytes: Most memory in bytes that a rank uses beyond the state.
        timeout_s: Seconds without progress after which a step fails on all ranks.
        io: ``auto``, ``buffered`` or ``direct`` reads of local files.
        read_threads: Reads in flight on each rank; None chooses.
        retries: Further attempts at a chunk after a transient storage error.
        trace: A local file to which rank 0 writes when each rank read, exchanged and placed what, for
            Chrome, Perfetto or ``fastload timeline``; also of a load that fails.
        on_report: Called on each rank with the `LoadReport` of a load that succeeded.
        progress: Called on each rank with (bytes placed, bytes wanted) as the load goes on.

    Raises:
        OptionError: A value cannot be used.
    """

    strategy: str = _setting("strategy")
    chunk_bytes: int | None = _setting("chunk_bytes")
    staging_bytes: int = _setting("staging_bytes")
    timeout_s: float = _setting("timeout_s")
    io: str = _setting("io")
    read_threads: int | None = _setting("read_threads")
    retries: int = _setting("retries")
    trace: str | os.PathLike[str] | None = _setting("trace")  # noqa: RUF009  (as the others)
    on_report: Callable[[LoadReport], None] | None = None
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        _require(self.strategy in STRATEGIES, "strategy", self.strategy, f"one of {', '.join(STRATEGIES)}")
        _require(self.io in IO_MODES, "io", self.io, f"one of {', '.join(IO_MODES)}")
        _require(
            _is_count(self.staging_bytes, 1 << 16), "staging_bytes", self.staging_bytes, "at least 65536"
        )
        _require(
            self.chunk_bytes is None or _is_count(self.chunk_bytes, 1),
            "chunk_bytes",
            self.chunk_bytes,
            "at least 1",
        )
        _require(
            self.read_threads is None or _is_count(self.read_threads, 1),
            "read_threads",
            self.read_threads,
            "at least 1",
        )
        _require(_is_count(self.retries, 0), "retries", self.retries, "at least 0")
        if isinstance(self.trace, os.PathLike):
            object.__setattr__(self, "trace", os.fspath(self.trace))
        is_path = isinstance(self.trace, str) and bool(self.trace)
        _require(self.trace is None or is_path, "trace", self.trace, "the path of a file")
        number = isinstance(self.timeout_s, int | float) and not isinstance(self.timeout_s, bool)
        _require(
            number and 0 < self.timeout_s < 1e7, "timeout_s", self.timeout_s, "a number of seconds above 0"
        )

    def shared(self) -> dict[str, Any]:
        """Returns the values that must be the same on every rank."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in SETTINGS}


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise OptionError(f"{name}={value!r}: must be {wanted}")
