"""Writes the checkpoints in this directory with DeepSpeed, on CPU, and what it says is in them.

DeepSpeed 0.19.8; not part of the test set-up, since its CPU backend compiles extensions::

    torchrun --nproc-per-node 3 tests/data/deepspeed/write.py zero3 3 float32
"""

import os
import shutil
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
from torch import nn

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # which compiles


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(7, 13), nn.Linear(13, 3), nn.Linear(3, 5)
        self.tied = nn.Linear(13, 3)
        self.tied.weight = self.b.weight
        self.register_buffer("count", torch.arange(4))
        self.frozen.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.a(inputs)
        return self.frozen(self.b(hidden)).sum() + self.tied(hidden).sum()


name, stage, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
folder = Path(__file__).parent
torch.manual_seed(0)
model = Model()
trained = [(key, value) for key, value in model.named_parameters() if value.requires_grad]
groups = [
    {"params": [value for key, value in trained if "bias" in key], "weight_decay": 0.0},
    {"params": [value for key, value in trained if "bias" not in key]},
]
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "bf16": {"enabled": dtype == "bfloat16"},
    "zero_optimization": {"stage": stage},
    "zero_force_ds_cpu_optimizer": False,
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
for _ in range(2):
    engine.backward(engine(torch.ones(1, 7, dtype=getattr(torch, dtype))))
    engine.step()
engine.save_checkpoint(str(folder / name), tag="step", client_state={"mine": 5})
found = {}
for key, parameter in trained if stage == 3 else ():  # in the other stages, ranks have parts
    for state in ("exp_avg", "exp_avg_sq"):
        found[f"{state}/{key}"] = safe_get_full_optimizer_state(parameter, state).reshape(-1)
dist.barrier()
if dist.get_rank() == 0:
    for file in (folder / name / "step").iterdir():
        shutil.move(file, folder / name / file.name)
    (folder / name / "step").rmdir()
    for script in ("latest", "zero_to_fp32.py", "zero_to_torch.py"):
        (folder / name / script).unlink()
    (folder / "latest").write_text(name)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    (folder / "latest").unlink()
    found |= {f"module/{key}": value.contiguous().clone() for key, value in weights.items()}
    save_file(found, folder / f"{name}.safetensors")
