"""What it costs a step of DDP that its collectives are shown in the recorder: two ranks, gloo, in turns.

python benchmarks/ddp_step.py --rounds 60
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.worker.hooks.process_groups import CollectivePatches
from gpuwatch.worker.record.group_operations import GroupTable
from torch import multiprocessing, nn
from turns import in_turns, interval

PLAIN, WATCHED = "plain", "watched"
_RANKS, _STEPS = 2, 8


def _rank(rank: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS)
    recorder = RecorderWriter(Path(folder) / f"recorder-{rank}", rank=rank, local_rank=rank, world_size=2, attempt=0)
    faults: list[Exception] = []
    watcher = CollectivePatches(GroupTable(recorder), lambda part, error: faults.append(error), native=True)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 512)
    spent: dict[str, list[float]] = {PLAIN: [], WATCHED: []}

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())

    def run(variant: str) -> None:
        if variant == WATCHED:
            watcher.attach()
        step()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(_STEPS):
            step()
        spent[variant].append((time.perf_counter() - began) / _STEPS * 1e3)
        if variant == WATCHED:
            watcher.detach()

    in_turns(list(spent), rounds, run)  # in the same order on both ranks
    dist.destroy_process_group()
    if faults:
        raise SystemExit(f"gpuwatch failed: {faults[0]!r}")
    if rank == 0:
        ratios = [watched / plain for plain, watched in zip(spent[PLAIN], spent[WATCHED], strict=True)]
        low, high = interval(ratios)
        print(f"a step of DDP, two ranks: {statistics.median(spent[PLAIN]):.2f} ms")
        print(
            f"with its collectives in the recorder: {statistics.median(ratios):.4f} of that ({low:.4f} to {high:.4f})"
        )


def main() -> None:
    """Print the median of the ratio of each round, and its 95 % interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help=f"of {_STEPS} steps each (default: 60)")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (parser.parse_args().rounds, folder), _RANKS)


if __name__ == "__main__":
    main()
