"""Who may read from a server, and which server a client trusts: tokens and certificates."""

from __future__ import annotations

import hmac
import re
import ssl

from fastload.errors import OptionError

_TOKEN = re.compile(r"[\x21-\x7e]+")


def read_token(path: str) -> str:
    """Reads a token: the text of a file, without blanks around it.

    Raises:
        OptionError: It cannot be read, or is no token.
    """
    try:
        with open(path, encoding="ascii") as file:
            token = file.read(1 << 16).strip()
    except (OSError, ValueError) as error:
        raise OptionError(f"token_file={path!r}: {error}") from None
    if not _TOKEN.fullmatch(token):
        raise OptionError(f"token_file={path!r}: has to have one word of printable ASCII characters")
    return token


def is_authorized(token: str, header: str) -> bool:
    """Whether an ``Authorization`` header has a token; takes as long for any other."""
    expected = f"Bearer {token}".encode()
    return hmac.compare_digest(expected, header.encode("utf-8", "surrogateescape"))


def server_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """Returns the TLS settings of a server.

    Raises:
        OptionError: The certificate or its key cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise OptionError(f"certificate={certificate!r}, key={key!r}: {error}") from None
    return context


def client_context(ca_file: str | None) -> ssl.SSLContext:
    """Returns the TLS settings of a client, which checks certificates and the names in them.

    Args:
        ca_file: The certificates to trust; None for those of the system.

    Raises:
        OptionError: They cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise OptionError(f"ca_file={ca_file!r}: {error}") from None
