"""Parses untrusted input (JSON, texts, names, sizes), and limits the memory that it takes."""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard

from fastload.errors import ManifestError

MAX_INT = 2**63 - 1
_FREE_BYTES = 128 << 20
_BYTES_PER_INPUT_BYTE = 16

_repr = reprlib.Repr()
_repr.maxstring, _repr.maxother, _repr.maxlist, _repr.maxlevel = 200, 200, 16, 3


class MemoryBudget:
    """Limits the memory that the values of a checkpoint take.

    A few bytes of a file can refer to one value many times, or make many long names of one key. So values are
    charged before they are made, by their length in bytes.

    Args:
        where: The checkpoint, for messages.
        free_bytes: Memory that is allowed for any input.
    """

    def __init__(self, where: str, free_bytes: int = _FREE_BYTES) -> None:
        self._where = where
        self._left_bytes = free_bytes
        self._total_bytes = free_bytes

    def add_input(self, nbytes: int) -> None:
        """Raises the limit for some bytes of a file."""
        self._left_bytes += _BYTES_PER_INPUT_BYTE * nbytes
        self._total_bytes += _BYTES_PER_INPUT_BYTE * nbytes

    def charge(self, nbytes: int) -> None:
        """Charges memory before it is taken.

        Raises:
            ManifestError: It is over the limit.
        """
        self._left_bytes -= nbytes
        if self._left_bytes < 0:
            raise ManifestError(
                f"{self._where}: its values take more than {self._total_bytes} bytes of memory: most of them "
                "are repeated, or have very long names"
            )


def show(value: Any) -> str:
    """Returns the text of a value for a message, shortened."""
    text = _repr.repr(value)
    return text if len(text) <= 400 else f"{text[:400]}..."


def parse_json(text: bytes, where: str, *, any_int: bool = False) -> dict[str, Any]:
    """Parses a JSON object as strictly as the safetensors library.

    Args:
        text: The text, in UTF-8.
        where: Its place, for messages.
        any_int: Whether to keep integers of any size. Else integers that do not fit 64 bits become floats, so
            that they are refused as integers, and no number costs more than its digits.

    Raises:
        ManifestError: It is not valid JSON, an object has a key twice, or it is no object.
    """
    try:
        value = parse_value(text) if any_int else _DECODER.decode(text.decode())
    except RecursionError:
        raise ManifestError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise ManifestError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ManifestError(f"{where} is not a JSON object but {show(value)}")
    return value


def parse_value(text: bytes) -> Any:
    """Parses a JSON value as `parse_json` does, with integers of any size.

    Raises:
        ValueError: It is not valid JSON (also `RecursionError`).
    """
    return _EXACT.decode(text.decode())


def parse_metadata(raw: Any, where: str) -> dict[str, str]:
    """Checks that a value is an object of texts.

    Raises:
        ManifestError: It is not.
    """
    if not isinstance(raw, dict):
        raise ManifestError(f"{where} is not an object of texts but {show(raw)}")
    for key, value in raw.items():
        if not (isinstance(value, str) and is_unicode(key) and is_unicode(value)):
            raise ManifestError(f"{where} {show(key)} is not a valid text: {show(value)}")
    return raw


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, which JSON can escape and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_size(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer from 0 to 2**63-1."""
    # type() and not isinstance(): a bool is an int to Python, but not to JSON.
    return type(value) is int and 0 <= value <= MAX_INT


def are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether a value is a list of integers from 0 to 2**63-1."""
    return type(value) is list and all(type(size) is int and 0 <= size <= MAX_INT for size in value)


def is_plain_path(name: str) -> bool:
    """Whether a name is below the root on every system, and the only spelling of its file."""
    if "\\" in name or "\0" in name or re.match("[A-Za-z]:", name) or not is_unicode(name):
        return False
    return not any(part in ("", ".", "..") for part in name.split("/"))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses an object with a key twice, which json.loads accepts."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {show(twice)} appears twice in {show(pairs)}")
    return fields


def _parse_int(text: str) -> int | float:
    """Parses an integer; ``-0`` and integers over 64 bits become floats, as in the safetensors library."""
    return int(text) if len(text) < 20 and text != "-0" else float(text)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _decoder(parse_int: Callable[[str], int | float]) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_unique_keys,
        parse_int=parse_int,
        parse_constant=_refuse_constant,
    )


_DECODER, _EXACT = _decoder(_parse_int), _decoder(int)
