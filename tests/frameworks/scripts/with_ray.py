"""Ray Train: workers on a Ray of this machine alone; `--how` is the address of one that was started before."""

import tempfile
import time
from pathlib import Path

import gpuwatch
import ray
import ray.train
import ray.train.torch
import torch
from model import Net, batches, parse
from ray._private import services

START_S = 300.0


def get_node(*args, ask=services.get_node):
    """Ray asks whether its node has started, for 30 s, and no variable of its changes that."""
    ends = time.monotonic() + START_S
    while True:
        try:
            return ask(*args)
        except RuntimeError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.1)


def work(config):
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for inputs in batches(rank, config["bad"]):
        loss = model(inputs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with Path(config["folder"], str(rank)).open("a") as file:
            file.write(f"rank {rank} loss {loss.item().hex()}\n")


if __name__ == "__main__":
    args = parse()
    services.get_node = get_node
    if args.how:
        ray.init(address=args.how, runtime_env={"env_vars": gpuwatch.env()}, log_to_driver=False)
    else:
        ray.init(num_cpus=args.ranks, include_dashboard=False, log_to_driver=False, configure_logging=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            work,
            train_loop_config={"bad": args.rank, "folder": folder},
            scaling_config=ray.train.ScalingConfig(num_workers=args.ranks),
            run_config=ray.train.RunConfig(storage_path=folder),
        )
        try:
            trainer.fit()
        finally:
            for told in sorted(Path(folder).glob("[0-9]")):
                print(told.read_text(), end="", flush=True)
