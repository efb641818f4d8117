"""The options of `fastload.stage`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastload.options import IoMode, ReadOptions, setting, with_defaults_shown

if TYPE_CHECKING:
    import os

    from fastload.ext.staging.report import StageReport
    from fastload.formats.sources import ByteSource, CopyInProgress
    from fastload.options import Size, SizeOrNone


@with_defaults_shown
@dataclass(frozen=True, kw_only=True)
class StageOptions(ReadOptions):
    """How to stage. An argument beats ``FASTLOAD_<NAME>``, which beats the default.

    All ranks of a group must use the same values, except for `sources`, `on_copy`, `on_report` and
    `progress`.

    Attributes:
        overwrite: Whether another checkpoint at the path is replaced.
        verify: Whether the bytes of an existing copy are read and checked, not only the sizes of its files,
            and new bytes are compared with the commit record, if the checkpoint has one.
        chunk_bytes, staging_bytes, timeout_s, retries, read_threads: As in `LoadOptions`.
        bases, sources: As in `LoadOptions`.
        write_threads: Writes in flight on each host; None chooses.
        io: ``auto``, ``buffered`` or ``direct`` reads and writes of local files.
        on_copy: Called on one rank of each host, with the copy that it begins to make; not if there is a
            complete one. `Server.follow` serves what is there of it.
        on_report: Called on each rank with the `StageReport` after success. An exception is raised on all
            ranks.
        progress: Called on one rank of each host with (bytes received, bytes to receive).

    Raises:
        OptionError: A value cannot be used.
    """

    overwrite: bool = False
    verify: bool = setting("verify")
    chunk_bytes: SizeOrNone = setting("chunk_bytes")
    staging_bytes: Size = setting("staging_bytes")
    timeout_s: float = setting("timeout_s")
    io: IoMode = setting("io")
    read_threads: int | None = setting("read_threads")
    write_threads: int | None = setting("write_threads")
    retries: int = setting("retries")
    bases: str | os.PathLike[str] | None = setting("bases")
    sources: Sequence[ByteSource] | None = None
    on_copy: Callable[[CopyInProgress], None] | None = None
    on_report: Callable[[StageReport], None] | None = None
    progress: Callable[[int, int], None] | None = None
