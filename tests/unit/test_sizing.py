"""Sizes and bandwidths against published figures, and worlds that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.planning.parameters import of_config, of_shape
from fastload.planning.sizing import (
    RECIPES,
    Topology,
    Transfer,
    checkpoint_bytes,
    overhead,
    topology,
    transfers,
)
from tests.unit.test_parameters import PUBLISHED

TB, GB, GIB = 10**12, 10**9, 2**30
TRILLION = topology(tp=8, pp=64, dp=6)


def by_how(nbytes: int, world: Topology, time_s: float) -> dict[str, Transfer]:
    return {f"{row.what}: {row.how}": row for row in transfers(nbytes, world, time_s)}


def test_recipes() -> None:
    assert {name: recipe.bytes_per_parameter for name, recipe in RECIPES.items()} == {
        "mixed-adam": 14, "fp32-adam": 12, "bf16": 2,
    }  # fmt: skip
    for recipe in RECIPES.values():
        parts = recipe.parts.partition(":")[0].split(" + ")
        assert sum(int(part.split()[0]) for part in parts) == recipe.bytes_per_parameter


def test_a_trillion_parameters_are_13_8_tb_within_3_percent() -> None:
    num = of_shape(num_layers=128, hidden=25600, vocabulary=51200, sequence=2048).num
    nbytes = checkpoint_bytes(num, RECIPES["mixed-adam"].bytes_per_parameter)
    assert nbytes / 13.8e12 == pytest.approx(1.023, abs=0.0005)


def test_other_published_sizes() -> None:
    assert checkpoint_bytes(65_200_000_000, 12) == pytest.approx(782e9, rel=1e-3)
    bloom = next(config for num, config in PUBLISHED if config["model_type"] == "bloom")
    nbytes = checkpoint_bytes(of_config(bloom).num, 2)
    assert nbytes / GIB == pytest.approx(328.3, abs=0.05)
    assert nbytes / GIB == pytest.approx(329, rel=0.003), "as published"
    # MLPerf Storage says GB and TB, its figures are in GiB.
    assert checkpoint_bytes(8_030_000_000, 14) / GIB == pytest.approx(104.7, abs=0.05)
    assert checkpoint_bytes(405_850_000_000, 14) / GIB == pytest.approx(5291.7, abs=0.05)


def test_published_times_and_bandwidths_of_a_trillion_parameters() -> None:
    nbytes, time_s = 13_800 * GB, 13_800 / 273
    assert time_s == pytest.approx(50.5, abs=0.05)
    rows = by_how(nbytes, TRILLION, time_s)
    alone, shared = rows["save: one replica writes"], rows["save: replicas share the writing"]
    assert (alone.num_gpus, shared.num_gpus) == (512, 3072)
    assert alone.gpu_bytes_per_s / GB == pytest.approx(0.53, abs=0.005)
    assert alone.host_bytes_per_s == pytest.approx(8 * alone.gpu_bytes_per_s)
    assert alone.storage_bytes_per_s == shared.storage_bytes_per_s == pytest.approx(273e9)
    assert shared.gpu_bytes_per_s == pytest.approx(alone.gpu_bytes_per_s / 6)
    many, once = rows["restore: every replica reads all"], rows["restore: read once, then exchanged"]
    assert many.storage_bytes_per_s / TB == pytest.approx(1.64, abs=0.005)
    assert once.storage_bytes_per_s / GB == pytest.approx(273)
    assert (many.nbytes, once.nbytes) == (6 * nbytes, nbytes)
    fast = by_how(nbytes, TRILLION, 13.8)["restore: read once, then exchanged"]
    assert fast.storage_bytes_per_s / TB == pytest.approx(1)


def test_32_hosts_that_each_read_100_gb() -> None:
    rows = by_how(100 * GB, topology(num_hosts=32, gpus_per_host=1), 1.0)
    assert rows["restore: every replica reads all"].nbytes == 3200 * GB


def test_one_save_of_50_5_s_every_4_hours() -> None:
    assert overhead(50.5, 4 * 3600) == pytest.approx(0.0035, abs=0.00005)


# Megatron's table: TP, PP, GPUs, DP.
TABLE = [
    (1, 1, 32, 32), (2, 1, 64, 32), (4, 1, 128, 32), (8, 1, 256, 32), (8, 2, 512, 32), (8, 4, 1024, 32),
    (8, 8, 1536, 24), (8, 16, 1920, 15), (8, 35, 2520, 9), (8, 64, 3072, 6),
]  # fmt: skip


@pytest.mark.parametrize(("tp", "pp", "gpus", "dp"), TABLE)
def test_megatrons_worlds(tp: int, pp: int, gpus: int, dp: int) -> None:
    world = topology(tp=tp, pp=pp, num_gpus=gpus)
    assert world == topology(tp=tp, pp=pp, dp=dp, num_gpus=gpus, num_hosts=gpus // 8)
    assert (world.dp, world.num_gpus_per_replica, world.num_hosts) == (dp, tp * pp, gpus // 8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tp": 8, "pp": 64, "dp": 6, "num_gpus": 3000}, "TP 8 × PP 64 × DP 6 = 3072 GPUs, not 3000"),
        ({"tp": 8, "pp": 64, "num_gpus": 3000}, "TP 8 × PP 64 × DP 5 = 2560 GPUs, not 3000"),
        ({"tp": 8, "pp": 2, "num_gpus": 8}, "TP 8 × PP 2 × DP 1 = 16 GPUs, not 8"),
        ({"dp": 12}, "12 GPUs do not fill hosts of 8"),
        ({"dp": 16, "num_hosts": 3}, "on hosts of 8 take 2, not 3"),
        ({"num_gpus": 64, "num_hosts": 2}, "on hosts of 8 take 8, not 2"),
        ({"tp": 0}, "tp=0: must be a whole number above 0"),
        ({"dp": -1}, "dp=-1"),
        ({"num_gpus": 2.5}, "num_gpus=2.5"),
        ({"gpus_per_host": 0}, "gpus_per_host=0"),
    ],
)
def test_impossible_worlds(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        topology(**given)


def test_a_job_may_use_part_of_one_host() -> None:
    world = topology(dp=3)
    assert (world.num_gpus, world.num_hosts) == (3, 1)
    row = transfers(300, world, 1.0)[1]
    assert (row.gpu_bytes_per_s, row.host_bytes_per_s) == (100, 300)


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf")])
def test_numbers_that_cannot_be(bad: float) -> None:
    for wrong in (
        lambda: transfers(100, TRILLION, bad),
        lambda: transfers(bad, TRILLION, 1.0),  # type: ignore[arg-type]
        lambda: overhead(1.0, bad),
        lambda: checkpoint_bytes(100, bad),
        lambda: checkpoint_bytes(bad, 14),  # type: ignore[arg-type]
    ):
        with pytest.raises(OptionError, match="must be a"):
            wrong()
    with pytest.raises(OptionError, match="stall_s=-1"):
        overhead(-1, 10)


sizes = st.integers(1, 64)


@given(tp=sizes, pp=sizes, dp=sizes, nbytes=st.integers(1, 10**15), time_s=st.floats(0.001, 1e6))
def test_the_parts_make_up_the_whole(tp: int, pp: int, dp: int, nbytes: int, time_s: float) -> None:
    world = topology(tp=tp, pp=pp, dp=dp, gpus_per_host=1)
    rows = transfers(nbytes, world, time_s)
    assert len(rows) == (2 if dp == 1 else 4)
    for row in rows:
        assert row.storage_bytes_per_s * row.time_s == pytest.approx(row.nbytes)
        assert row.gpu_bytes_per_s * row.num_gpus == pytest.approx(row.storage_bytes_per_s)
        assert row.nbytes == nbytes * (dp if row.how == "every replica reads all" else 1)
