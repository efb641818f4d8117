"""Options, and the environment variables that give their defaults."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from fastload.base.registry import extension, extensions
from fastload.errors import OptionError

if TYPE_CHECKING:
    from fastload.formats.sources import ByteSource
    from fastload.report import LoadReport, SaveReport

    # Of a field whose type is a descriptor, type checkers take the argument from `__set__`.

    class Size:
        """Bytes, given as a number or as text."""

        def __get__(self, options: object, kind: type | None = None) -> int: ...
        def __set__(self, options: object, size: int | str) -> None: ...

    class SizeOrNone:
        """Likewise, or None."""

        def __get__(self, options: object, kind: type | None = None) -> int | None: ...
        def __set__(self, options: object, size: int | str | None) -> None: ...


Strategy = Literal["auto", "allgather", "broadcast", "direct"]
IoMode = Literal["auto", "buffered", "direct"]
PerRankMismatch = (
    Literal["error", "skip"]
    | Callable[..., Any]
    | Mapping[str, Literal["error", "skip"] | Callable[..., Any]]
)
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
        default: Value without an argument and without an environment variable. If it is None, an argument may
            be None.
        parse: Parses the text of the environment variable; raises `ValueError`.
        allows: Whether a value can be used.
        allowed: Description of such values.
    """

    default: Any
    parse: Callable[[str], Any]
    allows: Callable[[Any], bool]
    allowed: str


def _choice(default: str, choices: tuple[str, ...]) -> Setting:
    return Setting(default, str, choices.__contains__, f"one of {', '.join(choices)}")


def _number(default: int | None, *, least: int, parse: Callable[[str], int] = int) -> Setting:
    return Setting(default, parse, partial(_is_count, least=least), f"at least {least}")


def _size(default: int | None, *, least: int) -> Setting:
    return _number(default, least=least, parse=parse_bytes)


def _flag(default: bool | None) -> Setting:
    return Setting(default, parse_bool, lambda value: isinstance(value, bool), "True or False")


def _path(kind: str) -> Setting:
    return Setting(None, str, _is_path, f"the path of a {kind}")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_mismatch(value: object) -> bool:
    actions = value.values() if isinstance(value, Mapping) else [value]
    return all(callable(action) or action in ("error", "skip") for action in actions)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e7


def _parse_writers(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _parse_shared(text: str) -> bool | str:
    return text if text == "auto" else parse_bool(text)


SETTINGS = {
    "strategy": _choice("auto", STRATEGIES),
    "chunk_bytes": _size(None, least=1),
    "staging_bytes": _size(256 << 20, least=1 << 16),
    "timeout_s": Setting(300.0, float, _is_time, "a number of seconds above 0"),
    "io": _choice("auto", get_args(IoMode)),
    "read_threads": _number(None, least=1),
    "retries": _number(4, least=0),
    "verify": _flag(True),
    "per_rank_mismatch": Setting(
        "error", str, _is_mismatch, "one of error, skip, a function, or a dict of these"
    ),
    "atomic": _flag(False),
    "prefetch_bytes": _size(None, least=0),
    "dequantize": _flag(False),
    "bases": _path("directory"),
    "trace": _path("file"),
}

SAVE_SETTINGS = {
    "max_shard_bytes": _size(5_000_000_000, least=1),
    "block_bytes": _size(None, least=4096),
    "writers": Setting(
        "auto",
        _parse_writers,
        lambda value: value in ("auto", "all", "host") or _is_count(value, 1),
        "auto, all, host or a number of at least 1",
    ),
    "staging_bytes": SETTINGS["staging_bytes"],
    "io": SETTINGS["io"],
    "write_threads": _number(None, least=1),
    "shared": Setting("auto", _parse_shared, ("auto", True, False).__contains__, "True, False or auto"),
    "check_replicas": _choice("small", get_args(ReplicaCheck)),
    "snapshot": _choice("block", get_args(SnapshotMode)),
    "bases": SETTINGS["bases"],
    "max_chain": _number(16, least=0),
    "timeout_s": SETTINGS["timeout_s"],
    "retries": SETTINGS["retries"],
    "trace": SETTINGS["trace"],
}

_OF_ONE_RANK = ("on_copy", "on_report", "progress", "sources")  # which may differ between ranks

_WITH_VARIABLES = {**SETTINGS, **SAVE_SETTINGS}
_ALL = {**_WITH_VARIABLES, "overwrite": _flag(None), "parts": _flag(False), "base": _path("checkpoint")}


_PREFIX = "FASTLOAD_"
_VARIABLES = {f"{_PREFIX}{name.upper()}" for name in _WITH_VARIABLES}


def named_staging(staging_bytes: int) -> str:
    """Returns a limit of staging buffers as an error names it, and whether it is the default."""
    is_default = staging_bytes == SETTINGS["staging_bytes"].default
    return f"staging_bytes={staging_bytes}{', the default' if is_default else ''}"


def _default(name: str) -> Any:
    setting = _WITH_VARIABLES[name]
    text = os.environ.get(f"{_PREFIX}{name.upper()}")
    if text is None:
        return setting.default
    try:
        return setting.parse(text)
    except ValueError as error:
        raise OptionError(f"{_PREFIX}{name.upper()}={text!r}: {error}") from None


def setting(name: str) -> Any:
    """Returns a field for an option of `SETTINGS` or `SAVE_SETTINGS`, with its default."""
    return field(default_factory=partial(_default, name))


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
class Options:
    """Base class of options; fields of the same name mean the same."""

    if TYPE_CHECKING:
        retries: int = 0
        timeout_s: float = 0.0

    def __post_init__(self) -> None:
        for name, setting in _ALL.items():
            if not hasattr(self, name):
                continue
            value = getattr(self, name)
            if name.endswith("_bytes") and isinstance(value, str):
                value = _parsed(name, value)
            elif isinstance(value, os.PathLike):
                value = os.fspath(value)
            object.__setattr__(self, name, value)
            is_open = value is None and getattr(type(self), name, setting.default) is None
            if not (is_open or setting.allows(value)):
                raise OptionError(f"{name}={value!r}: must be {setting.allowed}")
        if getattr(self, "trace", None) is not None:
            extension("observers", "trace", "trace=")
        if getattr(self, "dequantize", False):
            extension("layers", "dequantize", "dequantize=")

    @property
    def patience(self) -> Patience:
        """The patience of a rank alone with storage; ranks that wait for each other have less."""
        return Patience(self.retries, self.timeout_s)

    def shared_values(self) -> dict[str, Any]:
        """Returns the values that have to be the same on all ranks."""
        return {f.name: _shared(getattr(self, f.name)) for f in fields(self) if f.name not in _OF_ONE_RANK}


def _shared(value: Any) -> Any:
    """Returns a value with functions replaced by their names."""
    if isinstance(value, Mapping):
        return {name: _shared(action) for name, action in value.items()}
    return getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else value


class ReadOptions(Options):
    """Base class of the options for reading a checkpoint."""

    if TYPE_CHECKING:
        io: IoMode
        bases: str | os.PathLike[str] | None
        sources: Sequence[ByteSource] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        sources = _sources_in_environment() if self.sources is None else self.sources
        is_list = isinstance(sources, Sequence) and not isinstance(sources, str)
        if not (is_list and all(hasattr(source, "connect") for source in sources)):
            raise OptionError(f"sources={sources!r}: must be a list of sources such as fastload.peers(…)")
        object.__setattr__(self, "sources", tuple(sources))


def _sources_in_environment() -> tuple[ByteSource, ...]:
    """Returns the sources that environment variables name."""
    given = {name: text for name, text in environment(_PREFIX).items() if name not in _VARIABLES and text}
    if not given:
        return ()
    sources = []
    for name, known in sorted(extensions("sources").items()):
        variable = f"{_PREFIX}{name.upper()}"
        if text := given.get(variable):
            try:
                sources.append(known.load()(text))
            except ValueError as error:
                raise OptionError(f"{variable}={text!r}: {error}") from None
    return tuple(sources)


OptionsT = TypeVar("OptionsT", bound=Options)


def chosen_options(options: OptionsT | None, kind: type[OptionsT]) -> OptionsT:
    """Returns the options of a caller; the defaults for None.

    Raises:
        OptionError: They are of another class, or an environment variable has a value that cannot be used.
    """
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise OptionError(f"options= is a {type(options).__name__}: pass fastload.{kind.__name__}")
    return options


def _parsed(name: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise OptionError(f"{name}={text!r}: {error}") from None


_SIZE_TYPES = {"Size": "int | str", "SizeOrNone": "int | str | None"}


def with_defaults_shown(options: type[OptionsT]) -> type[OptionsT]:
    """Shows the defaults in the signature, not ``<factory>``, and the types of sizes."""
    init: Any = options.__init__
    signature = inspect.signature(init)
    init.__signature__ = signature.replace(
        parameters=[
            parameter.replace(
                default=_WITH_VARIABLES[name].default if name in _WITH_VARIABLES else parameter.default,
                annotation=_SIZE_TYPES.get(parameter.annotation, parameter.annotation),
            )
            for name, parameter in signature.parameters.items()
        ]
    )
    return options


@with_defaults_shown
@dataclass(frozen=True, kw_only=True)
class LoadOptions(ReadOptions):
    """How to load. An argument beats ``FASTLOAD_<NAME>``, which beats the default.

    All ranks of a group must use the same values, except for `sources`, `on_report` and `progress`.

    Attributes:
        strategy: ``auto``, ``allgather`` (each rank reads 1/N), ``broadcast`` (one rank reads) or ``direct``
            (each rank reads everything, without the network).
        chunk_bytes: Unit of reading and of exchange in bytes; None chooses.
        staging_bytes: Most memory in bytes that a rank uses beyond the state.
        timeout_s: Longest time without progress, in seconds; not of the whole load. Then it fails on all
            ranks.
        io: ``auto``, ``buffered`` or ``direct`` reads of local files.
        read_threads: Reads in flight on each rank; None follows storage.
        retries: Further attempts at a chunk after a transient storage error.
        verify: Whether each rank compares what it reads with the checksums of the commit record, if the
            checkpoint has one.
        per_rank_mismatch: What to do with a `PerRank` value that is wanted and that another number of ranks
            saved: ``error``, or ``skip``, which leaves its place in ``into=`` as it is, or None, with a
            warning and in `LoadReport.left_out`. Or a function of (the values of all ranks that saved, this
            rank, number of ranks) that returns this rank's value: see `fastload.ext.per_rank`. Or a dict of
            these by the name of the value; other values are an error.
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
        sources: Places that may have the bytes, and are asked before storage, such as `fastload.peers`; None
            for those that environment variables name (``FASTLOAD_PEERS``). See docs/peers.md.
        on_report: Called on each rank with the `LoadReport` after the load. An exception fails the load on
            all ranks.
        progress: Called on each rank with (bytes placed, bytes wanted) during the load.

    Raises:
        OptionError: A value cannot be used.
    """

    strategy: Strategy = setting("strategy")
    chunk_bytes: SizeOrNone = setting("chunk_bytes")
    staging_bytes: Size = setting("staging_bytes")
    timeout_s: float = setting("timeout_s")
    io: IoMode = setting("io")
    read_threads: int | None = setting("read_threads")
    retries: int = setting("retries")
    verify: bool = setting("verify")
    per_rank_mismatch: PerRankMismatch = setting("per_rank_mismatch")
    atomic: bool = setting("atomic")
    prefetch_bytes: SizeOrNone = setting("prefetch_bytes")
    dequantize: bool = setting("dequantize")
    bases: str | os.PathLike[str] | None = setting("bases")
    trace: str | os.PathLike[str] | None = setting("trace")
    sources: Sequence[ByteSource] | None = None
    on_report: Callable[[LoadReport], None] | None = None
    progress: Callable[[int, int], None] | None = None


@with_defaults_shown
@dataclass(frozen=True, kw_only=True)
class SaveOptions(Options):
    """How to save. An argument beats ``FASTLOAD_<NAME>``, which beats the default.

    All ranks of a group must use the same values, except for `on_report` and `progress`.

    Attributes:
        max_shard_bytes: Largest file in bytes; a tensor that is larger gets a file of its own.
        block_bytes: Length of a checksum block; None chooses.
        writers: Who writes: ``all`` ranks, one per ``host``, a number of ranks, or ``auto``.
        staging_bytes: Most memory in bytes that a rank uses beyond the state and, in the background, its
            share of it. In a sharded save with an exchange, its buffers are reused by the group's next save.
        io: ``auto``, ``buffered`` or ``direct`` writes of local files.
        write_threads: Writes in flight on each rank, as far as `staging_bytes` has room for them. None
            chooses: 2, and to S3 up to 32.
        overwrite: Whether an existing checkpoint is replaced. None: `fastload.save` refuses, and
            `CheckpointManager` and the integrations replace a checkpoint of the same step.
        shared: Whether all hosts write to one place (True), or each writes its own copy (False). ``auto`` is
            True, and an error if the hosts do not see the same files.
        check_replicas: How the ranks compare replicated tensors: ``small`` (in host memory small ones
            completely, and samples of large ones; on accelerators by digests that the devices compute; the
            latter two are warnings), ``full`` (all completely, in a separate step) or ``off`` (if they
            differ, a mixture of the ranks' tensors is saved). Plain values, names, dtypes and shapes are
            always compared.
        snapshot: Of saves in the background: ``block`` copies the state before the call returns, ``overlap``
            during the next forward and backward pass; see `SaveHandle.wait_snapshot`.
        parts: Whether each rank has its own part of the state (pipeline stages, experts), and the parts are
            merged by key. Needed only if no rank has a DTensor or a `Shard`.
        base: An existing checkpoint. Only the elements that differ from it are written; see docs/deltas.md.
            None writes everything.
        bases: As in `LoadOptions`, if `base` is a delta itself.
        max_chain: Most deltas after a complete checkpoint; then everything is written all the same.
        timeout_s: Longest time without progress, in seconds; not of the whole save. Then it fails on all
            ranks.
        retries: Further attempts after a transient storage error.
        trace: As in `LoadOptions`, for copying, writing and publishing; of a save that succeeds.
        on_report: Called on each rank with the `SaveReport` after a successful save; by a thread, if the save
            ran in the background. An exception is raised on all ranks; the checkpoint exists.
        progress: Called on each rank with its own (bytes written, bytes to write), likewise.

    Raises:
        OptionError: A value cannot be used.
    """

    max_shard_bytes: Size = setting("max_shard_bytes")
    block_bytes: SizeOrNone = setting("block_bytes")
    writers: int | Literal["auto", "all", "host"] = setting("writers")
    staging_bytes: Size = setting("staging_bytes")
    io: IoMode = setting("io")
    write_threads: int | None = setting("write_threads")
    overwrite: bool | None = None
    shared: bool | Literal["auto"] = setting("shared")
    check_replicas: ReplicaCheck = setting("check_replicas")
    snapshot: SnapshotMode = setting("snapshot")
    parts: bool = False
    base: str | os.PathLike[str] | None = None
    bases: str | os.PathLike[str] | None = setting("bases")
    max_chain: int = setting("max_chain")
    timeout_s: float = setting("timeout_s")
    retries: int = setting("retries")
    trace: str | os.PathLike[str] | None = setting("trace")
    on_report: Callable[[SaveReport], None] | None = None
    progress: Callable[[int, int], None] | None = None
