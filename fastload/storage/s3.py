"""What obstore cannot ask of S3, asked through boto3: parts of uploads, and keys that end with a slash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastload.base.threads import within
from fastload.errors import OptionError
from fastload.storage.bucket import ObstoreBucket
from fastload.storage.location import Location
from fastload.storage.process import boto3_session, making_client
from fastload.storage.retry import patiently
from fastload.storage.stores import s3_settings

__all__ = ["S3Bucket", "S3Requests", "error_code", "make_client"]

T = TypeVar("T")

_MAX_CONNECTIONS = 32
_PASSING = ("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "InternalError")


class S3Requests:
    """Requests below one prefix of a bucket, made again after errors that may pass.

    Args:
        url: What is opened, for messages.
        client: boto3's.
        root: Name of the bucket, and the prefix.
        timeout_s: Longest time in seconds for one request with its retries.
        retries: Further attempts.

    Attributes:
        url: What is opened.
        client: boto3's.
        bucket: Name of the bucket.
    """

    def __init__(
        self, url: str, client: Any, root: tuple[str, str], *, timeout_s: float, retries: int
    ) -> None:
        self.url = url
        self.client = client
        self.bucket, self._prefix = root
        self._timeout_s = timeout_s
        self._retries = retries

    def key(self, key: str) -> str:
        """Returns a key as the bucket knows it."""
        return f"{self._prefix}/{key}" if self._prefix else key

    def named(self, key: str) -> dict[str, str]:
        """Returns the arguments that name an object to the client."""
        return {"Bucket": self.bucket, "Key": self.key(key)}

    def ask(self, call: Callable[[], T]) -> T:
        """Makes a request, and makes it again as loads do: boto3's own pauses may all be short.

        Raises:
            DeadlineExceeded: It did not end in time.
        """
        timeout_s = self._timeout_s

        def ask() -> T:
            return patiently(call, _is_transient, retries=self._retries, timeout_s=timeout_s)

        return within(timeout_s, f"a request to {self.url}", ask)


class S3Bucket(ObstoreBucket):
    """Access through obstore, and through boto3 where that is needed.

    Args:
        root: Where keys begin.
        options: As for `ObstoreBucket`, and so are the other ones.
        url: What is opened, for messages.

    Attributes:
        requests: What asks through boto3.
    """

    def __init__(
        self,
        root: Location,
        options: Mapping[str, Any],
        *,
        url: str,
        timeout_s: float,
        attempt_s: float,
        retries: int,
    ) -> None:
        super().__init__(root, options, timeout_s=timeout_s, attempt_s=attempt_s, retries=retries)
        client = make_client(url, self.store, attempt_s=attempt_s)
        bucket, _, prefix = root.address.removeprefix(f"{root.scheme}://").partition("/")
        self.requests = S3Requests(url, client, (bucket, prefix), timeout_s=timeout_s, retries=retries)

    def delete_folder(self, folder: str) -> None:
        super().delete_folder(folder)
        # The object that some stores keep for a folder, with files or without.
        marker = self.requests.named(f"{folder}/")
        self.requests.ask(lambda: self.requests.client.delete_object(**marker))


def make_client(url: str, store: Any, *, attempt_s: float) -> Any:
    """Makes boto3's client for an S3 store of obstore's, so that a URL that loads also saves.

    Args:
        url: What is opened, for messages.
        store: The store, which knows the options under their canonical names.
        attempt_s: Longest time in seconds without an answer to one request.

    Raises:
        OptionError: boto3 is not installed, or does not take an option.
    """
    try:
        import boto3  # noqa: F401
        import botocore.config
    except ImportError as error:
        raise OptionError("saving to S3 needs boto3: pip install 'fastload-torch[remote]'") from error
    # What obstore reads from the environment and boto3 does not, or by other names.
    known = s3_settings(store)
    is_on = {"1", "true", "yes", "on", "y"}
    virtual = str(known.get("virtual_hosted_style_request", "")).lower() in is_on
    unsigned = str(known.get("skip_signature", "")).lower() in is_on
    config = botocore.config.Config(
        signature_version=botocore.UNSIGNED if unsigned else None,
        s3={"addressing_style": "virtual" if virtual else "path"},
        connect_timeout=attempt_s,  # which urllib3 goes by while it sends a part, too
        read_timeout=attempt_s,
        retries={"total_max_attempts": 1},
        max_pool_connections=_MAX_CONNECTIONS,
        # Without: not every store that speaks S3 knows them, and a signature covers the body as well.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        with making_client:
            return boto3_session().client(
                "s3",
                config=config,
                region_name=known.get("region") or known.get("default_region") or "us-east-1",
                endpoint_url=known["endpoint"],
                aws_access_key_id=known.get("access_key_id"),
                aws_secret_access_key=known.get("secret_access_key"),
                aws_session_token=known.get("token") or known.get("session_token"),
            )
    except ValueError as error:  # some of botocore's are
        raise OptionError(f"cannot open {url}: {error}") from error


def _is_transient(error: Exception) -> bool:
    """Whether another try could succeed after an error of boto3's."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status in (408, 429) or error_code(error) in _PASSING
    return isinstance(error, ConnectionError | HTTPClientError)


def error_code(error: BaseException) -> str:
    """Returns what S3 calls an error; empty for one that did not come from there."""
    response = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))
