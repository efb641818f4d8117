"""Copies of blobs, which Azure may make in the background."""

from __future__ import annotations

import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import datetime, timedelta
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from fastload.errors import StorageError
from fastload.ext.remote.s3_settings import is_on
from fastload.options import environment

_from_url: Any = from_url  # its overloads need the kind of store
_VALID = timedelta(days=1)
_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
_REQUEST_S = 10.0
_FORBIDDEN, _MISSING = 403, 404
_SAS_VARIABLES = ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN")
_SAS_OPTIONS = ("sas_key", "sas_token")


def url_of(store: Any, address: str, key: str) -> str:
    """Returns a URL to read a blob with, by a signature. Raises the error of obstore if it cannot sign.

    Args:
        store: The obstore store.
        address: URL of its root.
        key: Key of the blob.
    """
    variables = environment("AZURE_")
    places = (*map(store.config.get, _SAS_OPTIONS), *map(variables.get, _SAS_VARIABLES))
    try:
        return str(obstore.sign(store, "GET", key, _VALID))
    except BaseError:
        if not any(places):
            raise
    # A signature cannot sign. A key that does not matter gives the rest of the URL.
    left_out = (*_SAS_OPTIONS, "container_name")
    config = {name: value for name, value in store.config.items() if name not in left_out}
    config["account_key"] = "a2V5"
    other = _from_url(address, **config, client_options=store.client_options)
    url = str(obstore.sign(other, "GET", key, _VALID))
    return f"{url.partition('?')[0]}?{str(next(filter(None, places))).lstrip('?')}"


def wait_for_copy(url: str, client: Mapping[str, Any], *, timeout_s: float) -> None:
    """Waits until a blob is no longer the pending copy of another.

    Args:
        url: Signed URL of the blob.
        client: Options of obstore's HTTP client.
        timeout_s: Longest time in seconds without progress.

    Raises:
        StorageError: The copy has failed, or makes no progress.
    """
    opener, headers = _opener(client), _headers(client)
    until_s, pause_s, seen = time.monotonic() + timeout_s, _PAUSE_S, ""
    while True:
        status, about = _ask(opener, url, headers)
        if status in ("", "success"):
            return
        if status in ("failed", "aborted"):
            raise StorageError(
                f"Azure's copy of the uploaded file is {status}: {about or 'it gives no reason'}"
            )
        if status == "pending" and about != seen:
            until_s, seen = time.monotonic() + timeout_s, about
        if time.monotonic() > until_s:
            state = f"{status} {about}".strip()
            raise StorageError(f"Azure's copy of the uploaded file stands still for {timeout_s:g} s: {state}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _ask(opener: urllib.request.OpenerDirector, url: str, headers: Mapping[str, str]) -> tuple[str, str]:
    """Returns the status of a copy, and its progress or what has failed; an empty status if there is none."""
    request = urllib.request.Request(url, headers=dict(headers), method="HEAD")
    try:
        with opener.open(request, timeout=_REQUEST_S) as answer:
            status = answer.headers.get("x-ms-copy-status", "")
            name = "x-ms-copy-progress" if status == "pending" else "x-ms-copy-status-description"
            return status, answer.headers.get(name, "")
    except urllib.error.HTTPError as error:
        with error:
            if error.code == _MISSING:  # it is not visible yet
                return "pending", ""
            if error.code == _FORBIDDEN and _is_early(url, error.headers):
                return "unknown", "the store's clock is behind that of this host"
            if 400 <= error.code < 500 and error.code not in (408, 429):
                raise StorageError(f"cannot ask for the status of Azure's copy: HTTP {error.code}") from None
            return "unknown", f"HTTP {error.code}"
    except OSError as error:
        return "unknown", type(error).__name__


def _is_early(url: str, headers: Message) -> bool:
    """Whether a signature does not hold yet, by the clock of the server that refuses it."""
    try:
        [begins] = parse_qs(urlsplit(url).query)["st"]
        return parsedate_to_datetime(headers["Date"]) < datetime.fromisoformat(begins.replace("Z", "+00:00"))
    except (KeyError, TypeError, ValueError):
        return False


def _headers(client: Mapping[str, Any]) -> dict[str, str]:
    given = dict(client.get("default_headers") or {})
    return {n: value.decode() if isinstance(value, bytes) else str(value) for n, value in given.items()}


def _opener(client: Mapping[str, Any]) -> urllib.request.OpenerDirector:
    """Returns what makes requests by the options of obstore's HTTP client."""
    context = ssl.create_default_context()
    if certificates := client.get("root_certificate"):
        text = certificates.decode() if isinstance(certificates, bytes) else str(certificates)
        context.load_verify_locations(cadata=text)
    if is_on(client.get("allow_invalid_certificates")):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if proxy := client.get("proxy_url"):
        handlers.append(urllib.request.ProxyHandler({"http": str(proxy), "https": str(proxy)}))
    return urllib.request.build_opener(*handlers)
