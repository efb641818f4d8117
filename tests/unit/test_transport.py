"""What becomes of a chunk that could not be read, where no rank needs another."""

from __future__ import annotations

import pytest

from fastload.transfer.transport import FAILED, UNREADABLE, LocalTransport, Round


@pytest.mark.parametrize("status", [0, UNREADABLE, FAILED])
def test_the_status_of_a_chunk_is_told_with_its_round(status: int) -> None:
    work = Round(7)
    LocalTransport(3, pinned=False).start(work, status)
    assert work.done.is_set()
    assert work.statuses == ({3: status} if status else {})
