"""A script that trains without torch: numbers of two layers, which it writes into its recorder as the hooks would.

    light_rank.py BATCHES [--overflow RANK BATCH] [--goes-on] [--waits-at BATCH]

Rank, session, recorder and all that comes after them are the product's; a run takes a second instead of ten. A rank
waits at each batch for the others, as in an all_reduce, and at one of them for a file `go`. It writes its losses into
a file of its own at the end.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.definitions import ModuleDef, RootDef, ShapeDef, SlotDef
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.frames import FramePhase, RowKind
from gpuwatch.core.recorder.layout import NOTHING, HeadField, HooksState
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import DTYPE_CODES, NonFinite, ValueEncoding
from gpuwatch.worker import session as sessions

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FLOAT32 = ValueEncoding.FLOAT32 << 8
ONE, INF = 0x3F80_0000, 0x7F80_0000
LAYERS = ("fc1", "fc2")
NEVER_S = 300.0


class Frames:
    """What hooks would write of `Net(fc1, fc2)`."""

    def __init__(self, recorder: RecorderWriter, *, ends: bool) -> None:
        self._recorder = recorder
        self._ends = ends
        recorder.fields[HeadField.HOOKS] = HooksState.ATTACHED
        for entry in (RootDef(0, "Net"), ShapeDef(0, (4, 8)), ModuleDef(0, 0, "", "Net")):
            recorder.append(entry, name=True)
        for number, name in enumerate(LAYERS, 1):
            recorder.append(ModuleDef(number, 0, name, "Linear"), name=True)
        for number in range(1 + len(LAYERS)):
            for place, role in enumerate(("weight", "input[0]", "output")):
                recorder.append(SlotDef(3 * number + place, number, role), name=True)

    def batch(self, number: int, bad: str) -> None:
        """One forward. From the layer `bad` on the outputs are inf."""
        recorder = self._recorder
        recorder.fields[HeadField.STEP] = number
        page = recorder.begin_page(0, number, number)
        given, weight = self._value(ONE), self._value(ONE)
        first, is_bad = given, False
        for layer, name in enumerate(LAYERS, 1):
            is_bad = is_bad or name == bad
            made = self._value(ONE, inf=is_bad)
            index = self._frame(layer, 0, 1, number, (weight, given, made))
            if name == bad:
                where = RunPosition(RANK, 0, number, number, "Net", number, number, time.time_ns())
                recorder.append(
                    Anomaly(
                        where, index, name, "Linear", "forward", "output", "+inf", "float32", [4, 8], aborts=self._ends
                    )
                )
            given = made
        self._frame(0, NOTHING, 0, number, (NOTHING, first, given))
        recorder.end_page(page)

    def _value(self, bits: int, *, inf: bool = False) -> int:
        if inf:
            return self._recorder.value(0, INF, FLOAT32 | NonFinite.POSINF)
        return self._recorder.value(bits, bits, FLOAT32)

    def _frame(self, module: int, parent: int, depth: int, seq: int, values: tuple[int, int, int]) -> int:
        rows = [
            (3 * module + place, value, 0, DTYPE_CODES["float32"], RowKind.MEASURED.number, 0)
            for place, value in enumerate(values)
            if value != NOTHING
        ]
        return self._recorder.frame(module, parent, depth, FramePhase.FORWARD.number, seq, rows)


def meet(batch: int) -> None:
    """Wait until all ranks have reached this batch."""
    Path(f"here-{batch}-{RANK}").touch()
    wait_for(*(f"here-{batch}-{rank}" for rank in range(WORLD)))


def wait_for(*files: str) -> None:
    ends = time.monotonic() + NEVER_S
    while not all(Path(file).exists() for file in files):
        if time.monotonic() > ends or os.getppid() == 1:
            sys.exit("the other rank did not come")
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("batches", type=int)
    parser.add_argument("--overflow", type=int, nargs=2, default=(-1, -1), metavar=("RANK", "BATCH"))
    parser.add_argument("--goes-on", action="store_true")
    parser.add_argument("--waits-at", type=int, default=-1, metavar="BATCH")
    args = parser.parse_args()
    session = sessions._current
    frames = Frames(session.recorder, ends=not args.goes_on) if session is not None else None
    losses = []
    for batch in range(args.batches):
        overflows = (RANK, batch) == tuple(args.overflow)
        if frames is not None:
            frames.batch(batch, "fc2" if overflows else "")
        if overflows and frames is not None and not args.goes_on:
            raise OverflowDetected(f"fc2: +inf in output, batch {batch}")
        meet(batch)
        if batch == args.waits_at:
            wait_for("go")
        losses.append(math.inf if overflows else 1 / (1 + batch))
    Path(f"losses-{RANK}").write_text(" ".join(map(str, losses)))


main()
