"""Limits of a storage as nginx keeps them: time to the first byte, rate of a connection, rate of requests."""

from __future__ import annotations

import re
from dataclasses import dataclass

# nginx sends an answer in pieces of this many seconds at its rate, and waits after each but the last.
PIECE_S = 0.005
SHORTEST, LONGEST = 0.6, 1.2  # of the latency given: what a request waits, evenly distributed
BURST_S = 0.5  # requests at once that a rate of requests lets through


@dataclass(frozen=True)
class Limits:
    """How a storage answers; 0 is without a limit.

    Attributes:
        latency_s: Before the first byte of an answer: 50 ms stands for 30 to 60 ms.
        connection_rate: Bytes per second of each answer. Uploads have no rate of their own.
        requests_rate: Requests per second of all clients; those above it get status 503.
    """

    latency_s: float = 0.0
    connection_rate: int = 0
    requests_rate: int = 0

    def __str__(self) -> str:
        parts = [f"{self.latency_s * 1000:g} ms to the first byte"] if self.latency_s else []
        if self.connection_rate:
            parts.append(f"{self.connection_rate / 1e6:g} MB/s a connection")
        if self.requests_rate:
            parts.append(f"503 above {self.requests_rate} requests/s")
        return ", ".join(parts) or "at once"

    def zone(self) -> str:
        """nginx: what the block `http` needs."""
        if not self.requests_rate:
            return ""
        return f"limit_req_zone $server_port zone=requests:1m rate={self.requests_rate}r/s;"

    def directives(self) -> str:
        """nginx: what a block `server` needs."""
        lines = []
        if self.latency_s:
            least, most = (share * self.latency_s for share in (SHORTEST, LONGEST))
            wait = f"ngx.sleep({least:g} + {most - least:g} * math.random())"
            lines.append(f"access_by_lua_block {{ {wait} }}")
        if self.connection_rate:
            lines.append(f"limit_rate {self.connection_rate};")
            lines.append(f"sendfile_max_chunk {round(PIECE_S * self.connection_rate)};")
        if self.requests_rate:
            burst = max(1, round(BURST_S * self.requests_rate))
            lines += [f"limit_req zone=requests burst={burst} nodelay;", "limit_req_status 503;"]
        return "\n    ".join(lines)


def parse_seconds(text: str) -> float:
    """A time such as 50ms or 0.2s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a time such as 50ms or 0.2s")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def parse_connection_rate(text: str) -> int:
    """A rate such as 60MB/s, in bytes per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG])B/s", text)
    if match is None:
        raise ValueError(f"{text!r} is not a rate such as 60MB/s")
    return round(float(match[1]) * 1000 ** (1 + "kMG".index(match[2])))
