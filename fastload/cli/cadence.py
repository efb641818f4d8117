"""``fastload cadence``: how often to save."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich import box
from rich.table import Table

from fastload.cli.cadence_memory import Advice, Memory, memory_options
from fastload.cli.console import stdout
from fastload.cli.ettr_plot import draw_ettr
from fastload.cli.model import Model, describe, model_as_json, model_options, world_options
from fastload.cli.quantities import (
    COUNT,
    FRACTION,
    NUMBER,
    PNG,
    RATE,
    TIME,
    output_options,
    print_csv,
    print_json,
)
from fastload.errors import OptionError
from fastload.estimate import cadence as theory
from fastload.estimate.sizing import overhead, topology
from fastload.estimate.tiers import Tier
from fastload.estimate.units import format_duration

__all__ = ["cadence"]


@click.command(short_help="How often to save a training.")
@model_options
@world_options
@click.option("--at", "rate", type=RATE, help="Bandwidth that a save is written with.")
@click.option("--stall", type=TIME, help="Time training stands still for a save; all of it if not given.")
@click.option("--background", type=TIME, help="Time after that until it is durable; else by size and --at.")
@click.option("--step", type=TIME, help="Time of a training step.")
@click.option("--mtbf", type=TIME, help="Mean time between failures of the job; else by its hosts.")
@click.option(
    "--failures-per-1000-host-days", "failures", type=NUMBER, default="6.5", show_default=True,
    help="Failures of hosts.",
)  # fmt: skip
@click.option(
    "--restart", type=TIME, default="5min", show_default=True, help="From a failure until it trains."
)
@click.option(
    "--budget", type=FRACTION, default="3.5%", show_default=True, help="Largest share of time in stalls."
)
@click.option(
    "--in-flight", type=COUNT, default="1", show_default=True, help="Saves that storage gains from at once."
)
@memory_options
@click.option("--png", type=PNG, help="Draw the ETTR over the interval into this file.")
@output_options
def cadence(
    model: Model,
    gpus: int | None,
    hosts: int | None,
    gpus_per_host: int,
    rate: float | None,
    stall: float | None,
    background: float | None,
    step: float | None,
    mtbf: float | None,
    failures: float,
    restart: float,
    budget: float,
    in_flight: int,
    memory: Memory | None,
    png: str | None,
    output: str | None,
) -> None:
    """How often to save: intervals by the published rules, and one recommendation.

    The checkpoint (SOURCE as for `fastload size`) and --at give the time of a save, unless --stall and
    --background do. With --memory-copies, how often to save to the memory of hosts, and how often to storage.
    """
    world = topology(gpus_per_host=gpus_per_host, num_gpus=gpus, num_hosts=hosts)
    num_hosts = world.num_hosts if gpus or hosts else None
    _require_enough(
        has_size=model.nbytes is not None,
        has_times=rate is not None or stall is not None,
        has_failures=mtbf is not None or num_hosts is not None,
    )
    stall_s, background_s = _save_times(model, rate, stall, background)
    if mtbf is None:
        assert num_hosts is not None
        mtbf = theory.job_mtbf_s(num_hosts, failures / 1000 / 86400)
        why_mtbf = f"{num_hosts:,} hosts, {failures:g} failures per 1000 host-days"
    else:
        why_mtbf = "as given"
    facts = {"stall_s": stall_s, "background_s": background_s, "mtbf_s": mtbf, "restart_s": restart}
    best = theory.recommend(**facts, budget=budget, saves_in_flight=in_flight, step_s=step)
    rules = _rules(best, budget=budget, saves_in_flight=in_flight, step_s=step, **facts)
    if png is not None:
        draw_ettr(png, rules, best, **facts)
    advice = None
    if memory is not None:
        if num_hosts is None:
            raise OptionError("--memory-copies needs --gpus or --hosts")
        tier = memory.tier(num_hosts, model.nbytes, stall_s=stall, restart_s=restart)
        storage = Tier(stall_s, background_s, restart)
        advice = Advice.of(
            memory, tier, storage, num_hosts=num_hosts, mtbf_s=mtbf, budget=budget, step_s=step
        )
        rules += advice.rows()
    if output == "json":
        print_json(
            {
                **model_as_json(model),
                **facts,
                "step_s": step,
                "budget": budget,
                "saves_in_flight": in_flight,
                "recommendation": asdict(best),
                "rules": rules,
                "memory": advice.as_json() if advice is not None else None,
                "recoverable": advice.survival if advice is not None else [],
            }
        )
    elif output == "csv":
        print_csv(rules)
    else:
        _print_cadence(model, best, rules, why_mtbf, advice, **facts)


def _require_enough(*, has_size: bool, has_times: bool, has_failures: bool) -> None:
    """Asks for all that is missing at once, and for nothing that is known or follows from it.

    Raises:
        OptionError: Something is missing.
    """
    questions = []
    if not has_times:
        how = (
            "--at, the bandwidth of storage, or --stall" if has_size else "--stall, or a checkpoint and --at"
        )
        questions.append(f"how long does a save take? Give {how}")
    if not has_failures:
        questions.append("how often does the job fail? Give --mtbf, or --gpus or --hosts")
    if questions:
        raise OptionError("; ".join(questions))


def _save_times(
    model: Model, rate: float | None, stall_s: float | None, background_s: float | None
) -> tuple[float, float]:
    """Returns how long training stands still for a save, and how long it is written after that."""
    written_s = None
    if rate is not None:
        if model.nbytes is None:
            raise OptionError("--at needs a checkpoint: a SOURCE, --size, or --layers with --hidden")
        written_s = model.nbytes / rate
    if background_s is not None and written_s is not None:
        raise OptionError("give one of --background and --at: each follows from the other")
    if stall_s is not None:
        return stall_s, background_s if background_s is not None else written_s or 0.0
    assert written_s is not None
    return written_s, 0.0


def _rules(
    best: theory.Recommendation,
    *,
    stall_s: float,
    background_s: float,
    mtbf_s: float,
    restart_s: float,
    budget: float,
    saves_in_flight: int,
    step_s: float | None,
) -> list[dict[str, Any]]:
    """Lists what each rule says, and what would come of it."""
    lost_s = restart_s + background_s

    def row(kind: str, rule: str, interval_s: float, num_steps: int | None = None) -> dict[str, Any]:
        if num_steps is None and step_s is not None:
            num_steps = max(1, round(interval_s / step_s))
        return {
            "rule": rule,
            "kind": kind,
            "interval_s": interval_s,
            "interval_steps": num_steps,
            "overhead": overhead(stall_s, interval_s),
            "ettr": theory.ettr(interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=lost_s),
        }

    rows = []
    if stall_s:
        peak_s = theory.ettr_peak_s(stall_s=stall_s, mtbf_s=mtbf_s, restart_s=lost_s)
        affordable_s = theory.budget_interval_s(stall_s, budget)
        rows += [
            row("best", "Young", theory.young_s(stall_s, mtbf_s)),
            row("best", "Daly", theory.daly_s(stall_s, mtbf_s)),
            row("best", "ETTR peak", peak_s),
            row("at least", f"budget of {budget * 100:.3g} %", affordable_s),
        ]
    if background_s:
        rule, least_s, num_steps = _room(stall_s, background_s, budget, saves_in_flight, step_s)
        rows.append(row("at least", rule, least_s, num_steps))
    return [*rows, row("", "recommended", best.interval_s, best.interval_steps)]


def _room(
    stall_s: float, background_s: float, budget: float, saves_in_flight: int, step_s: float | None
) -> tuple[str, float, int | None]:
    """Returns the rule for saves that are not to catch up with each other: name, interval, steps."""
    slowdown = 1 + budget
    if saves_in_flight == 1:
        rule, least_s = "CheckFreq", background_s
    else:
        rule, least_s = f"PCcheck, {saves_in_flight} in flight", background_s / (saves_in_flight * slowdown)
    if step_s is None:
        return rule, least_s, None
    if saves_in_flight == 1:
        whole_s = stall_s + background_s
        num_steps = theory.checkfreq_steps(checkpoint_s=whole_s, stall_s=stall_s, step_s=step_s)
    else:
        num_steps = theory.pccheck_steps(
            write_s=background_s, step_s=step_s, saves_in_flight=saves_in_flight, slowdown=slowdown
        )
    return rule, num_steps * step_s, num_steps


def _print_cadence(
    model: Model,
    best: theory.Recommendation,
    rules: list[dict[str, Any]],
    why_mtbf: str,
    advice: Advice | None,
    *,
    stall_s: float,
    background_s: float,
    mtbf_s: float,
    restart_s: float,
) -> None:
    console = stdout()
    written = (
        f"then {format_duration(background_s)} in the background" if background_s else "then it is durable"
    )
    lines = (
        *describe(model),
        f"a save: training stands still for {format_duration(stall_s)}, {written}",
        f"a failure every {format_duration(mtbf_s)} ({why_mtbf}), {format_duration(restart_s)} to restart",
    )
    for line in lines if advice is None else (*lines, advice.facts):
        console.print(line, highlight=False)
    heads = ("rule", "", "interval", "steps", "overhead", "ETTR")
    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rules:
        table.add_row(
            row["rule"],
            row["kind"],
            format_duration(row["interval_s"]),
            "–" if row["interval_steps"] is None else f"{row['interval_steps']:,}",
            f"{row['overhead'] * 100:.2f} %",
            f"{row['ettr'] * 100:.2f} %",
            style="bold" if row["rule"] == "recommended" else None,
        )
    console.print(table)
    steps = "" if best.interval_steps is None else f" ({best.interval_steps:,} steps)"
    alone, style = ("", "bold") if advice is None else ("with storage alone, ", None)
    console.print(
        f"{alone}save every {format_duration(best.interval_s)}{steps}", style=style, highlight=False
    )
    console.print(f"why: {best.why}", highlight=False)
    if advice is not None:
        console.print(advice.headline, style="bold", highlight=False)
        for line in advice.reasons:
            console.print(line, highlight=False)
