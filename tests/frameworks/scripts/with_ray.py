"""Ray Train: two workers on a Ray of this machine alone; `--how` is the address of one that was started before."""

import tempfile
from pathlib import Path

import gpuwatch
import ray
import ray.train
import ray.train.torch
import torch
from model import Net, batches, parse


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
    bad, address = parse().rank, parse().how
    if address:
        ray.init(address=address, runtime_env={"env_vars": gpuwatch.env()}, log_to_driver=False)
    else:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            work,
            train_loop_config={"bad": bad, "folder": folder},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=folder),
        )
        try:
            trainer.fit()
        finally:
            for told in sorted(Path(folder).glob("[0-9]")):
                print(told.read_text(), end="", flush=True)
