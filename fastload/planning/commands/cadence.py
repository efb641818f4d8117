"""``fastload cadence``: recommended intervals of saves to storage and to the memory of hosts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import click

from fastload.cli.console import json_option, parse_png, print_json, stdout, table_of
from fastload.errors import OptionError
from fastload.planning import cadence as theory
from fastload.planning.cadence import Recommendation, Tier, Tiers
from fastload.planning.commands.options import (
    COUNT,
    FRACTION,
    NUMBER,
    RATE,
    TIME,
    GivenModel,
    csv_option,
    job_options,
    model_options,
    option_group,
    print_csv,
)
from fastload.planning.commands.pictures import draw_ettr
from fastload.planning.sizing import overhead, topology
from fastload.planning.units import format_duration

_NUM_MORE_HOSTS = 3  # lost beyond those that copies certainly survive


@dataclass(frozen=True)
class _Memory:
    """The options of the memory tier, by their names."""

    memory_copies: int | None
    memory_stall: float | None
    memory_background: float | None
    host_link: float | None
    memory_restart: float | None
    hosts_lost: int
    beyond_memory: float

    def __post_init__(self) -> None:
        given = self.memory_stall, self.memory_background, self.host_link, self.memory_restart
        if self.memory_copies is None and any(value is not None for value in given):
            raise OptionError("how many copies are in memory? Give --memory-copies")

    def tier(
        self, copies: int, num_hosts: int, nbytes: int | None, stall_s: float | None, restart_s: float
    ) -> Tier:
        """Returns the costs of a save to memory; by default those of storage, or computed from the link."""
        stall_s = self.memory_stall if self.memory_stall is not None else stall_s
        if stall_s is None:
            raise OptionError("how long does training wait for a copy in memory? Give --memory-stall")
        background_s = self.memory_background
        if background_s is not None and self.host_link is not None:
            raise OptionError("give one of --memory-background and --host-link: each follows from the other")
        if background_s is None and copies == 1:
            background_s = 0.0
        if background_s is None:
            if self.host_link is None or nbytes is None:
                raise OptionError(
                    "how long until all copies are there? Give --memory-background, or a checkpoint and "
                    "--host-link"
                )
            background_s = nbytes / num_hosts * (copies - 1) / self.host_link
        return Tier(
            stall_s, background_s, self.memory_restart if self.memory_restart is not None else restart_s
        )


_memory_options = option_group(
    "memory",
    _Memory,
    click.option("--memory-copies", type=COUNT, help="Copies in the memory of hosts."),
    click.option("--memory-stall", type=TIME, help="Stall of a save to memory; --stall by default."),
    click.option("--memory-background", type=TIME, help="Time after that until all copies have arrived."),
    click.option("--host-link", type=RATE, help="Bandwidth of a host's link, for --memory-background."),
    click.option("--memory-restart", type=TIME, help="Restart from memory; --restart by default."),
    click.option(
        "--hosts-lost", type=COUNT, default="1", show_default=True, help="Hosts lost in a failure."
    ),
    click.option(
        "--beyond-memory", type=FRACTION, default="1%", show_default=True,
        help="Share of failures that end all hosts, or the job.",
    ),
)  # fmt: skip


@click.command(short_help="Recommend how often to save a training.")
@model_options
@job_options
@click.option("--at", "rate", type=RATE, help="Bandwidth of storage for a save.")
@click.option("--stall", type=TIME, help="Time that training waits for a save; the complete save by default.")
@click.option("--background", type=TIME, help="Time after that until it is durable; else by size and --at.")
@click.option("--step", type=TIME, help="Time of a training step.")
@click.option("--mtbf", type=TIME, help="Mean time between failures of the job; by its hosts by default.")
@click.option(
    "--failures-per-1000-host-days", "failures", type=NUMBER, default="6.5", show_default=True,
    help="Failures of hosts.",
)  # fmt: skip
@click.option(
    "--restart", type=TIME, default="5min", show_default=True, help="From a failure until training continues."
)
@click.option(
    "--budget", type=FRACTION, default="3.5%", show_default=True, help="Largest share of time in stalls."
)
@click.option(
    "--concurrent-saves", type=COUNT, default="1", show_default=True, help="Saves that are written at once."
)
@_memory_options
@click.option(
    "--png", metavar="PNG", callback=parse_png, help="Plot the ETTR against the interval into this file."
)
@json_option
@csv_option
def cadence(
    model: GivenModel,
    job: dict[str, Any],
    rate: float | None,
    stall: float | None,
    background: float | None,
    step: float | None,
    mtbf: float | None,
    failures: float,
    restart: float,
    budget: float,
    concurrent_saves: int,
    memory: _Memory,
    png: str | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Recommend how often to save, next to the intervals of published rules.

    The time of a save follows from the checkpoint (SOURCE as for `fastload size`) and --at, or from --stall
    and --background. With --memory-copies there is an interval for the memory of hosts, and one for storage.
    """
    world = topology(**job)
    num_hosts = world.num_hosts if job["num_gpus"] or job["num_hosts"] else None
    _require_enough(
        has_size=model.nbytes is not None,
        has_times=rate is not None or stall is not None,
        has_failures=mtbf is not None or num_hosts is not None,
    )
    storage = Tier(*_save_times(model, rate, stall, background), restart)
    why_mtbf = "as given"
    if mtbf is None:
        assert num_hosts is not None
        mtbf = theory.job_mtbf_s(num_hosts, failures / 1000 / 86400)
        why_mtbf = f"{num_hosts:,} hosts, {failures:g} failures per 1000 host-days"
    costs = asdict(storage)
    best = theory.recommend(
        **costs, mtbf_s=mtbf, budget=budget, concurrent_saves=concurrent_saves, step_s=step
    )
    rules = _rules(best, storage, mtbf, budget=budget, concurrent_saves=concurrent_saves, step_s=step)
    if png is not None:
        draw_ettr(png, rules, best, storage, mtbf)
    both = None
    if memory.memory_copies is not None:
        if num_hosts is None:
            raise OptionError("--memory-copies needs --gpus or --hosts")
        tier = memory.tier(memory.memory_copies, num_hosts, model.nbytes, stall, restart)
        loss_probability = theory.loss_probability(
            num_hosts=num_hosts,
            copies=memory.memory_copies,
            mtbf_s=mtbf,
            window_s=tier.lost_s,
            hosts_lost=memory.hosts_lost,
            beyond_memory=memory.beyond_memory,
        )
        tiers = theory.recommend_tiers(
            memory=tier,
            storage=storage,
            mtbf_s=mtbf,
            loss_probability=loss_probability,
            budget=budget,
            step_s=step,
        )
        both = _Both(memory.memory_copies, tier, tiers, _survival(num_hosts, memory.memory_copies))
        rules += both.rows()
    if as_json:
        print_json(
            {
                **model.to_dict(),
                **costs,
                "mtbf_s": mtbf,
                "step_s": step,
                "budget": budget,
                "concurrent_saves": concurrent_saves,
                "recommendation": asdict(best),
                "rules": rules,
                "memory": both and both.to_dict(),
                "recoverable": both.survival if both else [],
            }
        )
    elif as_csv:
        print_csv(rules)
    else:
        stalls, written = format_duration(storage.stall_s), format_duration(storage.background_s)
        after = f"then {written} in the background" if storage.background_s else "then it is durable"
        about = [
            *model.lines(),
            f"a save: training stands still for {stalls}, {after}",
            f"a failure every {format_duration(mtbf)} ({why_mtbf}), {format_duration(restart)} to restart",
        ]
        _print(about, best, rules, both)


def _require_enough(*, has_size: bool, has_times: bool, has_failures: bool) -> None:
    """Raises one error that asks for all missing options."""
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
    model: GivenModel, rate: float | None, stall_s: float | None, background_s: float | None
) -> tuple[float, float]:
    """Returns the seconds that training waits for a save, and the seconds of writing after that."""
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
    best: Recommendation,
    storage: Tier,
    mtbf_s: float,
    *,
    budget: float,
    concurrent_saves: int,
    step_s: float | None,
) -> list[dict[str, Any]]:
    """Returns the interval of each published rule and its effects, as rows."""
    stall_s = storage.stall_s

    def row(kind: str, rule: str, interval_s: float) -> dict[str, Any]:
        return {
            "rule": rule,
            "kind": kind,
            "interval_s": interval_s,
            "interval_steps": None if step_s is None else max(1, round(interval_s / step_s)),
            "overhead": overhead(stall_s, interval_s),
            "ettr": theory.ettr(interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=storage.lost_s),
        }

    rows = []
    if stall_s:
        peak_s = theory.ettr_peak_s(stall_s=stall_s, mtbf_s=mtbf_s, restart_s=storage.lost_s)
        rows += [
            row("best", "Young", theory.young_s(stall_s, mtbf_s)),
            row("best", "Daly", theory.daly_s(stall_s, mtbf_s)),
            row("best", "ETTR peak", peak_s),
            row("at least", f"budget of {budget * 100:.3g} %", theory.budget_interval_s(stall_s, budget)),
        ]
    if storage.background_s:
        rows.append(row("at least", *_write_rule(storage, concurrent_saves, 1 + budget, step_s)))
    return [*rows, row("", "recommended", best.interval_s)]


def _write_rule(
    storage: Tier, concurrent_saves: int, slowdown: float, step_s: float | None
) -> tuple[str, float]:
    """Returns the rule against overlapping saves, and its interval in seconds."""
    stall_s, write_s = storage.stall_s, storage.background_s
    if concurrent_saves == 1:
        if step_s is None:
            return "CheckFreq", write_s
        steps = theory.checkfreq_steps(checkpoint_s=stall_s + write_s, stall_s=stall_s, step_s=step_s)
        return "CheckFreq", steps * step_s
    rule = f"PCcheck, {concurrent_saves} saves at once"
    if step_s is None:
        return rule, write_s / (concurrent_saves * slowdown)
    steps = theory.pccheck_steps(
        write_s=write_s, step_s=step_s, concurrent_saves=concurrent_saves, slowdown=slowdown
    )
    return rule, steps * step_s


@dataclass(frozen=True)
class _Both:
    """Saves to memory and to storage together.

    Attributes:
        copies: Copies of every share in memory.
        tier: Costs of a save to memory.
        tiers: Intervals of both tiers.
        survival: Probabilities that memory survives several lost hosts, as rows.
    """

    copies: int
    tier: Tier
    tiers: Tiers
    survival: list[dict[str, Any]]

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of the table, with the ETTR of both tiers together."""
        return [
            {
                "rule": f"to {name}",
                "kind": "both",
                "interval_s": each.interval_s,
                "interval_steps": each.interval_steps,
                "overhead": each.overhead,
                "ettr": self.tiers.ettr,
            }
            for name, each in (("memory", self.tiers.memory), ("storage", self.tiers.storage))
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"copies": self.copies, **asdict(self.tier), **asdict(self.tiers)}


def _survival(num_hosts: int, copies: int) -> list[dict[str, Any]]:
    """Returns the probabilities that memory survives several lost hosts, as rows."""
    rows = []
    for failures in range(copies, min(num_hosts, copies + _NUM_MORE_HOSTS) + 1):
        probability = theory.recoverable_probability(num_hosts=num_hosts, copies=copies, failures=failures)
        rows.append({"copies": copies, "failures": failures, "probability": probability})
    return rows


def _print(about: list[str], best: Recommendation, rules: list[dict[str, Any]], both: _Both | None) -> None:
    console = stdout()
    for line in about:
        console.print(line)
    if both is not None:
        console.print(
            f"a save to memory: training stands still for {format_duration(both.tier.stall_s)}, then "
            f"{format_duration(both.tier.background_s)} until there are {both.copies} copies; "
            f"{both.tiers.loss_probability * 100:.2g} % of the failures need storage"
        )
    table = table_of("rule", "", "interval", "steps", "overhead", "ETTR", text=("rule", ""))
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
    if both is None:
        console.print(f"save every {best}", style="bold")
        console.print(f"why: {best.why}")
        return
    console.print(f"with storage alone, save every {best}")
    console.print(f"why: {best.why}")
    tiers = both.tiers
    where = f"to memory every {tiers.memory}, to storage every {tiers.storage}"
    console.print(f"save {where}: ETTR {tiers.ettr * 100:.2f} %", style="bold")
    if tiers.memory.why == tiers.storage.why:
        console.print(f"why, both: {tiers.memory.why}")
    else:
        console.print(f"why, memory: {tiers.memory.why}")
        console.print(f"why, storage: {tiers.storage.why}")
    for row in both.survival:
        console.print(
            f"{row['copies']} copies in memory outlive {row['failures']} hosts that fail at once "
            f"with a probability of at least {row['probability'] * 100:.2f} %"
        )
