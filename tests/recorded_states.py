"""The states in `tests/data/recorded`, where older commits have saved them: those files load for ever.

What a commit wrote is made with its own code, by two ranks::

    git worktree add /tmp/old COMMIT
    PYTHONPATH=/tmp/old python -m torch.distributed.run --nproc-per-node 2 \
        tests/recorded_states.py tests/data/recorded/COMMIT

So this module needs nothing of fastload but its public names, and leaves out what a commit does not have yet.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["STATES", "STEPS", "own_state", "parts", "plain_state", "sharded_state", "step_state"]

STEPS = (3, 7, 5)  # of a run that goes back
_DTYPES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64"
    " complex64 complex128 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz"
)


def _tensor(dtype: str) -> torch.Tensor:
    values = torch.arange(6).view(2, 3) % (2 if dtype == "bool" else 6)
    return values.to(getattr(torch, dtype))


def plain_state() -> dict[str, Any]:
    """A training of any kind: types, dtypes and ties that a structure has to keep."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + number)
    tied = torch.arange(4, dtype=torch.float32)
    return {
        "model": model.state_dict(),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 3), 0.5)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1]}],
        },
        "dtypes": {name: _tensor(name) for name in _DTYPES.split()},
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(3.5),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "tied": [tied, tied],
        "a.b": {"c": torch.ones(1)},
        "a": {"b.c": torch.zeros(1)},
        "numbers": [None, True, 0, -(2**70), 1.5, float("inf"), -0.0, 1 - 2j],
        "texts": ["t\u00e9xt", "\ud800", b"\x00\xff"],
        "types": (bytearray(b"ab"), range(3), slice(1, None), torch.Size([2, 3]), torch.bfloat16, (), [[]]),
        "device": torch.device("cuda", 1),
        "sets": [{1, "a"}, frozenset({(2, None)})],
        "dicts": [OrderedDict(b=1, a=2), Counter("abca"), defaultdict(list, {"x": [1]})],
        "keys": {1: 0, "1": 1, (1,): 2, None: 3},
        "numpy": [np.arange(3, dtype="<f8"), np.array([[1, 2]], dtype=">i4"), np.float32(0.5), np.int64(-3)],
    }


def own_state(rank: int, per_rank: type) -> dict[str, Any]:
    """What ranks have in common, and what each has of its own.

    Args:
        rank: Which.
        per_rank: `fastload.PerRank`.
    """
    cursor = {"epoch": rank, "seen": list(range(rank + 60)), "note": "x" * 150 * rank}
    rng = torch.arange(5 + rank, dtype=torch.uint8)
    return {"weight": torch.arange(6.0), "rng": per_rank(rng), "cursor": per_rank(cursor)}


def parts() -> dict[str, torch.Tensor]:
    """The whole tensors of `sharded_state`."""
    rows = torch.arange(21.0).view(7, 3)
    return {"rows": rows, "columns": rows.to(torch.bfloat16), "both": rows.to(torch.float64) + 0.5}


def sharded_state() -> dict[str, Any]:
    """The same as DTensors on a mesh of all ranks; rows do not go up."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    placements = {"rows": Shard(0), "columns": Shard(1), "both": Replicate()}
    tensors = {name: distribute_tensor(whole, mesh, [placements[name]]) for name, whole in parts().items()}
    return {"step": 4, **tensors}


def step_state(step: int) -> dict[str, Any]:
    """What a manager saves."""
    return {"weight": torch.full((3,), float(step)), "step": step}


STATES = ("plain", "own", "sharded", "run")


def main(folder: Path) -> None:
    """Saves what the fastload that is imported can save."""
    import fastload

    print(fastload.__file__)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    fastload.save(plain_state(), folder / "plain", metadata={"made": "by hand"})
    if hasattr(fastload, "PerRank"):
        fastload.save(own_state(rank, fastload.PerRank), folder / "own")
    try:
        fastload.save(sharded_state(), folder / "sharded")
    except fastload.FastloadError as error:
        print(f"no sharded states: {error}"[:100])
    if hasattr(fastload, "CheckpointManager"):
        with fastload.CheckpointManager(folder / "run") as manager:
            for step in STEPS:
                manager.save(step, step_state(step), metrics={"loss": step / 4})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
