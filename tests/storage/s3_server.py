"""Real S3 servers on loopback: rclone over a folder, and SeaweedFS.

rclone keeps to less of S3: it ignores conditions on a put, answers a range with all of the object, and
joins the parts of an upload by copying them. SeaweedFS is what a store should be.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from fastload.ext.remote.s3 import S3Storage
from fastload.formats.names import NAMES
from fastload.options import Patience
from fastload.storage import locate

BUCKET = "bucket"
DOMAIN = "store.test"  # below which SeaweedFS takes buckets as parts of the host name
KEY, SECRET = "testkey", "testsecret"
_WEED_PORTS = (
    "master.port master.port.grpc volume.port volume.port.grpc filer.port filer.port.grpc s3.port.grpc"
).split()
_LOW_PORTS = range(12_000, 32_000)  # below those that the system gives
_STARTED_WITHIN_S = 20.0


def client_of(options: Mapping[str, Any]) -> Any:
    """Returns boto3's client for a server, as a save makes it."""
    return S3Storage(locate(f"s3://{BUCKET}"), NAMES, options, Patience(2, 20, 10)).client


@contextmanager
def s3_server(folder: Path, path: str = "") -> Iterator[dict[str, Any]]:
    """Has rclone serve a folder, in which the bucket is made; yields the storage options of its clients.

    Below a path, it takes any keys.
    """
    _need("rclone")
    (folder / BUCKET).mkdir(parents=True)
    command = ["rclone", "serve", "s3", str(folder), "--config", "", "--addr", "127.0.0.1:0"]
    command += ["--vfs-cache-mode", "off", "--dir-cache-time", "24h"]
    command += ["--baseurl", path] if path else ["--auth-key", f"{KEY},{SECRET}"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        lines = iter(server.stderr)
        ports = (re.search(r"http://127\.0\.0\.1:(\d+)", line) for line in lines)
        port = next(found[1] for found in ports if found)
        drain = threading.Thread(target=lambda: [None for _ in lines], daemon=True)
        drain.start()
        yield _options(int(port))
    finally:
        server.terminate()
        server.wait(10)
        drain.join(10)
        server.stderr.close()


@contextmanager
def seaweed_server(folder: Path) -> Iterator[dict[str, Any]]:
    """Has SeaweedFS keep its data in a folder, and makes the bucket; yields the clients' storage options."""
    _need("weed")
    config = folder / "s3.json"
    lab = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    config.write_text(json.dumps({"identities": [lab]}))
    port, *others = free_ports(1 + len(_WEED_PORTS))
    command = ["weed", f"-logdir={folder}", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-s3", f"-s3.config={config}", f"-s3.port={port}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-s3.domainName={DOMAIN}"]
    command += [f"-{name}={free}" for name, free in zip(_WEED_PORTS, others, strict=True)]
    command += ["-master.telemetry=false", "-volume.max=0", "-master.volumeSizeLimitMB=1024"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        options = _options(port)
        _make_bucket(options, server)
        yield options
    finally:
        server.kill()  # asked to end, it takes its time
        server.wait(10)
        for free in (port, *others):
            for left in Path("/tmp").glob(f"seaweedfs-*-{free}.sock"):
                left.unlink()


def _need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: NOT TESTED HERE")


def free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens on, nor is given when asking for any, until a server has them."""
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(_LOW_PORTS, 1000):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no port is free")


def _make_bucket(options: dict[str, Any], server: subprocess.Popen[bytes]) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint"],
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name=options["region"],
        config=Config(retries={"total_max_attempts": 1}),
    )
    until = time.monotonic() + _STARTED_WITHIN_S
    with contextlib.closing(client):
        while True:
            try:
                client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="started", Body=b"x")  # it can write
                return client.delete_object(Bucket=BUCKET, Key="started")
            except (BotoCoreError, ClientError):
                if server.poll() is not None or time.monotonic() > until:
                    raise
                time.sleep(0.1)


def _options(port: int) -> dict[str, Any]:
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "region": "us-east-1",
    }
