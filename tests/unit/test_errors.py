"""How an error gets to the other ranks: through JSON, with its type and what it carries."""

from __future__ import annotations

import json
from typing import Any

import pytest

import fastload
from fastload import errors
from fastload.errors import (
    DeadlineExceeded,
    FastloadError,
    MismatchError,
    PeerError,
    StorageError,
    from_wire,
    to_wire,
)

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FastloadError)]


def travel(error: BaseException) -> BaseException:
    return from_wire(json.loads(json.dumps(to_wire(error))))


def test_every_error_is_exported() -> None:
    assert {kind.__name__ for kind in KINDS} - {"Interrupted"} <= set(fastload.__all__)


@pytest.mark.parametrize("kind", KINDS)
def test_type_and_text(kind: type[FastloadError]) -> None:
    sent = kind("what went wrong: ünïcode \ud800 'quoted'")
    received = travel(sent)
    assert type(received) is kind
    assert str(received) == str(sent)
    assert repr(travel(received)) == repr(sent)


def test_what_a_storage_error_carries() -> None:
    sent = StorageError("no route", url="s3://b/k", offset=4096, nbytes=100, attempts=5, transient=True)
    received = travel(sent)
    assert isinstance(received, StorageError)
    assert vars(received) == vars(sent)
    assert str(received) == "s3://b/k [bytes 4096-4196]: no route after 5 attempts"
    whole = travel(StorageError("gone", url="/x"))
    assert isinstance(whole, StorageError)
    assert (whole.offset, whole.nbytes, whole.attempts, whole.transient) == (None, None, 1, False)
    assert str(whole) == "/x: gone"
    assert isinstance(whole, OSError)


def test_what_a_mismatch_carries() -> None:
    received = travel(MismatchError("does not fit", ("a",), ("b", "c"), ("d: shape",)))
    assert isinstance(received, MismatchError)
    assert (received.missing, received.unexpected, received.mismatched) == (("a",), ("b", "c"), ("d: shape",))


def test_a_peer_error_keeps_its_type() -> None:
    received = travel(PeerError("two failed", {1: DeadlineExceeded("late")}))
    assert isinstance(received, PeerError)
    assert str(received) == "two failed"
    assert isinstance(received.failures, dict)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError("cannot allocate 5 TB"), "cannot allocate 5 TB"),
        (KeyError("name"), "'name'"),
        (ValueError("bad", 3), "('bad', 3)"),
        (FileNotFoundError(2, "No such file", "/x"), "[Errno 2] No such file: '/x'"),
        (PermissionError(13, "Permission denied"), "[Errno 13] Permission denied"),
        (RuntimeError(), ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_builtin_errors_come_back_as_themselves(error: Exception, text: str) -> None:
    received = travel(error)
    assert type(received) is type(error)
    assert str(received) == text


class StrangeError(Exception):
    def __init__(self, message: str, thing: Any) -> None:
        super().__init__(message)
        self.thing = thing


class ValueErrorTwin(ValueError):
    pass


@pytest.mark.parametrize("thing", [object(), (object(),), [1], {"a": 1}, b"x", ((1, object()),)])
def test_a_foreign_error_is_named_whatever_it_carries(thing: Any) -> None:
    received = travel(StrangeError("odd", thing))
    assert type(received) is FastloadError
    assert str(received) == "StrangeError: odd"


@pytest.mark.parametrize(
    "error", [ValueErrorTwin("x"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), Exception("x")]
)
def test_what_cannot_be_rebuilt_keeps_its_name(error: Exception) -> None:
    received = travel(error)
    assert type(received) is FastloadError
    assert str(received).startswith(f"{type(error).__name__}: ")


@pytest.mark.parametrize(
    "name", ["BaseException", "SystemExit", "print", "to_wire", "Any", "os", "__import__"]
)
def test_only_exceptions_can_be_made(name: str) -> None:
    received = from_wire({"type": name, "message": "m", "fields": {}})
    assert type(received) is FastloadError
    assert str(received) == f"{name}: m"
