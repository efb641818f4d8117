"""Options of several commands: quantities with units, the size of the checkpoint, the size of the job."""

from __future__ import annotations

import csv
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any

import click

import fastload
from fastload.base.units import format_bytes
from fastload.cli.console import Command, shown
from fastload.errors import CheckpointError, CheckpointNotFound, OptionError
from fastload.formats.names import NAMES
from fastload.planning.parameters import Parameters, of_checkpoint, of_config, of_shape
from fastload.planning.sizing import DEFAULT_RECIPE, RECIPES, checkpoint_bytes
from fastload.planning.units import (
    format_count,
    parse_bytes_per_s,
    parse_duration_s,
    parse_fraction,
    parse_number,
    parse_parameters,
    parse_size_bytes,
    parse_whole,
)
from fastload.storage import name_of, open_storage

_MAX_CONFIG_BYTES = 1 << 20


class Quantity(click.ParamType):  # type: ignore[type-arg]  # before click 8.4 it takes no parameter
    """A number with its unit, or a name."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parses the text of an option."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except OptionError as error:
            raise OptionError(f"{param.opts[0] if param else self.name}: {error}") from None


def _parse_link_rate(text: str) -> float:
    """Parses the value of an option ending in -gbps: a number of Gbit/s, or a rate with its unit."""
    bare = text.lstrip("+-").replace(".", "", 1).isdigit()
    return parse_bytes_per_s(f"{text} Gbit/s" if bare else text)


csv_option = click.option("--csv", "as_csv", is_flag=True, help="Print rows as CSV.")

SIZE = Quantity("size", parse_size_bytes)
RATE = Quantity("rate", parse_bytes_per_s)
LINK_RATE = Quantity("rate", _parse_link_rate)
TIME = Quantity("time", parse_duration_s)
FRACTION = Quantity("percent", parse_fraction)
NUMBER = Quantity("number", parse_number)
COUNT = Quantity("count", parse_whole)


def option_group(name: str, make: Callable[..., Any], *options: Command) -> Callable[[Command], Command]:
    """Returns a decorator that adds options and passes them to the command as one argument.

    Args:
        name: Name of the argument.
        make: Makes its value from those of the options, passed by name.
        options: Results of ``click.option`` and ``click.argument``, in the order of the help.
    """

    def decorate(command: Command) -> Command:
        @wraps(command)
        def grouped(**given: Any) -> Any:
            own = {each: given.pop(each) for each in inspect.signature(make).parameters}
            return command(**{name: make(**own)}, **given)

        for option in reversed(options):
            grouped = option(grouped)
        return grouped

    return decorate


@dataclass(frozen=True)
class GivenModel:
    """The size of a checkpoint, as given by the options.

    Attributes:
        nbytes: Size in bytes; None if it was not given.
        parameters: Its parameters; None if they are unknown.
        recipe: Description of how the size was computed.
    """

    nbytes: int | None
    parameters: Parameters | None
    recipe: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields in JSON types."""
        return {
            "parameters": None if self.parameters is None else asdict(self.parameters),
            "recipe": self.recipe,
            "checkpoint_bytes": self.nbytes,
        }

    def lines(self) -> list[str]:
        """Returns the fields as lines of text."""
        lines = []
        if self.parameters is not None:
            num, about = self.parameters.num, "" if self.parameters.exact else "about "
            lines.append(f"{about}{num:,} parameters ({format_count(num)}), {shown(self.parameters.source)}")
        if self.nbytes is not None:
            both = f"{format_bytes(self.nbytes)} = {format_bytes(self.nbytes, binary=True)}"
            lines.append(f"checkpoint: {both}, {self.recipe}")
        return lines


def _model(
    source: str | None,
    size: int | None,
    layers: int | None,
    hidden: int | None,
    vocab: int,
    sequence: int,
    recipe: str | None,
    bytes_per_parameter: float | None,
) -> GivenModel:
    if (layers is None) != (hidden is None):
        raise OptionError("--layers and --hidden go together")
    if sum(given is not None for given in (source, size, layers)) > 1:
        raise OptionError("give one of SOURCE, --size, and --layers with --hidden")
    if recipe is not None and bytes_per_parameter is not None:
        raise OptionError("give one of --recipe and --bytes-per-parameter")
    has_recipe = recipe is not None or bytes_per_parameter is not None
    if size is not None and has_recipe:
        raise OptionError("--size is the size of the checkpoint: it takes no recipe")
    stored: int | None = size
    parameters: Parameters | None = None
    if layers is not None and hidden is not None:
        parameters = of_shape(num_layers=layers, hidden=hidden, vocabulary=vocab, sequence=sequence)
    elif source is not None:
        parameters, stored = _look_up(source)
    if parameters is None or (stored is not None and not has_recipe):
        return GivenModel(stored, parameters, "as stored" if parameters else "as given")
    if bytes_per_parameter is None:
        name = recipe or DEFAULT_RECIPE
        bytes_per_parameter = RECIPES[name].bytes_per_parameter
        label = f"{name}: {RECIPES[name].parts} bytes per parameter"
    else:
        label = f"{bytes_per_parameter:g} bytes per parameter"
    return GivenModel(checkpoint_bytes(parameters.num, bytes_per_parameter), parameters, label)


def _look_up(source: str) -> tuple[Parameters, int | None]:
    """Returns the parameters of a SOURCE, and its size if it is an existing checkpoint."""
    if source.endswith(".json"):
        try:
            return of_config(_read_config(source)), None
        except OptionError as error:
            raise CheckpointError(f"{name_of(source)}: {error}") from None
    try:
        return Parameters(parse_parameters(source), True, "as given"), None
    except OptionError as error:
        with closing(open_storage(source, NAMES)) as storage:
            is_path = not storage.probes or storage.stat("") is not None
        if not is_path:
            raise OptionError(f"{error}; nor is it a path") from None
    manifest = fastload.inspect(source)
    return of_checkpoint(manifest), manifest.nbytes


def _read_config(path: str) -> Any:
    with closing(open_storage(path, NAMES)) as storage:
        stat = storage.stat("")
        if stat is None:
            raise CheckpointNotFound(f"{storage.url}: no such file")
        if stat.nbytes > _MAX_CONFIG_BYTES:
            raise OptionError(f"{stat.nbytes} bytes are too many for a config")
        text = storage.read_all("", stat)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"not valid JSON: {error}") from None


model_options = option_group(
    "model",
    _model,
    click.argument("source", required=False),
    click.option("--size", type=SIZE, help="Size of the checkpoint, such as 13.8TB, instead of a SOURCE."),
    click.option("--layers", type=COUNT, help="Instead of a SOURCE: layers of a GPT, with --hidden."),
    click.option("--hidden", type=COUNT, help="Hidden size of that GPT."),
    click.option("--vocab", type=COUNT, default="51200", show_default=True, help="Its vocabulary."),
    click.option("--sequence", type=COUNT, default="2048", show_default=True, help="Its positions."),
    click.option(
        "--recipe",
        type=click.Choice(list(RECIPES)),
        help=f"Values saved per parameter. [default: {DEFAULT_RECIPE}]",
    ),
    click.option("--bytes-per-parameter", type=NUMBER, help="Instead of a recipe."),
)


def _job(gpus: int | None, hosts: int | None, gpus_per_host: int) -> dict[str, int | None]:
    """Returns arguments of `topology`."""
    return {"num_gpus": gpus, "num_hosts": hosts, "gpus_per_host": gpus_per_host}


job_options = option_group(
    "job",
    _job,
    click.option("--gpus", type=COUNT, help="GPUs of the job."),
    click.option("--hosts", type=COUNT, help="Hosts of the job."),
    click.option("--gpus-per-host", type=COUNT, default="8", show_default=True, help="GPUs of one host."),
)


def print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows with equal columns."""
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
