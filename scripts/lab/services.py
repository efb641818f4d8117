"""The lab's storage services, HTTP and S3, and the environment of their clients. See lab.py."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from limits import Limits
from network import LETTER, STORAGE, LabError, address_of, call, host_name, inside
from processes import is_running

OWN_DIR = os.environ.get("FASTLOAD_LAB_DIR")
NAME = f"fastload{LETTER}-lab"
LAB_DIR = Path(OWN_DIR or f"/run/{NAME}").absolute()
DATA_DIR = LAB_DIR / "data" if OWN_DIR else Path(f"/var/tmp/{NAME}")  # /run may be small
SERVICES = LAB_DIR / "services"

STORAGE_ADDRESS = address_of(STORAGE)
BUCKET = "lab"
HTTP_URL = f"http://{STORAGE_ADDRESS}:8080"
S3_URL = f"http://{STORAGE_ADDRESS}:9000"
KEY, SECRET, REGION = "labkey", "labsecret", "us-east-1"
SIGNED = ["--aws-sigv4", f"aws:amz:{REGION}:s3", "--user", f"{KEY}:{SECRET}"]  # for curl
RCLONE = "127.0.0.1:9001"  # inside the storage only, as is its remote control
RCLONE_CONTROL = "127.0.0.1:9002"
START_DEADLINE_S = 20.0

CLIENT_ENV = {
    "AWS_ENDPOINT_URL": S3_URL,
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": REGION,
    "AWS_ALLOW_HTTP": "true",
}

NGINX_MODULES = [f"/usr/lib/nginx/modules/{name}.so" for name in ("ndk_http_module", "ngx_http_lua_module")]

NGINX_CONF = """\
load_module {modules[0]};
load_module {modules[1]};
daemon off;
user root;
worker_processes 1;
pid {services}/nginx.pid;
error_log {services}/nginx.log;
events {{ worker_connections 4096; }}
http {{
  log_format lab '$remote_addr $server_port $request_method $request_uri "$http_range" '
                 '$status $body_bytes_sent';
  access_log {services}/access.log lab;
  client_body_temp_path {services}/tmp-body;
  proxy_temp_path {services}/tmp-proxy;
  fastcgi_temp_path {services}/tmp-fastcgi;
  uwsgi_temp_path {services}/tmp-uwsgi;
  scgi_temp_path {services}/tmp-scgi;
  default_type application/octet-stream;
  keepalive_requests 1000000;
  tcp_nopush on;
  {zone}
  server {{
    listen {address}:8080;
    {directives}
    root {served};
    sendfile on;
    autoindex on;
    autoindex_format json;
  }}
  upstream rclone {{ server {rclone}; keepalive 256; }}
  server {{
    listen {address}:9000;
    {directives}
    client_max_body_size 0;
    location / {{
      proxy_pass http://rclone;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $http_host;  # signed
      proxy_request_buffering off;
      proxy_max_temp_file_size 0;
      proxy_buffers 16 64k;
      # rclone answers a range with 200; S3 says 206, and some clients insist.
      header_filter_by_lua_block {{
        if ngx.status == 200 and ngx.header["Content-Range"] then ngx.status = 206 end
      }}
    }}
  }}
}}
"""


def start_services(limits: Limits) -> dict[str, int]:
    """Start nginx, which answers within limits, and rclone in the storage; they end with `down`."""
    served = DATA_DIR / BUCKET
    for directory in (SERVICES, served):
        directory.mkdir(parents=True, exist_ok=True)
    conf = SERVICES / "nginx.conf"
    where = {"services": SERVICES, "served": served, "address": STORAGE_ADDRESS, "rclone": RCLONE}
    text = {"modules": NGINX_MODULES, "zone": limits.zone(), "directives": limits.directives()}
    conf.write_text(NGINX_CONF.format_map(where | text))
    nginx = ["nginx", "-c", str(conf), "-e", str(SERVICES / "nginx.log")]
    rclone = ["rclone", "serve", "s3", str(DATA_DIR), "--config", "", "--addr", RCLONE]
    rclone += ["--auth-key", f"{KEY},{SECRET}"]
    rclone += ["--vfs-cache-mode", "off", "--no-checksum", "--dir-cache-time", "24h"]
    # Parts of an upload are taken in any order, as S3 does, and not only within a buffer.
    rclone += ["--multipart-streaming-buffer-limit", "0", "--multipart-streaming-buffer-total", "0"]
    rclone += ["--rc", "--rc-no-auth", "--rc-addr", RCLONE_CONTROL]
    return {"nginx": start(STORAGE, nginx), "rclone": start(STORAGE, rclone)}


def start(name: str, command: Sequence[str]) -> int:
    """Start a service inside a namespace, its output in a file; return its pid."""
    with (SERVICES / f"{command[0]}.log").open("ab") as log:
        process = subprocess.Popen(
            [*inside(name), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=lab_env(),
        )
    return process.pid


def wait_for_services(pids: Mapping[str, int]) -> None:
    """Return when both services answer host 1 over the network."""
    deadline = time.monotonic() + START_DEADLINE_S
    for service, url in (("nginx", HTTP_URL), ("rclone", S3_URL)):
        curl = ["curl", "-q", "-sfo", os.devnull, "-m", "2", *SIGNED, url]
        probe = ["ip", "netns", "exec", host_name(1), *curl]
        while subprocess.run(probe, check=False, env=lab_env()).returncode != 0:
            if time.monotonic() > deadline or not is_running(pids[service]):
                log = (SERVICES / f"{service}.log").read_text(errors="replace")[-2000:]
                raise LabError(f"{service} does not answer at {url}:\n{log}")
            time.sleep(0.05)


def lab_env() -> dict[str, str]:
    """The environment inside the lab: the storage's keys, the project's tools, no proxies."""
    env = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    env |= CLIENT_ENV
    env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = "eth0"
    env.setdefault("OMP_NUM_THREADS", "1")
    return env


def refresh(first: str) -> None:
    """Let rclone see what is new below one name of the bucket, and hash it.

    rclone hashes an object at its first access, which is slow: a HEAD of every object now
    keeps that out of whatever is timed later.
    """
    forget = f"http://{RCLONE_CONTROL}/vfs/forget?dir={quote(f'{BUCKET}/{first}')}"
    on_storage("--fail", "-X", "POST", forget)
    served = DATA_DIR / BUCKET
    keys = sorted(str(path.relative_to(served)) for path in served.rglob("*") if path.is_file())
    urls = "".join(f'url = "http://{RCLONE}/{BUCKET}/{quote(key)}"\n' for key in keys)
    on_storage("--fail", "--fail-early", "--head", *SIGNED, "--config", "-", stdin=urls)


def on_storage(*options: str, stdin: str | None = None) -> None:
    """curl from inside the storage, where nothing crosses the storage link."""
    curl = ["curl", "-q", "--silent", "--show-error", *options]
    call("ip", "netns", "exec", STORAGE, *curl, stdin=stdin)
