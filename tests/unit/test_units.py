"""Quantities: one spelling for each unit, and nothing is guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.base.units import format_bytes
from fastload.errors import OptionError
from fastload.planning.units import (
    format_count,
    format_duration,
    format_rate,
    parse_bytes_per_s,
    parse_duration_s,
    parse_fraction,
    parse_number,
    parse_parameters,
    parse_size_bytes,
    parse_whole,
    require_not_negative,
    require_positive,
    require_whole,
)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_size_bytes, "13.8 TB", 13_800_000_000_000),
        (parse_size_bytes, "64GiB", 64 * 2**30),
        (parse_size_bytes, "1GB", 10**9),
        (parse_size_bytes, "7 B", 7),
        (parse_size_bytes, "1.5e3 kB", 1_500_000),
        (parse_bytes_per_s, "273 GB/s", 273e9),
        (parse_bytes_per_s, "400 Gbit/s", 50e9),
        (parse_bytes_per_s, "1.64TB/s", 1.64e12),
        (parse_bytes_per_s, "1 GiB/s", 2.0**30),
        (parse_duration_s, "4 h", 14400.0),
        (parse_duration_s, "5min", 300.0),
        (parse_duration_s, "50.5s", 50.5),
        (parse_duration_s, "20 ms", 0.02),
        (parse_duration_s, "1 d", 86400.0),
        (parse_duration_s, "0 s", 0.0),
        (parse_fraction, "3.5 %", 0.035),
        (parse_parameters, "70B", 70 * 10**9),
        (parse_parameters, "1.3e12", 1_300_000_000_000),
        (parse_parameters, "1T", 10**12),
        (parse_parameters, "65.2B", 65_200_000_000),
        (parse_parameters, "124439808", 124_439_808),
        (parse_number, "6.5", 6.5),
        (parse_whole, "3072", 3072),
    ],
)  # fmt: skip
def test_what_is_read(parse, text, value) -> None:  # type: ignore[no-untyped-def]
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_size_bytes, "13.8 XB", "unknown unit 'XB'; known: B, kB, MB, GB, TB, PB, KiB, MiB"),
        (parse_size_bytes, "5 gb", "unknown unit 'gb'"),
        (parse_size_bytes, "5 Gb", "unknown unit 'Gb'"),
        (parse_size_bytes, "5 Gbit", "unknown unit 'Gbit'"),
        (parse_size_bytes, "5", "it has no unit; known: B"),
        (parse_size_bytes, "", "is not a number"),
        (parse_size_bytes, "0 GB", "is not above 0"),
        (parse_size_bytes, "-5 GB", "is negative"),
        (parse_size_bytes, "nan GB", "is not a number"),
        (parse_size_bytes, "1e999 GB", "out of all proportion"),
        (parse_size_bytes, "1 GB extra", "unknown unit|is not a number"),
        (parse_bytes_per_s, "273 GB", "unknown unit 'GB'; known: .*GB/s.*Gbit/s"),
        (parse_bytes_per_s, "273 Gbps", "unknown unit 'Gbps'"),
        (parse_bytes_per_s, "0 GB/s", "is not above 0"),
        (parse_bytes_per_s, "inf GB/s", "is not a number"),
        (parse_duration_s, "5 m", "unknown unit 'm'; known: ms, s, min, h, d"),
        (parse_duration_s, "-5 min", "is negative"),
        (parse_fraction, "0.035", "it has no unit; known: %"),
        (parse_fraction, "101 %", "more than 100 %"),
        (parse_fraction, "0 %", "is not above 0"),
        (parse_parameters, "70 GB", "unknown unit 'GB'; known: K, M, B, T"),
        (parse_parameters, "0.5", "not a whole number of parameters"),
        (parse_parameters, "\u06670B", "is not a number"),
        (parse_number, "6.5 d", "unknown unit 'd'; known: none"),
        (parse_whole, "0", "not a whole number above 0"),
        (parse_whole, "-8", "not a whole number above 0"),
        (parse_whole, "8.0", "not a whole number above 0"),
    ],
)
def test_what_is_refused(parse, text, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(OptionError, match=words):
        parse(text)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_size_bytes, parse_bytes_per_s, parse_duration_s, parse_parameters, parse_whole):
        try:
            value = parse(text)
        except OptionError:
            continue
        assert 0 <= value <= 1e24


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (format_bytes(13.8e12), "13.8 TB"),
        (format_bytes(13.8e12, binary=True), "12.6 TiB"),
        (format_bytes(999.7e9), "1 TB"),
        (format_bytes(0), "0 B"),
        (format_bytes(5e18), "5,000 PB"),
        (format_rate(1.638e12), "1.64 TB/s"),
        (format_rate(533e6), "533 MB/s"),
        (format_count(8_030_261_248), "8.03B"),
        (format_count(405_853_388_800), "406B"),
        (format_duration(0), "0 s"),
        (format_duration(0.02), "20 ms"),
        (format_duration(50.549), "50.5 s"),
        (format_duration(303), "5.05 min"),
        (format_duration(9.615 * 3600), "9.62 h"),
        (format_duration(30 * 86400), "30 d"),
    ],
)
def test_how_it_is_written(text: str, shown: str) -> None:
    assert text == shown


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1, True, "1", None])
def test_numbers_that_are_none(bad: object) -> None:
    for require in (require_positive, require_not_negative, require_whole):
        with pytest.raises(OptionError, match=r"^rate="):
            require(rate=bad)  # type: ignore[arg-type]


def test_zero_is_not_positive() -> None:
    require_not_negative(rate=0)
    for require in (require_positive, require_whole):
        with pytest.raises(OptionError, match="rate=0: must be a"):
            require(rate=0)
    with pytest.raises(OptionError, match="whole number"):
        require_whole(gpus=1.0)  # type: ignore[arg-type]
