"""What it costs the host to show a collective: `all_reduce` of four numbers on a gloo group of one process, in turns.

python benchmarks/collectives.py --rounds 200
python benchmarks/collectives.py --cpp           # issued by C++, as DDP's are: seen from torch 2.14 on
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpuwatch.core.judge import WarningLimits
from gpuwatch.core.recorder.group_table import GroupField
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker.hooks.process_groups import CollectivePatches
from gpuwatch.worker.record.late_masks import LateMasks
from gpuwatch.worker.record.names import ModuleSelection
from gpuwatch.worker.record.notable import NotableFilter
from gpuwatch.worker.record.passed import LatePassed, PassedValues
from gpuwatch.worker.record.progress import RunProgress
from gpuwatch.worker.record.rows import RowWriter
from turns import in_turns, interval

PLAIN, NATIVE, PYTHON = "plain", "native", "Python"
SHOWN = "native, not inspected"
AT_MOST_US = 1.0
"""What the native writer may add to a collective and its wait."""
_CALLS = 200


def measure(rounds: int, cpp: bool = False) -> dict[str, list[float]]:
    """Variant -> microseconds for a collective and its wait, one number a round. SystemExit on a fault of ours.

    `cpp`: C++ issues it and waits for it.
    """
    tensor = torch.ones(4)
    in_cpp = torch.ops._c10d_functional

    def reduce() -> None:
        if cpp:
            in_cpp.wait_tensor(in_cpp.all_reduce_(tensor, "sum", dist.group.WORLD.group_name))
        else:
            dist.all_reduce(tensor)

    spent: dict[str, list[float]] = {PLAIN: [], SHOWN: [], NATIVE: [], PYTHON: []}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        recorder = RecorderWriter(Path(folder) / "recorder", rank=0, local_rank=0, world_size=1, attempt=0)
        progress = RunProgress(recorder, WorkerSettings(""), 0)
        groups = progress.groups
        passed = PassedValues(progress)
        faults: list[Exception] = []

        def on_fault(part: str, error: Exception) -> None:
            faults.append(error)

        rows = RowWriter(recorder, NotableFilter(WarningLimits()), on_fault, ModuleSelection((), ()), progress.where)
        late = LatePassed(passed, rows, progress, LateMasks(rows))  # told of each collective, as in a watched rank
        watchers = {
            name: CollectivePatches(
                groups,
                on_fault,
                native=name != PYTHON,
                passed=passed if name != SHOWN else None,
                late=late,
            )
            for name in (SHOWN, NATIVE, PYTHON)
        }

        def run(variant: str) -> None:
            watcher = watchers.get(variant)
            if watcher is not None:
                watcher.attach()
                if (groups.native is not None) != (variant != PYTHON):
                    raise SystemExit("the native part is not there: install a C compiler, then gpuwatch again")
            reduce()
            began = time.perf_counter()
            for _ in range(_CALLS):
                reduce()
            spent[variant].append((time.perf_counter() - began) / _CALLS * 1e6)
            if watcher is not None:
                groups.notice()
                shown, number = groups.slot_of(dist.group.WORLD), GroupField.BEGUN if cpp else GroupField.ENDED
                if shown is None or recorder.groups[shown.field + number] < _CALLS:
                    raise SystemExit("the collectives were not noted")
                watcher.detach()

        in_turns(list(spent), rounds, run)
        dist.destroy_process_group()
        recorder.close()
    if faults:
        raise SystemExit(f"gpuwatch failed: {faults[0]!r}")
    return spent


def main() -> None:
    """Print the median of the difference, and its 95 % interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help=f"of {_CALLS} collectives each (default: 200)")
    parser.add_argument("--cpp", action="store_true", help="a functional collective, which C++ issues")
    options = parser.parse_args()
    spent = measure(options.rounds, options.cpp)
    print(f"torch {torch.__version__}, all_reduce of 4 numbers, one process: {statistics.median(spent[PLAIN]):.2f} us")
    for name in (SHOWN, NATIVE, PYTHON):
        added = [watched - plain for plain, watched in zip(spent[PLAIN], spent[name], strict=True)]
        low, high = interval(added)
        ratio = statistics.median(watched / plain for plain, watched in zip(spent[PLAIN], spent[name], strict=True))
        more = f"{statistics.median(added):.2f} us more ({low:.2f} to {high:.2f}), {ratio:.3f} of plain"
        print(f"shown in the recorder, {name}: {more}")


if __name__ == "__main__":
    main()
