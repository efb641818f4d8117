"""The settings of an S3 location, resolved once for the two libraries that talk to it: obstore and boto3."""

from __future__ import annotations

import base64
import importlib.util
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from fastload.base.threads import within
from fastload.errors import OptionError
from fastload.ext.remote.process import aws_descriptions
from fastload.options import environment
from fastload.storage.location import name_of

_DEFAULT_REGION = "us-east-1"
# Variables with an endpoint, as the AWS SDKs take them; the last is obstore's own.
_ENDPOINTS = ("endpoint_url_s3", "endpoint_url", "endpoint")
_OTHER_ENDPOINTS = ("use_accelerate_endpoint", "use_dualstack_endpoint", "use_fips_endpoint")
# An endpoint that is not a URL crashes obstore at the first request.
_ENDPOINT = re.compile(r"https?://(\[[0-9a-f:.]+\]|[^\s/?#:@\[\]]+)(:\d{1,5})?(/[^\s?#]*)?", re.IGNORECASE)
_ANSWER_S = 120.0  # most seconds for credentials; botocore waits for a credential process without a limit
_LOOK_S = 60.0  # most seconds between two looks at whether credentials expire
_SEARCH = "the search for the credentials of the profile"
_LIFETIMES_S = (900, 300, 60, 20, 5, 1)
# Options by which obstore finds credentials. boto3 reads them from the environment only.
_OF_PROVIDERS = frozenset(
    """
    container_authorization_token_file container_credentials_full_uri container_credentials_relative_uri
    credential_provider role_arn role_session_name web_identity_token_file
    """.split()
)
_NOT_FOR_SAVES = frozenset("http2_only proxy_ca_certificate proxy_excludes".split())


class AccessKeys(NamedTuple):
    """The keys of S3 at a moment, by the names of botocore."""

    access_key: str
    secret_key: str
    token: str | None


class Credentials:
    """The credentials of botocore's chain (profiles, roles, single sign-on, processes) for both libraries.

    Each request asks for them, so that they are renewed before they expire.

    Args:
        session: The botocore session that has found them.
    """

    method = "fastload"  # as botocore's own

    def __init__(self, session: Any) -> None:
        self._lock = threading.Lock()
        self._source = _found_by(session)
        self._keys: AccessKeys | None = None
        self._until_s = 0.0
        self.number = 0
        """Counts how often they were renewed by `renew`."""

    def __call__(self) -> dict[str, Any]:
        """Returns them as obstore takes them, to be asked for again with the next request."""
        keys = self.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(timezone.utc),
        }

    def load_credentials(self) -> Credentials:
        """Returns them to a session of botocore, whose own chain they replace."""
        return self

    def get_deferred_property(self, name: str) -> Callable[[], None]:
        """Returns what gives a property, the account for example, of which there is none."""
        return lambda: None

    def get_frozen_credentials(self) -> AccessKeys:
        """Returns them as botocore takes them."""
        with self._lock:
            if self._keys is None or time.monotonic() >= self._until_s:
                frozen = within(_ANSWER_S, _SEARCH, self._source.get_frozen_credentials)
                self._keys = AccessKeys(*frozen[:3])
                self._until_s = time.monotonic() + _good_for_s(self._source)
            return self._keys

    def renew(self, number: int) -> None:
        """Asks for other credentials, since the store says that they have expired.

        Args:
            number: `number` as it was before the request; if it has changed, they are new already.
        """
        with self._lock:
            if number == self.number:
                self._source = _found_by(new_session()) or self._source
                self._keys = None
                self.number += 1


def _found_by(session: Any) -> Any:
    return within(_ANSWER_S, _SEARCH, session.get_credentials)


def _good_for_s(source: Any) -> float:
    """Returns for how long credentials need no look: half of the time that they last at least."""
    if not hasattr(source, "refresh_needed"):
        return _LOOK_S
    lasts_s = next((s for s in _LIFETIMES_S if not source.refresh_needed(refresh_in=s)), 0)
    return min(_LOOK_S, lasts_s / 2)


@dataclass(frozen=True, repr=False)
class S3Settings:
    """How to reach a bucket, whichever library does it.

    Attributes:
        bucket: Name of the bucket.
        endpoint: URL of the store, without the bucket; None for that of AWS.
        region: The region.
        is_virtual: Whether the bucket is a part of the host name.
        is_unsigned: Whether requests are sent without a signature.
        keys: Keys that the user gave; None to use the credentials.
        credentials: Those of a profile; None if each library finds those of this machine or container.
        root_certificates: Certificates in PEM to trust, too; empty if there are none.
        options: All options of obstore, and variables of the environment, by the names of obstore.
        given: Names of the options that were arguments, those of the HTTP client included.
    """

    bucket: str
    endpoint: str | None
    region: str
    is_virtual: bool
    is_unsigned: bool
    keys: AccessKeys | None
    credentials: Credentials | None
    root_certificates: str
    options: Mapping[str, Any]
    given: frozenset[str]

    def for_obstore(self) -> dict[str, Any]:
        """Returns the configuration of an obstore store, in place of the one it would find.

        Raises:
            OptionError: obstore cannot be kept from another endpoint.
        """
        config: dict[str, Any] = {"region": self.region, "virtual_hosted_style_request": self.is_virtual}
        endpoint = self.host_endpoint
        if endpoint is not None:
            config["endpoint"] = endpoint
        special = self.options.get("endpoint_url_s3")
        if special and special.rstrip("/") != (endpoint or "").rstrip("/"):
            # It precedes all options of obstore, and is none itself.
            raise OptionError(
                f"AWS_ENDPOINT_URL_S3 is {name_of(special)!r}, so that obstore cannot use {endpoint!r}: "
                "unset it, and give the endpoint as endpoint= in storage_options, or in AWS_ENDPOINT_URL"
            )
        keys = self.keys
        if self.is_unsigned:
            config["skip_signature"] = True
        elif keys is not None:
            config["credential_provider"] = lambda: {
                "access_key_id": keys.access_key,
                "secret_access_key": keys.secret_key,
                "token": keys.token,
                "expires_at": None,
            }
        elif self.credentials is not None:
            config["credential_provider"] = self.credentials
        return config

    @property
    def host_endpoint(self) -> str | None:
        """The endpoint as obstore takes it: with the bucket, if that is a part of the host name."""
        if self.endpoint is None or not self.is_virtual:
            return self.endpoint
        parts = urlsplit(self.endpoint)
        return urlunsplit(parts._replace(netloc=f"{self.bucket}.{parts.netloc}"))

    def object_parameters(self) -> dict[str, Any]:
        """Returns the parameters of boto3's requests that obstore adds to its own by options."""
        known = self.options
        found: dict[str, Any] = {
            "SSEKMSKeyId": known.get("sse_kms_key_id"),
            "ContentType": known.get("default_content_type"),
        }
        encryption = known.get("server_side_encryption")
        if encryption == "sse-c":
            key = base64.b64decode(known.get("sse_customer_key_base64") or "")
            found |= {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key}
        else:
            found["ServerSideEncryption"] = encryption
        if is_on(known.get("sse_bucket_key_enabled")):
            found["BucketKeyEnabled"] = True
        if is_on(known.get("request_payer")) or str(known.get("request_payer")).lower() == "requester":
            found["RequestPayer"] = "requester"
        return {name: value for name, value in found.items() if value}

    @property
    def has_headers_of_reads(self) -> bool:
        """Whether a read takes more than a signed URL."""
        names = {"SSECustomerKey", "RequestPayer"}
        return bool(names & self.object_parameters().keys()) or is_on(self.options.get("s3_express"))

    def require_for_saves(self) -> None:
        """Requires options that boto3 can be given, too.

        Raises:
            OptionError: Some cannot.
        """
        unfit = {name for name in _NOT_FOR_SAVES & self.given if self.options[name]}
        if self.keys is None and self.credentials is None and not self.is_unsigned:
            unfit |= (_OF_PROVIDERS & self.given) | ({"sts_endpoint"} & self.options.keys())
        if unfit:
            raise OptionError(
                f"boto3, which saves to S3, does not take {', '.join(sorted(unfit))}: leave it out, or for "
                "credentials, set the variables of the AWS SDKs in the environment"
            )


def resolve(config: Mapping[str, Any], client: Mapping[str, Any], bucket: str) -> S3Settings:
    """Finds the settings of a bucket: in the options, then in the environment, then in the profile.

    Args:
        config: Options of the store, by the names that obstore gives them.
        client: Options of obstore's HTTP client.
        bucket: Name of the bucket.

    Raises:
        OptionError: A setting cannot be used.
    """
    texts = {name.removeprefix("AWS_").lower(): text for name, text in environment("AWS_").items()}
    variables = {name: text for name, text in texts.items() if text}
    known = {**variables, **client, **config}
    session = new_session() if _has_profile() else None
    profile: Mapping[str, Any] = session.get_scoped_config() if session is not None else {}
    of_s3 = _section(profile, "s3")
    is_virtual = is_on(known.get("virtual_hosted_style_request", of_s3.get("addressing_style") == "virtual"))
    places = [config.get("endpoint"), *map(variables.get, _ENDPOINTS)]
    endpoint = next(filter(None, [*places, _endpoint_of(session, profile)]), None)
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        raise OptionError(f"endpoint {name_of(endpoint)!r} is not a URL such as https://host:9000")
    if endpoint is None:
        _require_own_endpoint({**profile, **of_s3, **variables})
    _require_no_empty_endpoint(texts, endpoint)
    is_unsigned, has_provider = is_on(known.get("skip_signature")), "credential_provider" in config
    keys = _keys(config, variables) if not has_provider else None
    is_known = keys is not None or is_unsigned or bool(_OF_PROVIDERS & config.keys())
    has_chain = not is_known and session is not None and _found_by(session) is not None
    trusts_all = str(endpoint).startswith("http:") or is_on(client.get("allow_invalid_certificates"))
    return S3Settings(
        bucket=bucket,
        endpoint=_without_bucket(endpoint, bucket) if endpoint and is_virtual else endpoint,
        region=known.get("region") or known.get("default_region") or profile.get("region") or _DEFAULT_REGION,
        is_virtual=is_virtual,
        is_unsigned=is_unsigned,
        keys=keys,
        credentials=Credentials(session) if has_chain else None,
        root_certificates="" if trusts_all else _root_certificates(client, profile),
        options=known,
        given=frozenset({**client, **config}),
    )


def is_on(value: object) -> bool:
    """Whether obstore takes an option for true."""
    return str(value).lower() in ("1", "true", "yes", "on", "y")


def new_session() -> Any:
    """Returns a botocore session. All share the descriptions of services."""
    import botocore.session

    session = botocore.session.Session()
    session.register_component("data_loader", aws_descriptions())
    return session


def _has_profile() -> bool:
    """Whether there is a profile to look into."""
    if importlib.util.find_spec("botocore") is None:
        return False
    known = environment("AWS_")
    files = (
        known.get("AWS_CONFIG_FILE") or "~/.aws/config",
        known.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
    )
    is_named = bool(known.get("AWS_PROFILE") or known.get("AWS_DEFAULT_PROFILE"))
    return is_named or any(os.path.isfile(os.path.expanduser(path)) for path in files)


def _section(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a nested section of a profile; empty if there is none."""
    found = of.get(name)
    return found if isinstance(found, Mapping) else {}


def _endpoint_of(session: Any, profile: Mapping[str, Any]) -> str | None:
    """Returns the endpoint of a profile: one for S3, or one for all services."""
    services = _section(session.full_config, "services") if session is not None else {}
    special = _section(_section(services, str(profile.get("services"))), "s3")
    return special.get("endpoint_url") or profile.get("endpoint_url")


def _require_own_endpoint(known: Mapping[str, Any]) -> None:
    """Requires that AWS is used by its usual endpoint, which is the only one that obstore knows."""
    others = sorted(name for name in _OTHER_ENDPOINTS if is_on(known.get(name)))
    if others:
        raise OptionError(
            f"obstore does not know {', '.join(others)} of the environment or the profile: give the "
            "endpoint, such as endpoint='https://s3-fips.us-east-1.amazonaws.com' in storage_options"
        )


def _require_no_empty_endpoint(texts: Mapping[str, str], endpoint: str | None) -> None:
    """Requires that no empty variable is obstore's endpoint, which crashes then. Others take it for unset."""
    used = _ENDPOINTS if endpoint is None else _ENDPOINTS[:1]
    empty = [f"AWS_{name.upper()}" for name in used if texts.get(name) == ""]
    if empty:
        raise OptionError(f"{', '.join(empty)} is empty, which obstore takes for an endpoint: unset it")


def _without_bucket(endpoint: str, bucket: str) -> str:
    """Returns an endpoint without the bucket in its host name, where users of obstore put it."""
    scheme, _, rest = endpoint.partition("://")
    return f"{scheme}://{rest.removeprefix(f'{bucket}.')}"


def _keys(config: Mapping[str, Any], variables: Mapping[str, str]) -> AccessKeys | None:
    """Returns the keys of the options, else of the environment. A token belongs to the keys next to it."""
    names = {"access_key_id", "secret_access_key"}
    place = config if names <= config.keys() else {**variables, **config}
    key, secret = place.get("access_key_id"), place.get("secret_access_key")
    token = place.get("session_token") or place.get("token")
    return AccessKeys(key, secret, token) if key and secret else None


def _root_certificates(client: Mapping[str, Any], profile: Mapping[str, Any]) -> str:
    given = client.get("root_certificate")
    if given:
        return given.decode() if isinstance(given, bytes) else str(given)
    variables = {**environment("AWS_"), **environment("REQUESTS_")}
    path = variables.get("AWS_CA_BUNDLE") or profile.get("ca_bundle") or variables.get("REQUESTS_CA_BUNDLE")
    if not path:
        return ""
    try:
        with open(os.path.expanduser(path)) as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read the certificates in {path}: {error}") from None
