"""Random draws on devices; `python -m tests.gpu` runs more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.devices import Devices, on_devices
from tests.gpu.draws import Draw


@pytest.mark.slow(but=["2-ranks"])
@on_devices(2, 4, ranks_per_host=2, deadline_s=110)
@pytest.mark.parametrize(("first", "count"), [(0, 8)])
def test_draws(devices: Devices, rank: int, world: int, tmp_path: Path, first: int, count: int) -> None:
    for seed in range(first, first + count):
        draw = Draw(devices, rank, world, seed, tmp_path)
        try:
            draw.run()
            devices.check_faults()
        except BaseException as error:
            raise AssertionError(f"draw {seed} with {world} ranks: {draw.log}") from error
