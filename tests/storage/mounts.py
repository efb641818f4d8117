"""Buckets that are really mounted, by FUSE."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.storage.s3_server import BUCKET

__all__ = ["CLIENTS", "mounted"]

CLIENTS = ("rclone", "s3fs")
_MOUNTED_WITHIN_S = 20.0


@contextmanager
def mounted(client: str, folder: Path, options: Mapping[str, Any]) -> Iterator[Path]:
    """Mounts the bucket of a server in a new folder; skips the test, loudly, where that is not possible.

    Args:
        client: One of `CLIENTS`.
        folder: Where the mount point and files of the client's own go.
        options: Storage options of the server.
    """
    if missing := [tool for tool in (client, "fusermount3", "umount") if shutil.which(tool) is None]:
        pytest.skip(f"a mounted bucket needs {', '.join(missing)}: NOT TESTED HERE")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or os.geteuid() != 0:
        pytest.skip("a mounted bucket needs root and /dev/fuse: NOT TESTED HERE")
    point = folder / "mount"
    point.mkdir(parents=True)
    words = _rclone(point, folder, options) if client == "rclone" else _s3fs(point, folder, options)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until = time.monotonic() + _MOUNTED_WITHIN_S
        while not point.is_mount():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{client} does not mount: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)
        yield point
    finally:
        subprocess.run(["umount", "--lazy", point], check=False)
        process.terminate()
        process.wait(10)


def _rclone(point: Path, folder: Path, options: Mapping[str, Any]) -> Sequence[str]:
    # What a stream has read ahead when it ends was for nothing: that is to be little beside little files.
    words = ["rclone", "mount", f":s3:{BUCKET}", str(point), "--config", "", "--cache-dir", str(folder)]
    words += ["--buffer-size", "0", "--s3-provider", "Other", "--s3-endpoint", options["endpoint"]]
    words += ["--s3-access-key-id", options["access_key_id"]]
    return [*words, "--s3-secret-access-key", options["secret_access_key"]]


def _s3fs(point: Path, folder: Path, options: Mapping[str, Any]) -> Sequence[str]:
    keys = folder / "keys"
    keys.touch(0o600)
    keys.write_text(f"{options['access_key_id']}:{options['secret_access_key']}")
    given = f"passwd_file={keys},url={options['endpoint']},use_path_request_style"
    return ["s3fs", BUCKET, str(point), "-f", "-o", f"{given},multipart_size=5,parallel_count=1"]
