"""The process-wide state of boto3."""

from __future__ import annotations

from functools import cache
from typing import Any

from fastload.base.threads import ProcessLock
from fastload.options import environment

making_client = ProcessLock()
"""Held while a client of boto3 is created: what its sessions share is not thread-safe."""


@cache
def aws_descriptions() -> Any:
    """Returns the one loader of botocore. Its description of S3 takes most of a second to read."""
    import botocore.loaders

    return botocore.loaders.create_loader(environment("AWS_DATA_PATH").get("AWS_DATA_PATH"))
