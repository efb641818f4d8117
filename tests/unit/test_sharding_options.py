"""What `fastload load --mesh … --placements …` understands, and what it refuses."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Replicate, Shard

from fastload.errors import OptionError
from fastload.ext.load_verify import Sharding


@pytest.mark.parametrize(
    ("mesh", "placements", "num_ranks", "expected"),
    [
        ("8", "shard(0)", 8, Sharding((8,), (0,))),
        ("2x4", "replicate,shard(0)", 8, Sharding((2, 4), (None, 0))),
        ("2x4", " Replicate , Shard(1) ", 8, Sharding((2, 4), (None, 1))),
        ("2x3x10", "replicate,shard(0),shard(10)", 60, Sharding((2, 3, 10), (None, 0, 10))),
        ("1", "replicate", 1, Sharding((1,), (None,))),
    ],
    ids=["fsdp", "hsdp", "tp", "three", "one"],
)
def test_what_is_understood(mesh: str, placements: str, num_ranks: int, expected: Sharding) -> None:
    assert Sharding.parse(mesh, placements, num_ranks) == expected


@pytest.mark.parametrize(
    ("mesh", "placements", "message"),
    [
        ("2x", "shard(0)", "mesh='2x' is not written as 8 or 2x4"),
        ("0x8", "shard(0)", "mesh='0x8' is not written as 8 or 2x4"),
        ("8\n", "shard(0)", r"mesh='8\n' is not written as 8 or 2x4"),
        ("8", "", "placement '' is neither replicate nor shard(DIMENSION)"),
        ("8", "shard(-1)", "placement 'shard(-1)' is neither replicate nor shard(DIMENSION)"),
        ("8", "shard", "placement 'shard' is neither replicate nor shard(DIMENSION)"),
        ("8", "partial(sum)", "placement 'partial(sum)': checkpoints hold whole values, not partial sums"),
        ("2x4", "shard(0)", "placements='shard(0)' are 1, dimensions of mesh='2x4' are 2"),
        ("8", "replicate,shard(0)", "placements='replicate,shard(0)' are 2, dimensions of mesh='8' are 1"),
        ("2x3", "replicate,shard(0)", "mesh='2x3' has 6 ranks, the job has 8"),
    ],
)
def test_what_is_refused(mesh: str, placements: str, message: str) -> None:
    with pytest.raises(OptionError) as raised:
        Sharding.parse(mesh, placements, 8)
    assert str(raised.value) == message


def test_a_dimension_that_a_tensor_lacks_is_not_cut() -> None:
    sharding = Sharding((2, 4), (0, 1))
    assert [sharding.placements(num_dims) for num_dims in (0, 1, 2, 3)] == [
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
        (Shard(0), Shard(1)),
        (Shard(0), Shard(1)),
    ]
