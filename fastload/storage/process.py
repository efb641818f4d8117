"""What a process has once, however many storages and targets it opens: all such state of storage is here."""

from __future__ import annotations

from functools import cache, lru_cache
from logging import Logger
from typing import Any

from fastload.base.threads import ProcessLock
from fastload.storage.descriptors import DescriptorPool

__all__ = ["boto3_session", "living_saves", "making_client", "read_descriptors", "warn_once"]

read_descriptors = DescriptorPool(ProcessLock())
"""Of all files that are read: how many a process may have open is one number for all of them."""

living_saves: set[str] = set()
"""Tokens of this process's own saves to object stores, until they end. One whose owner is this process and
that is not here has ended, and what it could not remove is for anybody to remove."""

making_client = ProcessLock()
"""Held while a client is made of the session, which makes one at a time."""


@cache
def boto3_session() -> Any:
    """Returns the one session: it reads a description of S3 that takes most of a second."""
    import boto3

    return boto3.session.Session()


@lru_cache(256)  # texts, the latest of which are not said again
def warn_once(log: Logger, message: str, *args: object) -> None:
    """Says something that each further save would find, and say, again."""
    log.warning(message, *args)
