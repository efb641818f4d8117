"""What the facts of all ranks come to: one line for each subject, and what to do where that is a problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

from fastload.doctor.examine import Site
from fastload.doctor.facts import Facts
from fastload.doctor.wording import by_value, host_names, hosts, limit, rank_names, some
from fastload.estimate.units import count, format_bytes, format_duration, format_rate
from fastload.storage.mounts import IN_MEMORY_TYPES, is_network

__all__ = ["Finding", "Level", "findings"]

Level = Literal["ok", "note", "problem"]

_SLOW_LOOKUP_S = 1.0
_FAR_CLOCK_S = 1.0
_SLOW_LINK = 0.5  # of the median
_MIN_FILES = 512  # that a process has open besides those of checkpoints and connections
_MIN_SHM_BYTES = 1 << 30
_MIN_LOCKED_BYTES = 1 << 30
_HAS_TO_BE_EQUAL = ("fastload-torch", "torch")


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        subject: What it is about.
        found: What was found.
        level: ``note`` is worth knowing; ``problem`` will hurt.
        advice: What to do; empty where nothing is to be done.
    """

    subject: str
    found: str
    level: Level = "ok"
    advice: str = ""


def findings(site: Site) -> list[Finding]:
    """Judges what all ranks found. Pure.

    Args:
        site: What they found.
    """
    subjects = (
        _ranks,
        _versions,
        _backends,
        _interfaces,
        _rates,
        _names,
        _clocks,
        _memory,
        _shm,
        _open_files,
        _locked,
        _path,
        _reading,
    )
    return [finding for subject in subjects for finding in subject(site)]


def _ranks(site: Site) -> Iterator[Finding]:
    num_hosts, num_ranks = len(hosts(site)), len(site.facts)
    found = f"{count(num_ranks, 'rank')} on {count(num_hosts, 'host')}"
    if site.launcher == "none":
        yield Finding("ranks", f"{found}, without a launcher", "note", "run it under torchrun or srun")
        return
    yield Finding("ranks", f"{found}, by {site.launcher}; they met in {format_duration(site.met_s)}")
    names = {facts[0].host for facts in hosts(site)}
    if len(names) < num_hosts:
        yield Finding(
            "hosts",
            f"{num_hosts} machines, or containers, have {count(len(names), 'name')}: {some(sorted(names))}",
            "note",
            "errors and reports cannot tell them apart: give each a host name of its own; ranks in separate "
            "containers of one machine share no memory either: put them into one",
        )


def _versions(site: Site) -> Iterator[Finding]:
    first = site.facts[0].versions
    names = dict.fromkeys(name for facts in site.facts for name in facts.versions)
    differing = [name for name in names if len({facts.versions.get(name) for facts in site.facts}) > 1]
    yield Finding("versions", ", ".join(f"{name} {first[name]}" for name in first if name not in differing))
    for name in differing:
        found = by_value(site, partial(_version, name))
        level: Level = "problem" if name in _HAS_TO_BE_EQUAL else "note"
        yield Finding("versions", f"{name}: {found}", level, "install the same on all hosts")


def _version(name: str, facts: Facts) -> str:
    return facts.versions.get(name, "not installed")


def _backends(site: Site) -> Iterator[Finding]:
    found = by_value(site, lambda facts: " and ".join(facts.backends))
    lacking = [rank for rank, facts in enumerate(site.facts) if "gloo" not in facts.backends]
    if lacking:
        yield Finding("backends", found, "problem", "a torch with Gloo is needed on all ranks")
    else:
        yield Finding("backends", found)
    gpus = by_value(site, lambda facts: f"{len(facts.gpus)} × {some(sorted(set(facts.gpus)))}".rstrip(" ×"))
    fewer = [facts for facts in hosts(site) if 1 < len(facts[0].gpus) < len(facts)]
    without = any("cuda" in facts.versions and not facts.gpus for facts in site.facts)
    if not any(facts.gpus for facts in site.facts):
        advice = "if there should be: look at the driver, and at CUDA_VISIBLE_DEVICES" if without else ""
        yield Finding("GPUs", "none", "note" if advice else "ok", advice)
    elif fewer:
        yield Finding("GPUs", gpus, "problem", f"start no more ranks than GPUs on {host_names(fewer)}")
    else:
        yield Finding("GPUs", gpus)


def _interfaces(site: Site) -> Iterator[Finding]:
    def described(facts: Facts) -> str:
        name = facts.interface.partition(" ")[0]
        return f"{name} at {facts.speed_mbits / 1000:g} Gbit/s" if facts.speed_mbits else name

    found = by_value(site, described)
    lost = [
        facts
        for facts in hosts(site)
        if "(127." in facts[0].interface or "(no address)" in facts[0].interface
    ]
    if lost and len(hosts(site)) > 1:
        yield Finding(
            "interface",
            f"{found}; on {host_names(lost)} the others cannot reach it: {lost[0][0].interface}",
            "problem",
            "export GLOO_SOCKET_IFNAME=NAME (and NCCL_SOCKET_IFNAME), the interface that leads to the other "
            "hosts, or give the host's name that address in /etc/hosts",
        )
    else:
        yield Finding("interface", found)


def _rates(site: Site) -> Iterator[Finding]:
    if not site.rates:
        if len(site.facts) > 1:
            yield Finding("between hosts", "one host: its ranks share memory")
        return
    if failed := [rate for rate in site.rates if rate.problem]:
        yield Finding(
            "between hosts",
            f"nothing from {failed[0].source} to {failed[0].host}: {failed[0].problem}",
            "problem",
            "see whether a firewall lets TCP through between all hosts, on ports of the kernel's choice, and "
            "whether GLOO_SOCKET_IFNAME names the right interface",
        )
        return
    slowest = min(site.rates, key=lambda rate: rate.bytes_per_s)
    middle = median(rate.bytes_per_s for rate in site.rates)
    found = (
        f"{format_rate(middle)} over one connection while sending as much; "
        f"slowest {format_rate(slowest.bytes_per_s)}, from {slowest.source} to {slowest.host}"
    )
    if slowest.bytes_per_s < _SLOW_LINK * middle:
        slow = [rate for rate in site.rates if rate.bytes_per_s < _SLOW_LINK * middle]
        ways = some([f"{rate.source} → {rate.host}" for rate in slow])
        advice = f"a load goes as fast as its slowest host; look at cables, ports and interfaces of {ways}"
        yield Finding("between hosts", found, "problem", advice)
    else:
        yield Finding("between hosts", found)


def _names(site: Site) -> Iterator[Finding]:
    asked = [(facts.host, lookup) for facts in site.facts for lookup in facts.lookups]
    host, slowest = max(asked, key=lambda pair: pair[1].seconds)
    unknown = [facts for facts in hosts(site) if not facts[0].lookups[0].answer]
    found = f"slowest answer {format_duration(slowest.seconds)} ({slowest.question})"
    if slowest.seconds > _SLOW_LOOKUP_S:
        yield Finding(
            "name lookups",
            f"{found}, on {host}",
            "problem",
            "torch looks names and addresses up when ranks meet, which waits for this: mend the name server, "
            "or put all hosts into /etc/hosts",
        )
    elif unknown and len(hosts(site)) > 1:
        yield Finding(
            "name lookups",
            f"{host_names(unknown)}: the host's own name has no address",
            "problem",
            "Gloo then takes loopback: put the name into /etc/hosts, or export GLOO_SOCKET_IFNAME",
        )
    else:
        yield Finding("name lookups", found)


def _clocks(site: Site) -> Iterator[Finding]:
    if len(hosts(site)) == 1:
        return
    known = [(abs(offset), rank) for rank, offset in enumerate(site.clocks_s) if offset is not None]
    far, rank = max(known)
    found = f"at most {format_duration(far)} from that of rank 0"
    if far > _FAR_CLOCK_S:
        yield Finding(
            "clocks",
            f"{found}, on {site.facts[rank].host}",
            "problem",
            "run NTP or chrony: object stores refuse requests of another time, and ages of checkpoints "
            "would be wrong",
        )
    else:
        yield Finding("clocks", found)


def _memory(site: Site) -> Iterator[Finding]:
    tightest = min(hosts(site), key=lambda facts: facts[0].memory_bytes[1] / len(facts))
    total, free = tightest[0].memory_bytes
    found = (
        f"{format_bytes(free, binary=True)} of {format_bytes(total, binary=True)} free on {tightest[0].host}"
    )
    needed = site.staging_bytes * len(tightest)
    if free < needed:
        yield Finding(
            "host memory",
            found,
            "problem",
            f"{len(tightest)} ranks stage up to {format_bytes(needed, binary=True)}: lower "
            "FASTLOAD_STAGING_BYTES, or give the job more memory",
        )
        return
    whole = site.opening.nbytes * len(tightest) if site.opening else 0
    if free < whole + needed:
        advice = (
            f"the whole checkpoint in host memory of {count(len(tightest), 'rank')} takes "
            f"{format_bytes(whole, binary=True)}: load it onto GPUs, or into shards"
        )
        yield Finding("host memory", found, "note", advice)
    else:
        yield Finding("host memory", found)


def _shm(site: Site) -> Iterator[Finding]:
    least = min(hosts(site), key=lambda facts: facts[0].shm_bytes)[0]
    total, free = least.shm_bytes
    found = f"{format_bytes(free, binary=True)} of {format_bytes(total, binary=True)} free on {least.host}"
    if total < _MIN_SHM_BYTES:
        advice = (
            "loads do without it, but workers of DataLoaders, NCCL and `fastload stage … /dev/shm` do not: "
            "docker run --ipc=host or --shm-size=16g; on Kubernetes an emptyDir of medium Memory"
        )
        yield Finding("/dev/shm", found, "note", advice)
    else:
        yield Finding("/dev/shm", found)


def _open_files(site: Site) -> Iterator[Finding]:
    needed = _MIN_FILES + len(site.facts) + (site.opening.num_files if site.opening else 0)
    low = [facts for facts in site.facts if 0 <= facts.open_files[0] < needed]
    found = by_value(
        site, lambda facts: f"{limit(facts.open_files[0])} (at most {limit(facts.open_files[1])})"
    )
    if low:
        yield Finding(
            "open files",
            found,
            "problem",
            f"a rank may need {needed:,}: ulimit -n {max(65536, needed)} in the job script (LimitNOFILE= of "
            "the service that starts it, docker run --ulimit nofile=65536)",
        )
    else:
        yield Finding("open files", found)


def _locked(site: Site) -> Iterator[Finding]:
    def shown(facts: Facts) -> str:
        most = facts.locked_bytes
        return limit(most) if most < 0 else format_bytes(most, binary=True)

    found = by_value(site, shown)
    low = any(facts.infiniband and 0 <= facts.locked_bytes < _MIN_LOCKED_BYTES for facts in site.facts)
    if low:
        advice = "InfiniBand, and NCCL over it, need ulimit -l unlimited in the job script or of the service"
        yield Finding("locked memory", found, "problem", advice)
    else:
        yield Finding("locked memory", found)


def _path(site: Site) -> Iterator[Finding]:
    seen = [facts.path for facts in site.facts if facts.path is not None]
    if not seen or site.opening is None:
        return
    path = site.opening.path
    found = by_value(site, _file_system)
    if stuck := [rank for rank, view in enumerate(seen) if view.problem]:
        problem = f"{path} on {found}: {seen[stuck[0]].problem} on {rank_names(site, stuck)}"
        yield Finding("file system", problem, "problem", "see whether the mount answers: ls, df, dmesg")
        return
    if client := next((view.client for view in seen if view.client), ""):
        advice = (
            "loads work; save to the bucket itself (s3://…), which a save through the mount refuses to do"
        )
        yield Finding("file system", f"{found}, a bucket that {client} mounts", "note", advice)
    else:
        yield Finding("file system", found)
    missing = [rank for rank, view in enumerate(seen) if not view.exists]
    if missing and len(missing) < len(seen):
        yield Finding(
            "path",
            f"nothing is at {path} on {rank_names(site, missing)}",
            "note",
            "the other ranks read for these; for saves by all ranks mount the same place on all hosts",
        )
    unreadable = [rank for rank, view in enumerate(seen) if view.exists and not view.readable]
    if unreadable:
        advice = f"let the user of the job read it: chmod -R a+rX {path}, or a group of theirs"
        yield Finding("path", f"{path} cannot be read on {rank_names(site, unreadable)}", "problem", advice)


def _reading(site: Site) -> Iterator[Finding]:
    opening = site.opening
    if opening is None:
        return
    if opening.format:
        size = f"{format_bytes(opening.nbytes)} in {count(opening.num_files, 'file')} ({opening.format})"
        yield Finding("checkpoint", f"{opening.path}: {size}")
        how = f"{opening.strategy}: {opening.why}"
        if opening.notes:
            rank, note = next(iter(opening.notes.items()))
            advice = "others read for it; where all hosts should see the same files, look at their mounts"
            yield Finding(
                "how it is read", f"{how}; rank {rank} on {site.facts[rank].host} {note}", "note", advice
            )
        else:
            yield Finding("how it is read", how)
    elif opening.is_missing:
        yield from _place_to_save(site)
    else:
        advice = "mend what that says; fastload inspect PATH tells whether the checkpoint itself is good"
        yield Finding("checkpoint", opening.problem, "problem", advice)


def _place_to_save(site: Site) -> Iterator[Finding]:
    opening = site.opening
    assert opening is not None
    seen = [facts.path for facts in site.facts if facts.path is not None]
    if not seen or not any(view.is_folder for view in seen):
        yield Finding("checkpoint", opening.problem, "problem", "look at the path, and whether it is mounted")
        return
    free = min(view.free_bytes for view in seen)
    found = f"none at {opening.path} yet; {format_bytes(free)} free"
    if barred := [rank for rank, view in enumerate(seen) if not view.writable]:
        where = rank_names(site, barred)
        advice = "to save there, let the user of the job write: owner, mode, and mounts that are read-only"
        yield Finding("checkpoint", f"{found}; not writable on {where}", "problem", advice)
    else:
        yield Finding("checkpoint", f"{found}, and all ranks may write")


def _file_system(facts: Facts) -> str:
    kind = facts.path.kind if facts.path is not None else ""
    if not kind:
        return "an unknown file system"
    if kind in IN_MEMORY_TYPES:
        return f"{kind}, in the memory of each host"
    return f"{kind}, {'shared by hosts' if is_network(kind) else 'of each host alone'}"
