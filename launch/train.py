"""Trains a small language model on several ranks: initial weights, saves, stops and resumes with fastload.

    torchrun --nproc-per-node 2 launch/train.py --root /tmp/run --steps 200 --save-every 50
    launch/slurm_torchrun.sbatch and the other files next to it start it on a cluster

With `--parallel fsdp` or `hsdp` each rank holds a part of the model. The code that saves and resumes is the
same, and so are the files, so a training may continue with another `--parallel`, or on other ranks.

When started again, it continues from its last commit, and ends with the same weights as without the
interruption. On SIGUSR1 and SIGTERM it saves and exits with 0.

To begin a training of your own with this file, replace what stands below "Your model" and "Your data". An
epoch is `len(data)` samples, in an order that follows from `--seed` and the number of the epoch.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, default_collate

import fastload

# Your model

VOCABULARY = 128  # ASCII
_WORDS = "one rank reads a part of it and every rank ends with the whole state of the model".split()


class Decoder(nn.Module):
    """A decoder-only transformer; logits of the next character, (batch, length, VOCABULARY)."""

    def __init__(self, *, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.characters.weight, std=width**-0.5)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.characters.weight  # tied

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        hidden = self.characters(text) + self.places(torch.arange(length, device=text.device))
        return self.head(self.norm(self.layers(hidden, mask=mask, is_causal=True)))


def make_model(args: argparse.Namespace) -> nn.Module:
    """Returns the model, with weights that depend on torch's random state alone."""
    return Decoder(width=args.width, layers=args.layers, heads=4, length=args.length)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that FSDP gathers one by one."""
    return [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Returns the mean loss over the samples of a batch, here (samples, length + 1)."""
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


# Your data


class Text(Dataset[Tensor]):
    """Samples of text, (length + 1,), that follow from their number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 65_536

    def __getitem__(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        picks = torch.randint(len(_WORDS), (self.length,), generator=generator)
        return torch.tensor(list(" ".join(_WORDS[pick] for pick in picks).encode()[: self.length + 1]))


def make_data(args: argparse.Namespace) -> Dataset[Any]:
    """Returns the samples: tensors, or tuples or dicts of tensors, such as (image, label)."""
    return Text(args.length)


# The training


class Training:
    """The parts of a training.

    Attributes:
        state: The contents of a checkpoint; the same dict is saved and restored.
    """

    def __init__(self, args: argparse.Namespace, rank: int, device: str) -> None:
        self.args, self.rank, self.device = args, rank, device
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if args.batch % self.num_ranks:
            raise SystemExit(f"--batch {args.batch} cannot be split evenly between {self.num_ranks} ranks")
        torch.manual_seed(args.seed)  # the same weights on every rank
        self.model = make_model(args).to(device)
        if dist.is_initialized() and args.parallel != "ddp":
            shard(self.model, num_replicas=args.replicas if args.parallel == "hsdp" else 1)
        if args.init:
            fastload.load(args.init, into=self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / 1000))
        )
        self.data = make_data(args)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "step": 0,
            "loss": math.inf,
        }

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self.state["step"]

    def run(self, manager: fastload.CheckpointManager) -> None:
        """Trains until all steps are done, or until a signal asks to stop."""
        args = self.args
        parallel = self.in_parallel()
        batches = iter(self.loader())
        while self.step < args.steps and not manager.stop_requested:
            # For dropout, which follows from step and rank: so no random state has to be saved.
            torch.manual_seed(args.seed + self.step * 65_537 + self.rank)
            self.optimizer.zero_grad()
            loss = loss_of(parallel, on_device(next(batches), self.device))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.state |= {"step": self.step + 1, "loss": agreed(loss.detach())}
            if self.rank == 0 and self.step % args.log_every == 0:
                print(f"step {self.step}: loss {self.state['loss']:.4f}", flush=True)
            if self.step == args.steps or manager.should_save(self.step):
                self.use_buffers_of_rank_0()
                manager.save(self.step, self.state, metrics={"loss": self.state["loss"]})
            time.sleep(args.pause)

    def numbers_of(self, step: int) -> list[int]:
        """Returns the numbers of this rank's samples in a step.

        The batch of all ranks depends on the step alone, so a training may continue on other ranks. Where an
        epoch ends within a batch, the next one begins.
        """
        batch = range(step * self.args.batch, (step + 1) * self.args.batch)
        places = (divmod(position, len(self.data)) for position in batch[self.rank :: self.num_ranks])
        return [int(order_of(epoch, len(self.data), self.args.seed)[place]) for epoch, place in places]

    def loader(self) -> DataLoader[Any]:
        """Returns this rank's batches of the remaining steps; its workers survive Slurm's signals."""
        num_workers = self.args.workers
        context = fastload.worker_context(self.args.worker_method) if num_workers else None
        return DataLoader(
            self.data,
            batch_sampler=map(self.numbers_of, range(self.step, self.args.steps)),
            num_workers=num_workers,
            multiprocessing_context=context,
        )

    def in_parallel(self) -> nn.Module:
        """Returns the model with gradients that are the mean over all ranks."""
        if not dist.is_initialized() or self.args.parallel != "ddp":
            return self.model  # FSDP2 does that
        parallel = DistributedDataParallel(self.model)
        # After its first backward DDP reorders the gradients, which changes the order of summation over more
        # than two ranks. So that backward is done before the training, and changes no buffer.
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        first = default_collate([self.data[number] for number in self.numbers_of(self.step)])
        loss_of(parallel, on_device(first, self.device)).backward()
        for buffer, value in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(value)
        return parallel

    def use_buffers_of_rank_0(self) -> None:
        """Gives all ranks the buffers of rank 0; running statistics, as of BatchNorm, are those of a rank."""
        for buffer in self.model.buffers() if dist.is_initialized() else ():
            dist.broadcast(buffer, 0)


def shard(model: nn.Module, *, num_replicas: int) -> None:
    """Shards a model in place by FSDP2: over all ranks, or over those of each replica."""
    from torch.distributed.fsdp import fully_shard  # takes a second

    num_shards, rest = divmod(dist.get_world_size(), num_replicas)
    if rest:
        raise SystemExit(f"{dist.get_world_size()} ranks cannot be {num_replicas} replicas")
    device = next(model.parameters()).device.type
    mesh = dist.init_device_mesh(device, (num_replicas, num_shards), mesh_dim_names=("replicas", "shards"))
    for part in (*blocks_of(model), model):
        fully_shard(part, mesh=mesh if num_replicas > 1 else mesh["shards"])


def digest(weights: Mapping[str, Tensor]) -> str:
    """Returns a digest of all weights; of shards, a call of all ranks."""
    found = hashlib.sha256()
    for name, part in sorted(weights.items()):
        complete = getattr(part, "full_tensor", lambda p=part: p)()
        found.update(name.encode())
        found.update(complete.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:32]


@functools.lru_cache(maxsize=2)
def order_of(epoch: int, num_samples: int, seed: int) -> Tensor:
    """Returns the numbers of all samples in the order of an epoch."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))


def on_device(batch: Any, device: str) -> Any:
    """Returns a batch, of any structure of lists, tuples and dicts, with its tensors on a device."""
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: on_device(part, device) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        return [on_device(part, device) for part in batch]
    return batch


def agreed(loss: Tensor) -> float:
    """Returns the mean over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return float(loss)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small language model; goes on where it stopped.")
    parser.add_argument("--root", default="checkpoints", help="where checkpoints go: a directory or URL")
    parser.add_argument("--init", help="a checkpoint with the model's initial weights")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, metavar="STEPS")
    parser.add_argument("--save-seconds", type=float, default=900.0, metavar="S")
    parser.add_argument("--keep-last", type=int, default=3)
    parser.add_argument(
        "--memory",
        metavar="DIR",
        default=os.environ.get("MEMORY"),  # as the launch scripts say
        help="keeps recent steps in the memory of the hosts: auto, or a directory on each",
    )
    parser.add_argument("--memory-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--memory-copies", type=int, default=2, metavar="N")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--parallel", choices=["ddp", "fsdp", "hsdp"], default="ddp")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="of the model, with hsdp")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64, help="samples in each step, of all ranks together")
    parser.add_argument("--workers", type=int, default=0, help="processes on each rank that read the data")
    parser.add_argument(
        "--worker-method", choices=["fork", "spawn", "forkserver"], help="how they are started"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="seconds to wait in each step")
    parser.add_argument("--digest", action="store_true", help="print a digest of the weights at the end")
    return parser.parse_args()


def main() -> None:
    args = parse()
    logging.basicConfig(level=logging.WARNING)
    rank, device = fastload.world.initialize(args.device)  # torchrun, srun, or alone
    every = {"every_steps": args.save_every, "every_seconds": args.save_seconds}
    if args.memory:
        every |= {"memory": args.memory, "memory_every_steps": args.memory_every}
        every["memory_copies"] = args.memory_copies
    # From here on Slurm's signals do not end the process, so this comes first.
    with fastload.CheckpointManager(args.root, keep_last=args.keep_last, **every) as manager:
        training = Training(args, rank, device)
        if manager.latest() is not None:
            manager.restore(into=training.state)
        if rank == 0:
            source = f", from {manager.restored_from}" if manager.restored_from else ""
            print(f"begins at step {training.step} of {args.steps}{source}", flush=True)
        training.run(manager)
        if manager.stop_requested and training.step < args.steps and (stopped := os.environ.get("STOPPED")):
            Path(stopped).touch()  # launch/kubernetes/pod.sh asks whether it has finished
    # Here the last save is committed, on all ranks.
    if rank == 0:
        print(f"ends at step {training.step} of {args.steps}: loss {training.state['loss']:.4f}", flush=True)
    if args.digest:
        print(f"rank {rank}: weights {digest(training.model.state_dict())}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
