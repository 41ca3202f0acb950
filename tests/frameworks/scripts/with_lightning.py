"""Lightning starts its own ranks: `--how ddp` by running the script again, `ddp_spawn` by multiprocessing.

`--how manual` is ddp, and the module calls its optimizer itself. `--how log` is ddp with a logger, to which
gpuwatch logs.
"""

import gpuwatch
import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from model import BATCHES, Net, batches, parse, say

ARGS = parse()
MANUAL, LOGS = ARGS.how == "manual", ARGS.how == "log"


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.automatic_optimization = not MANUAL

    def training_step(self, inputs, number):
        loss = self.net(inputs).mean()
        if LOGS:
            self.log("loss", loss)
        say(f"rank {self.global_rank} loss {loss.item().hex()}")
        if MANUAL:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, inputs, number):
        self.net(inputs)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Batches(torch.utils.data.IterableDataset):
    def __init__(self, bad):
        self.bad = bad

    def __iter__(self):
        rank = torch.distributed.get_rank()
        yield from batches(rank, self.bad)


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator={"cpu": "cpu", "cuda": "gpu"}[ARGS.device],
        devices=ARGS.ranks,
        strategy="ddp" if MANUAL or LOGS else ARGS.how,
        max_epochs=1,
        limit_train_batches=BATCHES,
        logger=TensorBoardLogger(".") if LOGS else False,
        log_every_n_steps=1,
        callbacks=[gpuwatch.LightningCallback()] if LOGS else [],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=1,
    )
    load = torch.utils.data.DataLoader
    trainer.fit(Module(), load(Batches(ARGS.rank), batch_size=None), load(Batches(-1), batch_size=None))
