"""Saves safetensors files as FSDP ranks save with DCP: torchrun --nproc-per-node 4 save_dcp.py FROM TO."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main(source: Path, target: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for path in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            state[name] = (
                distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) if tensor.dim() else tensor
            )
    dcp.save(state, checkpoint_id=target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
