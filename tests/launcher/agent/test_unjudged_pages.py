"""A rank that rests cannot tell of a bad value whose numbers have come since: its agent finds it in the recorder."""

from __future__ import annotations

import pytest
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.definitions import ModuleDef, RootDef, SlotDef
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.frames import RowKind
from gpuwatch.core.recorder.layout import NOTHING, file_name
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import DTYPE_CODES, PENDING, NonFinite, ValueEncoding
from gpuwatch.core.wire.messages import PageMessage
from gpuwatch.launcher.agent.rank_watch import RankWatch

FLOAT32 = ValueEncoding.FLOAT32 << 8
FINITE, INF = (0, 0x3F800000, FLOAT32), (0, 0x7F800000, FLOAT32 | NonFinite.POSINF)
LATE = (0, 0, PENDING)
INPUT, OUTPUT, ROOT_OUTPUT = 0, 1, 2
FC, ROOT = 0, 1


class Rank:
    """Its recorder, and what its agent reads there."""

    def __init__(self, folder):
        self.writer = RecorderWriter(
            folder / file_name(0, 0), rank=0, local_rank=0, world_size=1, attempt=0, log_bytes=1 << 16, segments=8
        )
        for entry in (RootDef(0, "Net"), ModuleDef(FC, 0, "fc", "Linear"), ModuleDef(ROOT, 0, "", "Net")):
            self.writer.append(entry, name=True)
        for number, (module, role) in enumerate([(FC, "input[0]"), (FC, "output"), (ROOT, "output")]):
            self.writer.append(SlotDef(number, module, role), name=True)
        self.watch = RankWatch(folder, 0, 0, 4242, [])

    def batch(self, number, given, returned, root_returned=None):
        self.writer.begin_page(0, number, number)
        kind, dtype = RowKind.MEASURED.number, DTYPE_CODES["float32"]
        rows = [
            (slot, self.writer.value(*value), NOTHING, dtype, kind, 0) for slot, value in enumerate((given, returned))
        ]
        self.writer.frame(FC, ROOT, 1, 0, 0, rows)
        if root_returned is not None:
            row = (ROOT_OUTPUT, self.writer.value(*root_returned), NOTHING, dtype, kind, 0)
            self.writer.frame(ROOT, NOTHING, 0, 0, 0, [row])

    def unjudged(self):
        self.watch.poll(0)
        return [body.batch for body in self.watch.unjudged(1) if isinstance(body, PageMessage)]


@pytest.fixture
def rank(tmp_path):
    made = Rank(tmp_path)
    yield made
    made.watch.close()
    made.writer.close()


def test_the_page_with_the_bad_value_is_sent_at_once_and_no_other(rank):
    """Also one that is not complete, as its rank stands in it."""
    rank.batch(3, FINITE, FINITE, FINITE)
    rank.batch(4, FINITE, INF, INF)

    assert rank.unjudged() == [4]
    assert rank.unjudged() == []  # it has not changed since


@pytest.mark.parametrize(
    "batch",
    [(INF, FINITE, FINITE), (FINITE, INF, FINITE), (FINITE, FINITE, FINITE), (LATE, INF, INF), (FINITE, LATE, INF)],
    ids=["an argument", "taken away", "finite", "an argument is late", "an earlier number is late"],
)
def test_what_is_no_alarm_or_may_not_be_the_first_is_not_sent(rank, batch):
    rank.batch(4, *batch)

    assert rank.unjudged() == []


def test_what_the_rank_has_told_itself_is_not_looked_for_again(rank):
    rank.batch(4, FINITE, INF, INF)
    rank.writer.append(
        Anomaly(RunPosition(0, 0, 4, 4, "Net", 0), 0, "fc", "Linear", "forward", "output", "+inf", "float32")
    )
    rank.watch.poll(0)

    assert rank.watch.unjudged(9) == []
