"""The lab: several hosts on one machine.

A host is a network namespace and a uts namespace: its own address, host name and
``/etc/hosts``. One more namespace is the storage, serving one directory over HTTP ranges
(nginx) and S3 (rclone behind nginx, for a log of both and for the status of a range). All are joined by veth pairs to one bridge that lives in a
namespace of its own, so the machine's real network is neither used nor changed::

    fl-host1 eth0 ── h1 ┐
    fl-host2 eth0 ── h2 ┤ br0, in fl-bridge
    fl-storage eth0 ─ s ┘

Links are capped at both ends of the veth pair, so traffic is capped both ways. Neighbour
entries are permanent: a cut link swallows packets in silence, as an unplugged switch does,
and no sender is told "host unreachable".

Only the standard library is used. The entry points are the files beside this one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

PROJECT = Path(__file__).resolve().parents[2]
OWN_DIR = os.environ.get("FASTLOAD_LAB_DIR")
LAB_DIR = Path(OWN_DIR or "/run/fastload-lab")
DATA_DIR = LAB_DIR / "data" if OWN_DIR else Path("/var/tmp/fastload-lab")  # /run may be small
STATE = LAB_DIR / "state.json"
SERVICES = LAB_DIR / "services"
LOGS = LAB_DIR / "logs"
NETNS_DIR = Path("/run/netns")
ETC_NETNS = Path("/etc/netns")

BRIDGE, STORAGE = "fl-bridge", "fl-storage"
BRIDGE_MAC = "02:4c:00:00:00:00"
STORAGE_NUMBER = 254
STORAGE_ADDRESS = f"10.77.0.{STORAGE_NUMBER}"
BUCKET = "lab"
HTTP_URL = f"http://{STORAGE_ADDRESS}:8080"
S3_URL = f"http://{STORAGE_ADDRESS}:9000"
KEY, SECRET, REGION = "labkey", "labsecret", "us-east-1"
SIGNED = ["--aws-sigv4", f"aws:amz:{REGION}:s3", "--user", f"{KEY}:{SECRET}"]  # for curl
RCLONE = "127.0.0.1:9001"  # inside the storage only, as is its remote control
RCLONE_CONTROL = "127.0.0.1:9002"
MAX_HOSTS = 200

START_DEADLINE_S = 20.0
TERMINATE_S = 5.0
BURST_S = 0.005  # what a capped link lets through at once, within the two bounds below
BURST_BYTES = (128 << 10, 1 << 20)
QUEUE_S = 0.05  # what a capped link queues before it drops

CLIENT_ENV = {
    "AWS_ENDPOINT_URL": S3_URL,
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": REGION,
    "AWS_ALLOW_HTTP": "true",
}

NGINX_CONF = """\
load_module /usr/lib/nginx/modules/ndk_http_module.so;
load_module /usr/lib/nginx/modules/ngx_http_lua_module.so;
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
  server {{
    listen {address}:8080;
    root {served};
    sendfile on;
    autoindex on;
    autoindex_format json;
  }}
  upstream rclone {{ server {rclone}; keepalive 256; }}
  server {{
    listen {address}:9000;
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


class LabError(Exception):
    """Something the person at the keyboard can put right."""


# ---------------------------------------------------------------- commands and namespaces


def call(*command: str, stdin: str | None = None) -> str:
    """Run a command to its end and return its stdout; its stderr is the error."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def ip(namespace: str, *commands: str) -> None:
    """Run `ip` commands in a namespace, all in one process."""
    call("ip", "-n", namespace, "-batch", "-", stdin="\n".join(commands) + "\n")


def tc(namespace: str, *commands: str) -> None:
    """Run `tc` commands in a namespace, all in one process."""
    if commands:
        call("tc", "-n", namespace, "-batch", "-", stdin="\n".join(commands) + "\n")


def inside(name: str) -> list[str]:
    """The words before a command that put it inside a host: network, host name, /etc/hosts.

    Every word replaces the one before it (exec), so the pid stays the command's own.
    """
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
    return ["ip", "netns", "exec", name, *named]


def host_name(number: int) -> str:
    return f"fl-host{number}"


def number_of(name: str) -> int:
    return STORAGE_NUMBER if name == STORAGE else int(name.removeprefix("fl-host"))


def address_of(name: str) -> str:
    return f"10.77.0.{number_of(name)}"


def mac_of(name: str) -> str:
    return f"02:4c:00:00:00:{number_of(name):02x}"


def port_of(name: str) -> str:
    """The bridge's end of a host's (or the storage's) veth pair."""
    return "s" if name == STORAGE else f"h{number_of(name)}"


def is_mounted(path: Path) -> bool:
    """Whether something is mounted there, a bind of the same file system included."""
    return any(line.split()[4] == str(path) for line in Path("/proc/self/mountinfo").open())


def namespaces() -> list[str]:
    """The lab's namespaces that exist now, whoever made them."""
    names = [path.name for path in NETNS_DIR.glob("fl-*")] if NETNS_DIR.is_dir() else []
    return sorted(name for name in names if re.fullmatch(r"fl-(host\d+|bridge|storage)", name))


# -------------------------------------------------------------------------------- processes


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie waiting for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def end_processes(find: Callable[[], Iterable[int]]) -> None:
    """Ask every process that `find` names to end, then make it; until none is left."""
    started = time.monotonic()
    asked: set[int] = set()
    while pids := [pid for pid in find() if pid != os.getpid() and is_running(pid)]:
        waited = time.monotonic() - started
        if waited > 2 * TERMINATE_S:
            raise LabError(f"processes that will not end: {pids}")
        for pid in pids:
            if waited > TERMINATE_S or pid not in asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if waited > TERMINATE_S else signal.SIGTERM)
        asked.update(pids)
        time.sleep(0.05)


def pids_in_namespaces() -> list[int]:
    return [int(pid) for name in namespaces() for pid in call("ip", "netns", "pids", name).split()]


def pids_of_run(run_id: str) -> Iterator[int]:
    """Every process that inherited a run's mark, however many sessions and forks away."""
    mark = f"FASTLOAD_LAB_RUN={run_id}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


# ------------------------------------------------------------------------------------ rates


def parse_rate(text: str) -> int:
    """A rate in tc's syntax (400mbit, 2gbit, 50mbps) as bits per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(i?)(bit|bps)?", text.strip().lower())
    if not match or (match[3] and not match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 400mbit or 2gbit")
    scale = (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")
    bits = round(float(match[1]) * scale * (8 if match[4] == "bps" else 1))
    if bits < 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is below the smallest rate, 1mbit")
    return bits


def show_rate(bits: int | None) -> str:
    return f"{bits / 1e6:g} Mbit/s" if bits else "unshaped"


def burst(rate: int) -> int:
    """Bytes that a link may send at once: small beside any transfer worth timing."""
    smallest, largest = BURST_BYTES
    return min(max(round(BURST_S * rate / 8), smallest), largest)


def tbf(device: str, rate: int | None) -> list[str]:
    """tc: cap all that leaves a device."""
    if rate is None:
        return []
    shape = f"tbf rate {rate}bit burst {burst(rate)} latency {QUEUE_S * 1000:g}ms"
    return [f"qdisc replace dev {device} root {shape}"]


def htb(rate: int, ceiling: int) -> str:
    bursts = f"burst {burst(rate)} cburst {burst(ceiling)} quantum 200000"
    return f"rate {rate}bit ceil {ceiling}bit {bursts}"


def htb_class(parent: str, minor: int, rate: int, ceiling: int) -> list[str]:
    """tc: one capped class of eth0 with a queue as short as tbf's."""
    limit = burst(ceiling) + round(QUEUE_S * ceiling / 8)
    return [
        f"class add dev eth0 parent {parent} classid 1:{minor:x} htb {htb(rate, ceiling)}",
        f"qdisc add dev eth0 parent 1:{minor:x} handle {minor + 16:x}: bfifo limit {limit}",
    ]


def htb_root(total: int | None, default: int) -> tuple[list[str], str]:
    """tc: an htb root on eth0, and where its classes hang (below the total, if there is one)."""
    commands = [f"qdisc replace dev eth0 root handle 1: htb default {default:x}"]
    if total is None:
        return commands, "1:"
    commands.append(f"class add dev eth0 parent 1: classid 1:1 htb {htb(total, total)}")
    return commands, "1:1"


def to_class(name: str, minor: int) -> str:
    match = f"u32 match ip dst {address_of(name)}/32"
    return f"filter add dev eth0 parent 1: protocol ip prio 1 {match} flowid 1:{minor:x}"


def shape(state: Mapping) -> None:
    """Cap the links as asked: tbf everywhere, htb where each host has a share of storage.

    A share is a class for the storage's address at the host and a class for the host's
    address at the storage. Storage traffic still counts against the host's own link, as
    on a machine with one network card.
    """
    link, total, share = (state[key] for key in ("host_rate", "storage_rate", "share_rate"))
    hosts = [host_name(number) for number in range(1, state["num_hosts"] + 1)]
    for name in hosts:
        tc(BRIDGE, *tbf(port_of(name), link))
        if share is None:
            tc(name, *tbf("eth0", link))
        else:
            commands, parent = htb_root(link, 2 if link else 0)
            if link:
                commands += htb_class(parent, 2, link - share, link)
            commands += [*htb_class(parent, 3, share, share), to_class(STORAGE, 3)]
            tc(name, *commands)
    tc(BRIDGE, *tbf(port_of(STORAGE), total))
    if share is None:
        tc(STORAGE, *tbf("eth0", total))
    else:
        commands, parent = htb_root(total, 0)
        sure = min(share, total // len(hosts)) if total else share
        for name in hosts:
            minor = number_of(name) + 1
            commands += [*htb_class(parent, minor, sure, share), to_class(name, minor)]
        tc(STORAGE, *commands)


# ----------------------------------------------------------------------------------- up


def up(args: argparse.Namespace) -> int:
    need("nginx", "rclone", "curl", "unshare", "hostname")
    share, link = args.per_host_storage_rate, args.host_rate
    if not 1 <= args.hosts <= MAX_HOSTS:
        raise LabError(f"1 to {MAX_HOSTS} hosts, not {args.hosts}")
    if share and link and share >= link:
        raise LabError("--per-host-storage-rate must be below --host-rate")
    if STATE.exists() or namespaces():
        raise LabError("a lab is up already (or half made); end it with scripts/lab/down")
    state = {
        "num_hosts": args.hosts,
        "host_rate": link,
        "storage_rate": args.storage_rate,
        "share_rate": share,
        "made_netns_mount": not is_mounted(NETNS_DIR),
        "pids": {},
    }
    LAB_DIR.mkdir(parents=True, exist_ok=True)
    try:
        with STATE.open("x") as file:
            json.dump(state, file)
    except FileExistsError:
        raise LabError("another `up` is at work") from None
    try:
        make_network(args.hosts)
        shape(state)
        state["pids"] = start_services()
        STATE.write_text(json.dumps(state))
        wait_for_services(state["pids"])
    except BaseException:
        tear_down()
        raise
    print(summary(state))
    return 0


def make_network(num_hosts: int) -> None:
    """Make the namespaces, the bridge, the links, the addresses and the host files."""
    names = [*(host_name(number) for number in range(1, num_hosts + 1)), STORAGE]
    # torch looks its peers up by their mapped addresses, to name them in its messages.
    pairs = ((address_of(name), name) for name in names)
    lines = (f"{address} {name}\n::ffff:{address} v6.{name}\n" for address, name in pairs)
    hosts_file = "127.0.0.1 localhost\n" + "".join(lines)
    for name in [BRIDGE, *names]:
        call("ip", "netns", "add", name)
        quiet = "net.ipv4.ip_forward=0 net.ipv6.conf.all.disable_ipv6=1"
        settings = [f"/proc/sys/{pair.replace('.', '/')}".split("=") for pair in quiet.split()]
        script = "".join(f"echo {value} >{path};" for path, value in settings)
        call("ip", "netns", "exec", name, "sh", "-c", script)
    ip(
        BRIDGE,
        f"link add br0 address {BRIDGE_MAC} type bridge stp_state 0 mcast_snooping 0",
        "link set br0 up",
    )
    for name in names:
        (ETC_NETNS / name).mkdir(parents=True)
        (ETC_NETNS / name / "hosts").write_text(hosts_file)
        ip(
            BRIDGE,
            f"link add {port_of(name)} type veth peer name eth0 address {mac_of(name)} netns {name}",
            f"link set {port_of(name)} master br0 up",
        )
        others = [other for other in names if other != name]
        ip(
            name,
            "link set lo up",
            f"address add {address_of(name)}/24 dev eth0",
            "link set eth0 up",
            *(neighbour(other, mac_of(other)) for other in others),
        )


def neighbour(name: str, mac: str) -> str:
    """ip: where frames for a host go, for good: no ARP, so no answer can be missed."""
    return f"neighbour replace {address_of(name)} lladdr {mac} dev eth0 nud permanent"


def start_services() -> dict[str, int]:
    """Start nginx and rclone in the storage; they end with `down`."""
    served = DATA_DIR / BUCKET
    for directory in (SERVICES, LOGS, served):
        directory.mkdir(parents=True, exist_ok=True)
    conf = SERVICES / "nginx.conf"
    where = {"services": SERVICES, "served": served, "address": STORAGE_ADDRESS, "rclone": RCLONE}
    conf.write_text(NGINX_CONF.format_map(where))
    nginx = ["nginx", "-c", str(conf), "-e", str(SERVICES / "nginx.log")]
    rclone = ["rclone", "serve", "s3", str(DATA_DIR), "--config", "", "--addr", RCLONE]
    rclone += ["--auth-key", f"{KEY},{SECRET}"]
    rclone += ["--vfs-cache-mode", "off", "--no-checksum", "--dir-cache-time", "24h"]
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


def summary(state: Mapping) -> str:
    last = state["num_hosts"]
    lines = [
        f"hosts    {host_name(1)} to {host_name(last)}, 10.77.0.1 to 10.77.0.{last}",
        f"links    host {show_rate(state['host_rate'])}, storage "
        f"{show_rate(state['storage_rate'])}, storage per host {show_rate(state['share_rate'])}",
        f"storage  {STORAGE}, {STORAGE_ADDRESS}, serves {DATA_DIR / BUCKET}",
        f"http     {HTTP_URL}/NAME",
        f"s3       s3://{BUCKET}/NAME",
        *(f"env      {key}={value}" for key, value in CLIENT_ENV.items()),
    ]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------- down


def down(args: argparse.Namespace) -> int:
    tear_down()
    return 0


def tear_down() -> None:
    """Remove whatever of the lab exists, in the order that lets a second try finish."""
    made_netns_mount = False
    with contextlib.suppress(OSError, ValueError):
        made_netns_mount = json.loads(STATE.read_text())["made_netns_mount"]
    end_processes(pids_in_namespaces)
    for name in namespaces():
        call("ip", "netns", "delete", name)
    for directory in (*ETC_NETNS.glob("fl-*"), SERVICES, LOGS, DATA_DIR):
        if directory.exists():
            shutil.rmtree(directory)
    if made_netns_mount and is_mounted(NETNS_DIR) and not any(NETNS_DIR.iterdir()):
        call("umount", str(NETNS_DIR))
        NETNS_DIR.rmdir()
    STATE.unlink(missing_ok=True)
    for directory in (ETC_NETNS, LAB_DIR):
        with contextlib.suppress(OSError):  # not there, or not empty and so not ours
            directory.rmdir()


# ------------------------------------------------------------------------------------ run


def run(args: argparse.Namespace) -> int:
    """Run a command on several hosts; the first host's output goes through untouched."""
    state = load_state()
    names = args.on or [host_name(n) for n in range(1, (args.hosts or state["num_hosts"]) + 1)]
    for name in names:
        check_host(name, state)
    if not args.plain:
        need("torchrun")
    run_id = uuid.uuid4().hex[:8]
    logs = LOGS / run_id
    logs.mkdir(parents=True)
    port = random.randint(20000, 29999)  # below the range that outgoing connections take
    processes: dict[str, subprocess.Popen] = {}
    try:
        for rank, name in enumerate(names):
            command = args.command if args.plain else torchrun(args, names, rank, port)
            # If this process is killed outright, the launchers are told and end their ranks.
            words = ["setpriv", "--pdeathsig", "TERM", *inside(name), *command]
            with contextlib.ExitStack() as stack:
                log = None if rank == 0 else stack.enter_context((logs / name).open("wb"))
                processes[name] = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=lab_env() | {"FASTLOAD_LAB_RUN": run_id},
                )
        status = wait(processes, args.timeout, args.grace)
        if status != 0:
            show_failure(processes, logs)
    finally:
        end_processes(lambda: pids_of_run(run_id))
    if status == 0 and not args.keep_logs:
        shutil.rmtree(logs)
    return status


def torchrun(args: argparse.Namespace, names: Sequence[str], rank: int, port: int) -> list[str]:
    return [
        "torchrun",
        f"--nnodes={len(names)}",
        f"--node-rank={rank}",
        f"--nproc-per-node={args.nproc}",
        f"--master-addr={address_of(names[0])}",
        f"--master-port={port}",
        f"--local-addr={address_of(names[rank])}",
        "--no-python",
        *args.command,
    ]


def wait(processes: Mapping[str, subprocess.Popen], timeout_s: float, grace_s: float) -> int:
    """Wait for all; once one fails, the others have the grace time to end by themselves."""
    deadline, status = time.monotonic() + timeout_s, 0
    waiting = dict(processes)
    while waiting:
        for name, process in list(waiting.items()):
            if process.poll() is None:
                continue
            del waiting[name]
            if process.returncode != 0 and status == 0:
                status = exit_status(process.returncode)
                deadline = min(deadline, time.monotonic() + grace_s)
        if waiting and time.monotonic() > deadline:
            if status == 0:
                say(f"not done after {timeout_s:g} s: {', '.join(waiting)}")
            return status or 124
        time.sleep(0.02)
    return status


def exit_status(returncode: int) -> int:
    """What a shell calls a process's end: a signal is 128 and its number."""
    return returncode if returncode >= 0 else 128 - returncode


def show_failure(processes: Mapping[str, subprocess.Popen], logs: Path) -> None:
    """Say how each host ended, and show the end of what the hosts with log files said."""
    for name, process in processes.items():
        code = process.poll()
        say(f"{name} {'still runs' if code is None else f'ended with {exit_status(code)}'}")
        if (logs / name).exists():
            text = (logs / name).read_text(errors="replace").splitlines()[-40:]
            print("\n".join(f"[{name}] {line}" for line in text), file=sys.stderr)
    say(f"whole logs in {logs}")


def lab_env() -> dict[str, str]:
    """The environment inside the lab: the storage's keys, the project's tools, no proxies."""
    env = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    env |= CLIENT_ENV
    env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = "eth0"
    env.setdefault("OMP_NUM_THREADS", "1")
    return env


# ----------------------------------------------------------------------- bytes, put, cut, heal


def count_bytes(args: argparse.Namespace) -> int:
    """Print what crossed each link since `up`, seen from the link's own end."""
    state = load_state()
    hosts = {
        name: counters(name)
        for name in (host_name(number) for number in range(1, state["num_hosts"] + 1))
    }
    storage = counters(STORAGE)
    counts = {"storage_tx": storage["tx"], "storage_rx": storage["rx"], "hosts": hosts}
    print(json.dumps(counts))
    return 0


def counters(name: str) -> dict[str, int]:
    shown = call("ip", "-n", name, "-json", "-stats", "link", "show", "dev", "eth0")
    stats = json.loads(shown)[0]["stats64"]
    return {"tx": stats["tx"]["bytes"], "rx": stats["rx"]["bytes"]}


def put(args: argparse.Namespace) -> int:
    """Serve a file or a directory under a name, ready to be timed."""
    load_state()
    source, served = args.source.resolve(), DATA_DIR / BUCKET
    target = served / args.name
    if ".." in Path(args.name).parts or target == served or served not in target.parents:
        raise LabError(f"{args.name!r} does not name anything below the bucket")
    if not source.exists():
        raise LabError(f"{args.source} does not exist")
    if target.exists():
        raise LabError(f"{args.name} is served already; take another name")
    files = sorted(path for path in source.rglob("*") if path.is_file())
    pairs = [(path, target / path.relative_to(source)) for path in files]
    for path, link in [(source, target)] if source.is_file() else pairs:
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path.resolve(), link)
        except OSError:  # another file system
            shutil.copyfile(path, link)
    first = BUCKET + "/" + Path(args.name).parts[0]
    on_storage("--fail", "-X", "POST", f"http://{RCLONE_CONTROL}/vfs/forget?dir={quote(first)}")
    head_all(served)
    print(f"s3://{BUCKET}/{args.name}\n{HTTP_URL}/{args.name}")
    return 0


def head_all(served: Path) -> None:
    """HEAD every object: rclone hashes an object at its first access, which is slow."""
    keys = [str(path.relative_to(served)) for path in served.rglob("*") if path.is_file()]
    urls = "".join(f'url = "{S3_URL}/{BUCKET}/{quote(key)}"\n' for key in sorted(keys))
    on_storage("--fail", "--fail-early", "--head", *SIGNED, "--config", "-", stdin=urls)


def on_storage(*options: str, stdin: str | None = None) -> None:
    """curl from inside the storage, where nothing crosses the storage link."""
    curl = ["curl", "-q", "--silent", "--show-error", *options]
    call("ip", "netns", "exec", STORAGE, *curl, stdin=stdin)


def cut(args: argparse.Namespace) -> int:
    """Swallow all packets of a host, or all between it and the storage, both ways."""
    check_host(args.host, load_state(), storage_too=not args.storage)
    if args.storage:
        # The bridge itself takes the frames, and has nowhere to send them.
        ip(args.host, neighbour(STORAGE, BRIDGE_MAC))
        ip(STORAGE, neighbour(args.host, BRIDGE_MAC))
    else:
        ip(BRIDGE, f"link set {port_of(args.host)} nomaster")
    return 0


def heal(args: argparse.Namespace) -> int:
    """Undo every cut of a host."""
    check_host(args.host, load_state(), storage_too=True)
    ip(BRIDGE, f"link set {port_of(args.host)} master br0")
    if args.host != STORAGE:
        ip(args.host, neighbour(STORAGE, mac_of(STORAGE)))
        ip(STORAGE, neighbour(args.host, mac_of(args.host)))
    return 0


# --------------------------------------------------------------------------- command line


def load_state() -> dict:
    try:
        return json.loads(STATE.read_text())
    except FileNotFoundError:
        raise LabError("no lab is up; start one with scripts/lab/up") from None


def check_host(name: str, state: Mapping, storage_too: bool = False) -> None:
    names = [host_name(number) for number in range(1, state["num_hosts"] + 1)]
    if name not in names and not (storage_too and name == STORAGE):
        raise LabError(f"{name} is not a host here; hosts are {names[0]} to {names[-1]}")


def need(*tools: str) -> None:
    if os.geteuid() != 0:
        raise LabError("namespaces need root; run this as root")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        raise LabError(f"missing: {', '.join(missing)}; run scripts/lab/setup")


def say(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="scripts/lab/", description="Several hosts on one machine.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, action: Callable, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, prog=f"scripts/lab/{name}")
        sub.set_defaults(action=action)
        return sub

    sub = add("up", up, "Start N hosts and a storage, their links capped at the rates given.")
    sub.add_argument("hosts", type=int, metavar="N", help=f"how many hosts, 1 to {MAX_HOSTS}")
    rate = {"type": parse_rate, "metavar": "R"}
    sub.add_argument("--host-rate", **rate, help="each host's link, e.g. 2gbit (else unshaped)")
    sub.add_argument("--storage-rate", **rate, help="the storage's link, shared by all hosts")
    sub.add_argument("--per-host-storage-rate", **rate, help="each host's own share of storage")

    add("down", down, "End the lab: processes, namespaces, served data and state.")

    sub = add("run", run, "Run a command on the hosts, by torchrun: one rank per host, or K.")
    sub.add_argument("--nproc", type=int, default=1, metavar="K", help="ranks per host")
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--hosts", type=int, metavar="M", help="the first M hosts only")
    which.add_argument("--on", nargs="+", metavar="HOST", help="these hosts only")
    sub.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds (600)")
    sub.add_argument(
        "--grace", type=float, default=30, metavar="S",
        help="seconds the others have to end by themselves once a host failed (30)",
    )  # fmt: skip
    sub.add_argument("--plain", action="store_true", help="once per host, without torchrun")
    sub.add_argument("--keep-logs", action="store_true", help="keep log files of a good run")
    sub.add_argument("command", nargs="+", metavar="COMMAND", help="after --")

    add("bytes", count_bytes, "Print as JSON the bytes that crossed each link since `up`.")

    sub = add("put", put, "Serve a file or directory as NAME, by hard link or copy.")
    sub.add_argument("source", type=Path, metavar="DIR_OR_FILE")
    sub.add_argument("name", metavar="NAME")

    sub = add("cut", cut, "Cut a host off, silently: all its packets, or those of storage.")
    sub.add_argument("host", metavar="HOST", help=f"{host_name(1)}, …, or {STORAGE}")
    sub.add_argument("--storage", action="store_true", help="only between it and the storage")
    sub = add("heal", heal, "Undo every cut of a host.")
    sub.add_argument("host", metavar="HOST")
    return top


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    bins = [Path(os.environ[key]) / "bin" for key in ("VIRTUAL_ENV",) if key in os.environ]
    paths = [*bins, PROJECT / ".venv" / "bin", os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]
    os.environ["PATH"] = os.pathsep.join(map(str, paths))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        need("ip", "tc")
        return args.action(args)
    except LabError as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
