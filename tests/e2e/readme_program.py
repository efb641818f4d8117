"""Runs the python blocks of README and docs on ranks such as torchrun starts: readme_program.py FOLDER

What cannot be here is replaced as REPLACED says, and nothing else. Each block has a case, which prepares the
names that it needs and checks what it has done.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

import fastload
from tests.pages import ROOT, python_blocks

# What is written → what can be here; FOLDER holds the checkpoints of this test.
REPLACED = {
    '"/checkpoints/': '"FOLDER/',
    '"checkpoints/': '"FOLDER/',
    '"/local/': '"FOLDER/',
    '"layers.0.weight"': '"a.weight"',
    '"s3://bucket/': '"FOLDER/',
    '"runs/7"': '"FOLDER/runs/7"',
    '"*norm*"': '"*LayerNorm*"',  # as this model calls them
    "num_workers=8": "num_workers=1",
    '("cuda", (2, 4)': '("cpu", (1, 2)',
    '("cuda", (4, 2)': '("cpu", (1, 2)',
    '"cuda"': '"cpu"',
    '"embed_tokens.weight"': '"embeddings.word_embeddings.weight"',
    "(0, 1024), sizes=(4096, 512)": "(8, 16), sizes=(40, 32)",
    "torch.empty(4096, 512, dtype=torch.bfloat16)": "box_of_it",
}

Names = dict[str, Any]


def adapted(code: str, folder: Path) -> str:
    for written, here in REPLACED.items():
        code = code.replace(written, here)
    return code.replace("FOLDER", str(folder))


class Readme:
    """The cases, and what they share: a real model, and the folder of checkpoints that the pages load."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModel

        self.folder = folder
        self.auto_model = AutoModel
        self.config = AutoConfig.from_pretrained(folder / "llama")
        self.twin = AutoModel.from_pretrained(folder / "llama").eval()
        self.text = torch.randint(0, 1000, (2, 9), generator=torch.Generator().manual_seed(0))

    def new_model(self) -> Any:
        return self.auto_model.from_config(self.config)

    def check(self, model: Any) -> None:
        """The model is the one that is in the checkpoint: also what no checkpoint holds."""
        with torch.no_grad():
            assert torch.equal(model.eval()(self.text)[0], self.twin(self.text)[0])

    def loads(self, names: Names, run: Callable[[], None]) -> None:
        names["model"] = self.new_model()
        run()
        self.check(names["model"])
        assert all(
            torch.equal(names["state"][name], tensor) for name, tensor in self.twin.state_dict().items()
        )

    def opens(self, names: Names, run: Callable[[], None]) -> None:
        names |= {"group": dist.group.WORLD, "box_of_it": torch.empty(40, 32)}
        run()
        weights = self.twin.get_input_embeddings().weight
        assert torch.equal(names["box_of_it"], weights[8:48, 16:48])
        assert names["norms"]
        assert all("LayerNorm" in name for name in names["norms"])
        assert {tensor.dtype for tensor in names["state"].values()} == {torch.bfloat16}

    def reads_ahead(self, names: Names, run: Callable[[], None]) -> None:
        names["build_model"] = self.new_model
        run()
        self.check(names["model"])

    def loads_all_or_nothing(self, names: Names, run: Callable[[], None]) -> None:
        names |= {"path": self.folder / "llama", "model": self.new_model()}
        run()
        self.check(names["model"])

    def dequantizes(self, names: Names, run: Callable[[], None]) -> None:
        folder = self.folder / "DeepSeek-V3"
        weight = torch.arange(-128.0, 128.0).expand(8, 256).to(torch.float8_e4m3fn)
        if dist.get_rank() == 0:
            scale = torch.tensor([[0.5, 2.0]])
            config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
            save_file({"weight": weight, "weight_scale_inv": scale}, folder / "model.safetensors")
        dist.barrier()
        names["model"] = torch.nn.Linear(256, 8, bias=False, dtype=torch.bfloat16)
        run()
        scales = torch.tensor([0.5, 2.0]).repeat_interleave(128)
        assert torch.equal(names["model"].weight, (weight.float() * scales).bfloat16())

    def loads_deepspeed(self, names: Names, run: Callable[[], None]) -> None:
        if dist.get_rank() == 0:
            shutil.copytree(ROOT / "tests/data/deepspeed/zero1", self.folder / "global_step1000")
        dist.barrier()
        names["model"] = torch.nn.ModuleDict({"a": torch.nn.Linear(7, 13)})
        run()
        assert torch.equal(names["model"]["a"].weight, names["state"]["module"]["a.weight"])

    def saves_under_the_next_step(self, names: Names, run: Callable[[], None]) -> None:
        self.prepare_training(names)
        before = names["model"].weight.detach().clone()

        def train_step(batch: torch.Tensor) -> torch.Tensor:
            loss = names["model"](batch).sum()
            loss.backward()
            names["optimizer"].step()
            return loss

        names |= {"batch": torch.ones(4), "train_step": train_step}
        names["state"] = {"model": names["model"], "optimizer": names["optimizer"]}
        shutil.rmtree(self.folder / "step_500", ignore_errors=True)
        dist.barrier()
        run()
        names["handle"].wait()
        assert torch.equal(fastload.load(self.folder / "step_500")["model"]["weight"], before)
        dist.barrier()
        shutil.rmtree(self.folder / "step_500", ignore_errors=True)
        dist.barrier()

    def moves(self, names: Names, run: Callable[[], None]) -> None:
        """The last rank has the trained model, the others get it."""
        is_trainer = dist.get_rank() == dist.get_world_size() - 1
        names |= {"is_trainer": is_trainer, "fsdp_model": self.twin, "tp_model": self.new_model()}
        run()
        if not is_trainer:
            self.check(names["tp_model"])

    def wraps(self, names: Names, run: Callable[[], None]) -> None:
        names |= {"AutoModel": self.auto_model, "config": self.config}
        names["DistributedDataParallel"] = DistributedDataParallel
        run()
        self.check(names["parallel"].module)

    def builds_on_meta(self, names: Names, run: Callable[[], None]) -> None:
        names |= {"AutoModel": self.auto_model, "config": self.config}
        run()
        assert any("position_ids" in name for name, _ in names["model"].named_buffers())
        self.check(names["model"])

    def shards(self, names: Names, run: Callable[[], None]) -> None:
        names |= {"AutoModel": self.auto_model, "config": self.config}
        names |= {"fully_shard": fully_shard, "init_device_mesh": init_device_mesh}
        run()
        self.check_shards(names["model"])

    def cuts(self, names: Names, run: Callable[[], None]) -> None:
        names["parallelize_module"] = parallelize_module
        names["plan"] = {
            "encoder.layer.*.intermediate.dense": ColwiseParallel(),
            "encoder.layer.*.output.dense": RowwiseParallel(),
        }
        run()
        weights = dict(names["model"].named_parameters())
        assert weights["encoder.layer.0.output.dense.weight"].to_local().shape == (
            self.config.hidden_size,
            self.config.intermediate_size // 2,
        )
        self.check_shards(names["model"])

    def check_shards(self, model: Any) -> None:
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert all(torch.equal(whole[name], tensor) for name, tensor in self.twin.state_dict().items())

    def prepare_training(self, names: Names) -> None:
        model = torch.nn.Linear(4, 4)
        dist.broadcast(model.weight.data, 0)
        dist.broadcast(model.bias.data, 0)
        names |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 100}
        model(torch.ones(4)).sum().backward()
        names["optimizer"].step()

    def saves(self, names: Names, run: Callable[[], None]) -> None:
        self.prepare_training(names)
        run()
        assert names["state"]["step"] == names["plain"]["step"] == 100
        assert names["state"]["model"] is names["model"]
        assert torch.equal(names["plain"]["model"]["weight"], names["model"].weight)
        assert (self.folder / "step_200" / "fastload.json").exists()

    def saves_and_waits(self, names: Names, run: Callable[[], None]) -> None:
        self.prepare_training(names)
        run()
        for step in (400, 500):
            again = fastload.load(self.folder / f"step_{step}")
            assert torch.equal(again["model"]["weight"], names["model"].weight)

    def saves_shards(self, names: Names, run: Callable[[], None]) -> None:
        names |= {"model": self.auto_model.from_pretrained(self.folder / "llama"), "step": 300}
        names |= {"mesh": init_device_mesh("cpu", (2,))}
        run()
        again = self.new_model()
        fastload.load(self.folder / "step_300", into={"model": again}, strict=False)
        self.check(again)

    def saves_what_is_cut_by_hand(self, names: Names, run: Callable[[], None]) -> None:
        rank = dist.get_rank()
        names |= {"rank": rank, "step": 350, "weight": torch.full((512, 512), float(rank))}
        run()
        found = fastload.load(self.folder / "step_350")
        assert found["step"] == 350
        assert torch.equal(
            found["weight"], torch.arange(2.0).repeat_interleave(512)[:, None].expand(1024, 512)
        )
        assert torch.equal(names["weight"], torch.full((512, 512), float(rank)))

    def exports(self, names: Names, run: Callable[[], None]) -> None:
        spool = self.folder / "tmp"
        spool.mkdir(exist_ok=True)
        model = self.auto_model.from_pretrained(self.folder / "llama")
        names |= {"model": model, "dist": dist, "gathered": lambda model: model.state_dict().items()}
        run()
        found = fastload.load(self.folder / "export")
        wanted = model.state_dict().items()
        assert {name: tensor.dtype for name, tensor in found.items()} == {
            f"model.{name}": torch.bfloat16 for name, _ in wanted
        }
        assert all(torch.equal(found[f"model.{name}"], tensor.bfloat16()) for name, tensor in wanted)

    def trains(self, names: Names, run: Callable[[], None]) -> None:
        """Is told to stop in step 3, by a signal to all processes, and goes on from what it has saved.

        In each step each rank has a batch of other samples.
        """
        data = TensorDataset(torch.arange(50.0).reshape(50, 1))
        done: list[list[int]] = []
        later: list[list[int]] = []
        final = []
        for life in range(3):
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 1)
            parallel = DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(model.parameters())

            def train(batch: Any, life: int = life, model: Any = parallel, optimizer: Any = optimizer) -> Any:
                (numbers,) = batch
                assert numbers.shape == (8, 1)
                (done if life == 0 else later).append([int(number) for number in numbers])
                if life == 0 and len(done) == 3:
                    signal_all()
                loss = model(numbers.expand(-1, 4) / 50).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()  # of this rank alone

            names |= {"model": model, "optimizer": optimizer, "train": train, "rank": dist.get_rank()}
            names |= {"data": data, "batch_size": 8, "num_steps": 5000 if life == 0 else len(done) + 5}
            if life == 2:  # nobody interrupts it
                for numbers in [*done, *later]:
                    train([torch.tensor(numbers, dtype=torch.float32).reshape(8, 1)])
                del later[5:]
            else:
                run()
            final.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            if life == 0:
                assert names["state"]["step"] == len(done)
                assert 3 <= len(done) < 5000
                assert names["manager"].stop_requested
            if life == 1:
                assert len(later) == 5
        assert all(torch.equal(final[1][name], final[2][name]) for name in final[1])
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, [*done, *later])
        in_order = [number for step in zip(*everywhere, strict=True) for own in step for number in own]
        assert sorted(in_order[:50]) == list(range(50))
        assert in_order[50:100] == in_order[:50]

    def trains_briefly(self, names: Names, run: Callable[[], None]) -> None:
        done: list[int] = []
        self.prepare_training(names)
        names |= {"train": done.append, "num_steps": 3}
        run()
        names["num_steps"] = 5
        run()
        assert done == [1, 2, 3, 4, 5]
        assert names["state"]["step"] == 5

    def follows_policies(self, names: Names, run: Callable[[], None]) -> None:
        torch.manual_seed(0)
        names |= {"model": torch.nn.Linear(4, 4), "num_steps": 500}
        run()
        dist.barrier()
        saved = [int(path.name.removeprefix("step_")) for path in (self.folder / "dense").glob("step_*")]
        assert min(saved) >= 100
        assert sum(step.bit_count() > 1 for step in saved) <= 3 <= len(saved)

    def keeps_what_differs(self, names: Names, run: Callable[[], None]) -> None:
        sys.path.append(str(Path(sys.prefix) / "titan"))
        if importlib.util.find_spec("torchdata") is None:
            return
        self.prepare_training(names)
        torch.manual_seed(dist.get_rank())
        own = torch.get_rng_state()
        with fastload.CheckpointManager(self.folder / "own") as manager:
            names |= {"manager": manager, "step": 3, "data": range(64)}
            names["DistributedSampler"] = DistributedSampler
            run()
        assert torch.equal(torch.get_rng_state(), own)
        assert names["state"]["step"] == 3
        found = [batch.tolist() for batch in names["loader"]]
        assert sorted(number for batch in found for number in batch) == sorted(names["sampler"])

    def says_what_does_not_fit(self, names: Names, run: Callable[[], None]) -> None:
        names["model"] = torch.nn.Linear(4, 4)
        with redirect_stdout(StringIO()) as said:
            run()
        assert "('weight', 'bias')" in said.getvalue()
        assert "embeddings.word_embeddings.weight" in said.getvalue()

    def logs_all_frames(self, names: Names, run: Callable[[], None]) -> None:
        run()
        assert names["logging"].getLogger("fastload").isEnabledFor(names["logging"].DEBUG)
        names["logging"].getLogger("fastload").setLevel(names["logging"].NOTSET)

    def loads_with_options(self, names: Names, run: Callable[[], None]) -> None:
        run()
        assert names["options"].staging_bytes == 128 << 20
        assert names["state"].keys() == self.twin.state_dict().keys()


def signal_all() -> None:
    """Does as a launcher and Slurm: every process of this rank gets both signals, from somebody else."""
    group = os.getpgid(0)
    command = f"trap '' TERM USR1; kill -TERM -{group}; kill -USR1 -{group}"
    subprocess.run(["bash", "-c", command], check=True)


CASES: dict[str, str] = {
    "Load 1": "loads",
    "Save 1": "saves",
    "Train, stop, resume 1": "trains",
    "Loading 1": "loads",
    "More control 1": "opens",
    "Load in the background 1": "reads_ahead",
    "All or nothing 1": "loads_all_or_nothing",
    "Tensors of other ranks 1": "moves",
    "Quantised weights 1": "dequantizes",
    "DDP, FSDP and tensor parallelism 1": "wraps",
    "DDP, FSDP and tensor parallelism 2": "builds_on_meta",
    "DDP, FSDP and tensor parallelism 3": "shards",
    "DDP, FSDP and tensor parallelism 4": "cuts",
    "Checkpoints of DeepSpeed and FSDP1 1": "loads_deepspeed",
    "Saving 1": "saves_and_waits",
    "Copy the state under the next step 1": "saves_under_the_next_step",
    "Sharded states 1": "saves_shards",
    "Shards that you cut yourself 1": "saves_what_is_cut_by_hand",
    "Tensors that come one by one 1": "exports",
    "Training: stop and resume 1": "trains_briefly",
    "Policies of your own 1": "follows_policies",
    "What differs between ranks 1": "keeps_what_differs",
    "When something fails 1": "says_what_does_not_fit",
    "Tracebacks 1": "logs_all_frames",
    "Options 1": "loads_with_options",
}


@contextmanager
def named(block: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"in block {block}")
        raise


def main() -> None:
    warnings.simplefilter("ignore")  # what transformers warns of is not ours to mend
    folder = Path(sys.argv[1])
    readme = Readme(folder)
    names: Names = {}
    blocks = python_blocks()
    for block, case in CASES.items():
        code = compile(adapted(blocks[block], folder), block, "exec")
        with named(block):
            getattr(readme, case)(names, lambda code=code: exec(code, names))
        dist.barrier()
        sys.stdout.write(f"rank {dist.get_rank()} {block}\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
