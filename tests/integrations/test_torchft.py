"""Replicas of torchft heal by fastload's transport, with the real torchft."""

from __future__ import annotations

import importlib.util
import os
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

import fastload
from fastload.geometry.dtensors import local_of
from tests.dist.harness import ranks
from tests.e2e.forked import run_forked

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # what others warn of is not ours to mend
    pytest.mark.skipif(not importlib.util.find_spec("torchft"), reason="torchft is not installed"),
]
SECONDS = timedelta(seconds=20)


THEIR_TEST = """
import sys
from datetime import timedelta
from unittest import TestCase

import torch
from torchft.checkpointing import transport_test

from fastload.integrations.torchft import ReplicaTransport

cpu = torch.device("cpu")


def make(rank, world_size):
    return ReplicaTransport(lambda: transport_test.make_state_dict(cpu), folder=sys.argv[1], host="127.0.0.1")


# The test has ten seconds, and imports take some of them.
warm = ReplicaTransport(folder=sys.argv[1], host="127.0.0.1")
warm.send_checkpoint([], 0, {"x": torch.ones(1)}, timedelta(seconds=60))
warm.recv_checkpoint(0, warm.metadata(), 0, timedelta(seconds=60))
warm.shutdown()
transport_test.run_multi_recovery_test(TestCase(), make, device=cpu)
"""


def test_their_own_test_of_transports(tmp_path: Path) -> None:
    run(THEIR_TEST, tmp_path)


def run(program: str, tmp_path: Path) -> None:
    """Runs a program in a process of its own, which has no process group yet."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_forked(["-c", program, str(tmp_path)], cwd=tmp_path, env=environment, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


# One of two replica groups dies, and comes back with other weights.
TRAINING = """
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft._torchft import LighthouseServer

from fastload.integrations.torchft import ReplicaTransport

STEPS, DIES_AT = 6, 2
SECONDS = timedelta(seconds=40)
healed, ended = [], {}


class Noting(ReplicaTransport):
    def recv_checkpoint(self, src_rank, metadata, step, timeout):
        state = super().recv_checkpoint(src_rank, metadata, step, timeout)
        healed.append((step, state["user"]["default"]["weight"].data_ptr()))
        return state


def train(replica, lighthouse, *, seed, until):
    weight = torch.full((300, 5), float(seed))
    state = {"weight": weight, "step": 0}

    def load_state_dict(got):
        weight.copy_(got["weight"])
        state["step"] = got["step"]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=SECONDS)
    transport = Noting(
        lambda: {"user": {"default": dict(state)}, "torchft": manager.state_dict()},
        folder=sys.argv[1], host="127.0.0.1",
    )
    manager = Manager(
        pg=group, load_state_dict=load_state_dict, state_dict=lambda: dict(state), min_replica_size=1,
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}", hostname="127.0.0.1", timeout=SECONDS, quorum_timeout=SECONDS,
        connect_timeout=SECONDS, checkpoint_transport=transport, use_async_quorum=False,
    )
    try:
        while manager.current_step() < until:
            manager.start_quorum()
            gradient = torch.ones(300, 5)
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                weight.add_(gradient)
                state["step"] += 1
        return weight, state["step"], weight.data_ptr()
    finally:
        manager.shutdown(wait=False)
        group.shutdown()


lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
with ThreadPoolExecutor(2) as pool:
    first = pool.submit(train, 0, lighthouse.address(), seed=0, until=STEPS)
    pool.submit(train, 1, lighthouse.address(), seed=1, until=DIES_AT).result(80)
    second = pool.submit(train, 1, lighthouse.address(), seed=7, until=STEPS)
    (one, step, _), (other, other_step, place) = first.result(80), second.result(80)
lighthouse.shutdown()
assert step == other_step == STEPS
assert torch.equal(one, other) and one.unique().numel() == 1
assert any(at >= DIES_AT and where == place for at, where in healed), healed
"""


def test_a_manager_heals_a_replica_in_place(tmp_path: Path) -> None:
    """With the real lighthouse, managers and process groups of torchft."""
    run(TRAINING, tmp_path)


def state_of(mesh: Any, seed: int) -> dict[str, Any]:
    """What a training with FSDP2 hands to torchft's Manager."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Linear(13, 3)).bfloat16()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7).bfloat16()).sum().backward()
    optimizer.step()
    user = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return {"user": {"default": user}, "torchft": {"step": seed, "batches_committed": 2 * seed}}


@pytest.mark.slow
@ranks(4)
def test_shards_heal_in_place_from_the_rank_of_the_same_number(rank: int, world: int, tmp_path: Path) -> None:
    from fastload.integrations.torchft import ReplicaTransport

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))["shard"]
    live, own = state_of(mesh, 1), state_of(mesh, 2)
    before = [local.data_ptr() for local in map(local_of, tensors_of(own))]
    transport = ReplicaTransport(lambda: own, folder=tmp_path, host="127.0.0.1")
    urls: list[Any] = [None] * world
    dist.all_gather_object(urls, transport.metadata())
    if rank < 2:
        transport.send_checkpoint([rank + 2], 7, live, SECONDS)
    else:
        got = transport.recv_checkpoint(rank - 2, urls[rank - 2], 7, SECONDS)
        assert [local.data_ptr() for local in map(local_of, tensors_of(got))] == before
        assert got["torchft"] == live["torchft"]
        assert got["user"]["default"]["optimizer"]["param_groups"][0]["lr"] == 0.1
        for one, other in zip(tensors_of(got), tensors_of(live), strict=True):
            assert getattr(one, "placements", None) == getattr(other, "placements", None)
            assert torch.equal(local_of(one), local_of(other))
        bare = ReplicaTransport(folder=tmp_path, host="127.0.0.1")
        with pytest.raises(fastload.OptionError, match=rf"rank {rank - 2} has DTensors: give .* state_dict="):
            bare.recv_checkpoint(rank - 2, urls[rank - 2], 7, SECONDS)
        bare.shutdown()
    dist.barrier()
    transport.shutdown()
    dist.barrier()
    assert not list(tmp_path.iterdir())


def tensors_of(state: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def test_states_are_served_as_a_whole_verified_and_to_whoever_has_the_secret(tmp_path: Path) -> None:
    from fastload.integrations.torchft import ReplicaTransport

    sender, receiver = (ReplicaTransport(folder=tmp_path, host="127.0.0.1") for _ in range(2))
    state = {"weight": torch.randn(300, 500), "steps": [1, 2.5, None], "name": "é"}
    url = sender.metadata()
    with pytest.raises(fastload.DeadlineExceeded, match=r"rank 0, step 3 from 127\.0\.0\.1:\d+ timed out"):
        receiver.recv_checkpoint(0, url, 3, timedelta(milliseconds=10))
    sender.send_checkpoint([1], 3, state, SECONDS)
    got = receiver.recv_checkpoint(0, url, 3, SECONDS)
    assert torch.equal(got["weight"], state["weight"])
    assert (got["steps"], got["name"]) == (state["steps"], state["name"])
    secret = url.rpartition("/")[2]
    for path in ("", "/3/fastload.json", f"/{secret}x/3/fastload.json", f"/{secret}/../3/fastload.json",
                 f"/{secret}/3/%2e%2e", f"/{secret}/3/none"):  # fmt: skip
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(url.removesuffix(f"/{secret}") + path, timeout=20)
        refused.value.close()
    (file,) = tmp_path.glob("*/3/model.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(fastload.ChecksumError, match="weight"):
        receiver.recv_checkpoint(0, url, 3, SECONDS)
    sender.send_checkpoint([1], 4, state, SECONDS)
    with pytest.raises(fastload.DeadlineExceeded, match="step 3"):
        receiver.recv_checkpoint(0, url, 3, timedelta(milliseconds=10))
    sender.disallow_checkpoint()
    with pytest.raises(fastload.DeadlineExceeded, match="step 4"):
        receiver.recv_checkpoint(0, url, 4, timedelta(milliseconds=10))
    with pytest.raises(fastload.OptionError, match="cannot be saved"):
        sender.send_checkpoint([1], 5, {"x": object()}, SECONDS)
    sender.shutdown()
    receiver.shutdown()
    assert not list(tmp_path.iterdir())
