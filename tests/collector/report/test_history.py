"""What a report tells of how an overflow came, from the histories that node agents send."""

from __future__ import annotations

import msgspec
import numpy
import pytest
from gpuwatch.collector.assemble import shown_frames as limits
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.finish import build, open_store, report_from_store, write_report
from gpuwatch.collector.report.html.chart import over_the_batches
from gpuwatch.collector.report.html.page import render_html
from gpuwatch.collector.run_files import RunPaths
from gpuwatch.collector.written_report import read_report
from gpuwatch.core.events.definitions import SlotDef
from gpuwatch.core.frames import LOSS_CLASS, LOSS_MODULE
from gpuwatch.core.values import DTYPE_CODES
from gpuwatch.core.wire.columns import ABSENT, pack
from gpuwatch.core.wire.messages import AgentMessage, RankHistoryMessage, encode

LAST = 7


def codes_of(rows) -> numpy.ndarray:
    """Upper halves of float32; None is what was not measured."""
    numbers = numpy.array([[0.0 if each is None else each for each in row] for row in rows], numpy.float32)
    codes = (numbers.view(numpy.uint32) >> 16).astype(numpy.uint16)
    codes[numpy.array([[each is None for each in row] for row in rows])] = ABSENT
    return codes


def slots_of(batch) -> list[int]:
    """Of what `fc1` and `fc2` returned."""
    found = {(d.module, d.role): d.id for d in batch._definitions if hasattr(d, "role")}
    return [found[batch.module(name), "output"] for name in ("fc1", "fc2")]


def slot_of_loss(batch) -> int:
    """Of what the backward began from."""
    return slot_of_output(batch, LOSS_MODULE)


def slot_of_output(batch, module) -> int:
    """Of what this module returned."""
    slots = (each for each in batch._definitions if isinstance(each, SlotDef))
    return next(each.id for each in slots if each.module == batch.module(module) and each.role == "output")


DAMAGES = {
    "codes": lambda history: msgspec.structs.replace(history, codes=b"damaged"),
    "dtypes": lambda history: msgspec.structs.replace(history, dtypes=history.dtypes[:1]),
    "batches": lambda history: msgspec.structs.replace(history, batches=history.batches[:2]),
    "steps": lambda history: msgspec.structs.replace(history, steps=[]),
}


def job(make, ranks=2, bad=1, *, damaged=(), how="codes"):
    bodies = [make.hello(nproc=ranks)]
    for rank in range(ranks):
        batch = make.Batch(rank, batch=LAST, page=LAST)
        x, h, y = batch.tensor(), batch.tensor(8.0), batch.tensor(make.INF if rank == bad else 4.0)
        batch.call("fc1", "Linear", given=[x], returned=[h], dtype="float16")
        batch.call("fc2", "Linear", given=[h], returned=[y], dtype="float16")
        bodies += batch.messages()
        rows = [[8.0, 2.0**n] for n in range(LAST)] + [[8.0, make.INF if rank == bad else 128.0]]
        if rank == 0:
            rows[2] = [8.0, None]
        numbers = list(range(len(rows)))
        dtypes = bytes([DTYPE_CODES["float16"]] * 2)
        history = RankHistoryMessage(rank, 0, 0, numbers, numbers, slots_of(batch), dtypes, pack(codes_of(rows)))
        bodies.append(DAMAGES[how](history) if rank in damaged else history)
    bodies.append(make.ended(bad, 1))
    return [("a0", n, body) for n, body in enumerate(bodies, 1)]


def report_of(messages):
    return build_report(fold(messages), run_id="x", started=None, ended=None)


def test_the_named_module_over_the_batches_on_all_ranks(make):
    found = report_of(job(make)).history
    assert (found.module, found.cls, found.dtype, found.limit) == ("fc2", "Linear", "float16", 65504.0)
    healthy, bad = found.ranks
    assert (bad.rank, bad.batches, bad.abs_max) == (1, list(range(8)), [1, 2, 4, 8, 16, 32, 64, None])
    assert (healthy.batches, healthy.abs_max) == ([0, 1, 3, 4, 5, 6, 7], [1, 2, 8, 16, 32, 64, 128])


def test_all_modules_in_the_batch_of_the_overflow(make):
    found = report_of(job(make)).by_module
    assert found.batch == LAST
    assert [each.module for each in found.modules] == ["fc1", "fc2"]
    assert dict(zip(found.ranks, found.abs_max, strict=True)) == {0: [8.0, 128.0], 1: [8.0, None]}


def test_a_rank_that_counts_its_steps_otherwise_is_not_beside_it(make):
    messages = job(make)
    for place, (agent, n, body) in enumerate(messages):
        if isinstance(body, RankHistoryMessage) and body.rank == 0:
            messages[place] = agent, n, msgspec.structs.replace(body, steps=[0] * len(body.steps))
    assert report_of(messages).by_module.ranks == [1]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("damaged", [[0], [1], [0, 1]])
def test_a_damaged_history_is_left_out_and_the_verdict_is_the_same(make, damaged, how):
    report = report_of(job(make, damaged=damaged, how=how))
    assert report.verdict == report_of(job(make)).verdict
    assert [each.rank for each in (report.history.ranks if report.history else [])] == sorted({0, 1} - set(damaged))
    assert report.history is None or report.history.left_out == len(damaged)
    assert "fc2" in render_html(report)


def test_the_history_changes_no_verdict(make):
    without = [(agent, n, body) for agent, n, body in job(make) if not isinstance(body, RankHistoryMessage)]
    report = report_of(without)
    assert report.history is None and report.by_module is None
    assert report.verdict == report_of(job(make)).verdict
    assert "call by call" in render_html(report), "a store without histories still has a picture"


def test_where_the_output_stayed_finite_the_picture_is_of_the_batch(make):
    """A gradient was bad: the output of its module over the batches says nothing of that."""
    report = report_of(job(make))
    healthy = next(each for each in report.history.ranks if None not in each.abs_max)
    finite = msgspec.structs.replace(report.history, ranks=[msgspec.structs.replace(healthy, rank=1)])
    assert "batch by batch" not in render_html(msgspec.structs.replace(report, history=finite))


def test_of_many_ranks_those_that_met_something_are_there(make, monkeypatch):
    monkeypatch.setattr(limits, "MOST_RANKS", 4)
    found = report_of(job(make, ranks=40, bad=33)).history
    assert 33 in [each.rank for each in found.ranks]
    assert (len(found.ranks), found.left_out) == (4, 36)


def test_it_is_in_the_store_and_in_report_json(make, tmp_path):
    paths = RunPaths(tmp_path)
    store = open_store(paths, 21)
    for _, n, body in job(make):
        message = AgentMessage(n, body, n - 1)
        store.add("a0", message, encode(message))
    told = build(store, "x")  # what is not on the disk yet is read, too
    assert told.history is not None
    store.close()
    report = report_from_store(paths)
    assert report.history == told.history
    assert write_report(paths, report) is None
    assert read_report(paths).history == report.history
    assert "batch by batch" in render_html(read_report(paths))


def job_of_losses(make, bad=1, *, before=lambda n: 8.0 - n, weight=0.5):
    """The losses of two ranks over the batches; that of one is nan in the last."""
    bodies = [make.hello(nproc=2)]
    for rank in range(2):
        batch = make.Batch(rank, batch=LAST, page=LAST)
        x, y = batch.tensor(), batch.tensor(2.0)
        loss = batch.tensor(make.NAN if rank == bad else 1.0)
        batch.call("fc", "Linear", given=[x], returned=[y], weights={"weight": batch.tensor(weight)})
        batch.call("", "Net", given=[x], returned=[y])
        batch.call(LOSS_MODULE, LOSS_CLASS, returned=[loss], phase=make.Phase.LOSS, parent=None, depth=0)
        bodies += batch.messages()
        rows = [[before(n)] for n in range(LAST)] + [[make.NAN if rank == bad else 1.0]]
        numbers, dtypes = list(range(len(rows))), bytes([DTYPE_CODES["float32"]])
        slots = [slot_of_loss(batch)]
        bodies.append(RankHistoryMessage(rank, 0, 0, numbers, numbers, slots, dtypes, pack(codes_of(rows))))
    bodies.append(make.ended(bad, 1))
    return [("a0", n, body) for n, body in enumerate(bodies, 1)]


def test_the_loss_over_the_batches_on_all_ranks(make):
    report = report_of(job_of_losses(make))
    assert (report.verdict.phase, report.verdict.rank) == ("loss", 1)
    assert report.history.module == LOSS_MODULE
    series = {each.rank: each.abs_max for each in report.history.ranks}
    falling = [8.0 - n for n in range(LAST)]
    assert series == {0: [*falling, 1.0], 1: [*falling, None]}
    assert report.by_module.ranks == [0, 1]
    assert "abs max of the loss, batch by batch" in render_html(report)


def test_a_line_is_broken_where_the_loss_was_not_read(make):
    """Batches of an evaluation have no backward. The history has their modules, and no loss."""
    report = report_of(job_of_losses(make, before=lambda n: None if n in (2, 3) else 8.0 - n))
    series = report.history.ranks[0]
    assert (series.batches, series.gaps) == ([0, 1, *range(4, LAST + 1)], [2])
    assert [line.path.count("M") for line in over_the_batches(report).lines] == [2, 2]


def test_a_stretch_that_the_agent_did_not_read_is_a_gap_and_a_coarser_history_is_none():
    assert limits._far_apart([0, 1, 2, 3, 15, 16, 17]) == [4]
    assert limits._far_apart([0, 5, 6, 7]) == [1]
    assert limits._far_apart([0, 8, 16, 20, 24, 26, 28, 29, 30]) == []
    assert limits._far_apart([0, 10, 20]) == limits._far_apart([3, 90]) == []


def job_of_losses_beside_a_module(make):
    """An output of rank 1 is inf in the last batch; the losses of both ranks are beside it."""
    bodies = [make.hello(nproc=2)]
    for rank in range(2):
        batch = make.Batch(rank, batch=LAST, page=LAST)
        x, y = batch.tensor(), batch.tensor(make.INF if rank else 2.0)
        batch.call("fc", "Linear", given=[x], returned=[y], weights={"weight": batch.tensor(0.5)})
        batch.call("", "Net", given=[x], returned=[y])
        batch.call(LOSS_MODULE, LOSS_CLASS, returned=[batch.tensor(1.0)], phase=make.Phase.LOSS, parent=None, depth=0)
        bodies += batch.messages()
        numbers, dtypes = list(range(LAST)), bytes([DTYPE_CODES["float32"]])
        rows = pack(codes_of([[8.0 - n + rank] for n in range(LAST)]))
        bodies.append(RankHistoryMessage(rank, 0, 0, numbers, numbers, [slot_of_loss(batch)], dtypes, rows))
    bodies.append(make.ended(1, 1))
    return [("a0", n, body) for n, body in enumerate(bodies, 1)]


def test_the_losses_stand_beside_an_overflow_of_a_module(make):
    report = report_of(job_of_losses_beside_a_module(make))
    assert (report.verdict.kind, report.verdict.module, report.verdict.rank) == ("overflow", "fc", 1)
    assert {each.rank: each.abs_max for each in report.losses.ranks} == {
        rank: [8.0 - n + rank for n in range(LAST)] for rank in range(2)
    }
    page = render_html(report)
    assert page.count("abs max of the loss, batch by batch</figcaption>") == 1
    assert page.index('id="picture"') < page.index('id="losses"') < page.index('role="search"')


def test_a_loss_that_is_the_verdict_is_drawn_once(make):
    report = report_of(job_of_losses(make))
    assert report.losses is None
    assert render_html(report).count("abs max of the loss, batch by batch</figcaption>") == 1


def test_a_loss_that_ran_away_on_all_ranks_is_a_training_that_diverged(make):
    cause = report_of(job_of_losses(make, before=lambda n: 4.0**n, weight=200.0)).verdict.cause
    assert cause.kind == "divergence"
    assert cause.statement.startswith("outputs ran away on ranks 0 and 1 from batch 1 on")
    assert cause.statement.endswith("it is unknown whether a step began it: not all frames before batch 1 are kept")
    assert "abs max of the loss went 6.40e+01, 2.56e+02, 1.02e+03, 4.10e+03 in batches 3 to 6" in cause.statement


def job_of_a_growth(make, *, jumps, kept=True):
    """What `fc` returns grows on both ranks from batch 4 on. On those of `jumps`, batch 3 found a weight that is 300
    times what the step of batch 2 had left."""
    bodies = [make.hello(nproc=2)]
    sizes = [2.0, 2.0, 2.0, 2.0, 1e3, 1e9, 1e15]
    for rank in range(2):
        weight, slot = 0.5, -1
        for n in range(LAST + 1):
            batch = make.Batch(rank, batch=n, page=n)
            weight *= 300.0 if n == 3 and rank in jumps else 40.0 if n >= 4 else 1.0
            x, y = batch.tensor(), batch.tensor(make.INF if n == LAST else sizes[n])
            batch.call("fc", "Linear", given=[x], returned=[y], weights={"weight": batch.tensor(weight)})
            batch.call("", "Net", given=[x], returned=[y])
            batch.stepped("fc", "Linear", {"weight": weight * (40.0 if n >= 3 else 1.0)})
            bodies += batch.messages() if kept or n >= LAST - 1 else []
            slot = slot_of_output(batch, "fc")
        rows = pack(codes_of([[size] for size in sizes[:LAST]] + [[make.INF]]))
        numbers = list(range(LAST + 1))
        bodies.append(RankHistoryMessage(rank, 0, 0, numbers, numbers, [slot], bytes([DTYPE_CODES["float32"]]), rows))
    return [("a0", n, body) for n, body in enumerate([*bodies, make.ended(0, 1)], 1)]


@pytest.mark.parametrize(
    ("jumps", "kind", "where"), [([1], "replica", "on rank 1 alone"), ([0, 1], "step", "on ranks 0 and 1")]
)
def test_a_weight_that_no_step_made_large_is_the_cause_of_a_growth(make, jumps, kind, where):
    cause = report_of(job_of_a_growth(make, jumps=jumps)).verdict.cause
    assert (cause.kind, cause.certainty) == (kind, "supported")
    assert cause.statement.startswith(
        "weight of `fc` (Linear) had abs max 5.00e-01 after the step of batch 2, and 1.50e+02 in the forward of "
        f"batch 3, {where}: no optimizer step was seen in between"
    )


def test_a_growth_whose_beginning_is_kept_and_has_no_such_weight_is_a_divergence(make):
    cause = report_of(job_of_a_growth(make, jumps=[])).verdict.cause
    assert cause.statement.startswith("the training diverged on ranks 0 and 1 from batch 4 on")
    assert "unknown" not in cause.statement


def test_a_growth_whose_beginning_is_not_kept_is_not_told_as_a_divergence(make):
    cause = report_of(job_of_a_growth(make, jumps=[1], kept=False)).verdict.cause
    assert cause.statement.startswith("outputs ran away on ranks 0 and 1 from batch 4 on")
    assert cause.statement.endswith("it is unknown whether a step began it: not all frames before batch 4 are kept")
