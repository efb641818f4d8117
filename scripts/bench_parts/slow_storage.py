"""A storage on this machine that answers as late as an object store: nginx for files, or before SeaweedFS."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

from limits import Limits
from services import BUCKET, KEY, NGINX_MODULES, REGION, SECRET

_STARTED_WITHIN_S = 20.0
_CONF = """\
load_module {modules[0]};
load_module {modules[1]};
daemon off;
user root;
worker_processes 1;
pid {folder}/nginx.pid;
events {{ worker_connections 4096; }}
http {{
  log_format timed '$msec $request_time $server_port $status $body_bytes_sent $request_method $request_uri';
  access_log {folder}/access.log timed;
  client_body_temp_path {folder}/tmp-body;
  proxy_temp_path {folder}/tmp-proxy;
  fastcgi_temp_path {folder}/tmp-fastcgi;
  uwsgi_temp_path {folder}/tmp-uwsgi;
  scgi_temp_path {folder}/tmp-scgi;
  default_type application/octet-stream;
  keepalive_requests 1000000;
  tcp_nopush on;
  {zone}
{servers}}}
"""
_FILES = """\
  server {{
    listen 127.0.0.1:{port};
    root {served};
    sendfile on;
    autoindex on;
    autoindex_format json;
    {directives}
  }}
"""
_PROXY = """\
  upstream store {{ server 127.0.0.1:{store}; keepalive 256; }}
"""
_OBJECTS = """\
  server {{
    listen 127.0.0.1:{port};
    client_max_body_size 0;
    {directives}
    location / {{
      proxy_pass http://store;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $http_host;  # signed
      proxy_request_buffering off;
      proxy_max_temp_file_size 0;
      proxy_buffers 16 64k;
    }}
  }}
"""
_WEED_PORTS = (
    "master.port master.port.grpc volume.port volume.port.grpc filer.port filer.port.grpc s3.port.grpc"
)


@dataclass(frozen=True)
class Traffic:
    """The requests of a storage in some time, from its log.

    Attributes:
        requests: Number of them.
        refused: Those that got status 503.
        most_at_once: The most that were under way together.
        mean_at_once: The mean number under way, while any was.
        chain: The longest row of requests of which each began after the one before had ended.
    """

    requests: int
    refused: int
    most_at_once: int
    mean_at_once: float
    chain: int


@contextlib.contextmanager
def http_storage(folder: Path, served: Path, limits: Limits) -> Iterator[dict[str, Any]]:
    """Serves files twice, within limits and without; yields the ports and the log's path."""
    with _nginx(folder, _FILES, limits, served=served) as server:
        yield server


@contextlib.contextmanager
def s3_storage(folder: Path, limits: Limits) -> Iterator[dict[str, Any]]:
    """Runs an S3 store with a bucket, within limits and without; yields ports, and the path of the log."""
    with _weed(folder) as store, _nginx(folder, _OBJECTS, limits, store=store) as server:
        client = s3_client(store)
        until = time.monotonic() + _STARTED_WITHIN_S
        while True:
            try:
                client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="started", Body=b"x")  # it can write
                break
            except Exception:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
        yield server | {"store": store}


def s3_client(port: int, **settings: Any) -> Any:
    """Returns boto3's client of a server."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name=REGION,
        config=Config(s3={"addressing_style": "path"}, **settings),
    )


@contextlib.contextmanager
def _nginx(folder: Path, server: str, limits: Limits, **places: Any) -> Iterator[dict[str, Any]]:
    """Runs nginx with a server within limits, and one without."""
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if nginx is None or not all(Path(module).exists() for module in NGINX_MODULES):
        raise RuntimeError("nginx with Lua is missing: run scripts/lab/setup")
    slow, fast = free_ports(2)
    servers = [_PROXY.format_map(places)] if server == _OBJECTS else []
    for port, kept in ((slow, limits), (fast, Limits())):
        servers.append(server.format(port=port, directives=kept.directives(), **places))
    conf, log = folder / "nginx.conf", folder / "nginx.log"
    conf.write_text(
        _CONF.format(folder=folder, modules=NGINX_MODULES, zone=limits.zone(), servers="".join(servers))
    )
    with _running([nginx, "-c", str(conf), "-e", str(log)], log) as process:
        for port in (slow, fast):
            _wait_for(port, process, log)
        yield {"slow": slow, "fast": fast, "log": str(folder / "access.log")}


@contextlib.contextmanager
def _weed(folder: Path) -> Iterator[int]:
    """Runs SeaweedFS, its data in a folder; yields the port of its S3."""
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        raise RuntimeError(f"{weed} is missing: run scripts/setup")
    data = folder / "store"
    data.mkdir()
    identity = {"name": "lab", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (data / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = _WEED_PORTS.split()
    port, *others = free_ports(1 + len(ports))
    command = [str(weed), f"-logdir={data}", "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-s3", f"-s3.config={data / 's3.json'}", f"-s3.port={port}", "-s3.port.iceberg=0"]
    command += [
        "-s3.port.lance=0",
        "-master.telemetry=false",
        "-volume.max=0",
        "-master.volumeSizeLimitMB=1024",
    ]
    command += [f"-{name}={free}" for name, free in zip(ports, others, strict=True)]
    log = folder / "weed.log"
    try:
        with _running(command, log) as process:
            _wait_for(port, process, log)
            yield port
    finally:
        for free in (port, *others):
            for left in Path("/tmp").glob(f"seaweedfs-*-{free}.sock"):
                left.unlink()


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:  # SeaweedFS takes its time
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _STARTED_WITHIN_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it does not start:\n{log.read_text()[-2000:]}") from None
            time.sleep(0.05)


def traffic(lines: list[str]) -> Traffic:
    """Counts the requests of some lines of the log."""
    spans, refused = [], 0
    for line in lines:
        end, duration, _, status, *_ = line.split()
        spans.append((float(end) - float(duration), float(end)))
        refused += status == "503"
    steps = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    now, most, busy_s, last = 0, 0, 0.0, 0.0
    for at, step in steps:
        busy_s += at - last if now else 0.0
        now, last = now + step, at
        most = max(most, now)
    chain, done = 0, 0.0
    for begin, end in sorted(spans, key=lambda span: span[1]):
        if begin >= done:
            chain, done = chain + 1, end
    under_way_s = sum(end - begin for begin, end in spans)
    return Traffic(len(spans), refused, most, under_way_s / busy_s if busy_s else 0.0, chain)
