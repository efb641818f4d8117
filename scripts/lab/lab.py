"""The lab: several hosts on one machine.

A host is a network namespace and a uts namespace: its own address, host name and
``/etc/hosts``. One more namespace is the storage, serving one directory over HTTP ranges
(nginx) and S3 (rclone behind nginx). All are joined by veth pairs to one bridge that lives
in a namespace of its own, so the machine's real network is neither used nor changed::

    fl-host1 eth0 ── h1 ┐
    fl-host2 eth0 ── h2 ┤ br0, in fl-bridge
    fl-storage eth0 ─ s ┘

Links are capped at both ends of the veth pair, so traffic is capped both ways. Neighbour
entries are permanent: a cut link swallows packets in silence, as an unplugged switch does,
and no sender is told "host unreachable".

The storage can answer as late as an object store: with a time to the first byte, a rate for each
connection, and 503 above a rate of requests (limits.py).

The namespaces and links are in network.py, the services in services.py. Only the standard
library is used. The entry points are the executable files beside this one.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import network
import slurm
from limits import LONGEST, SHORTEST, Limits, parse_connection_rate, parse_seconds
from network import (
    ETC_NETNS,
    MAX_HOSTS,
    NETNS_DIR,
    STORAGE,
    LabError,
    State,
    address_of,
    call,
    host_name,
    inside,
    show_rate,
)
from processes import end_processes, pids_in_namespaces, pids_of_run
from services import (
    BUCKET,
    CLIENT_ENV,
    DATA_DIR,
    HTTP_URL,
    LAB_DIR,
    NGINX_MODULES,
    SERVICES,
    STORAGE_ADDRESS,
    lab_env,
    refresh,
    start_services,
    wait_for_services,
)

PROJECT = Path(__file__).resolve().parents[2]
STATE = LAB_DIR / "state.json"
LOGS = LAB_DIR / "logs"


# ------------------------------------------------------------------------------------- up and down


def up(args: argparse.Namespace) -> int:
    need("nginx", *NGINX_MODULES, "rclone", "curl", "unshare", "hostname")
    share, link = args.per_host_storage_rate, args.host_rate
    if not 1 <= args.hosts <= MAX_HOSTS:
        raise LabError(f"1 to {MAX_HOSTS} hosts, not {args.hosts}")
    if share and link and share >= link:
        raise LabError("--per-host-storage-rate must be below --host-rate")
    if STATE.exists() or network.namespaces():
        raise LabError("a lab is up already (or half made); end it with scripts/lab/down")
    state: State = {
        "num_hosts": args.hosts,
        "host_rate": link,
        "storage_rate": args.storage_rate,
        "share_rate": share,
        "limits": asdict(Limits(args.latency, args.connection_rate, args.requests_rate)),
    }
    LAB_DIR.mkdir(parents=True, exist_ok=True)
    try:
        with STATE.open("x") as file:
            json.dump(state, file)
    except FileExistsError:
        raise LabError("another `up` is at work") from None
    try:
        with shared_folders():
            network.make_network(args.hosts)
        network.shape(state)
        wait_for_services(start_services(Limits(**state["limits"])))
    except BaseException:
        tear_down()
        raise
    print(summary(state))
    return 0


def summary(state: State) -> str:
    first, last = host_name(1), host_name(state["num_hosts"])
    lines = [
        f"hosts    {first} to {last}, {address_of(first)} to {address_of(last)}",
        f"links    host {show_rate(state['host_rate'])}, "
        f"storage {show_rate(state['storage_rate'])}, "
        f"storage per host {show_rate(state['share_rate'])}",
        f"storage  {STORAGE}, {STORAGE_ADDRESS}, serves {DATA_DIR / BUCKET}",
        f"answers  {Limits(**state['limits'])}",
        f"http     {HTTP_URL}/NAME",
        f"s3       s3://{BUCKET}/NAME",
        *(f"env      {key}={value}" for key, value in CLIENT_ENV.items()),
    ]
    return "\n".join(lines)


def down(args: argparse.Namespace) -> int:
    tear_down()
    return 0


def tear_down() -> None:
    """Remove whatever of the lab exists, in the order that lets a second try finish."""
    end_processes(pids_in_namespaces)
    for name in network.namespaces():
        call("ip", "netns", "delete", name)
    for directory in (*ETC_NETNS.glob(f"{network.PREFIX}*"), SERVICES, LOGS, slurm.SLURM, DATA_DIR):
        if directory.exists():
            shutil.rmtree(directory)
    with shared_folders():
        if network.is_mounted(NETNS_DIR) and not any(NETNS_DIR.iterdir()):
            call("umount", str(NETNS_DIR))
            NETNS_DIR.rmdir()
        STATE.unlink(missing_ok=True)
        for directory in (ETC_NETNS, LAB_DIR):
            with contextlib.suppress(OSError):  # not there, or not empty and so not ours
                directory.rmdir()


@contextlib.contextmanager
def shared_folders() -> Iterator[None]:
    """Keeps other labs from making or removing the folders that all labs share."""
    folder = os.open("/run", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


# --------------------------------------------------------------------------------------------- run


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
    processes: dict[str, subprocess.Popen[bytes]] = {}
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


def wait(processes: Mapping[str, subprocess.Popen[bytes]], timeout_s: float, grace_s: float) -> int:
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


def show_failure(processes: Mapping[str, subprocess.Popen[bytes]], logs: Path) -> None:
    """Say how each host ended, and show the end of what the hosts with log files said."""
    for name, process in processes.items():
        code = process.poll()
        say(f"{name} {'still runs' if code is None else f'ended with {exit_status(code)}'}")
        if (logs / name).exists():
            for line in (logs / name).read_text(errors="replace").splitlines()[-40:]:
                print(f"[{name}] {line}", file=sys.stderr)
    say(f"whole logs in {logs}")


# --------------------------------------------------------------------------- bytes, put, cut, heal


def count_bytes(args: argparse.Namespace) -> int:
    """Print what crossed each link since `up`, seen from the link's own end."""
    state = load_state()
    hosts = {
        name: network.counters(name)
        for name in (host_name(number) for number in range(1, state["num_hosts"] + 1))
    }
    storage = network.counters(STORAGE)
    counts = {"storage_tx": storage["tx"], "storage_rx": storage["rx"], "hosts": hosts}
    print(json.dumps(counts))
    return 0


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
    refresh(Path(args.name).parts[0])
    print(f"s3://{BUCKET}/{args.name}\n{HTTP_URL}/{args.name}")
    return 0


def cut(args: argparse.Namespace) -> int:
    """Swallow all packets of a host, both ways, or all between it and the storage, or those of most ports."""
    check_host(args.host, load_state(), storage_too=not (args.storage or args.but_port))
    if args.but_port:
        network.leave_open(args.host, args.but_port)
    else:
        (network.cut_off_storage if args.storage else network.cut_off)(args.host)
    return 0


def heal(args: argparse.Namespace) -> int:
    """Undo every cut of a host."""
    check_host(args.host, load_state(), storage_too=True)
    network.reconnect(args.host)
    return 0


# ------------------------------------------------------------------------------------ command line


def load_state() -> State:
    try:
        state: State = json.loads(STATE.read_text())
    except FileNotFoundError:
        raise LabError("no lab is up; start one with scripts/lab/up") from None
    return state


def check_host(name: str, state: State, storage_too: bool = False) -> None:
    names = [host_name(number) for number in range(1, state["num_hosts"] + 1)]
    if name not in names and not (storage_too and name == STORAGE):
        raise LabError(f"{name} is not a host here; hosts are {names[0]} to {names[-1]}")


def need(*tools: str) -> None:
    if os.geteuid() != 0:
        raise LabError("namespaces need root; run this as root")
    missing = [tool for tool in tools if not (os.path.exists(tool) if "/" in tool else shutil.which(tool))]
    if missing:
        raise LabError(f"missing: {', '.join(missing)}; run scripts/lab/setup")


def say(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr)


def rate(text: str) -> int:
    try:
        return network.parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="scripts/lab/", description="Several hosts on one machine.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, action: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, prog=f"scripts/lab/{name}")
        sub.set_defaults(action=action)
        return sub

    sub = add("up", up, "Start N hosts and a storage, their links capped at the rates given.")
    sub.add_argument("hosts", type=int, metavar="N", help=f"how many hosts, 1 to {MAX_HOSTS}")
    sub.add_argument(
        "--host-rate", type=rate, metavar="R", help="each host's link, e.g. 2gbit (else unshaped)"
    )
    sub.add_argument("--storage-rate", type=rate, metavar="R", help="the storage's link, shared by all hosts")
    sub.add_argument(
        "--per-host-storage-rate", type=rate, metavar="R", help="each host's own share of storage"
    )
    sub.add_argument(
        "--latency",
        type=parse_seconds,
        default=0.0,
        metavar="T",
        help=f"time to the first byte, evenly distributed from {SHORTEST:g} to {LONGEST:g} T: 50ms",
    )
    sub.add_argument(
        "--connection-rate",
        type=parse_connection_rate,
        default=0,
        metavar="R",
        help="rate of each answer, but not of uploads: 60MB/s",
    )
    sub.add_argument(
        "--requests-rate", type=int, default=0, metavar="N",
        help="requests a second of HTTP, and of S3, above which the storage answers 503",
    )  # fmt: skip

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
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--storage", action="store_true", help="only between it and the storage")
    which.add_argument(
        "--but-port", type=int, metavar="P", help="only what it sends to other hosts by TCP, except port P"
    )
    sub = add("heal", heal, "Undo every cut of a host.")
    sub.add_argument("host", metavar="HOST")

    text = "Start Slurm: a controller, and a node on each of the first N hosts."
    sub = add("slurm_up", lambda args: slurm.up(args.hosts, load_state()), text)
    sub.add_argument("hosts", type=int, metavar="N", help="how many nodes")
    add("slurm_down", lambda args: slurm.down(), "End Slurm and its jobs; the lab stays.")
    sub = add("slurm", lambda args: slurm.command(args.command), "Run sbatch, squeue, ... on the first host.")
    sub.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
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
        status: int = args.action(args)
    except LabError as error:
        say(str(error))
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
