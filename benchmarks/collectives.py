"""What it costs the host to show a collective: `all_reduce` of four numbers on a gloo group of one process, in turns.

python benchmarks/collectives.py --rounds 200
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
from gpuwatch.worker.hooks.collectives import Collectives
from gpuwatch.worker.record.group_table import GroupTable
from turns import in_turns, interval

_CALLS = 200


def main() -> None:
    """Print the median of the difference, and its 95 % interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help=f"of {_CALLS} collectives each (default: 200)")
    rounds = parser.parse_args().rounds
    tensor = torch.ones(4)
    spent: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        recorder = RecorderWriter(Path(folder) / "recorder", rank=0, local_rank=0, world_size=1, attempt=0)
        faults: list[Exception] = []
        collectives = Collectives(GroupTable(recorder), lambda part, error: faults.append(error))

        def run(watched: bool) -> None:
            if watched:
                collectives.attach()
            dist.all_reduce(tensor)
            began = time.perf_counter()
            for _ in range(_CALLS):
                dist.all_reduce(tensor)
            spent[watched].append((time.perf_counter() - began) / _CALLS * 1e6)
            collectives.detach()

        in_turns([False, True], rounds, run)
        dist.destroy_process_group()
        recorder.close()
    if faults:
        raise SystemExit(f"gpuwatch failed: {faults[0]!r}")
    added = [watched - plain for plain, watched in zip(spent[False], spent[True], strict=True)]
    low, high = interval(added)
    print(f"all_reduce of 4 numbers, one process: {statistics.median(spent[False]):.2f} us")
    print(f"shown in the recorder: {statistics.median(added):.2f} us more ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
