"""`fastload.peers`: hosts that have a checkpoint, as sources of its bytes."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastload.base.tracebacks import short_tracebacks
from fastload.errors import ChecksumError, OptionError
from fastload.ext.serve.access import client_context, read_token
from fastload.ext.serve.addresses import PeerAddress, parse_addresses
from fastload.ext.serve.checkpoints import digest_of
from fastload.ext.serve.connection import Endpoint
from fastload.ext.serve.pool import PeerPool
from fastload.ext.serve.reader import PeerReader
from fastload.formats.manifest import Manifest
from fastload.formats.sources import ByteSource
from fastload.options import environment
from fastload.storage import CheckpointReader

_log = logging.getLogger(__name__)

_PREFIX = "FASTLOAD_PEERS_"


@short_tracebacks
def peers(
    *addresses: str,
    token_file: str | None = None,
    ca_file: str | None = None,
    digest: str | None = None,
) -> Peers:
    """Returns a source for `LoadOptions.sources` and `StageOptions.sources`: hosts that serve a checkpoint.

    Checksum blocks come from peers that have them, several at once and the fastest first, and are verified.
    What no peer has, or what a peer delivers wrong, late or not at all, comes from another peer or from
    storage. Such a peer is left alone, and the report names it. The commit record, or the seal, comes from
    the path that is loaded, and says which bytes are right.

    Args:
        addresses: URLs such as ``http://host:7070``, with ``https`` for TLS; ``dns://NAME:PORT`` for all
            addresses of a name, such as a headless service; ``hosts://node[01-08]:PORT`` for a list as Slurm
            writes it; ``dns+https://`` and ``hosts+https://`` for these with TLS. Several may be in one text,
            separated by commas. This process itself is left out.
        token_file: A file with the word that they ask for; None for that in ``FASTLOAD_PEERS_TOKEN_FILE``.
        ca_file: Certificates to trust in place of the system's; None for those in
            ``FASTLOAD_PEERS_CA_FILE``.
        digest: `Manifest.record_digest` of the checkpoint, for a path that is not trusted, such as the URL of
            a peer: another checkpoint there is an error.

    Raises:
        OptionError: An argument cannot be used.
    """
    if not addresses or not all(isinstance(each, str) for each in addresses):
        raise OptionError(f"peers{addresses!r}: needs one or more addresses")
    if digest == "":
        raise OptionError("digest='': only checkpoints that fastload saved have a record_digest")
    given = environment(_PREFIX)
    token_file = token_file or given.get(f"{_PREFIX}TOKEN_FILE")
    ca_file = ca_file or given.get(f"{_PREFIX}CA_FILE")
    parsed = tuple(one for each in addresses for one in parse_addresses(each))
    context = client_context(ca_file) if any(one.uses_tls for one in parsed) else None
    token = read_token(token_file) if token_file else None
    return Peers(parsed, token, context, digest)


@dataclass(frozen=True)
class Peers(ByteSource):
    """Hosts that serve a checkpoint. Made by `fastload.peers`.

    Attributes:
        addresses: Where they are.
        token: The word that they ask for; None for none.
        context: The TLS settings of those that speak TLS.
        digest: The digest that the checkpoint has to have; None for any.
    """

    addresses: tuple[PeerAddress, ...]
    token: str | None = field(repr=False)
    context: ssl.SSLContext | None = field(repr=False)
    digest: str | None

    def connect(self, origin: CheckpointReader, manifest: Manifest, *, is_base: bool) -> CheckpointReader:
        """Returns a reader that asks the peers first; see `ByteSource.connect`.

        Raises:
            ChecksumError: It is not the checkpoint with the digest.
        """
        found = digest_of(manifest)
        if self.digest is not None and not is_base and found != self.digest:
            raise ChecksumError(f"{manifest.url}: its digest is {found}, and {self.digest} is wanted")
        if not manifest.block_bytes:
            _log.warning(
                "%s: has no checksums, so peers are not asked: run `fastload seal` on it", manifest.url
            )
            return origin
        if not origin.shared:
            return origin
        return PeerReader(origin, manifest, PeerPool(self.endpoints, found), found)

    def endpoints(self) -> Sequence[Endpoint]:
        """Returns the servers, by what names stand for now."""
        return [
            Endpoint(host, address, port, self.context if one.uses_tls else None, self.token)
            for one in self.addresses
            for host, address, port in one.resolve()
        ]
