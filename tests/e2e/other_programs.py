"""Trains a little with other libraries, and has them save in the folder that is given."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from accelerate import Accelerator


class Module(lightning.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, width)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.net(batch[0]).sum()

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def main(folder: Path) -> None:
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder / "lightning",
    )
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    trainer.fit(Module(8), torch.utils.data.DataLoader(data, batch_size=2))
    trainer.save_checkpoint(folder / "last.ckpt")
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(4)])
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    model(torch.ones(20)).sum().backward()
    optimizer.step()
    accelerator.save_model(model, folder / "sharded", max_shard_size="3KB", safe_serialization=False)
    accelerator.save_state(str(folder / "state"), safe_serialization=False)
    torch.save(model.state_dict(), folder / "expected.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
