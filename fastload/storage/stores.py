"""Stores of obstore's: how one is made for a URL, and what its errors mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from os import PathLike
from typing import Any
from urllib.parse import quote

from obstore.exceptions import (
    GenericError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import HTTPStore, S3Store, from_url

from fastload.errors import OptionError
from fastload.options import environment
from fastload.storage.location import HTTP, locate, name_of
from fastload.storage.secrets import Secrets, basic_auth

__all__ = ["advice", "is_transient", "make_store", "s3_settings"]

_from_url: Any = from_url  # its overloads want the kind of store to be known
# What obstore takes apart from the options of a store, and dies of when it finds it among them.
_CLIENT_OPTIONS = frozenset(
    """
    allow_http allow_invalid_certificates connect_timeout default_content_type default_headers http1_only
    http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle http2_only
    pool_idle_timeout pool_max_idle_per_host proxy_ca_certificate proxy_excludes proxy_url
    randomize_addresses root_certificate timeout user_agent
    """.split()
)

# What obstore finds by itself, or is told to do without.
_OTHER_CREDENTIALS = frozenset(
    """
    access_key_id container_credentials_full_uri container_credentials_relative_uri skip_signature
    web_identity_token_file
    """.split()
)
_CONNECT_TIMEOUT = timedelta(seconds=5)
# obstore dies of an endpoint that is no URL, with the first request.
_ENDPOINT = re.compile(r"https?://(\[[0-9a-f:.]+\]|[^\s/?#:@\[\]]+)(:\d{1,5})?(/[^\s?#]*)?", re.IGNORECASE)
# What another try will not change.
_PERMANENT = (
    FileNotFoundError,
    InvalidPathError,
    NotImplementedError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
    ValueError,
)
# All else that happens is one `GenericError`, of which only the text tells what it is. In it these words come
# before those of the server.
_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})")
_PASSING = (408, 409, 429)  # 409: another conditional request is under way
_NO_RANGES = re.compile(r"Generic \S+ error: Received non-partial response when range requested")
# obstore looks nowhere but in the environment, and then asks the cloud's metadata service.
_NO_KEYS = re.compile(r"Error performing \w+ \S+/(latest/api/token|latest/meta-data/)")


def make_store(
    url: str | PathLike[str], options: Mapping[str, Any], *, attempt_s: float, retry: Mapping[str, Any]
) -> Any:
    """Makes obstore's store for a URL.

    Args:
        url: Its root, with its scheme. A name and a password in one of HTTP are sent to the server.
        options: Configuration of the store, as obstore takes it, beyond what the environment says; options
            of the HTTP client may stand among those of the store.
        attempt_s: Longest time in seconds for one request.
        retry: What obstore is to do about failures by itself.

    Raises:
        OptionError: The URL or an option is not one that the store takes.
    """
    location = locate(url)
    secrets = Secrets(location, options)
    config = dict(options)
    attempt = timedelta(seconds=attempt_s)
    client: dict[str, Any] = {
        "timeout": attempt,
        "connect_timeout": min(_CONNECT_TIMEOUT, attempt),
        "allow_http": True,  # whoever names an http:// endpoint means it
    }
    client |= {name: config.pop(name) for name in _CLIENT_OPTIONS & config.keys()}
    given = config.pop("client_options", {})
    if not isinstance(given, Mapping):
        raise OptionError(
            f"cannot open {location}: client_options= must be a dict, not {type(given).__name__}"
        )
    client |= given
    if (header := basic_auth(location)) is not None:
        client["default_headers"] = _with_header(client.get("default_headers"), "Authorization", header)
    config |= {"client_options": client, "retry_config": retry}
    try:
        if location.scheme in HTTP:  # which obstore would take for S3 or Azure by their hosts' names
            return HTTPStore.from_url(_without_user(location.address), **config)
        store = _from_url(_quoted(location.address), **config)
        if isinstance(store, S3Store) and (profile := _profile_for(store)) is not None:
            store = _from_url(_quoted(location.address), credential_provider=profile, **config)
    except BaseException as error:
        # Of what its authors did not foresee obstore dies with an exception that is no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        cause = secrets.clean(error) if isinstance(error, Exception) else None
        raise OptionError(f"cannot open {location}: {secrets.first_line(error)}") from cause
    endpoint = s3_settings(store)["endpoint"] if isinstance(store, S3Store) else None
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        shown = name_of(endpoint)
        raise OptionError(
            f"cannot open {location}: endpoint {shown!r} is not a URL such as https://host:9000"
        )
    return store


def is_transient(error: Exception) -> bool:
    """Whether another try could succeed after an error of obstore's."""
    if not isinstance(error, GenericError):
        return not isinstance(error, _PERMANENT)
    answer = _STATUS.search(str(error))
    status = int(answer[1]) if answer is not None else 0
    return not _lacks_ranges(error) and (not 400 <= status < 500 or status in _PASSING)


def advice(error: Exception) -> str:
    """Returns what helps with an error of obstore's, to be put behind its text; empty if nothing is known."""
    if _lacks_ranges(error):
        return " (it answers ranges with status 200, not 206: " + (
            "`rclone serve http` does it right)"
            if isinstance(error, NotSupportedError)
            else "as `rclone serve s3` does; SeaweedFS and MinIO do it right)"
        )
    if isinstance(error, GenericError) and _NO_KEYS.search(str(error)):
        return " (no AWS_ACCESS_KEY_ID in the environment, no profile in ~/.aws)"
    return ""


def _lacks_ranges(error: Exception) -> bool:
    """Whether the server sent all of an object when asked for a range, which has a type over HTTP only."""
    if isinstance(error, GenericError):
        return _NO_RANGES.match(str(error)) is not None
    return isinstance(error, NotSupportedError)


def _with_header(headers: Any, name: str, value: str) -> Any:
    """Adds a header, unless the user gives another one of that name."""
    given = dict(headers or {})
    return given if name.lower() in map(str.lower, given) else {**given, name: value}


def _without_user(url: str) -> str:
    scheme, _, rest = url.partition("://")
    host = re.split("[/?]", rest, maxsplit=1)[0]
    return f"{scheme}://{rest[host.rfind('@') + 1 :]}"


def _quoted(url: str) -> str:
    """Returns the URL of an object store as obstore reads it: those given say the keys as they are."""
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    return f"{scheme}://{host}/{quote(path)}"


def _profile_for(store: S3Store) -> Any:
    """Returns what asks boto3 for the credentials of a profile in ~/.aws, for a store that has no others.

    obstore knows no profiles: roles, single sign-on, and processes that print keys.
    """
    if _OTHER_CREDENTIALS & {name for name, value in s3_settings(store).items() if value}:
        return None
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    session = boto3.session.Session()
    if not session.available_profiles or session.get_credentials() is None:
        return None
    return Boto3CredentialProvider(session)


def s3_settings(store: S3Store) -> dict[str, Any]:
    """Returns what an S3 store goes by: its options, and the environment for what they do not say."""
    known: dict[str, Any] = {
        name.removeprefix("AWS_").lower(): value for name, value in environment("AWS_").items()
    }
    known |= store.config
    return {**known, "endpoint": known.get("endpoint") or known.get("endpoint_url")}
