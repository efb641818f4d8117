"""The size of a checkpoint, and the bandwidth to save and restore it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastload.errors import OptionError
from fastload.planning.units import require_not_negative, require_positive, require_whole


@dataclass(frozen=True, slots=True)
class Recipe:
    """The values that a checkpoint has for each parameter.

    Attributes:
        bytes_per_parameter: Bytes of a checkpoint for each parameter.
        parts: Description of these values.
    """

    bytes_per_parameter: float
    parts: str


# Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
# section 3.1; gradients are not saved.
RECIPES: Mapping[str, Recipe] = {
    "mixed-adam": Recipe(14, "2 weight + 4 master weight + 4 momentum + 4 variance"),
    "fp32-adam": Recipe(12, "4 weight + 4 momentum + 4 variance"),
    "bf16": Recipe(2, "2 weight: inference"),
}
DEFAULT_RECIPE = "mixed-adam"


def checkpoint_bytes(num_parameters: int, bytes_per_parameter: float) -> int:
    """Returns the size of a checkpoint in bytes.

    Args:
        num_parameters: Parameters of the model.
        bytes_per_parameter: Bytes kept of each, see `RECIPES`.

    Raises:
        OptionError: One of them is not above 0.
    """
    require_whole(num_parameters=num_parameters)
    require_positive(bytes_per_parameter=bytes_per_parameter)
    return round(num_parameters * bytes_per_parameter)


@dataclass(frozen=True, slots=True)
class Topology:
    """The layout of a job: TP × PP × DP GPUs, those of a replica adjacent. Made by `topology`.

    Attributes:
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        dp: Data-parallel replicas.
        gpus_per_host: GPUs of one host.
    """

    tp: int
    pp: int
    dp: int
    gpus_per_host: int

    @property
    def num_gpus(self) -> int:
        """GPUs of the job."""
        return self.tp * self.pp * self.dp

    @property
    def num_gpus_per_replica(self) -> int:
        """GPUs of one replica, which write if one replica writes."""
        return self.tp * self.pp

    @property
    def num_hosts(self) -> int:
        """Hosts of the job."""
        return -(-self.num_gpus // self.gpus_per_host)


def topology(
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    gpus_per_host: int = 8,
    num_gpus: int | None = None,
    num_hosts: int | None = None,
) -> Topology:
    """Computes the layout of a job, and refuses contradictory numbers.

    Args:
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        dp: Data-parallel replicas; None for as many as the GPUs make.
        gpus_per_host: GPUs of one host; a job on one host may use fewer.
        num_gpus: GPUs of the job; None for TP × PP × DP, or for all of `num_hosts`.
        num_hosts: Hosts of the job; None for as many as the GPUs fill.

    Raises:
        OptionError: Not a whole number above 0, or the numbers do not fit.
    """
    given = {"dp": dp, "num_gpus": num_gpus, "num_hosts": num_hosts}
    require_whole(
        tp=tp, pp=pp, gpus_per_host=gpus_per_host, **{k: v for k, v in given.items() if v is not None}
    )
    if num_gpus is None and num_hosts is not None:
        num_gpus = num_hosts * gpus_per_host if dp is None else tp * pp * dp
    if dp is None:
        dp = max(1, (num_gpus or 1) // (tp * pp))
    made = Topology(tp, pp, dp, gpus_per_host)
    product = f"TP {tp} × PP {pp} × DP {dp} = {made.num_gpus} GPUs"
    if num_gpus is not None and made.num_gpus != num_gpus:
        raise OptionError(f"{product}, not {num_gpus}")
    if made.num_gpus > gpus_per_host and made.num_gpus % gpus_per_host:
        raise OptionError(f"{product} do not fill hosts of {gpus_per_host}")
    if num_hosts is not None and made.num_hosts != num_hosts:
        raise OptionError(f"{product} on hosts of {gpus_per_host} take {made.num_hosts}, not {num_hosts}")
    return made


@dataclass(frozen=True, slots=True)
class Transfer:
    """One way to move a checkpoint, with the bandwidth that it needs.

    Attributes:
        what: ``save`` or ``restore``.
        how: Who moves what.
        num_gpus: GPUs that take part.
        nbytes: Bytes that storage moves for all of them together.
        time_s: Time that it may take in seconds.
        storage_bytes_per_s: What storage has to deliver to the whole cluster.
        host_bytes_per_s: Bandwidth between storage and a host with as many of these GPUs as fit.
        gpu_bytes_per_s: Bandwidth between storage and each of these GPUs.
    """

    what: str
    how: str
    num_gpus: int
    nbytes: int
    time_s: float
    storage_bytes_per_s: float
    host_bytes_per_s: float
    gpu_bytes_per_s: float


def transfers(nbytes: int, world: Topology, time_s: float) -> tuple[Transfer, ...]:
    """Returns the bandwidths to save and to restore a checkpoint within a time.

    One writer per shard of the model and a restore in which every replica reads everything are how it is
    commonly done (Narayanan et al., SC 2021); all ranks that share the bytes, each once, is
    what fastload does. With one replica the two are the same, and listed once.

    Args:
        nbytes: Size of the checkpoint in bytes.
        world: How the job is spread.
        time_s: Time for one save or one restore, in seconds.

    Raises:
        OptionError: A size or time is not above 0.
    """
    require_positive(nbytes=nbytes, time_s=time_s)

    def transfer(what: str, how: str, num_gpus: int, copies: int = 1) -> Transfer:
        rate = copies * nbytes / time_s
        per_host = rate / num_gpus * min(num_gpus, world.gpus_per_host)
        return Transfer(what, how, num_gpus, copies * nbytes, time_s, rate, per_host, rate / num_gpus)

    everyone, shard_owners = world.num_gpus, world.num_gpus_per_replica
    if world.dp == 1:
        return transfer("save", "every GPU writes its part", everyone), transfer(
            "restore", "every GPU reads its part", everyone
        )
    return (
        transfer("save", "one replica writes", shard_owners),
        transfer("save", "replicas share the writing", everyone),
        transfer("restore", "every replica reads all", everyone, world.dp),
        transfer("restore", "read once, then exchanged", everyone),
    )


def overhead(stall_s: float, interval_s: float) -> float:
    """Returns the time lost to stalls as a fraction of the time trained: stall ÷ interval.

    Raises:
        OptionError: The interval is not above 0, or the stall is negative.
    """
    require_positive(interval_s=interval_s)
    require_not_negative(stall_s=stall_s)
    return stall_s / interval_s
