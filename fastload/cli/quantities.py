"""Quantities as options, and rows as a table, as JSON or as CSV."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from fastload.errors import OptionError
from fastload.estimate.units import (
    parse_bytes_per_s,
    parse_duration_s,
    parse_fraction,
    parse_number,
    parse_size_bytes,
    parse_whole,
)

__all__ = [
    "COUNT",
    "FRACTION",
    "LINK_RATE",
    "NUMBER",
    "PNG",
    "RATE",
    "SIZE",
    "TIME",
    "WrongQuantity",
    "output_options",
    "print_csv",
    "print_json",
]


if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:  # before click 8.4 it takes no parameter
    _ParamType = click.ParamType


class WrongQuantity(click.ClickException):
    """A quantity that cannot be read: a usage error that is told in one line."""

    exit_code = 2


class _Quantity(_ParamType):
    """A number with its unit, or a name; what cannot be read is told in one line, without the usage."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reads the text of an option."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except OptionError as error:
            option = param.opts[0] if param is not None else self.name
            raise WrongQuantity(f"{option}: {error}") from None


def _parse_png(text: str) -> str:
    if not text.lower().endswith(".png"):
        raise OptionError(f"{text}: its name has to end in .png")
    return text


def _parse_link_rate(text: str) -> float:
    """Reads what an option ending in -gbps says: a number of Gbit/s, or a rate with a unit of its own."""
    bare = text.lstrip("+-").replace(".", "", 1).isdigit()
    return parse_bytes_per_s(f"{text} Gbit/s" if bare else text)


SIZE = _Quantity("size", parse_size_bytes)
RATE = _Quantity("rate", parse_bytes_per_s)
LINK_RATE = _Quantity("rate", _parse_link_rate)
TIME = _Quantity("time", parse_duration_s)
FRACTION = _Quantity("percent", parse_fraction)
NUMBER = _Quantity("number", parse_number)
COUNT = _Quantity("count", parse_whole)
PNG = _Quantity("png", _parse_png)

_Command = Callable[..., None]


def output_options(command: _Command) -> _Command:
    """Adds ``--json`` and ``--csv``, as the one argument `output`: ``table``, ``json`` or ``csv``."""
    for name, text in (("csv", "Print rows as CSV."), ("json", "Print one JSON object.")):
        command = click.option(f"--{name}", "output", flag_value=name, help=text)(command)
    return command


def print_json(fields: Mapping[str, Any]) -> None:
    """Prints one JSON object."""
    click.echo(json.dumps(fields, ensure_ascii=False))


def print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows that all have the same columns."""
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
