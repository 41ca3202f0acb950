"""Traced batches beyond what a job's store takes: thinned and counted, and the verdict and its frames do not change."""

from __future__ import annotations

from itertools import pairwise

import pytest
from gpuwatch.collector.finish import build
from gpuwatch.collector.store import RunStore
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.definitions import ModuleDef, RootDef, SlotDef
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptExit
from gpuwatch.core.frames import RowKind
from gpuwatch.core.recorder.layout import NOTHING, HeadField, HooksState, RankPhase, file_name
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import DTYPE_CODES, NonFinite, ValueEncoding
from gpuwatch.core.wire.beat import NodeBeat
from gpuwatch.core.wire.messages import AgentHello, AgentMessage, NodeBye, PageMessage, WantedBatch, encode
from gpuwatch.launcher.agent.rank_pages import TracedBatches
from gpuwatch.launcher.agent.rank_watch import RankWatch

FLOAT32 = ValueEncoding.FLOAT32 << 8
ONE, INF = 0x3F800000, 0x7F800000
BATCHES = 40


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [1, 7, 100, 900])
def test_whole_batches_are_sent_and_their_bytes_are_bounded(size):
    store_bytes = 1000
    traced = TracedBatches(nodes=1, store_bytes=store_bytes)
    sent, spent = [], 0
    for batch in range(200_000):
        if traced.takes(batch):
            sent.append(batch)
            for _ in range(4):  # ranks
                assert traced.takes(batch), "the same for all ranks"
                traced.spent(size)
                spent += size
    assert spent < store_bytes + 4 * size
    assert spent > 0.9 * store_bytes
    assert all(later - earlier <= 2 * earlier + 1 for earlier, later in pairwise(sent)), (
        "at no distance before all is used"
    )


def test_what_fits_is_never_thinned():
    traced = TracedBatches(nodes=8)
    for batch in range(500):
        assert traced.takes(batch)
        traced.spent(8 * 8000)


class Job:
    """Two ranks that write real recorders. Rank 1 overflows in `bad`, and both end well."""

    def __init__(self, folder, bad: int | None) -> None:
        self.writers = [
            RecorderWriter(
                folder / file_name(rank, 0), rank=rank, local_rank=rank, world_size=2, attempt=0, segments=12
            )
            for rank in range(2)
        ]
        self.folder, self.bad = folder, bad
        for writer in self.writers:
            writer.fields[HeadField.HOOKS] = HooksState.ATTACHED
            writer.append(RootDef(0, "Net"))
            for number, name in enumerate(("", "fc1", "fc2")):
                writer.append(ModuleDef(number, 0, name, "Linear" if name else "Net"))
                for place, role in enumerate(("weight", "input[0]", "output")):
                    writer.append(SlotDef(3 * number + place, number, role))

    def batch(self, number: int) -> None:
        for rank, writer in enumerate(self.writers):
            page = writer.begin_page(0, number, number)
            for index, module in enumerate((1, 2, 0)):
                is_bad = rank == 1 and number == self.bad and index > 0
                values = [writer.value(ONE, ONE, FLOAT32), writer.value(ONE, ONE, FLOAT32)]
                values.append(writer.value(0, INF, FLOAT32 | NonFinite.POSINF) if is_bad else values[0])
                writer.frame(
                    module,
                    0 if module else NOTHING,
                    1 if module else 0,
                    0,
                    number,
                    [
                        (3 * module + place, value, NOTHING, DTYPE_CODES["float32"], RowKind.MEASURED.number, 0)
                        for place, value in enumerate(values)
                    ],
                )
            writer.end_page(page)
            if rank == 1 and number == self.bad:
                where = RunPosition(1, 0, number, number, "Net", number, number, 5)
                writer.append(Anomaly(where, 1, "fc2", "Linear", "forward", "output", "+inf", "float32"))

    def watches(self, traced: list[int], store_bytes: int) -> list[RankWatch]:
        """Of one node."""
        traces = TracedBatches(1, store_bytes)
        return [RankWatch(self.folder, rank, 0, 1, traced, 2, traces) for rank in range(2)]

    def end(self) -> None:
        for rank, writer in enumerate(self.writers):
            writer.append(ScriptExit(RunPosition(rank, 0), 0))
            writer.fields[HeadField.PHASE] = RankPhase.FINISHED


def run(folder, bad: int | None, sizes: list[int]) -> list[list[object]]:
    """What the node's agent would send, with each of these sizes of the store. The collector asks as it does."""
    folder.mkdir()
    job = Job(folder, bad)
    nodes = [job.watches(list(range(BATCHES)), size) for size in sizes]
    sent: list[list[object]] = [[] for _ in sizes]
    for number in range(BATCHES):
        job.batch(number)
        for watches, messages in zip(nodes, sent, strict=True):
            for watch in watches:
                messages += watch.poll(float(number))
            if number == bad:
                for watch in watches:
                    watch.want(WantedBatch(0, "Net", 0, number), float(number))
                    watch.want(WantedBatch(0, "Net", 0, number - 1), float(number))
    job.end()
    for watches, messages in zip(nodes, sent, strict=True):
        for watch in watches:
            messages += watch.end(0, "itself", 100.0)
            watch.close()
    for writer in job.writers:
        writer.close()
    return sent


def report_of(path, messages):
    """Made of the store, as `gpuwatch report --again` does."""
    store = RunStore(path, create=True)
    hello = AgentHello("a.0", "host", 2, 1, 1, [], {}, "job", trace_batches=list(range(BATCHES)))
    for n, body in enumerate([hello, *messages, NodeBye("ok")], 1):
        message = AgentMessage(n, body, n - 1)
        if isinstance(body, NodeBeat):
            store.beat("a.0", encode(AgentMessage(0, NodeBeat([*_states(messages)], {}))))
        store.add("a.0", message, encode(message))
    store.commit()
    try:
        return build(store, "run")
    finally:
        store.close()


def _states(messages):
    return [state for body in messages if isinstance(body, NodeBeat) for state in body.ranks if state.final]


@pytest.mark.parametrize("bad", [None, 25, BATCHES - 1])
def test_the_verdict_and_its_frames_are_the_same_and_what_was_thinned_is_counted(tmp_path, bad):
    everything, little = run(tmp_path / "job", bad, [1 << 30, 4000])
    reports = [report_of(tmp_path / f"{n}.sqlite", sent) for n, sent in enumerate((everything, little))]
    full, thinned = reports
    assert full.verdict == thinned.verdict
    assert full.verdict.kind == ("clean" if bad is None else "overflow")
    assert [rank.frames for rank in full.ranks] == [rank.frames for rank in thinned.ranks]
    assert [rank.traces_thinned for rank in full.ranks] == [0, 0]
    for rank in thinned.ranks:
        stored = {body.number for body in little if isinstance(body, PageMessage) and body.rank == rank.rank}
        assert len(stored) + rank.traces_thinned == BATCHES, "recorded = stored + thinned"
        assert rank.traces_thinned > BATCHES // 2
        assert {0, BATCHES - 1} <= stored, "the first and the last"
    if bad is not None:
        stored = {body.number for body in little if isinstance(body, PageMessage) and body.rank == 1}
        assert set(range(bad - 3, bad + 1)) <= stored, "what tells how it came"
