"""Where peers are: URLs, all addresses of a name, and lists of hosts as Slurm writes them."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import NamedTuple

from fastload.errors import OptionError

PORT = 7070
"""The port that `fastload serve` listens at by default."""

_NEXT = re.compile(r",(?=[a-z]+(?:\+https?)?://)")
_ADDRESS = re.compile(
    r"(?P<kind>[a-z]+)(?:\+(?P<over>https?))?://(?P<rest>[^/?#@\s]+?)(?::(?P<port>\d{1,5}))?/*"
)
_BETWEEN_HOSTS = re.compile(r",(?![^\[]*\])")
_HOST = re.compile(r"[\w.-]+")
_NUMBERS = re.compile(r"\[([^\[\]]*)\]")
_MOST_HOSTS = 100_000


class HostAddress(NamedTuple):
    """A server by the name that was given, and one address of that name."""

    host: str
    address: str
    port: int


@dataclass(frozen=True)
class PeerAddress:
    """One or more servers, as given.

    Attributes:
        hosts: Names or addresses.
        port: Their port.
        uses_tls: Whether they speak TLS.
        all_addresses: Whether there is a server at each address of a name, not at its first one.
    """

    hosts: tuple[str, ...]
    port: int
    uses_tls: bool
    all_addresses: bool = False

    def resolve(self) -> list[HostAddress]:
        """Returns the servers; none for names that are unknown, perhaps for now."""
        found = []
        for host in self.hosts:
            try:
                answers = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError):
                continue
            addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
            found += [
                HostAddress(host, each, self.port) for each in addresses[: None if self.all_addresses else 1]
            ]
        return found


def parse_addresses(text: str) -> list[PeerAddress]:
    """Parses one or more addresses, separated by commas.

    Raises:
        OptionError: One is malformed.
    """
    return [_parse(each) for each in _NEXT.split(text.strip())]


def _parse(text: str) -> PeerAddress:
    match = _ADDRESS.fullmatch(text)
    kind = match["kind"] if match is not None else ""
    is_url = kind in ("http", "https")
    if match is None or kind not in ("http", "https", "dns", "hosts") or (is_url and match["over"]):
        raise OptionError(
            f"peers {text!r}: is none of http://HOST:PORT, https://HOST:PORT, dns://NAME:PORT (all addresses "
            "of a name) and hosts://node[01-08]:PORT; with TLS the latter are dns+https:// and hosts+https://"
        )
    port = int(match["port"] or PORT)
    if not 0 < port < 1 << 16:
        raise OptionError(f"peers {text!r}: {port} is no port")
    uses_tls = "https" in (kind, match["over"])
    hosts = expand_hosts(match["rest"]) if kind == "hosts" else [match["rest"].strip("[]")]
    return PeerAddress(tuple(hosts), port, uses_tls, kind == "dns")


def expand_hosts(text: str) -> list[str]:
    """Returns the hosts in a list such as ``node[01-08,11],login2``.

    Raises:
        OptionError: It is malformed.
    """
    found = [host for each in _BETWEEN_HOSTS.split(text) for host in _expand(each, text)]
    if not all(_HOST.fullmatch(host) for host in found):
        raise OptionError(f"hosts {text!r}: is no list such as node[01-08,11],login2")
    return found


def _expand(host: str, text: str) -> list[str]:
    match = _NUMBERS.search(host)
    if match is None:
        return [host]
    numbers: list[str] = []
    for part in match[1].split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        is_range = first.isdecimal() and last.isdecimal() and max(len(first), len(last)) < 10
        if not is_range or not 0 <= int(last) - int(first) < _MOST_HOSTS:
            raise OptionError(f"hosts {text!r}: {part!r} is no number, and no range such as 01-08")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    rest = _expand(host[match.end() :], text)
    if len(numbers) * len(rest) > _MOST_HOSTS:
        raise OptionError(f"hosts {text!r}: are more than {_MOST_HOSTS}")
    return [f"{host[: match.start()]}{number}{end}" for number in numbers for end in rest]
