"""The commit record: the same text whoever writes it, and nothing taken on trust when it is read."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import ChecksumError, FastloadError, ManifestError
from fastload.formats import record
from fastload.formats.record import Record, RecordedFile, checksum, parse

ONE = RecordedFile("model.safetensors", 1000, 128, b"\x00\x01\x02\x03\x04\x05\x06\xff", b"\xab" * 16)
RECORD = Record(512, (ONE,), {"step": 3, "names": ["a", "ü"]}, {"run": "seven"})
BODY: dict[str, Any] = {
    "format": "fastload", "version": 1, "block_bytes": 512,
    "files": [{"name": "model.safetensors", "nbytes": 1000, "header_bytes": 128,
               "header_checksum": "00010203040506ff", "checksums": "ab" * 16}],
    "state": {"step": 3, "names": ["a", "ü"]}, "metadata": {"run": "seven"},
}  # fmt: skip


def sealed(body: dict[str, Any]) -> bytes:
    """The text of a record with a checksum that fits, whatever it says."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(
        {**body, "checksum": xxhash.xxh3_64_hexdigest(text)}, sort_keys=True, separators=(",", ":")
    ).encode()


def test_the_text_is_what_the_format_says() -> None:
    assert RECORD.to_bytes() == sealed(BODY)
    assert RECORD.to_bytes().startswith(b'{"block_bytes":512,"checksum":"')
    assert parse(sealed(BODY)) == RECORD


@pytest.mark.parametrize("releases_gil", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 64 << 10, (64 << 10) + 1, 1 << 20])
def test_a_checksum_is_the_same_with_every_version_of_xxhash(
    nbytes: int, releases_gil: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_RELEASES_GIL", releases_gil)
    data = bytes(range(251)) * (1 + nbytes // 251)
    assert checksum(memoryview(data)[:nbytes]) == xxhash.xxh3_64_digest(data[:nbytes])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
recorded_files = st.builds(
    RecordedFile,
    name=st.text("abc-._", min_size=1).filter(lambda name: name not in (".", "..")),
    nbytes=st.integers(1000, 2**63 - 1),
    header_bytes=st.integers(10, 1000),
    header_checksum=st.binary(min_size=8, max_size=8),
    checksums=st.integers(0, 5).flatmap(lambda count: st.binary(min_size=8 * count, max_size=8 * count)),
)
records = st.builds(
    Record,
    block_bytes=st.integers(1, 2**63 - 1),
    files=st.lists(recorded_files, max_size=4, unique_by=lambda file: file.name).map(
        lambda files: tuple(sorted(files, key=lambda file: file.name))
    ),
    state=json_values,
    metadata=st.dictionaries(st.text(), st.text(), max_size=3),
)


@given(records)
def test_a_record_survives_the_round_trip(record: Record) -> None:
    text = record.to_bytes()
    again = parse(text)
    assert again == record
    assert again.to_bytes() == text


@given(records, st.data())
def test_no_flipped_bit_is_taken(record: Record, data: st.DataObject) -> None:
    text = bytearray(record.to_bytes())
    text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(ManifestError, ChecksumError):
        assert parse(bytes(text)) == record  # 1.0e5 and 1.0E5 are one number


@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_junk_is_refused(text: bytes) -> None:
    with pytest.raises(FastloadError):
        parse(text)


def test_a_cut_record_is_refused() -> None:
    text = RECORD.to_bytes()
    for length in range(len(text)):
        with pytest.raises(ManifestError):
            parse(text[:length])


def changed(**changes: Any) -> dict[str, Any]:
    return {**BODY, **changes}


def changed_file(**changes: Any) -> dict[str, Any]:
    return changed(files=[{**BODY["files"][0], **changes}])


DELTA = {"base": "step 1", "digest": "0" * 32, "num_deltas": 1, "checksums": {"model.safetensors": "ab" * 8}}


def changed_delta(**changes: Any) -> dict[str, Any]:
    return changed(version=2, delta={**DELTA, **changes})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (changed(version=5), "version 5: this fastload reads 'fastload', versions 1 and 2 and 3 and 4"),
        (changed(version=True), "version True: this fastload reads"),
        (changed(version=2), "needs exactly the keys"),
        (changed(delta=DELTA), "needs exactly the keys"),
        (changed_delta(base="a/b"), "the base is no name of a directory"),
        (changed_delta(base=".."), "the base is no name of a directory"),
        (changed_delta(base=3), "the base is no name of a directory"),
        (changed_delta(digest="00"), "the digest of the base is not of 32 hex digits"),
        (changed_delta(num_deltas=0), "num_deltas is not from 1"),
        (changed_delta(num_deltas=1.0), "num_deltas is not from 1"),
        (changed_delta(checksums=[]), "checksums of the result are no object"),
        (changed_delta(checksums={"a": "00"}), "checksums are not of 16 hex digits"),
        (changed_delta(checksums={"a": "zz"}), "checksums is not hex digits"),
        (changed_delta(more=1), "delta needs exactly the keys"),
        (changed(version=True, format="x"), "format 'x'"),
        (changed(more=1), "needs exactly the keys"),
        (changed(block_bytes=0), "block_bytes is not a size above 0: 0"),
        (changed(block_bytes=-1), "block_bytes"),
        (changed(block_bytes=2**63), "block_bytes"),
        (changed(block_bytes=1.5), "block_bytes"),
        (changed(block_bytes=True), "block_bytes"),
        (changed(files={}), "files is not a list"),
        (changed(files=[1]), "file 0: needs exactly the keys"),
        (changed(files=BODY["files"] * 2), "not in name order, each once"),
        (changed(metadata=[1]), "metadata is not an object of texts"),
        (changed(metadata={"a": 1}), "metadata 'a' is not a valid text"),
        (changed_file(name="../model.safetensors"), "not a plain relative file name: '../model"),
        (changed_file(name="/etc/passwd"), "not a plain relative file name"),
        (changed_file(name="a/../../b"), "not a plain relative file name"),
        (changed_file(name="c:x"), "not a plain relative file name"),
        (changed_file(name=""), "not a plain relative file name"),
        (changed_file(name=3), "not a plain relative file name"),
        (changed_file(nbytes=127), "a header of 128 bytes in a file of 127"),
        (changed_file(nbytes=2**80), "in a file of"),
        (changed_file(nbytes=1e3), "in a file of 1000.0"),
        (changed_file(header_bytes=9), "a header of 9 bytes"),
        (changed_file(header_checksum="00"), "header_checksum is not of 16 hex digits"),
        (changed_file(header_checksum=None), "header_checksum is not hex digits"),
        (changed_file(checksums="ab" * 9), "checksums are not of 16 hex digits each"),
        (changed_file(checksums="AB" * 8), "checksums is not hex digits"),
        (changed_file(checksums="ab " * 8), "checksums is not hex digits"),
        (changed_file(checksums="xy" * 8), "checksums is not hex digits"),
    ],
)
def test_what_no_save_writes_is_refused(body: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError) as raised:
        parse(sealed(body), "u")
    assert str(raised.value).startswith("u: ")
    assert words in str(raised.value)


@pytest.mark.parametrize("state", ["NaN", "1e999", '{"a":1,"a":1}', "[" * 100_000 + "]" * 100_000])
def test_a_state_that_is_no_proper_json_is_refused(state: str) -> None:
    text = RECORD.to_bytes().decode().replace('{"names":["a","\\u00fc"],"step":3}', state)
    assert state in text
    with pytest.raises(ManifestError):
        parse(text.encode())


def test_a_wrong_checksum_of_its_own_is_named() -> None:
    text = RECORD.to_bytes().replace(b'"step":3', b'"step":4')
    with pytest.raises(ChecksumError, match=r"u: the commit record is damaged: checksum '[0-9a-f]{16}'"):
        parse(text, "u")


def test_a_state_that_json_cannot_say_is_refused_on_the_way_out() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Record(1, (), float("inf")).to_bytes()


def test_a_checksum_is_xxh3() -> None:
    assert checksum(memoryview(b"abc")).hex() == xxhash.xxh3_64_hexdigest(b"abc")
