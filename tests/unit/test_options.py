"""Options: argument over environment over default, and values that cannot be used."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastload.errors import OptionError
from fastload.integrations.dcp import Reader, Writer
from fastload.options import SAVE_SETTINGS, SETTINGS, LoadOptions, SaveOptions, parse_bytes
from tests.pages import page


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(f"FASTLOAD_{name.upper()}", raising=False)


# Option, the variable's text, its value, and another value for the argument.
CASES: list[tuple[str, str, Any, Any]] = [
    ("strategy", "allgather", "allgather", "direct"),
    ("chunk_bytes", "4MiB", 4 << 20, 77),
    ("staging_bytes", "64 MB", 64_000_000, 1 << 16),
    ("timeout_s", "2.5", 2.5, 7),
    ("io", "buffered", "buffered", "direct"),
    ("read_threads", "3", 3, 1),
    ("retries", "0", 0, 9),
    ("verify", "off", False, False),
    ("per_rank_mismatch", "skip", "skip", "skip"),
    ("atomic", "yes", True, True),
    ("prefetch_bytes", "1GiB", 1 << 30, 0),
    ("dequantize", "yes", True, True),
    ("bases", "s3://bucket/complete", "s3://bucket/complete", "/complete"),
    ("trace", "a/b.json", "a/b.json", "c.json"),
]


def test_the_table_is_complete() -> None:
    assert [case[0] for case in CASES] == list(SETTINGS)
    others = {"sources", "on_report", "progress"}
    assert {f.name for f in dataclasses.fields(LoadOptions)} == {*SETTINGS, *others}


@pytest.mark.parametrize(("name", "text", "value", "other"), CASES, ids=lambda value: str(value))
def test_argument_beats_environment_beats_default(
    name: str, text: str, value: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = SETTINGS[name].default
    assert value != default != other
    assert getattr(LoadOptions(), name) == default
    monkeypatch.setenv(f"FASTLOAD_{name.upper()}", text)
    assert getattr(LoadOptions(), name) == value
    assert getattr(LoadOptions(**{name: other}), name) == other
    assert getattr(LoadOptions(**{name: default}), name) == default


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("STRATEGY", "fast", "strategy='fast': must be one of auto, allgather, broadcast, direct"),
        ("STRATEGY", "", "strategy='': must be one of"),
        ("PER_RANK_MISMATCH", "none", "per_rank_mismatch='none': must be one of error, skip"),
        ("CHUNK_BYTES", "4 miles", "FASTLOAD_CHUNK_BYTES='4 miles': '4 miles' is not a size"),
        ("CHUNK_BYTES", "", "FASTLOAD_CHUNK_BYTES='': '' is not a size"),
        ("CHUNK_BYTES", "0", "chunk_bytes=0: must be at least 1"),
        ("STAGING_BYTES", "-1", "FASTLOAD_STAGING_BYTES='-1'"),
        ("STAGING_BYTES", "65535", "staging_bytes=65535: must be at least 65536"),
        ("TIMEOUT_S", "soon", "FASTLOAD_TIMEOUT_S='soon'"),
        ("TIMEOUT_S", "nan", "timeout_s=nan"),
        ("TIMEOUT_S", "inf", "timeout_s=inf"),
        ("TIMEOUT_S", "-3", "timeout_s=-3.0"),
        ("IO", "mmap", "io='mmap': must be one of auto, buffered, direct"),
        ("READ_THREADS", "two", "FASTLOAD_READ_THREADS='two'"),
        ("READ_THREADS", "0", "read_threads=0: must be at least 1"),
        ("RETRIES", "-1", "retries=-1: must be at least 0"),
        ("RETRIES", "1.5", "FASTLOAD_RETRIES='1.5'"),
    ],
)
def test_bad_variables(name: str, text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"FASTLOAD_{name}", text)
    with pytest.raises(OptionError) as raised:
        LoadOptions()
    assert str(raised.value).startswith(words)


@pytest.mark.parametrize(
    "bad",
    [
        {"strategy": "ring"},
        {"strategy": None},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1.5},
        {"chunk_bytes": True},
        {"staging_bytes": 1000},
        {"staging_bytes": None},
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": "3"},
        {"timeout_s": True},
        {"io": "fast"},
        {"read_threads": 0},
        {"read_threads": 2.0},
        {"retries": -1},
        {"retries": None},
        {"trace": ""},
        {"trace": 3},
        {"sources": "http://host1:7070"},
        {"sources": ["http://host1:7070"]},
        {"sources": 7},
    ],
    ids=str,
)
def test_bad_arguments(bad: dict[str, Any]) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(OptionError) as raised:
        LoadOptions(**bad)
    assert str(raised.value).startswith(f"{name}={value!r}: must be ")
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0), ("123", 123), ("12b", 12), ("1k", 1000), ("1kB", 1000), ("1KiB", 1024), ("3 mib", 3 << 20),
        ("5GB", 5 * 10**9), (" 2 GiB ", 2 << 30), ("7M", 7_000_000), ("7Mi", 7 << 20),
    ],
)  # fmt: skip
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "1.5MiB", "-1", "1 M i B", "1TB", "0x10", "1e6"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as"):
        parse_bytes(text)


def test_sizes_may_be_texts_as_arguments_too() -> None:
    options = LoadOptions(staging_bytes="64MiB", chunk_bytes="1MB")  # type: ignore[arg-type]
    assert (options.staging_bytes, options.chunk_bytes) == (64 << 20, 1_000_000)
    assert options.shared_values() == LoadOptions(staging_bytes=64 << 20, chunk_bytes=10**6).shared_values()
    assert SaveOptions(max_shard_bytes="5GB").max_shard_bytes == 5 * 10**9  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"staging_bytes='64 miles': '64 miles' is not a size such as"):
        LoadOptions(staging_bytes="64 miles")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"staging_bytes=1024: must be at least 65536"):
        LoadOptions(staging_bytes="1KiB")  # type: ignore[arg-type]


def test_options_do_not_change_and_callbacks_are_each_rank_s_own() -> None:
    options = LoadOptions(progress=print, on_report=print)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.strategy = "direct"  # type: ignore[misc]
    assert options.shared_values() == LoadOptions().shared_values()
    assert set(options.shared_values()) == set(SETTINGS)


def test_sources_of_the_environment_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLOAD_PEERS", "host:7070")
    with pytest.raises(OptionError, match=r"^FASTLOAD_PEERS='host:7070': .*http://HOST:PORT"):
        LoadOptions()


def test_the_page_lists_every_option() -> None:
    for name in {**SETTINGS, **SAVE_SETTINGS}:
        assert f"| `{name}` | `FASTLOAD_{name.upper()}` |" in page("docs/options.md")


@pytest.mark.parametrize("kind", [Reader, Writer])
def test_a_storage_of_dcp_refuses_options_of_another_class(kind: Any) -> None:
    with pytest.raises(OptionError, match="options= is a dict: pass fastload"):
        kind("somewhere", options={"timeout_s": 12})
