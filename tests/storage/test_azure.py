"""Saves to Azure, whose copies may go on after the response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.errors import StorageError
from tests.storage.azure_server import ACCOUNT, AzureServer, azure_server
from tests.storage.gateway import make_authority

URL = "az://box/run/step"
STATE = {"a": torch.arange(5000), "step": 3}


@pytest.fixture
def server() -> Iterator[AzureServer]:
    with azure_server() as server:
        yield server


def save(server: AzureServer, options: Mapping[str, Any], *, timeout_s: float = 30.0) -> None:
    given = {"endpoint": server.url, "account_name": "acct", **options}
    patience = fastload.SaveOptions(retries=0, timeout_s=timeout_s)
    fastload.save(STATE, URL, storage_options=given, options=patience)


def assert_saved(server: AzureServer, **options: Any) -> None:
    given = {"endpoint": server.url, **ACCOUNT, **options}
    state = fastload.load(URL, storage_options=given)
    assert state["a"].tolist() == list(range(5000))
    assert not server.lost
    assert not [name for name in server.blobs if ".saving/" in name]


@pytest.mark.slow(but=["1-", "0-False"])
@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("looks", [0, 1, 5])
def test_a_save_waits_for_copies(server: AzureServer, looks: int, has_length: bool) -> None:
    server.looks, server.has_length = looks, has_length
    save(server, ACCOUNT)
    assert not server.pending
    assert_saved(server)


@pytest.mark.parametrize("ends", ["failed", "aborted"])
def test_a_copy_that_fails_is_an_error(server: AzureServer, ends: str) -> None:
    server.ends = ends
    with pytest.raises(StorageError, match=rf"step/model\.safetensors: .*copy .* is {ends}: 404 NotFound"):
        save(server, ACCOUNT)
    assert not server.lost, "its source was there until it ended"
    assert "run/step/fastload.json" not in server.blobs


def test_a_copy_without_progress_is_an_error_in_time(server: AzureServer) -> None:
    server.ends = "never"
    with pytest.raises(StorageError, match=r"model\.safetensors: .*stands still for .* s: pending 3/4"):
        save(server, ACCOUNT, timeout_s=8)
    assert "run/step/fastload.json" not in server.blobs


def test_a_clock_behind_that_of_this_host_is_waited_for(server: AzureServer) -> None:
    """A signature holds from the moment it was made."""
    server.behind_s = 1.3
    save(server, ACCOUNT)
    assert_saved(server)


@pytest.mark.parametrize("variable", ["", "AZURE_STORAGE_SAS_TOKEN"])
def test_a_signature_asks_by_itself(
    server: AzureServer, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared access signature, which obstore cannot sign anything by."""
    signature = "sv=2023-11-03&sp=rwdl&sig=c2lnbmF0dXJl"
    if variable:
        monkeypatch.setenv(variable, signature)
        save(server, {})
    else:
        save(server, {"sas_token": signature})
    assert_saved(server)
    asked = [query for method, _, query in server.log if method == "HEAD"]
    assert asked
    assert all(query["sig"] == ["c2lnbmF0dXJl"] for query in asked)


def test_who_cannot_sign_copies_without_the_store(server: AzureServer) -> None:
    """A user with a token, and without the permission to get a key for signatures."""
    save(server, {"bearer_token": "token"})
    assert not [headers for headers in server.headers if "x-ms-copy-source" in headers]
    assert_saved(server)


def test_the_options_of_the_client_hold_for_questions_about_copies(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    with azure_server(authority.context) as server:
        for option in ({"root_certificate": authority.pem}, {"allow_invalid_certificates": True}):
            server.blobs.clear()
            server.headers.clear()
            save(server, {**ACCOUNT, **option, "default_headers": {"x-team": "lab"}})
            assert_saved(server, **option)
            asked = [headers for headers in server.headers if "x-team" in headers]
            assert len(asked) >= len(server.headers) // 2
