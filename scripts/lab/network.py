"""The lab's network: namespaces, links, rates, cuts. See lab.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

NETNS_DIR = Path("/run/netns")
ETC_NETNS = Path("/etc/netns")
# Several labs may be up at once: FASTLOAD_LAB=b is one more, with names, addresses and state of its own.
LETTER = os.environ.get("FASTLOAD_LAB", "")
if not re.fullmatch("[a-z]?", LETTER):
    raise SystemExit(f"lab: FASTLOAD_LAB={LETTER!r} is not one letter, a to z")
PREFIX = f"fl{LETTER}-"
SUBNET = f"10.77.{ord(LETTER) - ord('a') + 1 if LETTER else 0}"
BRIDGE, STORAGE = f"{PREFIX}bridge", f"{PREFIX}storage"
BRIDGE_MAC = "02:4c:00:00:00:00"
STORAGE_NUMBER = 254
NOBODY = 253  # the number of no host
GONE_TABLE, RULES = 100, range(10, 14)  # routes to nobody, and the priorities of the rules that take them
MAX_HOSTS = 200

HEADER_BYTES = 14 + 20 + 32  # of a packet: Ethernet, IPv4, TCP with timestamps

BURST_S = 0.005  # what a capped link lets through at once, within the two bounds below
BURST_BYTES = (128 << 10, 1 << 20)
QUEUE_S = 0.05  # what a capped link queues before it drops

# No packet of a host's own accord: nothing is forwarded, and IPv6 announces nothing.
QUIET = """
echo 0 >/proc/sys/net/ipv4/ip_forward
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
"""

State = dict[str, Any]  # what `up` was asked for, kept in state.json


class LabError(Exception):
    """Something the person at the keyboard can put right."""


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


# ------------------------------------------------------------------------------------------- names


def host_name(number: int) -> str:
    return f"{PREFIX}host{number}"


def number_of(name: str) -> int:
    return STORAGE_NUMBER if name == STORAGE else int(name.removeprefix(f"{PREFIX}host"))


def address_of(name: str) -> str:
    return f"{SUBNET}.{number_of(name)}"


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
    names = [path.name for path in NETNS_DIR.glob(f"{PREFIX}*")] if NETNS_DIR.is_dir() else []
    return sorted(name for name in names if re.fullmatch(rf"{PREFIX}(host\d+|bridge|storage)", name))


# ------------------------------------------------------------------------------------------- links


def make_network(num_hosts: int) -> None:
    """Make the namespaces, the bridge, the links, the addresses and the host files."""
    names = [*(host_name(number) for number in range(1, num_hosts + 1)), STORAGE]
    # torch looks its peers up by their mapped addresses, to name them in its messages.
    pairs = ((address_of(name), name) for name in names)
    lines = (f"{address} {name}\n::ffff:{address} v6.{name}\n" for address, name in pairs)
    hosts_file = "127.0.0.1 localhost\n" + "".join(lines)
    for name in [BRIDGE, *names]:
        call("ip", "netns", "add", name)
        call("ip", "netns", "exec", name, "sh", "-c", QUIET)
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


def cut_off(name: str) -> None:
    """Swallow all packets of a host, both ways."""
    ip(BRIDGE, f"link set {port_of(name)} nomaster")


def cut_off_storage(name: str) -> None:
    """Swallow all packets between a host and the storage, both ways."""
    # The bridge itself takes the frames, and has nowhere to send them.
    ip(name, neighbour(STORAGE, BRIDGE_MAC))
    ip(STORAGE, neighbour(name, BRIDGE_MAC))


def leave_open(name: str, port: int) -> None:
    """Swallow what a host sends to other hosts by TCP, but for one port, as a firewall between them does."""
    gone = f"{SUBNET}.{NOBODY}"
    ip(
        name,
        # The bridge itself takes the frames, and has nowhere to send them.
        f"neighbour replace {gone} lladdr {BRIDGE_MAC} dev eth0 nud permanent",
        f"route replace default via {gone} dev eth0 table {GONE_TABLE}",
        f"rule add prio {RULES[0]} to {address_of(STORAGE)} lookup main",
        f"rule add prio {RULES[1]} ipproto tcp sport {port} lookup main",
        f"rule add prio {RULES[2]} ipproto tcp dport {port} lookup main",
        f"rule add prio {RULES[3]} ipproto tcp to {SUBNET}.0/24 lookup {GONE_TABLE}",
    )


def reconnect(name: str) -> None:
    """Undo every cut of a host."""
    ip(BRIDGE, f"link set {port_of(name)} master br0")
    rules = json.loads(call("ip", "-n", name, "-json", "rule", "show"))
    ip(name, *(f"rule del prio {rule['priority']}" for rule in rules if rule["priority"] in RULES))
    if name != STORAGE:
        ip(name, neighbour(STORAGE, mac_of(STORAGE)))
        ip(STORAGE, neighbour(name, mac_of(name)))


def counters(name: str) -> dict[str, int]:
    """Bytes that packets have carried, so the same however many packets the kernel made of them."""
    shown = call("ip", "-n", name, "-json", "-stats", "link", "show", "dev", "eth0")
    stats = json.loads(shown)[0]["stats64"]
    return {way: stats[way]["bytes"] - HEADER_BYTES * stats[way]["packets"] for way in ("tx", "rx")}


# ------------------------------------------------------------------------------------------- rates


def parse_rate(text: str) -> int:
    """A rate in tc's syntax (400mbit, 2gbit, 50mbps) as bits per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(i?)(bit|bps)?", text.strip().lower())
    if not match or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is not a rate such as 400mbit or 2gbit")
    scale: int = (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")
    bits = round(float(match[1]) * scale * (8 if match[4] == "bps" else 1))
    if bits < 1_000_000:
        raise ValueError(f"{text!r} is below the smallest rate, 1mbit")
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


def shape(state: State) -> None:
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
