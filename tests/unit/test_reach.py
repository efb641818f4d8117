"""Whether another rank can be connected to, and where Gloo says that a rank is found."""

from __future__ import annotations

import re
import socket
import struct
from datetime import timedelta

import pytest

from fastload.comm.hosts import Peer, address_in, listener_at, require_reachable
from fastload.errors import WorldError
from fastload.transfer.links import Links


def told(family: int, where: bytes) -> bytes:
    return struct.pack("=Q", 4) + b"host" + struct.pack("=QH", 136, family) + where.ljust(134, b"\0")


def test_where_gloo_says_that_a_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_in(told(socket.AF_INET, b"\x80\x01\x0a\x00\x00\x07")) == "10.0.0.7"
    v6 = b"\x80\x01" + bytes(4) + socket.inet_pton(socket.AF_INET6, "fd00::7")
    assert address_in(told(socket.AF_INET6, v6)) == "fd00::7"
    for odd in (b"", b"short", told(17, bytes(20)), told(socket.AF_INET, b"\x80\x01")[:23]):
        assert address_in(odd) is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    links = Links(0, timedelta(seconds=5))
    links.open([1])
    try:
        assert [address for address, _ in links.listen()] == ["127.0.0.1"], "this torch says it otherwise"
    finally:
        links.drop()


def test_the_addresses_for_many_ranks_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks get those of all others; Gloo's own have 213 characters each."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    links = Links(0, timedelta(seconds=5))
    try:
        assert len(links.open(range(1, 51))) < 50 * 60
    finally:
        links.drop()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_rank_that_listens_is_reached_and_others_are_named(address: str) -> None:
    listener = listener_at(address)
    if listener is None:
        pytest.skip(f"{address} is no address of this machine")
    port = listener.getsockname()[1]
    with listener:
        for _ in range(3):
            require_reachable(0, [Peer(rank, "host", address, port) for rank in range(1, 20)], limit_s=5)
    said = rf"could not connect to rank 3 on other at {re.escape(address)} port {port} \(Connection refused\)"
    with pytest.raises(WorldError, match=rf"{said}: open .*TCP ports.* between the hosts"):
        require_reachable(2, [Peer(1, "host", address, port), Peer(3, "other", address, port)], limit_s=5)
    assert listener_at("192.0.2.1") is None, "an address of no machine"
    require_reachable(0, [], limit_s=5)
