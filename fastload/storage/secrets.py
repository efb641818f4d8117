"""What nobody is to see of a storage: in messages, and in the errors of libraries that they come from."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from html import unescape
from typing import Any
from urllib.parse import unquote, urlsplit

from fastload.storage.location import HTTP, Location, redact

__all__ = ["Secrets", "basic_auth"]

_LEAST_CHARS = 4  # a shorter one would be found in every other word
_LONG_CHARS = 16  # what is that long in a query may be a signature, whatever its name
_NAMES = re.compile(
    r"secret|passw|passphrase|token|signature|credential|authorization|bearer|cookie|connection.?string"
    r"|key(_base64)?$|(^|[_-])(auth|pat|pwd|sas|sig)$",
    re.IGNORECASE,
)
_MARKUP = re.compile(r":?\s*<(?:\?xml|!doctype|html|error)\b.*", re.IGNORECASE)
_MOST_CHARS = 300  # shown of what a server says
_STAND_INS = (FileNotFoundError, NotADirectoryError, PermissionError, OSError, ValueError)


class Secrets:
    """The passwords, signatures and tokens in a location and in the options that open it.

    Args:
        location: What is opened.
        options: With what.
    """

    def __init__(self, location: Location, options: Mapping[str, Any]) -> None:
        found = {*_in_address(location), *_in_options(options)}
        self._texts = sorted((text for text in found if len(text) >= _LEAST_CHARS), key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Returns a text without them."""
        for secret in self._texts:
            text = text.replace(secret, "***")
        return redact(text)

    def first_line(self, error: BaseException) -> str:
        """Returns what to say of a library's error."""
        return self.hide(_first_line(f"{type(error).__name__}: {error}"))

    def clean(self, error: Exception) -> Exception:
        """Takes them out of a library's error, and of those that it comes from, which a traceback shows."""
        cleaned = self._clean(error)
        links = [(cleaned, "__cause__"), (cleaned, "__context__")]
        seen = {id(cleaned)}
        while links:
            holder, name = links.pop()
            link = getattr(holder, name)
            if isinstance(link, Exception) and id(link) not in seen:
                seen.add(id(link))
                links += [(link, "__cause__"), (link, "__context__")]
                setattr(holder, name, self._clean(link))
        return cleaned

    def _clean(self, error: Exception) -> Exception:
        text = str(error)
        hidden = self.hide(text)
        if hidden == text:
            return error
        error.args = tuple(self.hide(arg) if isinstance(arg, str) else arg for arg in error.args)
        if str(error) == self.hide(str(error)):
            return error
        kind = next((kind for kind in _STAND_INS if isinstance(error, kind)), RuntimeError)
        return kind(f"{type(error).__name__}: {hidden}")


def basic_auth(location: Location) -> str | None:
    """Returns the Authorization header for the name and the password in an HTTP URL; None without any."""
    parts = urlsplit(location.address)
    if location.scheme not in HTTP or parts.username is None:
        return None
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _first_line(text: str) -> str:
    """Returns the first line; of an answer in XML or HTML in it what an object store says with it, if any."""
    line, *markup = _MARKUP.split(text.split("\n", 1)[0])
    if not markup:
        return line
    said = (re.search(f"<{name}>([^<]+)</{name}>", text) for name in ("Code", "Message"))
    return ": ".join([line, *(" ".join(unescape(found[1]).split())[:_MOST_CHARS] for found in said if found)])


def _in_address(location: Location) -> Iterator[str]:
    if not location.scheme:
        return
    try:
        parts = urlsplit(location.address)
    except ValueError:
        return
    users = [parts.password, parts.username if location.scheme in HTTP else None]
    for text in filter(None, users):
        yield from (text, unquote(text))
    if (header := basic_auth(location)) is not None:
        yield header.partition(" ")[2]
    for name, _, value in (pair.partition("=") for pair in location.query.split("&")):
        if len(value) >= _LONG_CHARS or _NAMES.search(name):
            yield from (value, unquote(value))


def _in_options(value: Any, *, is_secret: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _in_options(inner, is_secret=is_secret or _NAMES.search(str(name)) is not None)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _in_options(inner, is_secret=is_secret)
    elif is_secret and isinstance(value, str | bytes):
        yield from _forms(value if isinstance(value, str) else value.decode(errors="replace"))


def _forms(secret: str) -> Iterator[str]:
    """Returns a secret as it is, and what of it may be shown alone."""
    yield from (secret, secret.rpartition(" ")[2])  # of "Bearer …" what follows
    for name, _, value in (pair.partition("=") for pair in secret.split(";")):  # a connection string
        if _NAMES.search(name):
            yield value.rstrip("=")
