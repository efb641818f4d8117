"""What users write for a path or URL: where it leads, what is shown of it, and what is refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from fastload.errors import OptionError
from fastload.storage import locate, redact
from fastload.storage.location import Location, Secrets, basic_auth

_MARKS = "'\"<> "


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    return Path.cwd()


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("a", "{here}/a"),
        ("a/.//b/", "{here}/a/b"),
        ("./a/../b", "{here}/./a/../b"),  # a may be a symbolic link
        ("dir/s3://x", "{here}/dir/s3:/x"),
        ("./s3:/x", "{here}/s3:/x"),
        ("~/a", "/home/me/a"),
        ("a~", "{here}/a~"),
        ("//a//b", "/a/b"),
        ("/", "/"),
        ("file:///a/b?c#d e", "/a/b?c#d e"),
        ("FILE://localhost/a", "/a"),
    ],
)
def test_paths_are_absolute_from_here_on(text: str, path: str, home: Path) -> None:
    path = path.format(here=home)
    for given in (text, Path(text)) if text == str(Path(text)) else (text,):
        assert locate(given).url == os.fspath(locate(given)) == path
        assert locate(given).given == os.fspath(given)
    assert locate(locate(text)) == locate(text)


@pytest.mark.parametrize(
    ("text", "address", "url"),
    [
        ("s3://b/a//b/", "s3://b/a/b", "s3://b/a/b"),
        ("S3://b/K ey%20?x", "s3://b/K ey%20?x", "s3://b/K ey%20?x"),
        ("s3://b/...a/b..c", "s3://b/...a/b..c", "s3://b/...a/b..c"),
        ("s3://b/model@v1", "s3://b/model@v1", "s3://b/model@v1"),
        ("abfss://box@me.dfs.core.windows.net/x", *["abfss://box@me.dfs.core.windows.net/x"] * 2),
        ("http://h/a//b/", "http://h/a//b", "http://h/a//b"),
        ("http://h:1/a@b#f", "http://h:1/a@b", "http://h:1/a@b"),
        ("http://me:p%40ss@[::1]:1/a@b", "http://me:p%40ss@[::1]:1/a@b", "http://***@[::1]:1/a@b"),
        ("HTTPS://token@h/x/?a=1&b=2", "https://token@h/x?a=1&b=2", "https://***@h/x"),
        ("http://me:p@ss@h/x", "http://me:p@ss@h/x", "http://***@h/x"),
        ("sftp://me:pass@h/d/", "sftp://me:pass@h/d", "sftp://me:***@h/d"),
        ("sftp://me@h/d", "sftp://me@h/d", "sftp://me@h/d"),
        (
            "zip://x::https://me:pass@h/x?s=1",
            *["zip://x::https://me:pass@h/x?s=1", "zip://x::https://***@h/x?***"],
        ),
        ("memory://", "memory://", "memory://"),
        # A password may have in it what ends a URL in a sentence, but what ends this one is its end.
        *((f"https://me:pa{mark}ss@h/x", f"https://me:pa{mark}ss@h/x", "https://***@h/x") for mark in _MARKS),
        *((f"sftp://me:pa{mark}ss@h/x", f"sftp://me:pa{mark}ss@h/x", "sftp://me:***@h/x") for mark in _MARKS),
        ("https://to'pass@h/x", "https://to'pass@h/x", "https://***@h/x"),
        ("zip://x::ftp://me:pa's@pass@h/x", "zip://x::ftp://me:pa's@pass@h/x", "zip://x::ftp://me:***@h/x"),
        ("az://b/x?sig=pa's pass&a=1", "az://b/x?sig=pa's pass&a=1", "az://b/x?sig=***&a=1"),
        ("zip://x::https://h/x?a'pass", "zip://x::https://h/x?a'pass", "zip://x::https://h/x?***"),
    ],
)
def test_urls(text: str, address: str, url: str) -> None:
    location = locate(text)
    assert (os.fspath(location), str(location)) == (address, url)
    assert "pass" not in repr(location)
    assert "ss@" not in repr(location)


def test_what_is_below_a_url_stands_before_its_query() -> None:
    below = locate("http://me:pass@h/a?sig=1") / "b c.json"
    assert (os.fspath(below), str(below)) == (
        "http://me:pass@h/a/b%20c.json?sig=1",
        "http://***@h/a/b c.json",
    )
    assert os.fspath(locate("s3://b/a") / "b c") == "s3://b/a/b c"
    assert os.fspath(locate("/") / "b c") == "/b c"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "is empty"),
        ("a\0b", r"'a\\x00b': contains a NUL"),
        ("s3://b/a\0", "contains a NUL"),
        (b"a", r"b'a': must be text or a path object: decode it with os\.fsdecode"),
        (None, "None: must be text"),
        (3, "3: must be text"),
        (Path("s3://b/x"), "is 's3://b/x' meant"),
        (Path("file:///x"), "is 'file:///x' meant"),
        (Path("sftp://me:secret@h/x"), r"is 'sftp://me:\*\*\*@h/x' meant"),
        (Path("sftp://me:se'cret@h/x"), r"'sftp:/me:\*\*\*@h/x': is 'sftp://me:\*\*\*@h/x' meant"),
        ("https://me:se'cret@h:port/x", r"'https://\*\*\*@h:port/x': is not a URL"),
        ("file://a/b", "begin a file URL with file:///"),
        ("file://", "begin a file URL with file:///"),
        ("file:///a%20b", "is '/a b' or '/a%20b' meant"),
        ("s3:///b/x", "names no bucket"),
        ("gs://", "names no bucket"),
        ("s3://b/a/../c", "do not agree on a key"),
        ("az://b/./c", "do not agree on a key"),
        ("s3://b\\x/a\\c", "do not agree on a key"),
        ("gs://b/a\n", "do not agree on a key"),
        ("s3://key:secret@b/x", r"s3://key:\*\*\*@b/x'.*storage_options="),
        ("s3://key:se/cret@b/x", r"s3://key:\*\*\*@b/x'.*storage_options="),
        ("http:///x", "names no host"),
        ("http://h:port/x", "is not a URL"),
        ("http://me:se/cret@h/x", r"'http://\*\*\*@h/x': is not a URL.* %2F for a slash"),
        ("http://me:se?cret@h/x", "is not a URL"),
        ("http://[::1/x", "is not a URL"),
    ],
    ids=str,
)
def test_what_is_no_path_or_could_be_two(given: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says) as raised:
        locate(given)
    assert "cret" not in str(raised.value)


def test_a_relative_path_needs_a_working_directory(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    with pytest.raises(OptionError, match="'a': the working directory does not exist any more: name an abs"):
        locate("a")
    assert locate("/a").url == "/a"
    os.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET http://me:pa@h/a?s=1&t=2 in 3 ms", "GET http://***@h/a?*** in 3 ms"),
        ('no "https://h/x?s=1"', 'no "https://h/x?***"'),
        ("(http://h:80/x@y) s3://b/x@y", "(http://h:80/x@y) s3://b/x@y"),
        ("ftp://me:pa@h/x, ftp://me@h/x", "ftp://me:***@h/x, ftp://me@h/x"),
        ("https://me:p/a@h/x", "https://***@h/x"),
        ("az://box/x?sv=1&sig=abc", "az://box/x?sv=1&sig=***"),
        ("webhdfs://h/x?delegation=abc&a=b", "webhdfs://h/x?delegation=***&a=b"),
        ("is it a? s3://b/what?", "is it a? s3://b/what?"),
    ],
)
def test_texts_without_the_secrets_of_their_urls(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


# What libraries say


class _OddError(Exception):
    """Says something of its own, as aiohttp's do."""

    def __str__(self) -> str:
        return "cannot open http://me:hunter2@h/x"


def _secrets() -> Secrets:
    options = {
        "password": "pass-word",
        "client_options": {"default_headers": {"Authorization": "Bearer t0ken"}},
    }
    return Secrets(locate("http://me:hunter%322@h/x?X-Amz-Signature=0123456789abcdef&host=a"), options)


def test_secrets_are_hidden_wherever_they_stand() -> None:
    text = "hunter22, hunter%322, 0123456789abcdef, pass-word, t0ken: host a"
    assert _secrets().hide(text) == "***, ***, ***, ***, ***: host a"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad: hunter22", 3),
        FileNotFoundError(2, "no such file", "http://me:hunter22@h/x"),
        PermissionError(13, "hunter22"),
        _OddError(),
    ],
    ids=repr,
)
def test_errors_are_told_without_secrets_with_all_they_come_from(error: Exception) -> None:
    try:
        try:
            try:
                raise error
            except Exception:
                raise KeyError("pass-word")  # noqa: B904
        except Exception as inner:
            raise OSError(f"failed for t0ken: {error}") from inner
    except OSError as outer:
        cleaned = _secrets().clean(outer)
    links: list[BaseException] = []
    link: BaseException | None = cleaned
    while link is not None:
        links.append(link)
        link = link.__cause__ or link.__context__
    assert len(links) == 3
    told = " ".join(f"{link} {link!r} {link.args}" for link in links) + repr(pickle.dumps(cleaned))
    for secret in ("hunter2", "pass-word", "t0ken"):
        assert secret not in told
    assert isinstance(cleaned, OSError)
    assert isinstance(links[-1], type(error) if not isinstance(error, _OddError) else RuntimeError)


@pytest.mark.parametrize(
    "options",
    [
        {"connection_string": "AccountName=me;AccountKey=hunter22=="},
        {"passphrase": "hunter22"},
        {"headers": {"X-Api-Key": "hunter22"}},
        {"client_options": {"default_headers": {"api-key": b"hunter22"}}},
        {"aws_sse_customer_key_base64": "hunter22"},
        {"accountKey": "hunter22"},
        {"key": "hunter22"},
        {"pwd": "hunter22"},
        {"sas": "hunter22"},
        {"pat": "hunter22"},
        {"auth": ("user", "hunter22")},
        {"auth": ["user", b"hunter22"]},
        {"password": b"hunter22"},
        {"token": {"any": {"thing": "hunter22"}}},
        {"connect_args": [{"password": "hunter22"}]},
        {"bearer": "Bearer hunter22"},
    ],
    ids=str,
)
def test_options_that_are_secrets_by_their_names(options: dict[str, Any]) -> None:
    told = Secrets(locate("s3://b/x"), options).hide("westland refused hunter22")
    assert told == "westland refused ***"


def test_options_that_are_no_secrets_are_shown() -> None:
    options = {
        "region": "westland",
        "path": "pathlike",
        "keyfile": "/etc/key.pem",
        "author": "somebody",
        "client_options": {"default_headers": {"User-Agent": "agent 7"}, "ports": [8000, 9000]},
    }
    text = "westland pathlike /etc/key.pem somebody agent 7 8000"
    assert Secrets(locate("s3://b/x"), options).hide(text) == text


def test_a_password_that_could_end_a_url_is_hidden_to_its_end() -> None:
    for mark in _MARKS:
        url = f"https://me:hun{mark}ter2@h/x?sig=s3c{mark}r3t"
        assert Secrets(locate(url), {}).hide(f"no {url} here") == "no https://***@h/x?*** here"


def test_what_holds_no_secret_is_left_as_it_is() -> None:
    error = FileNotFoundError(2, "no such file", "/x")
    assert _secrets().clean(error) is error
    assert (error.args, error.filename) == ((2, "no such file"), "/x")


def test_the_header_of_a_name_and_a_password() -> None:
    assert basic_auth(locate("http://me:p%40:s@h/x")) == "Basic bWU6cEA6cw=="
    assert basic_auth(locate("http://me@h/x")) == "Basic bWU6"
    assert basic_auth(locate("http://h/x")) is None
    assert basic_auth(Location("", "/a", "/a", "/a")) is None
