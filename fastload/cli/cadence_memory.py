"""What ``fastload cadence`` says of the memory of hosts: how likely it survives, how often to save there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any

import click

from fastload.cli.console import errors_to_exit_code
from fastload.cli.quantities import COUNT, FRACTION, RATE, TIME
from fastload.errors import OptionError
from fastload.estimate.cadence import recoverable_probability
from fastload.estimate.tiers import Tier, Tiers, loss_probability, recommend_tiers
from fastload.estimate.units import format_duration

__all__ = ["Advice", "Memory", "memory_options"]

_NUM_MORE_HOSTS = 3  # than outlive for certain, of which the probability is told


@dataclass(frozen=True)
class Memory:
    """The memory tier in question.

    Attributes:
        copies: Copies of every part, each on another host.
        stall_s: Time that training stands still for a save; None for as long as for one to storage.
        background_s: Time after that until all copies are there; None if it follows from the link.
        link: Rate of a host's link in bytes a second, if it was given.
        restart_s: Time from a failure until training goes on from memory; None for as long as from storage.
        hosts_lost: Hosts that a failure takes.
        beyond_memory: Share of the failures that take all hosts.
    """

    copies: int
    stall_s: float | None
    background_s: float | None
    link: float | None
    restart_s: float | None
    hosts_lost: int
    beyond_memory: float

    def tier(self, num_hosts: int, nbytes: int | None, *, stall_s: float | None, restart_s: float) -> Tier:
        """Returns what a save to memory takes.

        Args:
            num_hosts: Hosts of the job.
            nbytes: Size of the checkpoint; None if it is not known.
            stall_s: Stall of a save to storage, if that goes on in the background.
            restart_s: Time from a failure until training goes on from storage.

        Raises:
            OptionError: Too little was given.
        """
        stall = self.stall_s if self.stall_s is not None else stall_s
        if stall is None:
            raise OptionError("how long does training wait for a copy in memory? Give --memory-stall")
        background = self.background_s
        if background is not None and self.link is not None:
            raise OptionError("give one of --memory-background and --host-link: each follows from the other")
        if background is None and self.copies == 1:
            background = 0.0
        if background is None:
            if self.link is None or nbytes is None:
                raise OptionError(
                    "how long until all copies are there? Give --memory-background, or a checkpoint and "
                    "--host-link"
                )
            background = nbytes / num_hosts * (self.copies - 1) / self.link
        return Tier(stall, background, self.restart_s if self.restart_s is not None else restart_s)


def memory_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of the memory tier; they become one argument `memory`, None without copies."""

    @wraps(command)
    def with_memory(**given: Any) -> None:
        with errors_to_exit_code(rank=0):
            copies, *rest = (given.pop(name) for name in _NAMES)
            if copies is None and any(value is not None for value in rest[:4]):
                raise OptionError("how many copies are in memory? Give --memory-copies")
            command(memory=Memory(copies, *rest) if copies is not None else None, **given)

    for decorate in reversed(_OPTIONS):
        with_memory = decorate(with_memory)
    return with_memory


_OPTIONS = (
    click.option("--memory-copies", type=COUNT, help="Copies in the memory of hosts, beside storage."),
    click.option("--memory-stall", type=TIME, help="Time training stands still for that; else --stall."),
    click.option("--memory-background", type=TIME, help="Time after that until all copies are there."),
    click.option("--host-link", type=RATE, help="Instead: bandwidth of a host's link, each way."),
    click.option("--memory-restart", type=TIME, help="From a failure until it trains; else --restart."),
    click.option(
        "--hosts-lost", type=COUNT, default="1", show_default=True, help="Hosts that a failure takes."
    ),
    click.option(
        "--beyond-memory", type=FRACTION, default="1%", show_default=True,
        help="Share of failures that take all hosts, or the job.",
    ),
)  # fmt: skip
_NAMES = (
    "memory_copies", "memory_stall", "memory_background", "host_link", "memory_restart", "hosts_lost",
    "beyond_memory",
)  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """What comes of memory and storage together.

    Attributes:
        num_hosts: Hosts of the job.
        memory: What was asked.
        tier: What a save to memory takes.
        tiers: How often to save where.
    """

    num_hosts: int
    memory: Memory
    tier: Tier
    tiers: Tiers

    @classmethod
    def of(
        cls,
        memory: Memory,
        tier: Tier,
        storage: Tier,
        *,
        num_hosts: int,
        mtbf_s: float,
        budget: float,
        step_s: float | None,
    ) -> Advice:
        """Works it out; args are those of `recommend_tiers`.

        Raises:
            OptionError: As there.
        """
        share = loss_probability(
            num_hosts=num_hosts,
            copies=memory.copies,
            mtbf_s=mtbf_s,
            window_s=tier.lost_s,
            hosts_lost=memory.hosts_lost,
            beyond_memory=memory.beyond_memory,
        )
        given: dict[str, Any] = {"mtbf_s": mtbf_s, "budget": budget, "step_s": step_s}
        tiers = recommend_tiers(memory=tier, storage=storage, loss_probability=share, **given)
        return cls(num_hosts, memory, tier, tiers)

    @property
    def survival(self) -> list[dict[str, Any]]:
        """How likely memory outlives hosts that fail at once, as rows."""
        copies, most = self.memory.copies, min(self.num_hosts, self.memory.copies + _NUM_MORE_HOSTS)
        return [
            {
                "copies": copies,
                "failures": failures,
                "probability": recoverable_probability(
                    num_hosts=self.num_hosts, copies=copies, failures=failures
                ),
            }
            for failures in range(min(copies, most), most + 1)
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of the table; the ETTR is that of both together."""
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

    def as_json(self) -> dict[str, Any]:
        """Returns it in JSON types."""
        return {"copies": self.memory.copies, **asdict(self.tier), **asdict(self.tiers)}

    @property
    def facts(self) -> str:
        """The line that says what a save to memory takes."""
        copies, tier = self.memory.copies, self.tier
        return (
            f"a save to memory: training stands still for {format_duration(tier.stall_s)}, then "
            f"{format_duration(tier.background_s)} until there are {copies} copies; "
            f"{self.tiers.loss_probability * 100:.2g} % of the failures need storage"
        )

    @property
    def headline(self) -> str:
        """The line that says how often to save where."""
        tiers, often, rare = self.tiers, self.tiers.memory, self.tiers.storage
        return (
            f"save to memory every {format_duration(often.interval_s)}{_steps(often.interval_steps)}, "
            f"to storage every {format_duration(rare.interval_s)}{_steps(rare.interval_steps)}: "
            f"ETTR {tiers.ettr * 100:.2f} %"
        )

    @property
    def reasons(self) -> list[str]:
        """The lines that say why."""
        often, rare = self.tiers.memory, self.tiers.storage
        outlived = [
            f"{row['copies']} copies in memory outlive {row['failures']} hosts that fail at once "
            f"with a probability of at least {row['probability'] * 100:.2f} %"
            for row in self.survival
        ]
        whys = [f"why, memory: {often.why}", f"why, storage: {rare.why}"]
        return [*([f"why, both: {often.why}"] if often.why == rare.why else whys), *outlived]


def _steps(steps: int | None) -> str:
    return "" if steps is None else f" ({steps:,} steps)"
