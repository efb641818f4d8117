"""The S3 stores that these tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.storage.s3_server import s3_server, seaweed_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Storage options for rclone's."""
    with s3_server(tmp_path_factory.mktemp("rclone")) as options:
        yield options


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Storage options for SeaweedFS."""
    with seaweed_server(tmp_path_factory.mktemp("seaweed")) as options:
        yield options
