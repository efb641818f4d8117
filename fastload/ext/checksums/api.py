"""The public function `fastload.seal`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fastload.base.tracebacks import short_tracebacks
from fastload.comm.group import Meeting
from fastload.ext.checksums import write
from fastload.options import LoadOptions
from fastload.report import VerifyReport
from fastload.storage import locate, name_of, require_writable


@short_tracebacks
def seal(
    path: str | os.PathLike[str],
    *,
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> VerifyReport:
    """Computes the checksums of a checkpoint that another program saved; the ranks of a group share the work.

    They are written to ``fastload.seal.json`` next to its files, those of a single file ``NAME`` to
    ``NAME.fastload.seal.json``, and replace those of an earlier call. From then on, loads verify what they
    read, `fastload.verify` checks every byte, and `fastload.stage` compares the copies. The files themselves
    stay as they are. If hosts have their own disks, the copies of all hosts are compared, and each gets the
    checksums.

    Files in a cache of the Hugging Face hub that have an SHA-256 there are compared with it first.

    Args:
        path: A directory or file of any format that `fastload.load` reads; a local path or a URL that can be
            written to.
        process_group: As for `fastload.load`.
        storage_options: As for `fastload.load`.
        options: As for `fastload.load`.

    Returns:
        The report; `bytes_verified` counts the bytes that were read.

    Raises:
        CheckpointNotFound: No rank sees a checkpoint there.
        ManifestError: It is malformed, or tensors share bytes of a file.
        CheckpointError: It is a single file, or `fastload.save` wrote it, so that it has checksums.
        ChecksumError: The copies of the hosts differ, or a file is not the one on the hub.
        OptionError: The URL cannot be written to.
        PeerError: A rank could not read its part, or write the file.
    """
    with Meeting(process_group, f"sealing {name_of(path)}") as meeting:
        chosen, location = meeting.choose(options, LoadOptions), locate(path)
        require_writable(location)
    return write.seal(meeting.world, location, storage_options, chosen)
