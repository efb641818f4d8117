"""Findings from the facts of all ranks: one line for each subject, with advice against problems. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

from fastload.base.units import count, format_bytes
from fastload.errors import some_of
from fastload.planning.doctor.examine import Site
from fastload.planning.doctor.facts import Facts
from fastload.planning.units import format_duration, format_rate
from fastload.storage.mounts import IN_MEMORY_TYPES, is_network
from fastload.transfer.pace import MOST_READS

Level = Literal["ok", "note", "problem"]

_SLOW_LOOKUP_S = 1.0
_FAR_CLOCK_S = 1.0
_SLOW_LINK = 0.5  # of the median
_MIN_FILES = 512  # open files of a process besides checkpoints and connections
_MIN_SHM_BYTES = 1 << 30
_MIN_LOCKED_BYTES = 1 << 30
_HAS_TO_BE_EQUAL = ("fastload-torch", "torch")


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        subject: Its subject.
        found: The finding.
        level: ``ok``, ``note`` for information, or ``problem``.
        advice: What to do; empty if nothing.
    """

    subject: str
    found: str
    level: Level = "ok"
    advice: str = ""


def findings(site: Site) -> list[Finding]:
    """Judges the facts of all ranks."""
    subjects = (
        _ranks,
        _versions,
        _backends,
        _gpus,
        _interfaces,
        _rates,
        _names,
        _clocks,
        _memory,
        _shm,
        _open_files,
        _locked,
        _path,
        _checkpoint,
        _requests,
    )
    return [finding for subject in subjects for finding in subject(site)]


def _judged(subject: str, found: str, *, problem: str = "", note: str = "") -> Finding:
    """Returns a finding with the advice of a problem or of a note, if there is either."""
    return Finding(subject, found, "problem" if problem else "note" if note else "ok", problem or note)


def _ranks(site: Site) -> Iterator[Finding]:
    num_hosts = len(_hosts(site))
    found = f"{count(len(site.facts), 'rank')} on {count(num_hosts, 'host')}"
    if site.launcher == "none":
        yield _judged("ranks", f"{found}, without a launcher", note="run it under torchrun or srun")
        return
    yield Finding("ranks", f"{found}, by {site.launcher}; they met in {format_duration(site.met_s)}")
    names = {facts[0].host for facts in _hosts(site)}
    if len(names) < num_hosts:
        yield _judged(
            "hosts",
            f"{num_hosts} machines, or containers, have {count(len(names), 'name')}: "
            f"{some_of(sorted(names))}",
            note="errors and reports cannot tell them apart: give each a host name of its own; ranks in "
            "separate containers of one machine share no memory either: put them into one",
        )


def _versions(site: Site) -> Iterator[Finding]:
    first = site.facts[0].versions
    names = dict.fromkeys(name for facts in site.facts for name in facts.versions)
    differing = [name for name in names if len({facts.versions.get(name) for facts in site.facts}) > 1]
    yield Finding("versions", ", ".join(f"{name} {first[name]}" for name in first if name not in differing))
    for name in differing:
        found = _by_value(site, partial(_version, name))
        level: Level = "problem" if name in _HAS_TO_BE_EQUAL else "note"
        yield Finding("versions", f"{name}: {found}", level, "install the same on all hosts")


def _version(name: str, facts: Facts) -> str:
    return facts.versions.get(name, "not installed")


def _backends(site: Site) -> Iterator[Finding]:
    has_gloo = all("gloo" in facts.backends for facts in site.facts)
    found = _by_value(site, lambda facts: " and ".join(facts.backends))
    yield _judged("backends", found, problem="" if has_gloo else "a torch with Gloo is needed on all ranks")


def _gpus(site: Site) -> Iterator[Finding]:
    if not any(facts.gpus for facts in site.facts):
        expected = any("cuda" in facts.versions for facts in site.facts)
        note = "if there should be: look at the driver, and at CUDA_VISIBLE_DEVICES" if expected else ""
        yield _judged("GPUs", "none", note=note)
        return
    gpus = _by_value(
        site, lambda facts: f"{len(facts.gpus)} × {some_of(sorted(set(facts.gpus)))}".rstrip(" ×")
    )
    fewer = [facts for facts in _hosts(site) if 1 < len(facts[0].gpus) < len(facts)]
    problem = f"start no more ranks than GPUs on {_host_names(fewer)}" if fewer else ""
    yield _judged("GPUs", gpus, problem=problem)


def _interfaces(site: Site) -> Iterator[Finding]:
    def described(facts: Facts) -> str:
        name = facts.interface.partition(" ")[0]
        return f"{name} at {facts.speed_mbits / 1000:g} Gbit/s" if facts.speed_mbits else name

    found, problem = _by_value(site, described), ""
    lost = [
        facts
        for facts in _hosts(site)
        if "(127." in facts[0].interface or "(no address)" in facts[0].interface
    ]
    if lost and len(_hosts(site)) > 1:
        found += f"; on {_host_names(lost)} the others cannot reach it: {lost[0][0].interface}"
        problem = (
            "export GLOO_SOCKET_IFNAME=NAME (and NCCL_SOCKET_IFNAME), the interface that leads to the other "
            "hosts, or give the host's name that address in /etc/hosts"
        )
    yield _judged("interface", found, problem=problem)


def _rates(site: Site) -> Iterator[Finding]:
    if not site.rates:
        if len(site.facts) > 1:
            yield Finding("between hosts", "one host: its ranks share memory")
        return
    if failed := [rate for rate in site.rates if rate.problem]:
        yield _judged(
            "between hosts",
            f"nothing from {failed[0].source} to {failed[0].host}: {failed[0].problem}",
            problem="see whether a firewall lets TCP through between all hosts, on ports of the kernel's "
            "choice, and whether GLOO_SOCKET_IFNAME names the right interface",
        )
        return
    slowest = min(site.rates, key=lambda rate: rate.bytes_per_s)
    middle = median(rate.bytes_per_s for rate in site.rates)
    slow = [f"{rate.source} → {rate.host}" for rate in site.rates if rate.bytes_per_s < _SLOW_LINK * middle]
    look_at = f"look at cables, ports and interfaces of {some_of(slow)}"
    yield _judged(
        "between hosts",
        f"{format_rate(middle)} over one connection while sending as much; "
        f"slowest {format_rate(slowest.bytes_per_s)}, from {slowest.source} to {slowest.host}",
        problem=f"a load goes as fast as its slowest host; {look_at}" if slow else "",
    )


def _names(site: Site) -> Iterator[Finding]:
    asked = [(facts.host, lookup) for facts in site.facts for lookup in facts.lookups]
    host, slowest = max(asked, key=lambda pair: pair[1].seconds)
    unknown = [facts for facts in _hosts(site) if not facts[0].lookups[0].answer]
    found, problem = f"slowest answer {format_duration(slowest.seconds)} ({slowest.question})", ""
    if slowest.seconds > _SLOW_LOOKUP_S:
        found += f", on {host}"
        problem = (
            "torch looks names and addresses up when ranks meet, which waits for this: mend the name server, "
            "or put all hosts into /etc/hosts"
        )
    elif unknown and len(_hosts(site)) > 1:
        found = f"{_host_names(unknown)}: the host's own name has no address"
        problem = "Gloo then takes loopback: put the name into /etc/hosts, or export GLOO_SOCKET_IFNAME"
    yield _judged("name lookups", found, problem=problem)


def _clocks(site: Site) -> Iterator[Finding]:
    if len(_hosts(site)) == 1:
        return
    far, rank = max((abs(offset), rank) for rank, offset in enumerate(site.clocks_s))
    found, problem = f"at most {format_duration(far)} from that of rank 0", ""
    if far > _FAR_CLOCK_S:
        found += f", on {site.facts[rank].host}"
        problem = (
            "run NTP or chrony: object stores refuse requests of another time, and ages of checkpoints "
            "would be wrong"
        )
    yield _judged("clocks", found, problem=problem)


def _memory(site: Site) -> Iterator[Finding]:
    tightest = min(_hosts(site), key=lambda facts: facts[0].memory_bytes[1] / len(facts))
    total, free = tightest[0].memory_bytes
    staging_bytes = site.staging_bytes * len(tightest)
    state_bytes = site.opening.nbytes * len(tightest) if site.opening else 0
    problem = note = ""
    if free < staging_bytes:
        problem = (
            f"{len(tightest)} ranks stage up to {_binary(staging_bytes)}: lower FASTLOAD_STAGING_BYTES, or "
            "give the job more memory"
        )
    elif free < state_bytes + staging_bytes:
        note = (
            f"the whole checkpoint in host memory of {count(len(tightest), 'rank')} takes "
            f"{_binary(state_bytes)}: load it onto GPUs, or into shards"
        )
    found = f"{_binary(free)} of {_binary(total)} free on {tightest[0].host}"
    yield _judged("host memory", found, problem=problem, note=note)


def _shm(site: Site) -> Iterator[Finding]:
    least = min(_hosts(site), key=lambda facts: facts[0].shm_bytes)[0]
    total, free = least.shm_bytes
    note = ""
    if total < _MIN_SHM_BYTES:
        note = (
            "loads do without it, but workers of DataLoaders, NCCL and `fastload stage … /dev/shm` do not: "
            "docker run --ipc=host or --shm-size=16g; on Kubernetes an emptyDir of medium Memory"
        )
    yield _judged("/dev/shm", f"{_binary(free)} of {_binary(total)} free on {least.host}", note=note)


def _open_files(site: Site) -> Iterator[Finding]:
    needed = _MIN_FILES + len(site.facts) + (site.opening.num_files if site.opening else 0)
    problem = ""
    if any(0 <= facts.open_files[0] < needed for facts in site.facts):
        problem = (
            f"a rank may need {needed:,}: ulimit -n {max(65536, needed)} in the job script (LimitNOFILE= of "
            "the service that starts it, docker run --ulimit nofile=65536)"
        )
    found = _by_value(
        site,
        lambda facts: "{} (at most {})".format(*(_limit(most, f"{most:,}") for most in facts.open_files)),
    )
    yield _judged("open files", found, problem=problem)


def _locked(site: Site) -> Iterator[Finding]:
    found = _by_value(site, lambda facts: _limit(facts.locked_bytes, _binary(facts.locked_bytes)))
    low = any(facts.infiniband and 0 <= facts.locked_bytes < _MIN_LOCKED_BYTES for facts in site.facts)
    advice = "InfiniBand, and NCCL over it, need ulimit -l unlimited in the job script or of the service"
    yield _judged("locked memory", found, problem=advice if low else "")


def _path(site: Site) -> Iterator[Finding]:
    seen = [facts.path for facts in site.facts if facts.path is not None]
    if not seen or site.opening is None:
        return
    path = site.opening.path
    found = _by_value(site, _file_system)
    if stuck := [rank for rank, view in enumerate(seen) if view.problem]:
        yield _judged(
            "file system",
            f"{path} on {found}: {seen[stuck[0]].problem} on {_rank_names(site, stuck)}",
            problem="see whether the mount answers: ls, df, dmesg",
        )
        return
    if client := next((view.client for view in seen if view.client), ""):
        yield _judged(
            "file system",
            f"{found}, a bucket that {client} mounts",
            note="loads work; save to the bucket itself (s3://…): a save through the mount is refused",
        )
    else:
        yield Finding("file system", found)
    missing = [rank for rank, view in enumerate(seen) if not view.exists]
    if missing and len(missing) < len(seen):
        yield _judged(
            "path",
            f"nothing is at {path} on {_rank_names(site, missing)}",
            note="the other ranks read for these; for saves by all ranks mount the same place on all hosts",
        )
    if unreadable := [rank for rank, view in enumerate(seen) if view.exists and not view.readable]:
        yield _judged(
            "path",
            f"{path} cannot be read on {_rank_names(site, unreadable)}",
            problem=f"let the user of the job read it: chmod -R a+rX {path}, or a group of theirs",
        )


def _file_system(facts: Facts) -> str:
    kind = facts.path.kind if facts.path is not None else ""
    if not kind:
        return "an unknown file system"
    if kind in IN_MEMORY_TYPES:
        return f"{kind}, in the memory of each host"
    return f"{kind}, {'shared by hosts' if is_network(kind) else 'of each host alone'}"


def _checkpoint(site: Site) -> Iterator[Finding]:
    opening = site.opening
    if opening is None:
        return
    if opening.is_missing:
        yield _place_to_save(site)
        return
    if opening.problem:
        advice = "mend what that says; fastload inspect PATH tells whether the checkpoint itself is good"
        yield _judged("checkpoint", opening.problem, problem=advice)
        return
    size = f"{format_bytes(opening.nbytes)} in {count(opening.num_files, 'file')} ({opening.format})"
    yield Finding("checkpoint", f"{opening.path}: {size}")
    how, advice = f"{opening.strategy}: {opening.why}", ""
    if opening.notes:
        rank, note = next(iter(opening.notes.items()))
        how += f"; rank {rank} on {site.facts[rank].host} {note}"
        advice = "others read for it; where all hosts should see the same files, look at their mounts"
    yield _judged("how it is read", how, note=advice)


def _requests(site: Site) -> Iterator[Finding]:
    """How storage answers a request, and what that leaves for loads."""
    opening = site.opening
    if opening is None or opening.answers is None:
        return
    answers = opening.answers
    found = f"{format_duration(answers.latency_s)} to the first byte"
    if answers.connection_bytes_per_s:
        found += f", then {format_rate(answers.connection_bytes_per_s)} over one connection: "
        found += f"a rank reads at most {format_rate(answers.most_bytes_per_s)} "
        found += f"with {MOST_READS} requests in flight"
    yield Finding("requests", found)


def _place_to_save(site: Site) -> Finding:
    opening = site.opening
    assert opening is not None
    seen = [facts.path for facts in site.facts if facts.path is not None]
    if not any(view.is_folder for view in seen):
        return _judged("checkpoint", opening.problem, problem="look at the path, and whether it is mounted")
    found = f"none at {opening.path} yet; {format_bytes(min(view.free_bytes for view in seen))} free"
    if barred := [rank for rank, view in enumerate(seen) if not view.writable]:
        return _judged(
            "checkpoint",
            f"{found}; not writable on {_rank_names(site, barred)}",
            problem="to save there, let the user of the job write: owner, mode, read-only mounts",
        )
    return Finding("checkpoint", f"{found}, and all ranks may write")


def _hosts(site: Site) -> list[list[Facts]]:
    """Returns the facts of the ranks of each host, by first rank."""
    by_machine: dict[str, list[Facts]] = {}
    for facts in site.facts:
        by_machine.setdefault(facts.machine, []).append(facts)
    return list(by_machine.values())


def _by_value(site: Site, value: Callable[[Facts], Hashable]) -> str:
    """Writes a value that all ranks have, or each value with the ranks that have it."""
    ranks: dict[Hashable, list[int]] = {}
    for rank, facts in enumerate(site.facts):
        ranks.setdefault(value(facts), []).append(rank)
    if len(ranks) == 1:
        return str(next(iter(ranks)))
    return "; ".join(f"{text} on {_rank_names(site, those)}" for text, those in ranks.items())


def _rank_names(site: Site, ranks: Sequence[int]) -> str:
    """Writes which ranks, with the host if it is one."""
    names = {site.facts[rank].host for rank in ranks}
    where = f" ({names.pop()})" if len(names) == 1 else ""
    if len(ranks) == 1:
        return f"rank {ranks[0]}{where}"
    return f"{len(ranks)} ranks{where}: {some_of([str(rank) for rank in ranks])}"


def _host_names(hosts: Sequence[Sequence[Facts]]) -> str:
    return some_of([facts[0].host for facts in hosts])


def _limit(number: int, text: str) -> str:
    """Writes a limit of the system."""
    return "unlimited" if number < 0 else text


def _binary(nbytes: int) -> str:
    return format_bytes(nbytes, binary=True)
