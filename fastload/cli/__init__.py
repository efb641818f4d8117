"""The command line: ``fastload COMMAND``, or ``python -m fastload COMMAND`` under torchrun."""

from __future__ import annotations

import logging
import sys
from importlib import import_module

from fastload.base.version import require_alone

try:
    require_alone()  # here, too, since the other one may have replaced our fastload/__init__.py
    import click
    import rich  # noqa: F401
except ModuleNotFoundError as error:
    sys.exit(f"the command line needs {error.name}: pip install 'fastload-torch[cli]'")
except ImportError as error:
    sys.exit(f"fastload: {error}")

import fastload
from fastload.cli.console import CommandGroup
from fastload.errors import OptionError

__all__ = ["main"]


@click.group(
    cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(fastload.__version__, prog_name="fastload")
@click.option("-v", "--verbose", count=True, help="Log each step to stderr; -vv: phases and causes, too.")
@click.option(
    "--import",
    "modules",
    multiple=True,
    metavar="MODULE",
    envvar="FASTLOAD_IMPORT",
    help="Import a Python module first, such as one that registers a storage; repeatable.",
)
def main(verbose: int, modules: tuple[str, ...]) -> None:
    """Loads, checks, copies and plans checkpoints of PyTorch jobs: every byte is read once."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    if verbose:  # not the logs of libraries, which contain signed headers
        logging.getLogger("fastload").setLevel(logging.INFO if verbose == 1 else logging.DEBUG)
    for module in modules:
        try:
            import_module(module)
        except Exception as error:
            raise OptionError(f"--import {module}: {type(error).__name__}: {error}") from error
