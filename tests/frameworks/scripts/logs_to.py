"""Rank 0 logs its loss to a tracker, `--how`, and beside it what gpuwatch sees."""

import gc

import gpuwatch
import torch
from model import Net, batches, parse, say

ARGS = parse()


def tracker():
    """What logs a loss, and the target of gpuwatch."""
    if ARGS.how == "wandb":
        import wandb

        wandb.init(project="test", mode="offline")
        return lambda loss, step: wandb.log({"loss": loss}), wandb, None
    if ARGS.how == "mlflow":
        import mlflow

        mlflow.start_run()
        return lambda loss, step: mlflow.log_metric("loss", loss, step), mlflow, 10
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter("curves")
    return lambda loss, step: writer.add_scalar("loss", loss, step), writer, 10


torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
rank = torch.distributed.get_rank()
model = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
if rank == 0:
    log, target, steps = tracker()
for number, inputs in enumerate(batches(rank, ARGS.rank)):
    loss = model(inputs).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        gpuwatch.log_to(target, steps and steps * number)
        log(loss.item(), steps and steps * number)
    say(f"rank {rank} loss {loss.item().hex()}")
del model, optimizer, loss
gc.collect()
torch.distributed.destroy_process_group()
