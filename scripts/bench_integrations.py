"""The cost of checkpoints in a training with transformers' Trainer or Lightning: their own, and fastload's.

    python scripts/bench_integrations.py trainer --model minilm
    python scripts/bench_integrations.py lightning --model 400MB

Each arm is a separate training with DDP on one machine: some steps, a save after each, and a long step after
each save, so that a save in the background ends before the next one. Then another training resumes with each
arm in turn, several times, from files that are not in the page cache. Seconds are those of the slowest rank:
the time that training waits for a save, and the time that a resume waits for the state of model and
optimizer. Run as root, since the page cache is dropped.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores

import click
import torch.distributed as dist
from bench_parts.job import all_ranks, run_on_ranks, write_json

MODELS = {  # hidden size, layers, words: of a Llama, in float32
    "minilm": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 30522},
    "400MB": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 16384},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
}
ARMS = ("theirs", "fastload", "fastload, in the background")
NUM_SAVES = 4


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("library", type=click.Choice(["trainer", "lightning"]))
@click.option("--model", type=click.Choice(list(MODELS)), default="minilm", show_default=True)
@click.option("--ranks", default=4, show_default=True, help="Processes that train together.")
@click.option("--loads", default=3, show_default=True, help="How often each arm resumes.")
@click.option("--folder", type=click.Path(file_okay=False), help="On the file system to save to.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write all numbers there.")
def main(library: str, model: str, ranks: int, loads: int, folder: str | None, json_path: str | None) -> None:
    """Trains and saves with each arm, resumes with each in turn, and prints a table."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder) as whole:

        def measured(arm: str, **given: Any) -> Any:
            below = Path(whole, str(ARMS.index(arm)))
            below.mkdir(exist_ok=True)
            return run_on_ranks(__file__, ranks, str(below), library=library, model=model, arm=arm, **given)

        for arm in ARMS:
            rows[arm] = measured(arm, resumes=False) | {"loads_s": []}
        for _ in range(loads):
            for arm in ARMS:
                rows[arm]["loads_s"].append(measured(arm, resumes=True)["load_s"])
    nbytes = rows["theirs"]["nbytes"]
    print(f"{library}, {model}, {ranks} ranks, {nbytes / 1e6:.0f} MB a checkpoint; medians, in seconds")
    print("| | the first save | each later save | load | min\u2013max |\n|---|---|---|---|---|")
    for arm, row in rows.items():
        (first, *later), loaded = row["stalls_s"], row["loads_s"]
        numbers = f"{first:.2f} | {median(later):.2f} | {median(loaded):.2f}"
        print(f"| {arm} | {numbers} | {min(loaded):.2f}\u2013{max(loaded):.2f} |", flush=True)
    write_json(json_path, rows)


# ---- the ranks


class Clock:
    """Sums the seconds of calls, on all ranks from a barrier to the slowest."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def around(self, owner: Any, name: str) -> None:
        """Times a method from now on."""
        own = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            dist.barrier()
            began = time.perf_counter()
            result = own(*arguments, **keywords)
            self.seconds.append(max(all_ranks(time.perf_counter() - began)))
            return result

        setattr(owner, name, timed)


def rank(settings: dict[str, Any]) -> None:
    """Runs one rank of a training; the first one writes its measurements."""
    run: Callable[..., Any] = {"trainer": with_trainer, "lightning": with_lightning}[settings["library"]]
    folder = Path(settings["folder"])
    if settings["resumes"]:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
    clock = Clock()
    run(folder / "run", MODELS[settings["model"]], settings["arm"], settings["resumes"], clock)
    if int(os.environ["RANK"]) == 0:
        nbytes = sum(path.stat().st_size for path in (folder / "run").rglob("*")) / NUM_SAVES
        rows = {"stalls_s": clock.seconds, "load_s": sum(clock.seconds), "nbytes": nbytes}
        (folder / "rows.json").write_text(json.dumps(rows))
    if dist.is_initialized():  # otherwise threads of Gloo may abort a process at its exit
        dist.barrier()
        dist.destroy_process_group()


def llama(sizes: dict[str, int]) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8))


def with_trainer(folder: Path, sizes: dict[str, int], arm: str, resumes: bool, clock: Clock) -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from fastload.integrations.trainer import TrainerMixin

    class Ours(TrainerMixin, Trainer):
        saves_in_background = arm.endswith("background")

    class LongSteps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assembly = getattr(trainer, "_assembly", None)
            while assembly is not None and any(all_ranks(assembly.goes_on)):
                time.sleep(0.05)

    data: Any = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64
    steps = NUM_SAVES + resumes
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=1,
        max_steps=steps,
        save_steps=1 if not resumes else 100,
        save_strategy="no" if resumes else "steps",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    kind = Trainer if arm == "theirs" else Ours
    trainer = kind(model=llama(sizes), args=arguments, train_dataset=data, callbacks=[LongSteps()])
    for name in (
        ("_load_from_checkpoint", "_load_optimizer_and_scheduler") if resumes else ("_save_checkpoint",)
    ):
        clock.around(trainer, name)
    trainer.train(resume_from_checkpoint=resumes)


def with_lightning(folder: Path, sizes: dict[str, int], arm: str, resumes: bool, clock: Clock) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy as Theirs

    from fastload.integrations.lightning import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = llama(sizes)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(input_ids=batch[0], labels=batch[0]).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class LongSteps(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            handle = getattr(getattr(strategy, "_saves", None), "_handle", None)
            while handle is not None and any(all_ranks(not handle.done())):
                time.sleep(0.05)

    data = torch.utils.data.TensorDataset(torch.arange(8).repeat(64, 1))
    strategy: Any = Theirs() if arm == "theirs" else DDPStrategy(in_background=arm.endswith("background"))
    trainer = pl.Trainer(
        max_steps=NUM_SAVES + resumes,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        callbacks=[
            LongSteps(),
            *([] if resumes else [ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)]),
        ],
        enable_checkpointing=not resumes,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if resumes:
        connector = trainer._checkpoint_connector
        for name in ("resume_start", "restore_model", "restore_optimizers"):
            clock.around(connector, name)
        path = max(folder.iterdir(), key=lambda each: each.stat().st_mtime)
        trainer.fit(Module(), torch.utils.data.DataLoader(data), ckpt_path=str(path))
    else:
        clock.around(trainer, "save_checkpoint")
        trainer.fit(Module(), torch.utils.data.DataLoader(data))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(json.loads(sys.argv[2]))
    else:
        main()
