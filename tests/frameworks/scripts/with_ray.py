"""Ray Train: two workers on a Ray of this machine alone. `--how PORT`: on one started before, as a cluster is."""

import contextlib
import os
import subprocess
import sys
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


@contextlib.contextmanager
def cluster(port):
    """In an environment of its own: what is in ours does not come to its workers."""
    clean = {name: value for name, value in os.environ.items() if name not in gpuwatch.env()}
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
        limits = [
            "--node-ip-address=127.0.0.1",
            "--num-cpus=2",
            "--include-dashboard=false",
            "--disable-usage-stats",
            f"--temp-dir={folder}",
        ]
        with subprocess.Popen([*start, *limits], env=clean, stdout=subprocess.DEVNULL) as head:
            try:
                yield f"127.0.0.1:{port}"
            finally:
                ray.shutdown()
                head.terminate()


def main(bad, **where):
    ray.init(log_to_driver=False, configure_logging=False, **where)
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
    if args.how:
        with cluster(args.how) as address:
            main(args.rank, address=address, runtime_env={"env_vars": gpuwatch.env()})
    else:
        main(args.rank, num_cpus=2, include_dashboard=False)
