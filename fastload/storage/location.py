"""Paths and URLs: one form to open, one to print, and the credentials that are never printed."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from html import unescape
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from fastload.base.registry import extensions
from fastload.errors import FastloadError, OptionError, StorageError
from fastload.storage.process import registered_storages

HTTP = frozenset("http https".split())
OBJECT_STORES = frozenset("s3 s3a gs az adl azure abfs abfss".split())
"""Schemes of URLs that consist of a bucket and a key."""

SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]*"
_URL = re.compile(rf"((?:{SCHEME}::)*{SCHEME})://(.*)", re.DOTALL)  # fsspec chains them: simplecache::s3://
_ONE_SLASH = re.compile(rf"({SCHEME}):/(?!/)(.*)", re.DOTALL)
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]")
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")

# A password with a slash in it, which libraries do not recognize.
_BROKEN_USER = re.compile(
    rf"({SCHEME})(://)([^\s/?#:@\[]+:[^\s/?#@]*[^\s/?#@\d][^\s/?#@]*[/?#](?!/)[^\s@]*)@"
)


class _Patterns:
    """Patterns of credentials in URLs.

    Args:
        ends: Characters that end a URL.
    """

    def __init__(self, ends: str) -> None:
        self.user = re.compile(rf"({SCHEME})(://?)([^/?#{ends}]*)@")
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


_IN_TEXT = _Patterns(r"\s'\"<>")  # such as an error message of a library
_ALONE = _Patterns(r"\0")


@dataclass(frozen=True)
class Location:
    """A resolved path or URL, made by `locate`. Its text is the form to print.

    Attributes:
        scheme: Scheme of the URL in lower case; empty for a path of this host.
        url: Absolute path, or URL without credentials, for reports, messages and logs.
        given: The argument of the user without credentials: equal on ranks that name the same, whatever
            their working directories and passwords are.
        address: Absolute path, or URL with credentials, to open; never printed.
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
        """Returns the location of a name below this one, with ``/`` between parts."""
        if not name:
            return self
        path, mark, query = self._parts()
        step = quote(name) if self.scheme in HTTP else name
        address = f"{path.rstrip('/')}/{step}{mark}{query}"
        return replace(
            self, url=f"{self.url.rstrip('/')}/{name}", given=f"{self.given}/{name}", address=address
        )

    def sibling(self, name: str) -> Location:
        """Returns the location of a name next to this one."""
        path, mark, query = self._parts()
        parent = path.rstrip("/").rpartition("/")[0]
        step = quote(name) if self.scheme in HTTP else name
        return locate(f"{parent}/{step}{mark}{query}" if self.scheme else f"{parent}/{name}")

    def next_to_file(self, ending: str) -> Location | None:
        """Returns the location of ``NAME.ending`` next to a single file ``NAME``.

        None if it cannot be reached: a sibling of an ``https://`` URL may need another signature.
        """
        name = self.address.rstrip("/").rpartition("/")[2]
        if not name or (self.scheme and self.scheme not in OBJECT_STORES):
            return None
        return self.sibling(f"{name}.{ending}")

    @property
    def query(self) -> str:
        """The query of an HTTP URL."""
        return self._parts()[2]

    def _parts(self) -> tuple[str, str, str]:
        return self.address.partition("?") if self.scheme in HTTP else (self.address, "", "")


def locate(path: object) -> Location:
    """Resolves a path or URL, relative to the current working directory.

    Schemes are case-insensitive. In URLs of object stores, consecutive slashes count as one.

    Args:
        path: Text, a path object, or a `Location`.

    Raises:
        OptionError: It is no path or URL, or is ambiguous.
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
        raise OptionError(f"path={shown!r}: contains a NUL character")
    match = _URL.fullmatch(text)
    if match is None:
        _require_path(text, shown)
        return _local(text, shown)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        return _local(_path_of(rest, shown), shown)
    return _KINDS.get(scheme, _other)(scheme, rest, shown)


def local_directory(path: object, use: str) -> str:
    """Returns the address of a directory on a disk of this host.

    Args:
        path: A path.
        use: What it is for, for messages, such as ``stage to``.

    Raises:
        OptionError: It is a URL.
    """
    location = locate(path)
    if location.scheme:
        raise OptionError(f"cannot {use} {location}: name a directory on a disk of each host")
    return location.address


def _require_path(text: str, shown: str) -> None:
    """Refuses a URL that has lost a slash, which would be a path below a directory ``s3:``."""
    match = _ONE_SLASH.fullmatch(text)
    if match is None:
        return
    from fsspec import available_protocols  # which takes longer to import than all of this module

    scheme = match[1].lower()
    of_others = {*registered_storages, *extensions("storages"), *available_protocols()}
    if scheme in OBJECT_STORES | HTTP | of_others | {"file"}:
        url = _shown(f"{scheme}://{'/' if scheme == 'file' else ''}{match[2]}")
        raise OptionError(
            f"path={shown!r}: is {url!r} meant? Give a URL as text: a path object drops one of its slashes"
        )


def _path_of(rest: str, shown: str) -> str:
    """Returns the path of a file:// URL."""
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
    # Only the kernel can resolve ".." behind a symbolic link.
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
        raise OptionError(f"path={shown!r}: is not a URL{reason}; {advice}") from None
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
    """Returns a path or URL as messages print it, even if it is invalid; never raises."""
    try:
        return locate(path).given
    except Exception:
        with suppress(Exception):  # a path object of the caller may refuse its text, too
            return _shown(str(path))
        return f"a {type(path).__name__}"


def redact(text: str) -> str:
    """Redacts the passwords and signatures of URLs in a text.

    `locate` hides more: within a text, a quote ends a URL, but it may be part of a password.
    """
    return _IN_TEXT.hide(text)


def _shown(given: str) -> str:
    """Returns the argument of a user without credentials."""
    is_url = _URL.fullmatch(given) or _ONE_SLASH.fullmatch(given)
    return _ALONE.hide(given) if is_url else redact(given)


def _without_password(match: re.Match[str]) -> str:
    scheme, slashes, user = match.groups()
    if scheme.lower() in HTTP:
        return f"{scheme}{slashes}***@"  # some services take a token for the name
    name, colon, _ = user.partition(":")
    return f"{scheme}{slashes}{name}{':***' if colon else ''}@"


_LEAST_CHARS = 4  # shorter ones would match ordinary words
_LONG_CHARS = 16  # a query value this long may be a signature, whatever its name
_NAMES = re.compile(
    r"secret|passw|passphrase|token|signature|credential|authorization|bearer|cookie|connection.?string"
    r"|key(_base64)?$|(^|[_-])(auth|pat|pwd|sas|sig)$",
    re.IGNORECASE,
)
_MARKUP = re.compile(r":?\s*<(?:\?xml|!doctype|html|error)\b.*", re.IGNORECASE)
# What botocore says of its own retries. There are none, since fastload repeats its requests.
_OWN_RETRIES = re.compile(r" \(reached max retries: 0\)")
# Why a connection failed, which is innermost in the debug text of obstore: `message: "Connection refused",`
_REASON = re.compile(r'HttpError \{.*^ *(?:\w+: )?"?(\w[^\n]*?)"?[\s\])},]*\Z', re.MULTILINE | re.DOTALL)
_MOST_CHARS = 300  # shown of a server's response
_STAND_INS = (FileNotFoundError, NotADirectoryError, PermissionError, OSError, ValueError)


class Secrets:
    """Redacts the credentials of a location and its options from messages and library errors.

    Args:
        location: The location to open.
        options: The options to open it with.
    """

    def __init__(self, location: Location, options: Mapping[str, Any]) -> None:
        texts = {*_in_address(location), *_in_options(options)}
        self._texts = sorted((text for text in texts if len(text) >= _LEAST_CHARS), key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Returns a text without the credentials."""
        for secret in self._texts:
            text = text.replace(secret, "***")
        return redact(text)

    def first_line(self, error: BaseException) -> str:
        """Returns the first line of a library error, without credentials."""
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
        """Turns errors of a library into `StorageError` without credentials; fastload's own pass.

        Args:
            url: URL of the object, to print.
            offset: First byte of the request.
            nbytes: Length of the request in bytes.
            is_transient: Whether another attempt could succeed after an error.
            advice: Text to add to the message of an error.
        """
        try:
            yield
        except FastloadError:
            raise
        except Exception as error:
            message, transient = self.first_line(error) + advice(error), is_transient(error)
            attempts = getattr(error, "attempts", 1)  # see `patiently`
            cause = self.clean(error)
            raise StorageError(message, url, offset, nbytes, attempts, transient=transient) from cause

    def clean(self, error: Exception) -> Exception:
        """Removes the credentials from a library error and its causes, which tracebacks print."""
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
    """Returns the Authorization header for the user and password of an HTTP URL; None without them."""
    parts = urlsplit(location.address)
    if location.scheme not in HTTP or parts.username is None:
        return None
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _first_line(text: str) -> str:
    """Returns the first line of a message with the reason, or code and message of an XML response in it."""
    line, *markup = _MARKUP.split(_OWN_RETRIES.sub("", text.split("\n", 1)[0]))
    if not markup:
        reason = _REASON.search(text)
        return f"{line}: {reason[1]}" if reason else line
    elements = (re.search(f"<{name}>([^<]+)</{name}>", text) for name in ("Code", "Message"))
    said = (" ".join(unescape(element[1]).split())[:_MOST_CHARS] for element in elements if element)
    return ": ".join([line, *said])


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
    """Yields a credential, and the parts of it that a message could show alone."""
    yield from (secret, secret.rpartition(" ")[2])  # the part after "Bearer"
    for name, _, value in (pair.partition("=") for pair in secret.split(";")):  # a connection string
        if _NAMES.search(name):
            yield value.rstrip("=")
