"""Lightning starts a second rank, and is the first itself; in batch 3 both wait until a file is there."""

import sys
import time
from pathlib import Path

import lightning
import torch
from ddp_overflow import Net


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, inputs, number):
        if number == 3:
            sys.stdout.write(f"rank {self.global_rank} waits\n")
            sys.stdout.flush()
            while not Path(sys.argv[1]).exists():
                time.sleep(0.05)
        return self.net(inputs).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


if __name__ == "__main__":
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"),
        False,
    )
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.rand(24, 8), batch_size=4))
