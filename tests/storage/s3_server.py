"""A real S3 server on loopback: rclone, over a folder."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUCKET = "bucket"
KEY, SECRET = "testkey", "testsecret"


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, Any]]:
    """Serves a folder, in which the bucket is made; yields the storage options of its clients."""
    (folder / BUCKET).mkdir(parents=True)
    command = ["rclone", "serve", "s3", str(folder), "--config", "", "--addr", "127.0.0.1:0"]
    command += ["--auth-key", f"{KEY},{SECRET}", "--vfs-cache-mode", "off", "--dir-cache-time", "24h"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        lines = iter(server.stderr)
        ports = (re.search(r"http://127\.0\.0\.1:(\d+)", line) for line in lines)
        port = next(found[1] for found in ports if found)
        drain = threading.Thread(target=lambda: [None for _ in lines], daemon=True)
        drain.start()
        yield {
            "endpoint": f"http://127.0.0.1:{port}",
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "region": "us-east-1",
        }
    finally:
        server.terminate()
        server.wait(10)
        drain.join(10)
        server.stderr.close()
