"""``fastload serve``."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import click

from fastload.base.units import count
from fastload.ext.serve.addresses import PORT
from fastload.ext.serve.api import Server
from fastload.ext.serve.api import serve as open_server
from fastload.formats.sources import CopyInProgress

_NAMES = ("host", "port", "token_file", "certificate", "key", "insecure", "rate")
_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_OPTIONS = (
    click.option("--host", default="127.0.0.1", show_default=True, help="Address or name to listen at."),
    click.option("--port", type=int, default=PORT, show_default=True, help="Port; 0 for one that is free."),
    click.option("--token-file", metavar="FILE", help="A file with a word that clients have to send."),
    click.option("--certificate", metavar="FILE", help="Certificate, for TLS."),
    click.option("--key", metavar="FILE", help="Key of the certificate, if not in the same file."),
    click.option("--insecure", is_flag=True, help="Listen on a network with neither token nor certificate."),
    click.option("--rate", metavar="BYTES", help="Most bytes per second for all clients, such as 200MB."),
)  # fmt: skip


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a server to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(short_help="Serve checkpoints over HTTP, as a source for other hosts.")
@click.argument("path")
@server_options
def serve(path: str, **options: Any) -> None:
    """Serve the checkpoint at PATH, or all of those directly below PATH, until a signal.

    Hosts that load or stage the same checkpoint name this one with --peers, and read from it in place of
    storage. Only files that a commit record or a seal covers are served.
    """
    with open_server(path, **options) as server:
        block_signals()
        names = server.checkpoints
        what = "nothing yet" if not names else count(len(names), "checkpoint")
        click.echo(f"serving {what} at {server.url}")
        wait_for_signal()


class CopyServing:
    """Serves the copy that ``fastload stage`` makes, from its first verified blocks on.

    Args:
        options: Those of `serve`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._server: Server | None = None

    @staticmethod
    def add_options(command: Callable[..., Any]) -> Callable[..., Any]:
        """Adds ``--serve`` and the options of a server to a command."""
        text = "Serve the copy while it is made, and after that until a signal."
        return click.option("--serve", is_flag=True, help=text)(server_options(command))

    @classmethod
    def follow(cls, values: Mapping[str, Any]) -> AbstractContextManager[CopyServing | None]:
        """Returns what serves the copy; None without ``--serve``."""
        return cls({name: values[name] for name in _NAMES}) if values["serve"] else nullcontext()

    def begin(self, copy: CopyInProgress) -> None:
        """Serves a copy that begins."""
        self._open().follow(copy)

    def end(self, path: str) -> None:
        """Serves the complete copy, until a signal."""
        server = self._open()
        block_signals()
        server.add(path)
        click.echo(f"serving {path} at {server.url}", err=True)
        wait_for_signal()

    def _open(self) -> Server:
        self._server = self._server or open_server(None, **self._options)
        return self._server

    def __enter__(self) -> CopyServing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()


def block_signals() -> None:
    """Has SIGINT and SIGTERM wait for `wait_for_signal`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def wait_for_signal() -> None:
    """Waits until the process is to end, by a signal that is blocked."""
    signal.sigwait(_SIGNALS)
