"""`fastload doctor` as a user runs it, on a site with real troubles; and the rates that it measures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastload
from fastload.comm.group import join
from fastload.planning.doctor.examine import measure_rates
from tests.dist.harness import ranks
from tests.e2e.forked import run_forked

ROOT = Path(__file__).resolve().parents[2]


def environ(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FASTLOAD_")}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables


def by_subject(printed: str) -> dict[str, dict[str, Any]]:
    return {one["subject"]: one for one in json.loads(printed)["findings"]}


def test_a_place_without_trouble(tmp_path: Path) -> None:
    fastload.save({"weight": torch.ones(300)}, tmp_path / "saved")
    words = ["-m", "fastload", "doctor", str(tmp_path / "saved")]
    done = run_forked(words, ranks=2, cwd=tmp_path, env=environ(), timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in (
        "✓   ranks            2 ranks on 1 host, by torchrun",
        "✓   between hosts    one host: its ranks share memory",
        f"✓   checkpoint       {tmp_path / 'saved'}: 1.2 kB in 1 file (fastload)",
        "✓   how it is read   direct: one host with a local file system",
    ):
        assert done.stdout.count(shown) == 1, done.stdout + done.stderr  # rank 0 speaks for all


# Root may read all; not so without two of its capabilities.
_LOWERED = """
import ctypes, resource, sys
from fastload.cli import main
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
for number in (0, 1):  # what is effective, and permitted
    sets[number] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
assert libc.capset(header, sets) == 0
sys.exit(main())
"""


@pytest.mark.slow
def test_limits_and_rights_that_are_too_low(tmp_path: Path) -> None:
    fastload.save({"weight": torch.ones(300)}, tmp_path / "saved")
    (tmp_path / "saved").chmod(0)
    words = ["-c", _LOWERED, "doctor", str(tmp_path / "saved"), "--json"]
    done = run_forked(words, ranks=2, cwd=tmp_path, env=environ(), timeout=60)
    (tmp_path / "saved").chmod(0o755)
    assert done.returncode == 1, done.stderr
    found = by_subject(done.stdout)
    assert found["open files"]["found"] == "256 (at most 512)"
    assert "ulimit -n" in found["open files"]["advice"]
    assert "cannot be read on 2 ranks" in found["path"]["found"]
    assert "chmod" in found["path"]["advice"]
    levels = {name: found[name]["level"] for name in ("open files", "path", "checkpoint")}
    assert set(levels.values()) == {"problem"}


@ranks(3, ranks_per_host=1, same=True)
def test_rates_between_hosts(rank: int, world: int) -> Any:
    """Hosts by name only: all bytes go over loopback, each host to the next."""
    names = [f"host{number}" for number in range(world)]
    joined = join(call="measuring", timeout_s=60)
    with joined.together():
        rates = measure_rates(joined, names, names)
    joined.acknowledge()
    assert [(rate.source, rate.host) for rate in rates] == [(names[n - 1], names[n]) for n in range(world)]
    assert all(rate.bytes_per_s > 0 and not rate.problem for rate in rates)
    dist.barrier()
    return rates
