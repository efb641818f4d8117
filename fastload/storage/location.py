"""Paths and URLs, with one form to open and one to print, and their credentials, which are never printed."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import unescape
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from fastload.errors import FastloadError, OptionError, StorageError

HTTP = frozenset("http https".split())
OBJECT_STORES = frozenset("s3 s3a gs az adl azure abfs abfss".split())
"""Whose URLs are a bucket and keys."""

_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]*"
_URL = re.compile(rf"((?:{_SCHEME}::)*{_SCHEME})://(.*)", re.DOTALL)  # fsspec chains them: simplecache::s3://
_ONE_SLASH = re.compile(rf"({_SCHEME}):/(?!/)(.*)", re.DOTALL)
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]")
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")

# A password with a slash in it, which no library takes for one.
_BROKEN_USER = re.compile(
    rf"({_SCHEME})(://)([^\s/?#:@\[]+:[^\s/?#@]*[^\s/?#@\d][^\s/?#@]*[/?#](?!/)[^\s@]*)@"
)


class _Patterns:
    """What is not to be shown of URLs.

    Args:
        ends: The characters that end a URL.
    """

    def __init__(self, ends: str) -> None:
        self.user = re.compile(rf"({_SCHEME})(://?)([^/?#{ends}]*)@")
        self.query = re.compile(rf"(https?://[^?{ends}]*)\?[^{ends}]*", re.IGNORECASE)
        self.signed = re.compile(
            rf"([?&][^\s=&]*(?:sig|token|secret|passw|credential|delegation)[^\s=&]*)=[^&{ends}]*",
            re.IGNORECASE,
        )

    def hide(self, text: str) -> str:
        text = _BROKEN_USER.sub(_without_password, text)
        text = self.user.sub(_without_password, text)
        text = self.query.sub(r"\1?***", text)
        return self.signed.sub(r"\1=***", text)


_IN_TEXT = _Patterns(r"\s'\"<>")  # such as what a library says of a request that failed
_ALONE = _Patterns(r"\0")


@dataclass(frozen=True)
class Location:
    """A path or URL as a user named it; its text is the form to show. Made by `locate`.

    Attributes:
        scheme: That of the URL, in lower case; empty for what is on a file system of this host.
        url: An absolute path or a URL, without its secrets: for reports, messages and logs.
        given: What the user named, without its secrets: the same on ranks that named the same, whatever
            their working directories and passwords are.
        address: The same as `url` with all secrets: to open it, and never to be shown.
    """

    scheme: str
    url: str
    given: str
    address: str = field(repr=False)

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.address

    def __truediv__(self, name: str) -> Location:
        """Returns what has a name below it, with ``/`` between parts; of an empty name, itself."""
        if not name:
            return self
        path, mark, query = self._parts()
        step = quote(name) if self.scheme in HTTP else name
        address = f"{path.rstrip('/')}/{step}{mark}{query}"
        return replace(
            self, url=f"{self.url.rstrip('/')}/{name}", given=f"{self.given}/{name}", address=address
        )

    @property
    def query(self) -> str:
        """What follows the question mark of an HTTP URL."""
        return self._parts()[2]

    def _parts(self) -> tuple[str, str, str]:
        return self.address.partition("?") if self.scheme in HTTP else (self.address, "", "")


def locate(path: object) -> Location:
    """Finds out where a path or URL leads: from the working directory and the home as they are now.

    A URL's scheme may be in capitals. Of object stores, slashes that follow each other count as one.

    Args:
        path: Text, a path object, or what this function returned.

    Raises:
        OptionError: It cannot be a path or URL, or is not clear; the message has no secrets.
    """
    if isinstance(path, Location):
        return path
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        advice = ": decode it with os.fsdecode" if isinstance(text, bytes) else ""
        raise OptionError(f"path={path!r}: must be text or a path object{advice}")
    shown = _shown(text)
    if not text:
        raise OptionError("path='': is empty; name a file, a directory or a URL")
    if "\0" in text:
        raise OptionError(f"path={shown!r}: has a NUL character in it, which no path can have")
    found = _URL.fullmatch(text)
    if found is None:
        _require_path(text, shown)
        return _local(text, shown)
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file":
        return _local(_path_of(rest, shown), shown)
    return _KINDS.get(scheme, _other)(scheme, rest, shown)


def _require_path(text: str, shown: str) -> None:
    """Refuses a URL that has lost a slash: as a path it would be a directory by the name of ``s3:``."""
    found = _ONE_SLASH.fullmatch(text)
    if found is None:
        return
    from fsspec import available_protocols  # which takes longer to import than all of this module

    scheme = found[1].lower()
    if scheme in OBJECT_STORES | HTTP | {"file", *available_protocols()}:
        url = _shown(f"{scheme}://{'/' if scheme == 'file' else ''}{found[2]}")
        raise OptionError(
            f"path={shown!r}: is {url!r} meant? Give a URL as text: a path object drops one of its slashes"
        )


def _path_of(rest: str, shown: str) -> str:
    """Returns the path in a file:// URL."""
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise OptionError(
            f"path={shown!r}: begin a file URL with file:///, its path is absolute and on this host"
        )
    if _ESCAPE.search(path):
        raise OptionError(
            f"path={shown!r}: is {'/' + unquote(path)!r} or {'/' + path!r} meant? Give it without file://"
        )
    return slash + path


def _local(text: str, shown: str) -> Location:
    path = os.path.expanduser(text)
    if not os.path.isabs(path):
        try:
            path = os.path.join(os.getcwd(), path)
        except FileNotFoundError:
            message = f"path={shown!r}: the working directory does not exist any more: name an absolute path"
            raise OptionError(message) from None
    # Where a symbolic link leads, ".." is not what it seems: that is for the system to say.
    path = path if ".." in path.split("/") else "/" + os.path.normpath(path).lstrip("/")
    return Location("", path, shown, path)


def _bucket(scheme: str, rest: str, shown: str) -> Location:
    host, _, key = rest.partition("/")
    if not host:
        raise OptionError(f"path={shown!r}: names no bucket")
    if ":" in host and "@" in rest:
        raise OptionError(
            f"path={shown!r}: keys do not go into a URL of an object store, but into the environment or "
            "storage_options="
        )
    parts = [part for part in key.split("/") if part]
    if {".", ".."} & set(parts) or _UNSAFE.search(key):
        raise OptionError(
            f"path={shown!r}: object stores do not agree on a key with . or .. as a part, a backslash, or a "
            "control character"
        )
    return _as_url(scheme, "/".join([host, *parts]))


def _http(scheme: str, rest: str, shown: str) -> Location:
    url = f"{scheme}://{rest}".partition("#")[0]
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        reason = "" if "@" in rest else f" ({error})"
        advice = "in a password, write %2F for a slash, %3F for ?, %23 for #"
        raise OptionError(f"path={shown!r}: is no URL{reason}; {advice}") from None
    if not host:
        raise OptionError(f"path={shown!r}: names no host")
    path, mark, query = url.partition("?")
    address = f"{path.rstrip('/')}{mark}{query}"
    shown = _shown(address).partition("?")[0]
    return Location(scheme, shown, shown, address)


def _other(scheme: str, rest: str, shown: str) -> Location:
    return _as_url(scheme, rest.rstrip("/"))


def _as_url(scheme: str, rest: str) -> Location:
    address = f"{scheme}://{rest}"
    return Location(scheme, _shown(address), _shown(address), address)


_KINDS: dict[str, Callable[[str, str, str], Location]] = {
    **dict.fromkeys(OBJECT_STORES, _bucket),
    **dict.fromkeys(HTTP, _http),
}


def name_of(path: object) -> str:
    """Returns what a path or URL is called in messages, and compared by, even if it cannot be one."""
    try:
        return locate(path).given
    except OptionError:
        return _shown(str(path))


def redact(text: str) -> str:
    """Returns a text without the passwords and signatures in the URLs that it holds.

    Of a URL alone, `locate` hides more: a quote may be part of a password, but in a text it ends the URL.
    """
    return _IN_TEXT.hide(text)


def _shown(given: str) -> str:
    """Returns what to show of what a user named."""
    is_url = _URL.fullmatch(given) or _ONE_SLASH.fullmatch(given)
    return _ALONE.hide(given) if is_url else redact(given)


def _without_password(found: re.Match[str]) -> str:
    scheme, slashes, user = found.groups()
    if scheme.lower() in HTTP:
        return f"{scheme}{slashes}***@"  # some services take a token for the name
    name, colon, _ = user.partition(":")
    return f"{scheme}{slashes}{name}{':***' if colon else ''}@"


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

    @contextmanager
    def errors(
        self,
        url: str,
        offset: int | None = None,
        nbytes: int | None = None,
        *,
        is_transient: Callable[[Exception], bool] = lambda error: False,
        advice: Callable[[Exception], str] = lambda error: "",
    ) -> Iterator[None]:
        """Turns errors of a library into `StorageError` without secrets; fastload's own pass.

        Args:
            url: What was asked for, to be printed.
            offset: First byte of it.
            nbytes: How many bytes of it.
            is_transient: Whether another try could succeed after an error.
            advice: What to say behind the text of an error.
        """
        try:
            yield
        except FastloadError:
            raise
        except Exception as error:
            message, transient = self.first_line(error) + advice(error), is_transient(error)
            raise StorageError(message, url, offset, nbytes, transient=transient) from self.clean(error)

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
