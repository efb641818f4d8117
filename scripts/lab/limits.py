"""Limits of a storage as nginx keeps them: time to the first byte, rate of a connection, rate of requests."""

from __future__ import annotations

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
