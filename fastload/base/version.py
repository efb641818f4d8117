"""The version of fastload, and of the protocol between ranks."""

from __future__ import annotations

__version__ = "0.2.0.dev0"
"""The next release, with ``.dev0`` until it is made. The first commit after a release names the next one."""

PROTOCOL = 3
"""Incremented by each commit that changes messages between ranks, or values that all ranks compute alike,
such as plans of transfers and layouts of files."""
