"""Formats quantities for messages and reports: ``13.8 TB``, ``2 hosts``."""

from __future__ import annotations


def format_bytes(nbytes: float, *, binary: bool = False) -> str:
    """Formats a size with three digits: ``13.8 TB``, or ``12.6 TiB`` if `binary`."""
    units = "B KiB MiB GiB TiB PiB".split() if binary else "B kB MB GB TB PB".split()
    return scaled(nbytes, 1024 if binary else 1000, units)


def count(number: int, thing: str) -> str:
    """Formats a number of things: ``1 host``, ``2 hosts``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def scaled(value: float, base: int, units: list[str]) -> str:
    """Formats a value in the unit that suits it, each `base` times the one before."""
    *smaller, last = units
    for unit in smaller:
        if value < base - 0.5:  # 999.7 would show as 1,000
            return f"{three_digits(value)} {unit}"
        value /= base
    return f"{three_digits(value)} {last}"


def three_digits(value: float) -> str:
    """Formats a number with three digits."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
