"""Ray Train: two workers on a Ray of this machine alone.

`--how "handed on"`: that Ray runs without the variables of a run, as one that was started before; its workers get them.
"""

import os
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


def main(bad, **where):
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False, **where)
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


if __name__ == "__main__":
    args = parse()
    variables = gpuwatch.env()
    if args.how == "handed on":
        for name in variables:
            del os.environ[name]
        main(args.rank, runtime_env={"env_vars": variables})
    else:
        main(args.rank)
