"""How many examples a property is tried with."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def draws(number: int, **options: Any) -> settings:
    """Returns settings for a number of examples; a quarter of them, at least 8, without ``--slow``."""
    share = settings().max_examples / 100  # of the profile that conftest loads
    return settings(max_examples=max(round(number * share), 8), **options)
