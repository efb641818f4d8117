"""Tensors that torch lets nobody write, or that have no shape; callbacks of the caller's that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastload
from fastload.errors import MismatchError, OptionError, PeerError
from tests.checkpoints import assert_same_bits
from tests.dist.harness import ranks

_NUM = 30_000


def _inference_state() -> dict[str, Any]:
    with torch.inference_mode():
        numbers = torch.arange(float(_NUM))
        return {
            "whole": numbers,
            "view": numbers[10:90],
            "small": numbers[:3].clone(),
            "model": nn.Linear(9, 7).state_dict(),
        }


def _empty_like(state: dict[str, Any]) -> dict[str, Tensor]:
    """Inference tensors to load into: contiguous, strided, of another dtype, small."""
    with torch.inference_mode():
        return {
            "whole": torch.zeros(_NUM, 2)[:, 1],
            "view": torch.zeros(80, dtype=torch.float64),
            "small": torch.zeros(3),
            "model.weight": torch.zeros(7, 9),
            "model.bias": torch.zeros(7),
        }


@pytest.mark.slow(but=["2-ranks"])
@ranks(1, 2)
def test_inference_tensors_are_saved_and_loaded_into(rank: int, world: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = _inference_state()
    fastload.save(state, tmp_path / "a")
    fastload.async_save(state, tmp_path / "b").wait()
    flat = {
        **{n: state[n] for n in ("whole", "view", "small")},
        **{f"model.{n}": t for n, t in state["model"].items()},
    }
    for name in ("a", "b"):
        for strategy in ("direct", "allgather") if world > 1 else ("direct",):
            options = fastload.LoadOptions(strategy=strategy, chunk_bytes=10_000)
            loaded = fastload.load(tmp_path / name, names="*", options=options)
            assert_same_bits(loaded, flat)
            assert not any(tensor.is_inference() for tensor in loaded.values())
            into = {**_empty_like(state), "view": torch.zeros(80)}
            fastload.load(tmp_path / name, into=into, options=options)
            assert_same_bits(into, flat)
            cast = {name: tensor.to(torch.float64) for name, tensor in flat.items()}
            with torch.inference_mode():
                wide = {name: torch.zeros_like(tensor) for name, tensor in cast.items()}
            fastload.load(tmp_path / name, into=wide, dtype=torch.float64, options=options)
            assert_same_bits(wide, cast)


@ranks(2)
def test_tensors_without_a_shape_are_named(rank: int, world: int, tmp_path: Path) -> None:
    fastload.save(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).state_dict(), tmp_path / "real")
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(MismatchError, match=r"0\.weight: into= has a tensor without a shape yet") as raised:
        fastload.load(tmp_path / "real", into=lazy.state_dict())
    assert len(raised.value.mismatched) == 6
    with pytest.raises(
        OptionError, match=r"state\['m'\]\['1\.running_mean'\] .*no shape yet: call its module once"
    ):
        fastload.save({"m": lazy.state_dict()}, tmp_path / "never")
    fastload.load(tmp_path / "real", into=lazy)
    assert lazy[0].weight.shape == (3, 4)
    lazy(torch.ones(2, 4))


class Mine(Exception):
    pass


@ranks(3)
def test_progress_of_a_save_that_raises_on_one_rank(rank: int, world: int, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if rank == 1 and done == total:
            raise Mine("of rank 1")

    options = fastload.SaveOptions(progress=progress, timeout_s=30, writers="all")
    state = {"t": torch.arange(3 << 20)}
    for save in (fastload.save, lambda *given, **more: fastload.async_save(*given, **more).wait()):
        with pytest.raises(PeerError, match=r"rank 1 on .*: Mine: of rank 1") as raised:
            save(state, tmp_path / "never", options=options)
        assert set(raised.value.failures) == {1}
        assert str(raised.value.failures[1]) == "Mine: of rank 1"
        dist.barrier()
        assert not list(tmp_path.iterdir())
        dist.barrier()
    fastload.save(state, tmp_path / "well")


@ranks(2)
def test_a_dtype_may_be_named(rank: int, world: int, tmp_path: Path) -> None:
    fastload.save({"a": torch.ones(8)}, tmp_path / "a")
    dtype = "bfloat16" if rank else torch.bfloat16
    assert fastload.load(tmp_path / "a", dtype=dtype)["a"].dtype is torch.bfloat16
    assert fastload.load(tmp_path / "a", dtype="torch.float16")["a"].dtype is torch.float16
    for wrong in ("bf16", "nn", 3):
        with pytest.raises(OptionError, match=rf"dtype={wrong!r}: must be a torch.dtype or the name of one"):
            fastload.load(tmp_path / "a", dtype=wrong)  # type: ignore[arg-type]
    for integer in ("int8", torch.int64, torch.bool):
        with pytest.raises(OptionError, match=r"dtype=.*: must be a floating point dtype.* quantise"):
            fastload.load(tmp_path / "a", dtype=integer)
    assert fastload.load(tmp_path / "a", dtype=torch.complex64)["a"].tolist() == [1] * 8
