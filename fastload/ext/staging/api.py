"""`fastload.stage`: a copy of a checkpoint on every host."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastload.base.tracebacks import short_tracebacks
from fastload.comm.group import Meeting
from fastload.errors import CheckpointExists, OptionError
from fastload.ext.staging.options import StageOptions
from fastload.ext.staging.report import StageReport
from fastload.ext.staging.stage import Stage
from fastload.loading.access import Access, open_access
from fastload.storage import local_directory, locate, name_of

Path = str | os.PathLike[str]


@short_tracebacks
def stage(
    src: Path,
    dst: Path,
    *,
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    options: StageOptions | None = None,
) -> StageReport:
    """Copies a checkpoint to a disk of each host, byte for byte; together the hosts read every byte once.

    A call of all ranks; one rank of each host writes. All files directly below `src` are copied, and compared
    on every host with the commit record, if there is one, and with the other hosts' copies. On each host the
    copy appears in one step.

    A complete copy is left as it is, and supplies the hosts without one. After a failure, or a kill, the next
    call resumes.

    The bases of a delta are staged first, under their names next to `dst`; what is there is never replaced.
    The returned report is that of the delta; `StageOptions.on_report` gets one for each of them.

    Args:
        src: A directory, or a single file, such as one of torch.save; a local path or a URL.
        dst: The directory to make, on a file system of each host's own; ``/dev/shm`` is possible.
        process_group: As for `fastload.load`.
        storage_options: As for `fastload.load`; for `src`.
        options: How to stage; None for the defaults.

    Raises:
        CheckpointNotFound: No rank sees a checkpoint at `src`.
        IncompleteCheckpoint: Its save never finished, or files are missing.
        ManifestError: It is malformed.
        ChecksumError: Bytes differ from those that were written.
        PeerError: Ranks failed, for example because a disk is full or has something else at `dst`
            (`CheckpointExists`); with every cause.
        StorageError: Storage failed, in a group of one rank.
        OptionError: An option or argument cannot be used.
    """
    began = time.perf_counter()
    with Meeting(process_group, f"staging {name_of(src)}") as meeting:
        chosen = meeting.choose(options, StageOptions)
        location, path = locate(src), local_directory(dst, "stage to")
    world = meeting.world
    call = {"call": "stage", "src": location.given, "dst": path}
    access = open_access(world, location, storage_options, chosen, call)
    try:
        for each, copy in _copies(access, path):
            own = chosen if copy == path else replace(chosen, overwrite=False)
            try:
                report = Stage(world, each, copy, own, began=began).run()
            except CheckpointExists:
                if copy == path:
                    raise
                raise CheckpointExists(
                    f"{copy}: has the name of a base of {location}, and is another checkpoint: move it away, "
                    "or stage to another directory"
                ) from None
    finally:
        access.storage.close()
    return report


def _copies(access: Access, path: str) -> list[tuple[Access, str]]:
    """Returns what is staged, and where to: first the bases of a delta, next to its copy."""
    parts = access.components or (access,)
    bases = [part.stored.delta.base for part in parts[:-1] if part.stored.delta is not None]
    if len(bases) < len(parts) - 1:
        raise OptionError(
            f"{access.stored.url}: a layer made it of {len(parts)} checkpoints: stage each of them"
        )
    paths = [path, *(os.path.join(os.path.dirname(path), base) for base in bases)]
    if len(set(paths)) < len(paths):
        raise OptionError(
            f"{access.stored.url}: is a delta, and one of its bases has the name of the copy, {path}: "
            "stage it to a directory with another name"
        )
    return list(zip(parts, paths, strict=True))[::-1]
