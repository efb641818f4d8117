"""Which fastload this is: its version, and what changes between two versions that matters between ranks."""

from __future__ import annotations

__version__ = "0.2.0.dev0"
"""That of the next release, with ``.dev0`` until it is made; the first commit after it names the next one."""

PROTOCOL = 3
"""Rises with every commit that changes what ranks tell each other, or what each of them works out for itself
and takes to be the same on all: plans of transfers, layouts of files, who does what."""
