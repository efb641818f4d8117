"""``fastload inspect``, ``ls`` and ``prune``: the contents of a checkpoint or a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import click
from rich.filesize import decimal

import fastload
from fastload.base.registry import extension, find
from fastload.base.units import count
from fastload.cli.console import (
    age,
    json_option,
    print_json,
    print_table,
    progress,
    set_rank,
    shown,
    stdout,
    table_of,
)
from fastload.comm.launch import ALONE, Launch, from_env, join_job
from fastload.errors import CheckpointNotFound, UnsupportedVersion
from fastload.formats.manifest import Delta, TensorEntry
from fastload.formats.open import Sight, look
from fastload.formats.state import optimizer_tensors, own_view
from fastload.geometry.box import row_major
from fastload.options import LoadOptions
from fastload.training.catalog import Catalog, Entry
from fastload.training.history import History
from fastload.training.restore import CheckpointRestorer
from fastload.training.retention import Retention
from fastload.training.tier import STORAGE


@click.command(short_help="Show the tensors of a checkpoint without reading its data.")
@click.argument("path")
@json_option
def inspect(path: str, as_json: bool) -> None:
    """Show the tensors, dtypes, sizes and files of the checkpoint at PATH, without reading its data.

    The state of an optimizer is one line; --json has all of its tensors.
    """
    manifest = fastload.inspect(path)
    if as_json:
        print_json(_manifest_as_json(manifest))
    else:
        _print_manifest(manifest)


def _print_manifest(manifest: fastload.Manifest) -> None:
    console = stdout()
    is_single = not manifest.files[0].name  # its name is the path
    file_head = [] if is_single else ["file"]
    table = table_of(
        "tensor", "dtype", "shape", "size", *file_head, text=("tensor", "dtype", "shape", "file")
    )
    sizes: Counter[str] = Counter()
    optimizers = optimizer_tensors(manifest.structure).stored
    grouped = set().union(*optimizers.values())
    for entry in manifest.tensors:
        sizes[entry.dtype] += entry.nbytes
        if entry.name not in grouped:
            where = [] if is_single else [_files_of(entry, manifest)]
            shape = str(list(entry.shape))
            table.add_row(shown(entry.name), entry.dtype, shape, decimal(entry.nbytes), *where)
    for name, stored in optimizers.items():
        entries = [manifest.by_name[tensor] for tensor in stored]
        places = sorted({_files_of(entry, manifest) for entry in entries})
        where = [] if is_single else [places[0] if len(places) == 1 else count(len(places), "file")]
        dtypes = ", ".join(sorted({entry.dtype for entry in entries}))
        nbytes = decimal(sum(entry.nbytes for entry in entries))
        label = f"{shown(name)}: an optimizer" if name else "an optimizer"
        table.add_row(label, dtypes, count(len(entries), "tensor"), nbytes, *where)
    print_table(table)
    numbers = Counter(entry.dtype for entry in manifest.tensors)
    tensors, files = count(len(manifest.tensors), "tensor"), count(len(manifest.files), "file")
    total = f"{tensors}, {decimal(manifest.nbytes)} in {files} ({manifest.format})"
    if len(numbers) == 1:
        total = f"{''.join(numbers)}: {total}"
    else:
        for dtype, number in sorted(numbers.items()):
            console.print(f"{dtype}: {count(number, 'tensor')}, {decimal(sizes[dtype])}")
    console.print(total, style="bold")
    if (delta := manifest.delta) is not None:
        chain = f"{count(delta.num_deltas, 'delta')} since the last complete checkpoint"
        console.print(f"a delta of {shown(delta.base)}; {chain}")
    for line in _refused(manifest):
        console.print(f"cannot be loaded: {shown(line)}")


def _refused(manifest: fastload.Manifest) -> list[str]:
    """Returns the values of the state that cannot be loaded, with the reasons."""
    return [] if manifest.format == "fastload" else own_view(manifest.structure, 0, 0).refused


def _files_of(entry: TensorEntry, manifest: fastload.Manifest) -> str:
    files = {piece.file for piece in entry.pieces}
    if len(files) > 1:
        return f"{len(entry.pieces)} pieces in {len(files)} files"
    name = shown(manifest.files[entry.file].name)
    return f"{len(entry.pieces)} pieces in {name}" if len(entry.pieces) > 1 else name


def _manifest_as_json(manifest: fastload.Manifest) -> dict[str, Any]:
    return {
        "url": manifest.url,
        "format": manifest.format,
        "nbytes": manifest.nbytes,
        "metadata": dict(manifest.metadata),
        "refused": _refused(manifest),
        "delta": _delta_as_json(manifest.delta),
        "files": [{"name": file.name, "nbytes": file.nbytes} for file in manifest.files],
        "tensors": [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": entry.shape,
                "file": manifest.files[entry.file].name,
                "offset": entry.offset,
                "nbytes": entry.nbytes,
                **({"pieces": _pieces_as_json(entry, manifest)} if entry.pieces else {}),
            }
            for entry in manifest.tensors
        ],
    }


def _delta_as_json(delta: Delta | None) -> dict[str, Any] | None:
    if delta is None:
        return None
    return {"base": delta.base, "digest": delta.digest, "num_deltas": delta.num_deltas}


def _pieces_as_json(entry: TensorEntry, manifest: fastload.Manifest) -> list[dict[str, Any]]:
    return [
        {
            "offsets": piece.box.offsets,
            "sizes": piece.box.sizes,
            "file": manifest.files[piece.file].name,
            "offset": piece.offset,
            "nbytes": piece.nbytes,
            "strides": piece.strides or row_major(piece.box.sizes),
        }
        for piece in entry.pieces
    ]


@click.command(short_help="List the checkpoints of a run, or in memory.")
@click.argument("root", required=False)
@click.option(
    "--memory",
    is_flag=False,
    flag_value="auto",
    metavar="[DIR]",
    help="Directory of the memory tier on this host. Without ROOT, list all jobs in it.",
)
@json_option
def ls(root: str | None, memory: str | None, as_json: bool) -> None:
    """List the checkpoints of a CheckpointManager below ROOT: step, size, age, metrics.

    The newest is last. A checkpoint is complete if the names and sizes of its files match its commit record;
    to check its data, use `fastload verify`.

    The last lines say which checkpoint a restore would take, and why. They know the memory of this host, or
    with --memory that of all hosts on which srun or torchrun starts this command.
    """
    if root is None and memory is not None:
        directory = None if memory == "auto" else memory
        extension("ls", "memory", "--memory")(directory, as_json=as_json)
        return
    catalog = _catalog(root)
    launch = from_env() if memory is not None else ALONE
    set_rank(launch.rank)
    choices, note = _choices(launch, catalog, memory or "auto")
    if launch.rank:
        return
    entries = _entries(catalog)
    if as_json:
        listed = [_entry_as_json(entry) for entry in entries]
        print_json({"root": catalog.root.url, "checkpoints": listed, "restore": choices})
    else:
        _print_entries(entries)
        _print_choices(choices, {entry.step: entry.state for entry in entries}, note)


def _choices(launch: Launch, catalog: Catalog, memory: str) -> tuple[list[dict[str, Any]], str]:
    """Returns what a restore tries, in this order, on all ranks; and a note, such as why it refuses."""
    options = LoadOptions()
    [world] = join_job(launch, f"listing the checkpoints in {catalog.root}", timeout_s=options.timeout_s)
    with world.ending():
        survey = find("surveys", "memory")
        tier = survey.load()(world, catalog, memory) if survey is not None else None
        history = History(world, catalog, lists=world.rank == 0, process_group=None)
        restorer = CheckpointRestorer(world, {"options": options}, catalog, history, tier)
        listing = history.look(world)
        try:
            choices = restorer.choices(listing)
        except UnsupportedVersion as error:
            return [], f"a restore refuses: {error}"
    found = [{"step": one.point.step, "source": one.source, "why": why} for one, why in choices]
    is_partial = tier is not None and world.size == 1 and bool(found) and found[0]["source"] == STORAGE
    return found, _ONE_HOST if is_partial else ""


_ONE_HOST = "the memory of other hosts was not looked at: run this with --memory on all of them, as by srun"


def _print_choices(choices: list[dict[str, Any]], states: Mapping[int, str], note: str) -> None:
    console = stdout()
    for each in choices:
        step, source, why = each["step"], each["source"], each["why"]
        state = states.get(step, "gone") if source == STORAGE else "complete"
        if state == "complete":
            console.print(f"a restore takes step {step} from {source}{shown(f': {why}') if why else ''}")
            break
        console.print(f"a restore passes over step {step}, which is {state}")
    if note:
        console.print(note)


@click.command(short_help="Delete old checkpoints and the files of dead saves.")
@click.argument("root", required=False)
@click.option("--keep-last", type=click.IntRange(1), help="Number of newest checkpoints to keep.")
@click.option("--keep-every", type=click.IntRange(1), help="Also keep multiples of this step.")
@click.option("--memory", is_flag=True, help="Delete those of dead jobs in memory; ROOT is their directory.")
@click.option("--dry-run", is_flag=True, help="Only print what would be deleted.")
def prune(
    root: str | None, keep_last: int | None, keep_every: int | None, memory: bool, dry_run: bool
) -> None:
    """Delete old checkpoints below ROOT, and the files of dead saves.

    Incomplete, damaged and unreadable checkpoints are left alone and do not count; so are links and their
    targets. The newest complete checkpoint always stays.
    """
    if memory:
        extension("prune", "memory", "--memory")(root, dry_run=dry_run)
        return
    if keep_last is None:
        raise click.UsageError("Missing option '--keep-last'.")
    catalog = _catalog(root)
    entries = {entry.step: entry for entry in _entries(catalog)}
    retention = Retention(keep_last=keep_last, keep_every=keep_every)
    steps = catalog.expendable(list(entries.values()), retention)
    if not dry_run:
        _remove(catalog, [entries[step] for step in steps])
    for step in steps:
        click.echo(f"{'would delete' if dry_run else 'deleted'} {catalog.path(step)}")
    for note in filter(None, map(_note, entries.values())):
        click.echo(f"left alone: {note}")
    nbytes = sum(_nbytes(entries[step]) for step in steps)
    left = sum(entry.is_complete for entry in entries.values()) - len(steps)
    verb = " to delete" if dry_run else ""
    click.echo(f"{count(len(steps), 'checkpoint')}, {decimal(nbytes)}{verb}; {left} stay")


def _remove(catalog: Catalog, entries: list[Entry]) -> None:
    with progress(0, shown=True, what="deleting") as show:
        done, total = 0, sum(map(_nbytes, entries))
        for entry in entries:
            catalog.remove(entry.step)
            done += _nbytes(entry)
            if show is not None:
                show(done, total)
    for path in catalog.clean_abandoned():
        click.echo(f"deleted {path}, which a save that died left behind")


def _catalog(root: str | None) -> Catalog:
    if root is None:
        raise click.UsageError("Missing argument 'ROOT'.")
    options = LoadOptions()
    return Catalog(root, None, options.patience, checks_bases=options.bases is None)


def _entries(catalog: Catalog) -> list[Entry]:
    entries = catalog.entries()
    if not entries:
        with closing(catalog.open_storage(catalog.root)) as storage:
            if look(storage) == Sight.CHECKPOINT:
                raise CheckpointNotFound(
                    f"{catalog.root}: this is a checkpoint, not a run: fastload inspect shows it"
                )
        raise CheckpointNotFound(f"{catalog.root}: no checkpoints named step_00000001 and so on")
    return entries


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    return {
        "step": entry.step,
        "branch": entry.point.branch,
        "state": entry.state,
        "problem": entry.problem or None,
        "link": entry.place if entry.is_link else None,
        "saved_s": entry.saved_s or None,
        "nbytes": entry.summary.nbytes if entry.summary is not None else None,
        "num_files": len(entry.summary.files) if entry.summary is not None else None,
        "base": (entry.summary.base or None) if entry.summary is not None else None,
        "num_deltas": entry.summary.num_deltas if entry.summary is not None else None,
        "metrics": entry.saved.metrics,
    }


def _print_entries(entries: list[Entry]) -> None:
    metrics = sorted({name for entry in entries for name in entry.saved.metrics})
    branched = ["branch"] if any(entry.point.branch for entry in entries) else []
    bases = ["delta of"] if any(map(_base_of, entries)) else []
    head = ["step", *branched, "", "size", "files", "age", *bases, *map(shown, metrics)]
    table = table_of(*head, text=("", *bases))
    for entry in entries:
        measured = entry.saved.metrics
        table.add_row(
            str(entry.step),
            *([str(entry.point.branch)] if branched else []),
            entry.state,
            decimal(entry.summary.nbytes) if entry.summary is not None else "–",
            str(len(entry.summary.files)) if entry.summary is not None else "–",
            age(entry.saved_s),
            *([shown(_base_of(entry)) or "–"] if bases else []),
            *(f"{measured[name]:g}" if name in measured else "–" for name in metrics),
        )
    console = stdout()
    print_table(table)
    for note in filter(None, map(_note, entries)):
        console.print(note)
    console.print(f"{count(len(entries), 'checkpoint')}, {decimal(sum(map(_nbytes, entries)))}", style="bold")


def _base_of(entry: Entry) -> str:
    return entry.summary.base if entry.summary is not None else ""


def _note(entry: Entry) -> str:
    """Returns a note on a link or an incomplete checkpoint; empty for others."""
    link = f"a link to {entry.place}" if entry.is_link else ""
    state = f"{entry.state}: {entry.problem}" if entry.problem else ""
    about = ", ".join(filter(None, (link, state)))
    return shown(f"step {entry.step}: {about}") if about else ""


def _nbytes(entry: Entry) -> int:
    return entry.summary.nbytes if entry.summary is not None else 0
