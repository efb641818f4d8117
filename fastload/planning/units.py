"""Parses and formats quantities with units: ``13.8 TB``, ``400 Gbit/s``, ``5 min``.

Strict on purpose: a unit is always given and spelled in one way, so that GB and GiB, or Gbit/s and
GB/s, are never taken for each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal

from fastload.base.units import format_bytes, scaled, three_digits
from fastload.errors import OptionError

_SIZES: Mapping[str, int] = {
    **{unit: 1000**power for power, unit in enumerate("B kB MB GB TB PB".split())},
    **{unit: 1024**power for power, unit in enumerate("KiB MiB GiB TiB PiB".split(), start=1)},
}
_RATES: Mapping[str, int | Decimal] = {f"{unit}/s": nbytes for unit, nbytes in _SIZES.items()} | {
    f"{unit}/s": Decimal(1000**power) / 8 for power, unit in enumerate("kbit Mbit Gbit Tbit".split(), start=1)
}
_DURATIONS: Mapping[str, int | Decimal] = {"ms": Decimal("0.001"), "s": 1, "min": 60, "h": 3600, "d": 86400}
_COUNTS: Mapping[str, int | Decimal] = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_FRACTIONS: Mapping[str, int | Decimal] = {"%": Decimal("0.01")}
_NO_UNITS: Mapping[str, int | Decimal] = {"": 1}

_QUANTITY = re.compile(r"([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)\s*(\S*)", re.ASCII)
_MOST = Decimal("1e24")  # far above every checkpoint; larger numbers are typing errors


def parse_size_bytes(text: str) -> int:
    """Parses a size such as ``13.8 TB`` or ``64GiB`` into bytes.

    Raises:
        OptionError: It is not a number above 0 with a known unit; so do the functions below.
    """
    return round(_above_zero(text, _parse(text, _SIZES, "13.8 TB")))


def parse_bytes_per_s(text: str) -> float:
    """Parses a bandwidth such as ``273 GB/s`` (bytes) or ``400 Gbit/s`` (bits) into bytes per second."""
    return float(_above_zero(text, _parse(text, _RATES, "273 GB/s")))


def parse_duration_s(text: str) -> float:
    """Parses a time such as ``4 h``, ``5min`` or ``0 s`` into seconds."""
    return float(_parse(text, _DURATIONS, "5 min"))


def parse_fraction(text: str) -> float:
    """Parses a share such as ``3.5 %`` into a fraction of 1, above 0 and at most 1."""
    share = _above_zero(text, _parse(text, _FRACTIONS, "3.5 %"))
    if share > 1:
        raise OptionError(f"{text!r} is more than 100 %")
    return float(share)


def parse_parameters(text: str) -> int:
    """Parses a number of parameters such as ``70B``, ``1.3e12`` or ``124439808``."""
    number = _above_zero(text, _parse(text, _COUNTS, "70B"))
    if number != int(number):
        raise OptionError(f"{text!r} is not a whole number of parameters")
    return int(number)


def parse_number(text: str) -> float:
    """Parses a number above 0 without a unit, such as ``6.5``."""
    return float(_above_zero(text, _parse(text, _NO_UNITS, "6.5")))


def parse_whole(text: str) -> int:
    """Parses a count such as ``8``."""
    if re.fullmatch(r"\d{1,12}", text, re.ASCII) is None or int(text) == 0:
        raise OptionError(f"{text!r} is not a whole number above 0")
    return int(text)


def _parse(text: str, units: Mapping[str, int | Decimal], example: str) -> Decimal:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise OptionError(f"{text!r} is not a number such as {example}")
    number, unit = Decimal(found[1]), found[2]
    if unit not in units:
        known = ", ".join(name for name in units if name)
        what = f"unknown unit {unit!r}" if unit else "it has no unit"
        raise OptionError(f"{text!r}: {what}; known: {known or 'none'}")
    value = number * units[unit]
    if not 0 <= value <= _MOST:
        raise OptionError(f"{text!r} is {'negative' if value < 0 else 'out of all proportion'}")
    return value


def _above_zero(text: str, value: Decimal) -> Decimal:
    if not value:
        raise OptionError(f"{text!r} is not above 0")
    return value


def require_positive(**quantities: float) -> None:
    """Checks that numbers given by name are above 0 and finite.

    Raises:
        OptionError: One is not.
    """
    _require(quantities, lambda value: value > 0, "a number above 0")


def require_not_negative(**quantities: float) -> None:
    """Checks that numbers given by name are at least 0 and finite.

    Raises:
        OptionError: One is not.
    """
    _require(quantities, lambda value: value >= 0, "a number, at least 0")


def require_whole(**counts: int) -> None:
    """Checks that counts given by name are whole numbers above 0.

    Raises:
        OptionError: One is not.
    """
    _require(counts, lambda value: isinstance(value, int) and value > 0, "a whole number above 0")


def _require(values: Mapping[str, float], fits: Callable[[float], bool], wanted: str) -> None:
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and fits(value)):
            raise OptionError(f"{name}={value!r}: must be {wanted}")


def format_rate(bytes_per_s: float) -> str:
    """Formats a bandwidth with three digits: ``273 GB/s``."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_count(number: float) -> str:
    """Formats a number of parameters with three digits: ``70.6B``."""
    return scaled(number, 1000, ["", *"KMBT"]).replace(" ", "")


def format_duration(seconds: float) -> str:
    """Formats a time with three digits in the unit that suits it: ``50.5 s``, ``31.2 min``."""
    if 0 < seconds < 1:
        return f"{three_digits(seconds * 1000)} ms"
    for unit, factor, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 72)):
        if seconds < most * factor:
            return f"{three_digits(seconds / factor)} {unit}"
    return f"{three_digits(seconds / 86400)} d"
