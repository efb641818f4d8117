"""What the ranks of test_lightning.py do. Not imported by pytest itself: Lightning takes seconds."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy as TheirDDPStrategy
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

import fastload
from fastload.integrations.lightning import DDPStrategy, ModelParallelStrategy
from fastload.storage.local_target import LocalFiles
from tests.pages import run_program

# Of a launcher; the ranks have met already.
ENVIRONMENT = {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


class Module(pl.LightningModule):
    """Has weights, running statistics, and a scheduler."""

    def __init__(self, width: int = 8, where: Any = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
        )

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not hasattr(self.net, "unshard"):
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


class Killer(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Own(Callback):
    """Has a state that differs between the ranks; that of rank 0 is saved, as Lightning does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "tensor": torch.tensor(self.rank)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == state["tensor"] == 0


def strategy_of(kind: str, world: int, **keywords: Any) -> Any:
    environment = {"cluster_environment": TorchElasticEnvironment()}
    if kind == "theirs":
        return TheirDDPStrategy(**environment, find_unused_parameters=True)
    if kind == "ddp":  # whose way of adding up stays the same from the first step on, with unused parameters
        return DDPStrategy(**environment, **keywords, find_unused_parameters=True)
    strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, **keywords)
    strategy.cluster_environment = TorchElasticEnvironment()
    return strategy


def trainer_of(
    folder: Path, kind: str, world: int, *, plugins: Any = None, kill_at: int = -1, **keywords: Any
) -> pl.Trainer:
    os.environ |= ENVIRONMENT
    kept = ModelCheckpoint(folder, monitor="loss", save_top_k=1, save_last=True)
    return pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=world,
        strategy=strategy_of(kind, world, **keywords),
        callbacks=[kept, Killer(kill_at)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=plugins,
    )


def loader() -> Any:
    values = torch.rand(32, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(values), batch_size=2, shuffle=True)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def trains(rank: int, world: int, folder: Path, kind: str, kill_at: int, resumes: bool) -> dict[str, Any]:
    pl.seed_everything(1, verbose=False)
    trainer = trainer_of(folder, kind, world, kill_at=kill_at, in_background=True)
    model = Module()
    began_at: list[int] = []

    class Beginning(Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            began_at.append(trainer.global_step)

    trainer.callbacks += [Beginning(), Own(rank)]
    trainer.fit(model, loader(), ckpt_path="last" if resumes else None)
    assert trainer.current_epoch == 4
    callback: Any = trainer.checkpoint_callback
    weights = weights_of(model)
    # What is last is all that Lightning would have saved, as a state.
    state = fastload.load(folder / "last.ckpt")
    assert {"epoch", "global_step", "loops", "callbacks", "lr_schedulers", "hyper_parameters"} <= state.keys()
    if rank == 0:
        assert all(torch.equal(state["state_dict"][name], tensor) for name, tensor in weights.items())
    assert len(state["optimizer_states"][0]["state"]) == len(list(model.parameters()))
    return {
        "weights": {name: tensor.tolist() for name, tensor in weights.items()} if rank == 0 else {},
        "best": Path(callback.best_model_path).name,
        "kept": sorted(path.name for path in folder.iterdir()),
        "began_at": began_at[0],
    }


def adapts(rank: int, world: int, folder: Path) -> None:
    """The adapters of a model of PEFT train, and come back with its base, plain or sharded."""
    from peft import LoraConfig, get_peft_model

    class Adapted(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = get_peft_model(self.net, LoraConfig(target_modules=["0"]))  # type: ignore[arg-type,assignment]

        def configure_model(self) -> None:
            if isinstance(self.trainer.strategy, ModelParallelStrategy):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    for kind, other in (("ddp", "shards"), ("shards", "ddp")):
        pl.seed_everything(1, verbose=False)
        model, again = Adapted(), Adapted()
        trainer_of(folder / kind, kind, world).fit(model, loader())
        trainer_of(folder / "other", other, world).validate(
            again, loader(), ckpt_path=str(folder / kind / "last.ckpt"), verbose=False
        )
        expected, found = fastload.load(folder / kind / "last.ckpt")["state_dict"], weights_of(again)
        assert expected["net.base_model.model.0.lora_B.default.weight"].any()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def loads_elsewhere(rank: int, world: int, folder: Path, kind: str) -> None:
    """A checkpoint of one kind, on another number of ranks; weights alone; and a file of Lightning's own."""
    weights = fastload.load(folder / "last.ckpt")["state_dict"]
    pl.seed_everything(2, verbose=False)
    model = Module()
    trainer_of(folder / "other", kind, world).validate(
        model, loader(), ckpt_path=str(folder / "last.ckpt"), verbose=False
    )
    assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(model).items() if rank == 0)
    if kind == "ddp":
        theirs = trainer_of(folder / "theirs", "theirs", world)
        theirs.fit(Module(), loader())
        ours = trainer_of(folder / "ours", kind, world)
        ours.fit_loop.max_epochs = 5
        ours.fit(model, loader(), ckpt_path=theirs.checkpoint_callback.last_model_path)  # type: ignore[union-attr]
        assert ours.global_step == theirs.global_step // 4 * 5
        assert (folder / "ours" / "last.ckpt" / "fastload.json").exists()
        keeps_the_best_of_each(rank, world, folder / "both")


def keeps_the_best_of_each(rank: int, world: int, folder: Path) -> None:
    """Two callbacks that think of the same names, while saves take longer than what is between them."""
    kept = [ModelCheckpoint(folder, monitor="loss", mode=mode) for mode in ("min", "max")]
    trainer = trainer_of(folder / "neither", "ddp", world, in_background=True)
    trainer.callbacks[-2:] = kept
    trainer.fit_loop.max_epochs = 2
    finish = LocalFiles.finish

    def finish_late(files: LocalFiles) -> None:
        time.sleep(0.2)
        finish(files)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFiles, "finish", finish_late)
        trainer.fit(Module(), loader())
    paths = [callback.best_model_path for callback in kept]
    assert len({*paths}) == 2
    if rank == 0:  # which removes
        assert sorted(map(str, folder.iterdir())) == sorted(paths)


class Odd(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"it": object()}


class Sharding(Module):
    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.1)


class Quantized(Module):
    """With a weight of several tensors, as those of torchao are, by a class that torch has itself."""

    def configure_model(self) -> None:
        name, weight = next(iter(self.named_parameters()))
        owner, _, last = name.rpartition(".")
        odd = TwoTensor(weight.detach(), weight.detach())
        setattr(self.get_submodule(owner), last, torch.nn.Parameter(odd))


class EightfoldLater(torch.optim.SGD):
    """Makes states of several tensors in its first step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["a"] = self.made_for(parameter)
        return loss

    def made_for(self, parameter: torch.Tensor) -> Any:
        return TwoTensor(parameter.detach(), parameter.detach())


class Eightfold(EightfoldLater):
    """Likewise, with the method by which the optimizers of torchao make theirs."""

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> Any:
        return self.made_for(p)


class Compressed(Module):
    kind: Any = None

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1)


def refuses(rank: int, world: int, folder: Path) -> None:
    def fit(model: Module, *callbacks: Callback, plugins: Any = None) -> None:
        trainer = trainer_of(folder, "ddp", world, plugins=plugins)
        trainer.callbacks += callbacks
        trainer.fit(model, loader())

    with pytest.raises(fastload.OptionError, match=r"(?s)cannot be saved: .*hyper_parameters.*where.*Path"):
        fit(Module(where=pathlib.Path("a")))
    with pytest.raises(fastload.OptionError, match=r"(?s)cannot be saved: .*callbacks.*Odd.*it.*object"):
        fit(Module(), Odd())
    with pytest.raises(fastload.OptionError, match=r"AsyncCheckpointIO: fastload takes the place"):
        fit(Module(), plugins=[AsyncCheckpointIO()])
    with pytest.raises(fastload.OptionError, match=r"optimizers that shard their states themselves"):
        fit(Sharding())
    with pytest.raises(fastload.OptionError, match=r"cannot save a training with weights of .*TwoTensor$"):
        fit(Quantized())
    for kind, why in ((Eightfold, r".*state is a torch\."), (EightfoldLater, r".*\['a'\] is a torch\.")):
        model = Compressed()
        model.kind = kind
        with pytest.raises(
            fastload.OptionError, match=rf"with the optimizer .*{kind.__name__}: {why}.*TwoTensor"
        ):
            fit(model)
    with pytest.raises(fastload.OptionError, match=r"save_distributed_checkpoint"):
        ModelParallelStrategy(save_distributed_checkpoint=False)


def runs_the_recipe(rank: int, world: int) -> None:
    os.environ |= ENVIRONMENT
    run_program("docs/recipes/lightning.md")


def runs_the_recipe_for_fabric(rank: int, world: int) -> None:
    os.environ |= ENVIRONMENT
    run_program("docs/recipes/fabric.md")


def saves_and_is_killed(
    rank: int, world: int, folder: Path, in_background: bool, dies_when: str, resumes: bool
) -> int:
    """A training with ``save_last="link"`` that is killed within its third epoch, or where a checkpoint goes.

    Args:
        dies_when: ``writing``: while its second checkpoint is written. ``written``: once that is the last
            one. ``removing``: once the first one is gone. Empty if it lives on.

    Returns:
        The epoch with which it begins.
    """
    last, dying, is_blocked = folder / "last.ckpt", folder.with_name("dying"), threading.Event()
    began_at: list[int] = []

    def block(done: int, total: int) -> None:
        if dies_when == "writing" and rank == 0 and (folder / "epoch=0.ckpt").exists():
            is_blocked.set()
            time.sleep(60)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Beginning(Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, _: Any) -> None:
            began_at.append(trainer.current_epoch)
            if trainer.current_epoch != 2 or dies_when not in ("writing", "written"):
                return
            if rank:
                wait_until(dying.exists)
                die()
            if dies_when == "writing":
                assert is_blocked.wait(30)
                names = sorted(path.name for path in folder.iterdir() if path.name[0] != ".")
                assert names == ["epoch=0.ckpt", "last.ckpt"]
            else:  # without a further call of the training
                wait_until(lambda: last.resolve().name == "epoch=1.ckpt")
                wait_until(lambda: not (folder / "epoch=0.ckpt").exists())
                assert (last / "fastload.json").exists()
            dying.touch()
            die()

    def remove(path: Any, *given: Any, **how: Any) -> None:
        rmtree(path, *given, **how)
        if os.path.basename(path) == "epoch=0.ckpt":
            die()

    options = fastload.SaveOptions(progress=block)
    trainer = trainer_of(folder, "ddp", world, in_background=in_background, save_options=options)
    checkpoints = ModelCheckpoint(
        folder, "{epoch}", save_last="link", save_top_k=1, save_on_train_epoch_end=True
    )
    trainer.callbacks[:] = [Beginning(), checkpoints]
    rmtree = shutil.rmtree
    with pytest.MonkeyPatch.context() as patch:
        if dies_when == "removing":
            patch.setattr(shutil, "rmtree", remove)
        pl.seed_everything(1, verbose=False)
        survives = (
            contextlib.suppress(RuntimeError, fastload.FastloadError)
            if dies_when
            else contextlib.nullcontext()
        )
        with survives:
            trainer.fit(Module(), loader(), ckpt_path="last" if resumes else None)
    if not dies_when:
        assert fastload.load(last)["epoch"] == 3
    return began_at[0]


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def saves_after_a_link(rank: int, world: int, folder: Path) -> None:
    """Trainings that go on differently replace a directory by a link, and a link instead of its target."""
    for kind, num_epochs in ((True, 1), ("link", 2), (True, 3)):
        trainer = trainer_of(folder, "ddp", world, in_background=True)
        trainer.fit_loop.max_epochs = num_epochs
        trainer.callbacks[:] = [ModelCheckpoint(folder, "{epoch}", save_last=kind, save_top_k=-1)]  # type: ignore[arg-type]
        trainer.fit(Module(), loader(), ckpt_path="last")
    torch.distributed.barrier()  # rank 0 removes the old link
    epochs = {path.name: fastload.load(path)["epoch"] for path in sorted(folder.iterdir())}
    assert epochs == {"epoch=0.ckpt": 0, "epoch=1.ckpt": 1, "epoch=2.ckpt": 2, "last.ckpt": 2}
    assert not (folder / "last.ckpt").is_symlink()


class Stumbling(Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 12:
            raise ZeroDivisionError


def stumbles(rank: int, world: int, folder: Path) -> None:
    """What is saved because of an error is complete when ``fit`` raises it."""
    trainer = trainer_of(folder, "ddp", world, in_background=True)
    trainer.callbacks[:] = [
        Stumbling(),
        ModelCheckpoint(folder, "{step}", save_last="link", save_top_k=-1, save_on_exception=True),
        OnExceptionCheckpoint(folder, "error"),
    ]
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Module(), loader())
    assert fastload.load(folder / "error.ckpt")["global_step"] == 12
    assert (folder / "last.ckpt").resolve().name == "step=12.ckpt"
    assert fastload.load(folder / "last.ckpt")["global_step"] == 12


def cannot_link(rank: int, world: int, folder: Path) -> None:
    """A link that cannot be made is an error of the next save, on all ranks."""

    def refuse(*_: Any) -> None:
        raise PermissionError("no links here")

    trainer = trainer_of(folder, "ddp", world, in_background=True)
    trainer.callbacks[:] = [ModelCheckpoint(folder, "{epoch}", save_last="link", save_top_k=-1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "symlink", refuse)
        with pytest.raises(fastload.FastloadError, match=r"linking .*last\.ckpt failed: .*no links here"):
            trainer.fit(Module(), loader())


class Phased(Module):
    """Has a buffer that is a lazy conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phases", torch.tensor([1 + 2j, 3 - 1j]).conj())
        assert self.phases.is_conj()


def averages(rank: int, world: int, folder: Path) -> None:
    """Averages of weights and running statistics, which are the callback's, and differ between ranks."""

    def fit(num_epochs: int) -> EMAWeightAveraging:
        torch.manual_seed(rank)  # DDP makes the parameters alike, after the callback has copied them
        trainer = trainer_of(folder, "ddp", world, in_background=True)
        trainer.fit_loop.max_epochs = num_epochs
        averaging = EMAWeightAveraging(decay=0.9, update_starting_at_epoch=1, update_starting_at_step=100)
        trainer.callbacks[:] = [averaging, ModelCheckpoint(folder, save_last=True, save_top_k=-1)]
        trainer.fit(Phased(), loader(), ckpt_path="last")
        return averaging

    for num_epochs in (1, 3):  # the first one ends before anything is averaged
        averaging = fit(num_epochs)
        torch.distributed.barrier()
        saved = fastload.load(folder / "last.ckpt")
        assert saved["epoch"] == num_epochs - 1
        assert torch.allclose(saved["state_dict"]["phases"], torch.tensor([1 - 2j, 3 + 1j]))
        assert saved["current_model_state"].keys() == saved["state_dict"].keys()
        assert saved["averaging_state"]["n_averaged"] == num_epochs - 1
        if rank == 0:
            model: Any = averaging._average_model
            for name, tensor in model.module.state_dict().items():
                assert torch.equal(saved["state_dict"][name], tensor), name


class Shadow(Callback):
    """Saves sharded tensors of its own, next to a value that differs between ranks."""

    loaded: Any = None

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.saved = {name: each.detach() * 2 for name, each in pl_module.named_parameters()}
        checkpoint["shadow"] = {"tensors": [self.saved, trainer.global_step], "rank": trainer.global_rank}

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["shadow"]


def shadows(rank: int, world: int, folder: Path) -> None:
    trainer = trainer_of(folder, "shards", world, in_background=True)
    shadow = Shadow()
    trainer.callbacks[:] = [shadow, ModelCheckpoint(folder, save_last=True, save_top_k=-1)]
    trainer.fit(Module(), loader())
    assert isinstance(shadow.saved["net.0.weight"], DTensor)
    expected = {name: tensor.full_tensor() for name, tensor in shadow.saved.items()}
    saved = fastload.load(folder / "last.ckpt")["shadow"]
    again = trainer_of(folder / "again", "shards", world)
    again.callbacks.insert(0, shadow)
    again.validate(Module(), loader(), ckpt_path=str(folder / "last.ckpt"), verbose=False)
    for found in (saved, shadow.loaded):
        tensors, step = found["tensors"]
        assert (found["rank"], step) == (0, trainer.global_step)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
