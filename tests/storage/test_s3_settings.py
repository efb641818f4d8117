"""Every setting of an S3 location, through both of the libraries that talk to it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.errors import DeadlineExceeded, OptionError, StorageError
from fastload.ext.remote import s3_settings
from fastload.formats.names import NAMES
from fastload.storage import open_storage, open_target
from tests.pages import page
from tests.storage.gateway import Answer, Authority, Gateway, Request, make_authority, serving_gateway
from tests.storage.s3_server import BUCKET, DOMAIN, KEY, SECRET, s3_server

KEYS = {"access_key_id": KEY, "secret_access_key": SECRET}
KEY_VARIABLES = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
NOBODY = "http://127.0.0.1:9"
STATE = {"a": torch.arange(100_000), "step": 3}


@dataclass
class Case:
    """One way to give settings. In its texts, names in braces stand for what the test makes.

    Attributes:
        options: storage_options.
        variables: Those of the environment.
        profile: Lines of the profile ``lab``, and of sections after it.
        through: Which server is to get all requests: ``plain``, ``tls``, or ``token``, which takes tokens.
        headers: Headers that every request has to have, as patterns; empty ones must be missing.
        host: The host that every request has to name, as a pattern.
    """

    options: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    profile: str = ""
    through: str = "plain"
    headers: dict[str, str] = field(default_factory=dict)
    host: str = r"127\.0\.0\.1:.*"


VIRTUAL = rf"{BUCKET}\.{DOMAIN}"
PROXIED = {"endpoint": f"http://{DOMAIN}", "proxy_url": "{plain}", **KEYS}
PLAIN = {"endpoint": "{plain}", **KEYS}
TLS = {"endpoint": "{tls}", **KEYS}
PROFILE = "endpoint_url = {plain}\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
CASES = {
    "options": Case(PLAIN),
    "endpoint_url": Case({"endpoint_url": "{plain}", **KEYS}),
    "AWS_ENDPOINT_URL": Case(variables={"AWS_ENDPOINT_URL": "{plain}", **KEY_VARIABLES}),
    "AWS_ENDPOINT": Case(variables={"AWS_ENDPOINT": "{plain}", **KEY_VARIABLES}),
    "AWS_ENDPOINT_URL_S3": Case(
        variables={"AWS_ENDPOINT_URL_S3": "{plain}", "AWS_ENDPOINT_URL": "{other}", **KEY_VARIABLES}
    ),
    "options before variables": Case(
        PLAIN,
        {"AWS_ENDPOINT_URL": "{other}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y",
         "AWS_SESSION_TOKEN": "a token of other keys"},
        headers={"x-amz-security-token": ""},
    ),
    "variables before a profile": Case(
        variables={"AWS_ENDPOINT_URL": "{plain}", **KEY_VARIABLES},
        profile="endpoint_url = {other}\naws_access_key_id = x\naws_secret_access_key = y\n",
    ),
    "AWS_SESSION_TOKEN": Case(
        {"endpoint": "{token}"}, {"AWS_SESSION_TOKEN": "t0ken", **KEY_VARIABLES}, through="token",
        headers={"x-amz-security-token": "t0ken"},
    ),
    "session_token, with keys of the environment": Case(
        {"session_token": "t0ken", "endpoint": "{token}"}, KEY_VARIABLES, through="token",
        headers={"x-amz-security-token": "t0ken"},
    ),
    "session_token": Case(
        {"session_token": "t0ken", "endpoint": "{token}", **KEYS},
        through="token",
        headers={"x-amz-security-token": "t0ken"}
    ),
    "a profile": Case(profile=PROFILE),
    "services of a profile": Case(
        profile=PROFILE.replace("{plain}", "{other}")
        + "services = ours\n[services ours]\ns3 =\n  endpoint_url = {plain}\n"
    ),
    "a process": Case(
        profile="endpoint_url = {token}\ncredential_process = {process}\n",
        through="token",
        headers={"x-amz-security-token": "t0ken"},
    ),
    "region": Case({"region": "eu-lab-1", **PLAIN}, headers={"authorization": ".*/eu-lab-1/s3/.*"}),
    "AWS_REGION": Case(PLAIN, {"AWS_REGION": "eu-lab-1"}, headers={"authorization": ".*/eu-lab-1/s3/.*"}),
    "AWS_DEFAULT_REGION": Case(
        PLAIN, {"AWS_DEFAULT_REGION": "eu-lab-1"}, headers={"authorization": ".*/eu-lab-1/s3/.*"}
    ),
    "region of a profile": Case(
        PLAIN, profile="region = eu-lab-1\n", headers={"authorization": ".*/eu-lab-1/s3/.*"}
    ),
    "proxy_url": Case(PROXIED, host=re.escape(DOMAIN)),
    "HTTP_PROXY": Case(
        {"endpoint": f"http://{DOMAIN}", **KEYS}, {"HTTP_PROXY": "{plain}", "http_proxy": "{plain}"},
        host=re.escape(DOMAIN),
    ),
    "NO_PROXY": Case(
        PLAIN,
        {**dict.fromkeys(("HTTP_PROXY", "http_proxy"), "{other}"),
         **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")},
    ),
    "HTTPS_PROXY": Case(PLAIN, {"HTTPS_PROXY": "{other}", "https_proxy": "{other}"}),
    "virtual": Case({"virtual_hosted_style_request": True, **PROXIED}, host=VIRTUAL),
    "virtual, with the bucket": Case(
        {**PROXIED, "virtual_hosted_style_request": "true", "endpoint": f"http://{BUCKET}.{DOMAIN}"},
        host=VIRTUAL,
    ),
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": Case(
        PROXIED, {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"}, host=VIRTUAL
    ),
    "virtual by a profile": Case(PROXIED, profile="s3 =\n  addressing_style = virtual\n", host=VIRTUAL),
    "root_certificate": Case({"root_certificate": "{pem}", **TLS}, through="tls"),
    "root_certificate, bytes": Case({"root_certificate": b"{pem}", **TLS}, through="tls"),
    "client_options": Case({"client_options": {"root_certificate": "{pem}"}, **TLS}, through="tls"),
    "allow_invalid_certificates": Case({"allow_invalid_certificates": True, **TLS}, through="tls"),
    "AWS_CA_BUNDLE": Case(TLS, {"AWS_CA_BUNDLE": "{authority}"}, through="tls"),
    "REQUESTS_CA_BUNDLE": Case(TLS, {"REQUESTS_CA_BUNDLE": "{authority}"}, through="tls"),
    "SSL_CERT_FILE": Case(TLS, {"SSL_CERT_FILE": "{authority}"}, through="tls"),
    "ca_bundle of a profile": Case(TLS, profile="ca_bundle = {authority}\n", through="tls"),
    "default_headers": Case(
        {"default_headers": {"x-team": "lab", "x-other": b"bytes"}, **PLAIN},
        headers={"x-team": "lab", "x-other": "bytes"},
    ),
    "user_agent": Case({"user_agent": "lab/1", **PLAIN}, headers={"user-agent": "lab/1.*"}),
    "request_payer": Case({"request_payer": True, **PLAIN}, headers={"x-amz-request-payer": "requester"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


def as_a_part(request: Request, answer: Answer) -> Answer:
    """Says that a part is one, which rclone does not."""
    is_part = answer.status == 200 and any(name.lower() == "content-range" for name, _ in answer.headers)
    return Answer(206 if is_part else answer.status, answer.headers, answer.body)


@pytest.fixture(scope="module")
def gateways(
    seaweed: dict[str, Any], s3: dict[str, Any], authority: Authority
) -> Iterator[dict[str, Gateway]]:
    """Of SeaweedFS; that for tokens is of rclone, which leaves them alone."""
    store = seaweed["endpoint"]
    with (
        serving_gateway(store) as plain,
        serving_gateway(store, authority.context) as tls,
        serving_gateway(store) as other,
        serving_gateway(s3["endpoint"]) as token,
    ):
        token.change = as_a_part
        yield {"plain": plain, "tls": tls, "other": other, "token": token}


@pytest.fixture
def plain(gateways: dict[str, Gateway]) -> Iterator[Gateway]:
    """A server without TLS, as it was."""
    gateway = gateways["token"]
    gateway.log.clear()
    change, answer = gateway.change, gateway.answer
    yield gateway
    gateway.change, gateway.answer = change, answer


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment without settings of stores, and no profile."""
    of_stores = re.compile(
        r"AWS_.*|(https?|all|no)_proxy|(REQUESTS|CURL)_CA_BUNDLE|SSL_CERT_.*", re.IGNORECASE
    )
    for name in filter(of_stores.fullmatch, [*os.environ]):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


class Issuer:
    """A credential process: a program that counts its runs, and gives what a file says.

    Attributes:
        command: What to write into a profile.
    """

    def __init__(self, folder: Path) -> None:
        self._runs, self._answer = folder / "runs", folder / "answer.json"
        self._runs.touch()
        program = folder / "process.py"
        program.write_text(
            "import datetime, json\n"
            f"open({str(self._runs)!r}, 'a').write('x')\n"
            f"found, lasts_s = json.load(open({str(self._answer)!r}))\n"
            "ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=lasts_s)\n"
            "print(json.dumps({**found, 'Expiration': ends.isoformat()}))\n"
        )
        self.command = f"{sys.executable} -S {program}"
        self.give("t0ken")

    @property
    def num_runs(self) -> int:
        return len(self._runs.read_text())

    def give(self, token: str, lasts_s: float = 36_000) -> None:
        found = {"Version": 1, "AccessKeyId": KEY, "SecretAccessKey": SECRET, "SessionToken": token}
        self._answer.write_text(json.dumps([found, lasts_s]))


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path)


def filled(value: Any, names: Mapping[str, str]) -> Any:
    """Puts what the test has made into a setting."""
    if isinstance(value, dict):
        return {name: filled(inner, names) for name, inner in value.items()}
    if isinstance(value, bytes):
        return filled(value.decode(), names).encode()
    if not isinstance(value, str):
        return value
    return re.sub(r"\{(\w+)\}", lambda found: names[found[1]], value)


def set_profile(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(os.environ["AWS_CONFIG_FILE"]).write_text(f"[profile lab]\n{text}")
    monkeypatch.setenv("AWS_PROFILE", "lab")


def round_trip(options: dict[str, Any]) -> None:
    """Saves, lists, loads and deletes."""
    run = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    fastload.save(STATE, f"{run}/a", storage_options=options)
    with closing(open_storage(run, NAMES, options)) as storage:
        assert list(storage.folders()) == ["a"]
        assert storage.list() is None
        state = fastload.load(f"{run}/a", storage_options=options)
        assert (state["a"].tolist(), state["step"]) == (STATE["a"].tolist(), 3)  # type: ignore[attr-defined]
        with closing(open_target(f"{run}/a", NAMES, options)) as target:
            target.remove()
        assert not storage.folders()


# Other names of what others set, other places of the same, or what one line of the settings passes on.
ALIKE = {
    "user_agent", "default_headers", "region", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE", "virtual", "HTTP_PROXY",
    "options before variables",
    "endpoint_url", "AWS_ENDPOINT", "session_token", "AWS_REGION", "AWS_DEFAULT_REGION",
    "region of a profile",
    "virtual, with the bucket", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "root_certificate, bytes",
    "client_options", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in CASES]
)
def test_settings(
    name: str,
    gateways: dict[str, Gateway],
    authority: Authority,
    issuer: Issuer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is saved is where it is loaded from, listed and deleted, by the same keys and in the same way."""
    case = CASES[name]
    made = {each: gateway.url for each, gateway in gateways.items()}
    made |= {"pem": authority.pem, "authority": str(authority.path), "process": issuer.command}
    made |= {"KEY": KEY, "SECRET": SECRET}
    for variable, value in case.variables.items():
        monkeypatch.setenv(variable, filled(value, made))
    if case.profile:
        set_profile(filled(case.profile, made), monkeypatch)
    for gateway in gateways.values():
        gateway.log.clear()

    round_trip(filled(case.options, made))

    log = gateways[case.through].log
    assert not [each for each in gateways if each != case.through and gateways[each].log]
    methods = {request.method for request in log}
    assert {"GET", "PUT", "POST", "DELETE"} <= methods, "of both libraries"
    for request in log:
        assert re.fullmatch(case.host, request.host), request
        for header, value in case.headers.items():
            assert re.fullmatch(value, request.headers.get(header, "")), (header, request)


@pytest.mark.parametrize(
    ("options", "direct"),
    [({}, True), ({"request_payer": True}, False)],
    ids=str,
)
def test_long_bodies_are_asked_for_by_signed_urls(
    plain: Gateway, options: dict[str, Any], direct: bool
) -> None:
    """And are received directly, unless a signed URL is not enough."""
    url = f"s3://{BUCKET}/{uuid.uuid4().hex} ä+"
    fastload.save(STATE, url, storage_options={"endpoint": plain.url, **KEYS})
    plain.log.clear()
    fastload.load(url, storage_options={"endpoint": plain.url, **KEYS, **options})
    signed = [request for request in plain.log if "x-amz-signature" in request.headers]
    assert bool(signed) is direct
    assert all(request.headers["accept-encoding"] == "identity" for request in signed)


def test_an_endpoint_with_a_path(tmp_path: Path) -> None:
    """As that of the storage buckets of the Hugging Face hub."""
    with s3_server(tmp_path, "/me") as options, serving_gateway(options["endpoint"]) as gateway:
        gateway.change = as_a_part
        round_trip({**options, "endpoint": f"{gateway.url}/me"})
        assert {request.path.partition("?")[0].split("/")[1] for request in gateway.log} == {"me"}


def test_every_setting_of_the_page_is_tried() -> None:
    table = re.search(r"^\| setting \|.*\n\|---.*\n((?:\|.*\n)+)", page("docs/storage.md"), re.MULTILINE)
    assert table is not None
    tried = f"{CASES} {Path(__file__).read_text()}"
    names = [found.partition(" =")[0] for found in re.findall(r"`([^`…]+)`", table[1])]
    assert len(names) > 30
    assert not [name for name in names if name not in tried]


def test_keys_are_not_used_where_requests_are_not_signed(plain: Gateway, issuer: Issuer) -> None:
    options = {**filled(PLAIN, {"plain": plain.url}), "skip_signature": True}
    plain.answer = lambda request: Answer(403)
    for call in (fastload.load, lambda url, **given: fastload.save(STATE, url, **given)):
        plain.log.clear()
        with pytest.raises(StorageError):
            call(f"s3://{BUCKET}/x", storage_options=options)
        assert plain.log
        assert not [request for request in plain.log if "authorization" in request.headers]


@pytest.mark.parametrize("of_environment", [False, True])
def test_objects_are_encrypted_by_all_requests_that_make_some(
    plain: Gateway, of_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of tensors come by another library than the others."""
    options = filled(PLAIN, {"plain": plain.url})
    if of_environment:
        monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
        monkeypatch.setenv("AWS_SSE_KMS_KEY_ID", "key-of-ours")
        monkeypatch.setenv("AWS_SSE_BUCKET_KEY_ENABLED", "true")
    else:
        options |= {"server_side_encryption": "aws:kms", "sse_kms_key_id": "key-of-ours"}
        options |= {"sse_bucket_key_enabled": True}

    def is_made(request: Request) -> bool:
        return request.method == "POST" or (request.method == "PUT" and "partNumber" not in request.path)

    def answer(request: Request) -> Answer | None:
        if request.method == "PUT":
            return Answer(501) if "partNumber" in request.path else Answer(200, [("ETag", '"1"')])
        return Answer(200, body=begun) if is_made(request) and "uploads" in request.path else None

    begun = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"

    plain.answer = answer
    with pytest.raises(StorageError):
        fastload.save(
            STATE, f"s3://{BUCKET}/{uuid.uuid4().hex}/x", storage_options=options,
            options=fastload.SaveOptions(retries=0),
        )  # fmt: skip
    made = [request for request in plain.log if is_made(request) and "delete" not in request.path]
    assert {request.method for request in made} == {"PUT", "POST"}
    for request in made:
        assert request.headers["x-amz-server-side-encryption"] == "aws:kms"
        assert request.headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-of-ours"
        assert request.headers["x-amz-server-side-encryption-bucket-key-enabled"].lower() == "true"


OPENERS: list[Callable[..., Any]] = [open_storage, open_target]


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize(
    ("options", "variables", "profile", "says"),
    [
        (KEYS | {"endpoint": NOBODY}, {"AWS_ENDPOINT_URL_S3": "http://a:8"}, "", "AWS_ENDPOINT_URL_S3"),
        (
            KEYS | {"virtual_hosted_style_request": True},
            {"AWS_ENDPOINT_URL_S3": "http://store.test"}, "", "http://bucket.store.test",
        ),
        (KEYS | {"endpoint": NOBODY}, {"AWS_ENDPOINT_URL_S3": ""}, "", "AWS_ENDPOINT_URL_S3 is empty"),
        (KEYS, {"AWS_ENDPOINT_URL": "", "AWS_REGION": ""}, "", "AWS_ENDPOINT_URL is empty"),
        (KEYS, {"AWS_ENDPOINT": ""}, "", "AWS_ENDPOINT is empty"),
        (KEYS, {"AWS_USE_FIPS_ENDPOINT": "true"}, "", "use_fips_endpoint"),
        (KEYS, {"AWS_USE_DUALSTACK_ENDPOINT": "true"}, "", "use_dualstack_endpoint"),
        (KEYS, {}, "s3 =\n  use_accelerate_endpoint = true\n", "use_accelerate_endpoint"),
        (KEYS, {"AWS_CA_BUNDLE": "/nowhere.pem"}, "", "/nowhere.pem"),
        (KEYS, {}, "endpoint_url = my host\n", "'my host'"),
        ({"access_key_id": KEY}, {}, "", "Missing SecretAccessKey"),
        (KEYS, {}, "[", "ConfigParseError"),
        ({}, {}, "credential_process = false\n", "Error when retrieving credentials"),
    ],
    ids=lambda value: value if isinstance(value, str) and value and "=" not in value else "",
)  # fmt: skip
def test_settings_that_cannot_be_used_are_named(
    opener: Any,
    options: dict[str, Any],
    variables: dict[str, str],
    profile: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if profile:
        set_profile(profile, monkeypatch)
    with pytest.raises(OptionError) as raised:
        opener("s3://bucket/runs/a", NAMES, options)
    assert str(raised.value).startswith("cannot open s3://bucket")
    assert says in str(raised.value)


def test_a_credential_process_that_hangs_is_an_error(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a store is opened, and when they are renewed."""
    set_profile("credential_process = sleep 9\n", monkeypatch)
    monkeypatch.setattr(s3_settings, "_ANSWER_S", 1.0)
    with pytest.raises(OptionError, match=r"cannot open s3://bucket: .*the credentials of the profile"):
        open_storage("s3://bucket/a", NAMES, {"endpoint": NOBODY})
    monkeypatch.setattr(s3_settings, "_ANSWER_S", 20.0)
    set_profile(f"credential_process = {issuer.command}\n", monkeypatch)
    found = s3_settings.Credentials(s3_settings.new_session())
    monkeypatch.setattr(s3_settings, "_ANSWER_S", 1.0)
    set_profile("credential_process = sleep 9\n", monkeypatch)
    with pytest.raises(DeadlineExceeded, match="the credentials of the profile"):
        found.renew(found.number)


@pytest.mark.parametrize(
    "option",
    [
        {"http2_only": True},
        {"proxy_excludes": "10.0.0.0/8"},
        {"proxy_ca_certificate": "pem"},
        {"web_identity_token_file": "/token", "role_arn": "arn:aws:iam::1:role/a"},
        {"container_credentials_full_uri": "http://127.0.0.1/a"},
        {"credential_provider": lambda: {**KEYS, "expires_at": None}},
    ],
    ids=lambda option: next(iter(option)),
)
def test_settings_that_only_loads_can_use_are_named_by_saves(option: dict[str, Any]) -> None:
    of_others = ("role_arn", "container_credentials_full_uri", "credential_provider")
    keys = {} if any(name in option for name in of_others) else KEYS
    options = {"endpoint": NOBODY, **keys, **option}
    with pytest.raises(OptionError, match=rf"cannot save to s3://bucket/runs: .*{next(iter(option))}"):
        open_target("s3://bucket/runs/a", NAMES, options)
    if "proxy_ca_certificate" not in option:
        open_storage("s3://bucket/runs/a", NAMES, options).close()


def test_a_provider_of_the_user_goes_before_keys_of_the_environment(
    plain: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in KEY_VARIABLES:
        monkeypatch.setenv(name, "of-the-environment")
    options = {"endpoint": plain.url, "credential_provider": lambda: {**KEYS, "expires_at": None}}
    with closing(open_storage(f"s3://{BUCKET}/{uuid.uuid4().hex}", NAMES, options)) as storage:
        assert storage.list() is None
    assert all(KEY in request.headers["authorization"] for request in plain.log)


# Credentials that expire


def with_tokens(gateway: Gateway, valid: set[str]) -> None:
    """Has a server take requests with these tokens only, as S3 does."""
    said = b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code><Message>it has expired</Message></Error>"

    def answer(request: Request) -> Answer | None:
        is_valid = request.headers.get("x-amz-security-token") in valid
        return None if is_valid else Answer(400, [("Content-Type", "application/xml")], said)

    gateway.answer = answer


def test_credentials_are_renewed_before_they_expire(
    plain: Gateway, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a checkpoint is open, or is being saved; and not with each request."""
    options = {"endpoint": plain.url}
    set_profile(f"credential_process = {issuer.command}\n", monkeypatch)
    issuer.give("first", lasts_s=2)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/a"
    fastload.save(STATE, url, storage_options=options)
    with fastload.open(url, storage_options=options) as checkpoint:
        issuer.give("second")
        wait_until(lambda: open_and_see(plain, checkpoint) == "second")
        before = issuer.num_runs
        for _ in range(3):
            checkpoint.load()
        assert issuer.num_runs == before


def wait_until(condition: Callable[[], bool], *, limit_s: float = 30) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def open_and_see(gateway: Gateway, checkpoint: Any) -> str:
    """Loads, and returns the token of the last request."""
    checkpoint.load()
    return gateway.log[-1].headers["x-amz-security-token"]


@pytest.mark.parametrize("what", ["load", "save"])
def test_credentials_that_a_store_calls_expired_are_renewed_once(
    plain: Gateway, issuer: Issuer, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Revoked, or by another clock."""
    options = {"endpoint": plain.url}
    set_profile(f"credential_process = {issuer.command}\n", monkeypatch)
    issuer.give("first")
    valid = {"first"}
    with_tokens(plain, valid)
    run = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    fastload.save(STATE, f"{run}/a", storage_options=options)
    if what == "load":
        with fastload.open(
            f"{run}/a", storage_options=options, options=fastload.LoadOptions(retries=0)
        ) as checkpoint:
            valid.clear()
            valid.add("second")
            issuer.give("second")
            runs = issuer.num_runs
            assert checkpoint.load()["step"] == 3
            assert checkpoint.load()["step"] == 3
            assert issuer.num_runs == runs + 1
            valid.clear()
            with pytest.raises(StorageError, match=r"ExpiredToken: it has expired"):
                checkpoint.load()
        return
    target = open_target(f"{run}/b", NAMES, options)
    with closing(target):
        valid.clear()
        valid.add("second")
        issuer.give("second")
        runs = issuer.num_runs
        content = memoryview(b"0123456789")
        target.join(target.prepare([("x.safetensors", len(content))], overwrite=False))
        target.write("x.safetensors", 0, content)
        target.publish([target.flush()], [(NAMES.record, b"{}")])
        assert issuer.num_runs == runs + 1, "for both libraries"


def test_a_token_that_nobody_renews_has_a_hint(plain: Gateway) -> None:
    with_tokens(plain, set())
    options = {"endpoint": plain.url, **KEYS, "session_token": "old"}
    with pytest.raises(StorageError, match=r"ExpiredToken.*those of a profile in ~/\.aws are renewed"):
        fastload.load(f"s3://{BUCKET}/x", storage_options=options)
