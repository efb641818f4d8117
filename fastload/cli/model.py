"""Which checkpoint a question is about: a size, a number of parameters, a shape, a config or a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any

import click

import fastload
from fastload.cli.console import errors_to_exit_code, shown
from fastload.cli.quantities import COUNT, NUMBER, SIZE, WrongQuantity
from fastload.errors import CheckpointNotFound, OptionError
from fastload.estimate.parameters import Parameters, of_checkpoint, of_config, of_shape
from fastload.estimate.sizing import DEFAULT_RECIPE, RECIPES, checkpoint_bytes
from fastload.estimate.units import format_bytes, format_count, parse_parameters
from fastload.formats.names import NAMES
from fastload.storage import name_of, open_storage

__all__ = ["Model", "describe", "model_as_json", "model_options", "world_options"]

_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class Model:
    """The checkpoint in question.

    Attributes:
        nbytes: Its size in bytes; None if it was not given.
        parameters: Its parameters, where they are known.
        recipe: What makes its size, in words.
    """

    nbytes: int | None
    parameters: Parameters | None
    recipe: str


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the argument and options that say which checkpoint; they become one argument `model`."""

    @wraps(command)
    def with_model(**given: Any) -> None:
        with errors_to_exit_code(rank=0):
            model = _model(**{name: given.pop(name) for name in _NAMES})
            command(model=model, **given)

    for decorate in reversed(_OPTIONS):
        with_model = decorate(with_model)
    return with_model


def world_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that say how large the job is: `gpus`, `hosts` and `gpus_per_host`."""
    for option in (
        click.option("--gpus-per-host", type=COUNT, default="8", show_default=True, help="GPUs of one host."),
        click.option("--hosts", type=COUNT, help="Hosts of the job."),
        click.option("--gpus", type=COUNT, help="GPUs of the job."),
    ):
        command = option(command)
    return command


def model_as_json(model: Model) -> dict[str, Any]:
    """Returns what is known of the checkpoint in JSON types."""
    return {
        "parameters": None if model.parameters is None else asdict(model.parameters),
        "recipe": model.recipe,
        "checkpoint_bytes": model.nbytes,
    }


def describe(model: Model) -> list[str]:
    """Returns the lines that say what is known of the checkpoint."""
    lines = []
    if model.parameters is not None:
        num, about = model.parameters.num, "" if model.parameters.exact else "about "
        lines.append(f"{about}{num:,} parameters ({format_count(num)}), {shown(model.parameters.source)}")
    if model.nbytes is not None:
        both = f"{format_bytes(model.nbytes)} = {format_bytes(model.nbytes, binary=True)}"
        lines.append(f"checkpoint: {both}, {model.recipe}")
    return lines


_OPTIONS = (
    click.argument("source", required=False),
    click.option("--size", type=SIZE, help="Size of the checkpoint, such as 13.8TB, instead of a SOURCE."),
    click.option("--layers", type=COUNT, help="Instead of a SOURCE: layers of a GPT, with --hidden."),
    click.option("--hidden", type=COUNT, help="Hidden size of that GPT."),
    click.option("--vocab", type=COUNT, default="51200", show_default=True, help="Its vocabulary."),
    click.option("--sequence", type=COUNT, default="2048", show_default=True, help="Its positions."),
    click.option(
        "--recipe", type=click.Choice(list(RECIPES)), help=f"What is kept. [default: {DEFAULT_RECIPE}]"
    ),
    click.option("--bytes-per-parameter", type=NUMBER, help="Instead of a recipe."),
)
_NAMES = ("source", "size", "layers", "hidden", "vocab", "sequence", "recipe", "bytes_per_parameter")


def _model(
    source: str | None,
    size: int | None,
    layers: int | None,
    hidden: int | None,
    vocab: int,
    sequence: int,
    recipe: str | None,
    bytes_per_parameter: float | None,
) -> Model:
    if (layers is None) != (hidden is None):
        raise OptionError("--layers and --hidden go together")
    if sum(given is not None for given in (source, size, layers)) > 1:
        raise OptionError("give one of SOURCE, --size, and --layers with --hidden")
    if recipe is not None and bytes_per_parameter is not None:
        raise OptionError("give one of --recipe and --bytes-per-parameter")
    kept = recipe is not None or bytes_per_parameter is not None
    if size is not None and kept:
        raise OptionError("--size is the size of the checkpoint: it takes no recipe")
    stored: int | None = size
    parameters: Parameters | None = None
    if layers is not None and hidden is not None:
        parameters = of_shape(num_layers=layers, hidden=hidden, vocabulary=vocab, sequence=sequence)
    elif source is not None:
        parameters, stored = _look_up(source)
    if parameters is None or (stored is not None and not kept):
        return Model(stored, parameters, "as stored" if parameters else "as given")
    if bytes_per_parameter is None:
        chosen = RECIPES[recipe or DEFAULT_RECIPE]
        nbytes = checkpoint_bytes(parameters.num, chosen.bytes_per_parameter)
        label = f"{recipe or DEFAULT_RECIPE}: {chosen.parts} bytes per parameter"
        return Model(nbytes, parameters, label)
    label = f"{bytes_per_parameter:g} bytes per parameter"
    return Model(checkpoint_bytes(parameters.num, bytes_per_parameter), parameters, label)


def _look_up(source: str) -> tuple[Parameters, int | None]:
    """Returns parameters, and the size of a checkpoint that exists, by what the user named."""
    if source.endswith(".json"):
        try:
            return of_config(_read_config(source)), None
        except OptionError as error:
            raise OptionError(f"{name_of(source)}: {error}") from None
    try:
        return Parameters(parse_parameters(source), True, "as given"), None
    except OptionError as error:
        if not _is_path(source):
            raise WrongQuantity(f"{error}; nor is it a path") from None
    manifest = fastload.inspect(source)
    return of_checkpoint(manifest), manifest.nbytes


def _is_path(source: str) -> bool:
    storage = open_storage(source, NAMES)
    try:
        return not storage.probes or storage.stat("") is not None
    finally:
        storage.close()


def _read_config(path: str) -> Any:
    storage = open_storage(path, NAMES)
    try:
        stat = storage.stat("")
        if stat is None:
            raise CheckpointNotFound(f"{storage.url}: no such file")
        if stat.nbytes > _MAX_CONFIG_BYTES:
            raise OptionError(f"{stat.nbytes} bytes are too many for a config")
        text = bytearray(stat.nbytes)
        storage.read_into("", 0, [memoryview(text)])
    finally:
        storage.close()
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"not valid JSON: {error}") from None
