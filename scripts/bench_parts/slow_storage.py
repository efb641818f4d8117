"""A storage on this machine that answers as slowly as an object store does: nginx in front of files."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

from limits import Limits
from services import NGINX_MODULES

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
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if nginx is None or not all(Path(module).exists() for module in NGINX_MODULES):
        raise RuntimeError("nginx with Lua is missing: run scripts/lab/setup")
    slow, fast = free_ports(2)
    servers = (
        _FILES.format(port=port, served=served, directives=kept.directives())
        for port, kept in ((slow, limits), (fast, Limits()))
    )
    conf = folder / "nginx.conf"
    conf.write_text(
        _CONF.format(folder=folder, modules=NGINX_MODULES, zone=limits.zone(), servers="".join(servers))
    )
    with (folder / "nginx.log").open("wb") as log:
        server = subprocess.Popen([nginx, "-c", conf, "-e", folder / "nginx.log"], stdout=log, stderr=log)
    try:
        for port in (slow, fast):
            _wait_for(port, server, folder / "nginx.log")
        yield {"slow": slow, "fast": fast, "log": str(folder / "access.log")}
    finally:
        server.terminate()
        server.wait()


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
                raise RuntimeError(f"nginx does not start:\n{log.read_text()[-2000:]}") from None
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
