"""Options, and the environment variables that give their defaults."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from fastload.errors import OptionError

if TYPE_CHECKING:
    from fastload.report import LoadReport, SaveReport, StageReport

__all__ = [
    "SAVE_SETTINGS",
    "SETTINGS",
    "LoadOptions",
    "Patience",
    "SaveOptions",
    "Setting",
    "StageOptions",
    "environment",
    "parse_bool",
    "parse_bytes",
]

Strategy = Literal["auto", "allgather", "broadcast", "direct"]
IoMode = Literal["auto", "buffered", "direct"]
PerRankMismatch = Literal["error", "skip"]
ReplicaCheck = Literal["off", "small", "full"]
SnapshotMode = Literal["block", "overlap"]
STRATEGIES = get_args(Strategy)

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


def environment(prefix: str) -> dict[str, str]:
    """Returns the environment variables with a prefix."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def parse_bool(text: str) -> bool:
    """Reads ``1``, ``true``, ``yes``, ``on`` or ``0``, ``false``, ``no``, ``off``, in any case.

    Raises:
        ValueError: The text is none of these.
    """
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    if text.strip().lower() not in words:
        raise ValueError(f"{text!r} is none of {', '.join(words)}")
    return words[text.strip().lower()]


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table of options.

    Attributes:
        default: Value without an argument and without an environment variable.
        parse: Parses the text of the environment variable; raises `ValueError`.
        help: Its effect, in one line.
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
    "timeout_s": Setting(300.0, float, "longest time without progress, in seconds; then all ranks fail"),
    "io": Setting("auto", str, "local files: auto, buffered, direct (O_DIRECT)"),
    "read_threads": Setting(
        None, int, "reads in flight on each rank; chosen from the cores of the host if not set"
    ),
    "retries": Setting(4, int, "further attempts at a chunk after a transient storage error"),
    "verify": Setting(
        True,
        parse_bool,
        "check what is read against the checksums of a checkpoint that fastload saved or sealed",
    ),
    "per_rank_mismatch": Setting(
        "error", str, "PerRank values that another number of ranks saved: error, or skip them"
    ),
    "atomic": Setting(
        False, parse_bool, "change no tensor of into= before all ranks have read and verified every byte"
    ),
    "prefetch_bytes": Setting(
        None, parse_bytes, "most host memory for what a rank reads ahead; its whole share if not set"
    ),
    "dequantize": Setting(
        False, parse_bool, "turn weights that config.json says are quantised into floating point numbers"
    ),
    "bases": Setting(None, str, "directory or URL with the bases of deltas that are not next to them"),
    "trace": Setting(None, str, "file that rank 0 writes a Chrome/Perfetto trace of all ranks to"),
}


def _parse_writers(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _parse_shared(text: str) -> bool | str:
    return text if text == "auto" else parse_bool(text)


SAVE_SETTINGS = {
    "max_shard_bytes": Setting(
        5_000_000_000, parse_bytes, "largest file; a tensor that is larger gets a file of its own"
    ),
    "block_bytes": Setting(
        None, parse_bytes, "bytes of a tensor with one checksum; chosen from the size if not set"
    ),
    "writers": Setting(
        "auto", _parse_writers, "who writes: all ranks, one per host (host), a number, or auto"
    ),
    "staging_bytes": SETTINGS["staging_bytes"],
    "io": SETTINGS["io"],
    "write_threads": Setting(2, int, "writes in flight on each rank"),
    "shared": Setting(
        "auto",
        _parse_shared,
        "whether all hosts write to one place (True), each a copy of its own (False), auto",
    ),
    "check_replicas": Setting(
        "small", str, "compare the ranks' tensors before they are mixed: off, small, full"
    ),
    "snapshot": Setting(
        "block",
        str,
        "background saves: block until the state is copied, or overlap that with the next step",
    ),
    "bases": SETTINGS["bases"],
    "max_chain": Setting(16, int, "most deltas after a complete checkpoint; then a complete one is saved"),
    "timeout_s": SETTINGS["timeout_s"],
    "retries": SETTINGS["retries"],
    "trace": SETTINGS["trace"],
}


def _default(name: str) -> Any:
    setting = SETTINGS.get(name) or SAVE_SETTINGS[name]
    text = os.environ.get(f"FASTLOAD_{name.upper()}")
    if text is None:
        return setting.default
    try:
        return setting.parse(text)
    except ValueError as error:
        raise OptionError(f"FASTLOAD_{name.upper()}={text!r}: {error}") from None


def _setting(name: str) -> Any:
    return field(default_factory=partial(_default, name))


_CHOICES = {
    "strategy": STRATEGIES,
    "io": get_args(IoMode),
    "per_rank_mismatch": get_args(PerRankMismatch),
    "check_replicas": get_args(ReplicaCheck),
    "snapshot": get_args(SnapshotMode),
}
_PATHS = {"trace": "file", "base": "checkpoint", "bases": "directory"}
_LEAST = {
    "chunk_bytes": 1,
    "staging_bytes": 1 << 16,
    "prefetch_bytes": 0,
    "read_threads": 1,
    "write_threads": 1,
    "retries": 0,
    "max_shard_bytes": 1,
    "block_bytes": 4096,
    "max_chain": 0,
}


class Patience(NamedTuple):
    """How often, and for how long, a request to storage is made.

    Attributes:
        retries: Further attempts after transient errors.
        timeout_s: Longest time in seconds for one request, all attempts and pauses included.
        longest_attempt_s: An attempt that takes longer has stalled.
    """

    retries: int = 4
    timeout_s: float = 300.0
    longest_attempt_s: float = 30.0

    @property
    def attempt_s(self) -> float:
        """Longest time in seconds for one attempt, so that there is time for others."""
        return min(self.longest_attempt_s, self.timeout_s / 3)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Base class of options; fields of the same name mean the same."""

    if TYPE_CHECKING:
        retries: int
        timeout_s: float

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            if name.endswith("_bytes") and isinstance(value, str):
                value = _size(name, value)
                object.__setattr__(self, name, value)
            if name in _CHOICES:
                _require(value in _CHOICES[name], name, value, f"one of {', '.join(_CHOICES[name])}")
            elif name in _LEAST:
                chosen = value is None and {**SETTINGS, **SAVE_SETTINGS}[name].default is None
                _require(chosen or _is_count(value, _LEAST[name]), name, value, f"at least {_LEAST[name]}")
            elif name in ("atomic", "overwrite", "parts", "verify", "dequantize"):
                is_open = value is None and getattr(type(self), name) is None
                _require(is_open or isinstance(value, bool), name, value, "True or False")
            elif name == "timeout_s":
                number = isinstance(value, int | float) and not isinstance(value, bool)
                _require(number and 0 < value < 1e7, name, value, "a number of seconds above 0")
            elif name in _PATHS and value is not None:
                path = os.fspath(value) if isinstance(value, os.PathLike) else value
                object.__setattr__(self, name, path)
                is_path = isinstance(path, str) and bool(path) and "\0" not in path
                _require(is_path, name, value, f"the path of a {_PATHS[name]}")

    @property
    def patience(self) -> Patience:
        """The patience of a rank alone with storage; ranks that wait for each other have less."""
        return Patience(self.retries, self.timeout_s)

    def shared_values(self) -> dict[str, Any]:
        """Returns the values that have to be the same on all ranks."""
        return {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("on_report", "progress")
        }


_O = TypeVar("_O", bound=type[_Options])


def _with_defaults_shown(options: _O) -> _O:
    """Shows the defaults in the signature, not ``<factory>``."""
    init: Any = options.__init__
    signature = inspect.signature(init)
    settings = {**SETTINGS, **SAVE_SETTINGS}
    init.__signature__ = signature.replace(
        parameters=[
            parameter.replace(default=settings[name].default) if name in settings else parameter
            for name, parameter in signature.parameters.items()
        ]
    )
    return options


@_with_defaults_shown
@dataclass(frozen=True, kw_only=True)
class LoadOptions(_Options):
    """How to load. An argument beats ``FASTLOAD_<NAME>``, which beats the default.

    All ranks of a group must use the same values, except for `on_report` and `progress`.

    Attributes:
        strategy: ``auto``, ``allgather`` (each rank reads 1/N), ``broadcast`` (one rank reads) or ``direct``
            (each rank reads everything, without the network).
        chunk_bytes: Unit of reading and of exchange in bytes; None chooses.
        staging_bytes: Most memory in bytes that a rank uses beyond the state.
        timeout_s: Longest time without progress, in seconds; not of the whole load. Then it fails on all
            ranks.
        io: ``auto``, ``buffered`` or ``direct`` reads of local files.
        read_threads: Reads in flight on each rank; None chooses.
        retries: Further attempts at a chunk after a transient storage error.
        verify: Whether each rank compares what it reads with the checksums of the commit record, if the
            checkpoint has one.
        per_rank_mismatch: What to do with a `PerRank` value that is wanted and that another number of ranks
            saved: ``error``, or ``skip``, which leaves its place in ``into=`` as it is, or None, with a
            warning and in `LoadReport.left_out`.
        atomic: Whether no tensor of ``into=`` changes on any rank before all ranks have read and verified
            every byte. Each rank holds what it reads in host memory until then; with ``auto`` the ranks share
            the reading. See `FastloadError.is_partial` for what may fail afterwards.
        prefetch_bytes: Most host memory in bytes for what a rank reads ahead (`fastload.prefetch`); the rest
            is read by the load. None: all of its share, the checkpoint ÷ the ranks that read.
        dequantize: Whether weights that ``quantization_config`` in ``config.json`` says are quantised come as
            floating point tensors; see "Quantised weights" in docs/loading.md.
        bases: A directory or URL in which the base of a delta is searched by its name and digest, if it is
            not next to the delta; see docs/deltas.md.
        trace: A local file to which rank 0 writes a trace of the reads, exchanges and writes of all ranks,
            for Chrome, Perfetto or ``fastload timeline``; also of a load that fails.
        on_report: Called on each rank with the `LoadReport` after the load. An exception fails the load on
            all ranks.
        progress: Called on each rank with (bytes placed, bytes wanted) during the load.

    Raises:
        OptionError: A value cannot be used.
    """

    strategy: Strategy = _setting("strategy")
    chunk_bytes: int | None = _setting("chunk_bytes")
    staging_bytes: int = _setting("staging_bytes")
    timeout_s: float = _setting("timeout_s")
    io: IoMode = _setting("io")
    read_threads: int | None = _setting("read_threads")
    retries: int = _setting("retries")
    verify: bool = _setting("verify")
    per_rank_mismatch: PerRankMismatch = _setting("per_rank_mismatch")
    atomic: bool = _setting("atomic")
    prefetch_bytes: int | None = _setting("prefetch_bytes")
    dequantize: bool = _setting("dequantize")
    bases: str | os.PathLike[str] | None = _setting("bases")
    trace: str | os.PathLike[str] | None = _setting("trace")
    on_report: Callable[[LoadReport], None] | None = None
    progress: Callable[[int, int], None] | None = None


@_with_defaults_shown
@dataclass(frozen=True, kw_only=True)
class SaveOptions(_Options):
    """How to save. An argument beats ``FASTLOAD_<NAME>``, which beats the default.

    All ranks of a group must use the same values, except for `on_report` and `progress`.

    Attributes:
        max_shard_bytes: Largest file in bytes; a tensor that is larger gets a file of its own.
        block_bytes: Length of a checksum block; None chooses.
        writers: Who writes: ``all`` ranks, one per ``host``, a number of ranks, or ``auto``.
        staging_bytes: Most memory in bytes that a rank uses beyond the state and, in the background, its
            share of it. In a sharded save with an exchange, its buffers are reused by the group's next save.
        io: ``auto``, ``buffered`` or ``direct`` writes of local files.
        write_threads: Writes in flight on each rank.
        overwrite: Whether an existing checkpoint is replaced. None: `fastload.save` refuses, and
            `CheckpointManager` and the integrations replace a checkpoint of the same step.
        shared: Whether all hosts write to one place (True), or each writes its own copy (False). ``auto`` is
            True, and an error if the hosts do not see the same files.
        check_replicas: How the ranks compare replicated tensors: ``small`` (small ones in host memory, at no
            cost), ``full`` (all, in a separate step) or ``off``. Plain values, names, dtypes and shapes are
            always compared.
        snapshot: Of saves in the background: ``block`` copies the state before the call returns, ``overlap``
            during the next forward and backward pass; see `SaveHandle.wait_snapshot`.
        parts: Whether each rank has its own part of the state (pipeline stages, experts), and the parts are
            merged by key. Needed only if no rank has a DTensor.
        base: An existing checkpoint. Only the elements that differ from it are written; see docs/deltas.md.
            None writes everything.
        bases: As in `LoadOptions`, if `base` is a delta itself.
        max_chain: Most deltas after a complete checkpoint; then everything is written all the same.
        timeout_s: Longest time without progress, in seconds; not of the whole save. Then it fails on all
            ranks.
        retries: Further attempts after a transient storage error.
        trace: As in `LoadOptions`, for copying, writing and publishing; of a save that succeeds.
        on_report: Called on each rank with the `SaveReport` after a successful save; by a thread, if the save
            ran in the background.
        progress: Called on each rank with its own (bytes written, bytes to write), likewise.

    Raises:
        OptionError: A value cannot be used.
    """

    max_shard_bytes: int = _setting("max_shard_bytes")
    block_bytes: int | None = _setting("block_bytes")
    writers: int | Literal["auto", "all", "host"] = _setting("writers")
    staging_bytes: int = _setting("staging_bytes")
    io: IoMode = _setting("io")
    write_threads: int = _setting("write_threads")
    overwrite: bool | None = None
    shared: bool | Literal["auto"] = _setting("shared")
    check_replicas: ReplicaCheck = _setting("check_replicas")
    snapshot: SnapshotMode = _setting("snapshot")
    parts: bool = False
    base: str | os.PathLike[str] | None = None
    bases: str | os.PathLike[str] | None = _setting("bases")
    max_chain: int = _setting("max_chain")
    timeout_s: float = _setting("timeout_s")
    retries: int = _setting("retries")
    trace: str | os.PathLike[str] | None = _setting("trace")
    on_report: Callable[[SaveReport], None] | None = None
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.writers in ("auto", "all", "host") or _is_count(self.writers, 1)
        _require(known, "writers", self.writers, "auto, all, host or a number of at least 1")
        _require(self.shared in ("auto", True, False), "shared", self.shared, "True, False or auto")


@_with_defaults_shown
@dataclass(frozen=True, kw_only=True)
class StageOptions(_Options):
    """How to stage. An argument beats ``FASTLOAD_<NAME>``, which beats the default.

    All ranks of a group must use the same values, except for `on_report` and `progress`.

    Attributes:
        overwrite: Whether another checkpoint at the path is replaced.
        verify: Whether the bytes of an existing copy are read and checked, not only the sizes of its files,
            and new bytes are compared with the commit record, if the checkpoint has one.
        chunk_bytes, staging_bytes, timeout_s, retries, read_threads: As in `LoadOptions`.
        bases: As in `LoadOptions`.
        write_threads: Writes in flight on each host.
        io: ``auto``, ``buffered`` or ``direct`` reads and writes of local files.
        on_report: Called on each rank with the `StageReport` after success.
        progress: Called on one rank of each host with (bytes received, bytes to receive).

    Raises:
        OptionError: A value cannot be used.
    """

    overwrite: bool = False
    verify: bool = _setting("verify")
    chunk_bytes: int | None = _setting("chunk_bytes")
    staging_bytes: int = _setting("staging_bytes")
    timeout_s: float = _setting("timeout_s")
    io: IoMode = _setting("io")
    read_threads: int | None = _setting("read_threads")
    write_threads: int = _setting("write_threads")
    retries: int = _setting("retries")
    bases: str | os.PathLike[str] | None = _setting("bases")
    on_report: Callable[[StageReport], None] | None = None
    progress: Callable[[int, int], None] | None = None


def _size(name: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise OptionError(f"{name}={text!r}: {error}") from None


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise OptionError(f"{name}={value!r}: must be {wanted}")
