"""The accounts of what was written, and the names of what is pending."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import StorageError
from fastload.storage.base import Written, new_token, pending_name, saved_name

RANGES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda pair: tuple(sorted(pair))))


@given(st.lists(RANGES, max_size=3), st.integers(12, 14))
def test_every_byte_has_to_be_written_by_somebody(writers: list[list[tuple[int, int]]], nbytes: int) -> None:
    receipts = []
    for ranges in writers:
        written = Written()
        for begin, end in ranges:
            written.add("a", begin, end)
        receipts.append({"written": written.to_json()})
    covered = {byte for ranges in writers for begin, end in ranges for byte in range(begin, end)}
    missing = sorted(set(range(nbytes)) - covered)
    if not missing:
        Written().require_all({"a": nbytes}, receipts, "url")
        return
    with pytest.raises(StorageError, match=r"url/a .*no rank wrote it") as raised:
        Written().require_all({"a": nbytes}, receipts, "url")
    assert raised.value.offset == missing[0]
    assert raised.value.nbytes is not None
    assert set(range(missing[0], missing[0] + raised.value.nbytes)) <= set(missing)


def test_the_first_error_is_raised_again_and_again() -> None:
    written = Written()
    written.check()
    written.fail(StorageError("first", "url", 1, 2))
    written.fail(StorageError("second", "url", 3, 4))
    for _ in range(2):
        with pytest.raises(StorageError, match=re.escape("url [bytes 1-3]: first")):
            written.check()


def test_what_goes_wrong_within_is_noted_and_nothing_is_done_after_it() -> None:
    written, done = Written(), []

    def fail(error: StorageError) -> None:
        with written.noted():
            done.append(error)
            raise error

    for error in (StorageError("first", "url", 1, 2), StorageError("second", "url")):
        with pytest.raises(StorageError, match=re.escape("url [bytes 1-3]: first")):
            fail(error)
    assert len(done) == 1
    with pytest.raises(StorageError, match="first"):
        written.require_all({}, [], "url")


@given(st.text(st.characters(exclude_characters="/\0"), min_size=1))
def test_a_pending_name_tells_what_it_is_for(name: str) -> None:
    assert saved_name(pending_name(name, new_token())) == name


@pytest.mark.parametrize(
    "name", ["step-7", ".saving", ".a.saving", ".a.0123.saving", "a.0123456789abcdef.saving"]
)
def test_what_is_no_pending_name(name: str) -> None:
    assert saved_name(name) is None
