"""Which batches of two ranks may be compared. Ranks number their batches by themselves."""

from __future__ import annotations

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.facts.replicas import page_at_same_point
from gpuwatch.collector.report.text_report import render_text


def forward(make, rank, *, weight=1.0, out=1.0, trained=True, **place):
    """One batch; the weights of a step are the same on all ranks and change with every step."""
    batch = make.Batch(rank, **place)
    x, h, y = batch.tensor(), batch.tensor(), batch.tensor(out)
    batch.call("fc", "Linear", given=[x], returned=[h], weights={"weight": batch.tensor(weight)})
    batch.call("head", "Linear", given=[h], returned=[y], weights={"weight": batch.tensor(2.0)})
    batch.call("", "Net", given=[x], returned=[y])
    if trained and out == 1.0:
        batch.backward("head", "Linear", "output", 1.0)
    return batch


def facts_of(make, *batches, ends=()):
    bodies = [make.hello(nproc=2), *(body for batch in batches for body in batch.messages()), *ends]
    return fold(("a0", n, body) for n, body in enumerate(bodies, 1))


def point(facts, *, number=0):
    """The batch of rank 0 that is compared with that page of rank 1; None if none is."""
    mine, other = facts.ranks[0, 1], facts.ranks[0, 0]
    found = page_at_same_point(mine, mine.pages[number], other)
    return found.batch if found is not None else None


def test_ranks_in_step_have_the_same_batch(make):
    assert point(facts_of(make, forward(make, 0, batch=7, seq=3), forward(make, 1, batch=7, seq=3))) == 7


@pytest.mark.parametrize("other", [{"step": 27}, {"root": "Critic"}, {"seq": 9}])
def test_another_step_root_or_number_of_collectives_is_another_point(make, other):
    mine = forward(make, 1, batch=30, step=30, seq=3)
    assert point(facts_of(make, forward(make, 0, **{"batch": 30, "step": 30, "seq": 3, **other}), mine)) is None


def test_where_rank_0_alone_evaluates_the_step_is_what_counts(make):
    """Three evaluations before: batch 33 of rank 0 is the step of batch 30 of rank 1."""
    mine = forward(make, 1, batch=30, step=30)
    ranks = [forward(make, 0, batch=30, step=27, page=0), forward(make, 0, batch=33, step=30, page=1)]
    assert point(facts_of(make, *ranks, mine)) == 33


def test_of_several_micro_batches_only_the_same_one(make):
    """Gradient accumulation: batches 4 to 7 are step 1, and only batch 7 of rank 0 was received."""
    assert point(facts_of(make, forward(make, 0, batch=7, step=1), forward(make, 1, batch=6, step=1))) is None


def test_an_evaluation_is_no_peer_of_a_training(make):
    evaluation = forward(make, 0, batch=5, step=5, trained=False, page=1)
    ranks = [forward(make, 0, batch=4, step=4, page=0), evaluation]
    assert point(facts_of(make, *ranks, forward(make, 1, batch=5, step=5))) is None
    # a forward that did not return may be either; where rank 0 has counted other batches, it is not compared
    bad = forward(make, 1, batch=5, step=5, out=make.INF)
    together = [make.ended(0, -15, "torchrun", batch=5, step=5), make.ended(1, 1, batch=5, step=5)]
    apart = [make.ended(0, -15, "torchrun", batch=9, step=5), make.ended(1, 1, batch=5, step=5)]
    assert point(facts_of(make, *ranks, bad, ends=together)) == 5
    assert point(facts_of(make, *ranks, bad, ends=apart)) is None


# -- what follows for a report ------------------------------------------------------------------------------------


def report_of(facts):
    return build_report(facts, run_id="run", started=None, ended=None)


def test_no_bit_has_flipped_where_rank_0_is_at_another_step(make):
    """nanoGPT: rank 0 evaluates alone. Its batch 33 is step 30, with the weights of that step."""
    ranks = [
        forward(make, 0, weight=1e-3, batch=32, step=29, page=0),
        forward(make, 0, weight=1e-3, batch=33, step=30, page=1),
        forward(make, 1, weight=1.0, batch=32, step=32, page=0),
        forward(make, 1, weight=100.0, batch=33, step=33, page=1, out=make.INF),
    ]
    report = report_of(facts_of(make, *ranks))
    verdict = report.verdict
    assert (verdict.rank, verdict.phase, verdict.module, verdict.certainty) == (1, "forward", "head", "supported")
    told = [verdict.statement, *verdict.evidence, *verdict.next]
    assert not any("copy" in text or "memory" in text for text in told)
    assert not any("finite" in line for line in verdict.evidence if "rank 0" in line)
    assert any("rank 0: no frames of that step were received" in line for line in verdict.evidence)
    assert "rank by rank" not in render_text(report)


def test_the_same_step_stands_side_by_side_under_its_own_number(make):
    ranks = [
        forward(make, 0, batch=30, step=27, page=0),
        forward(make, 0, batch=33, step=30, page=1),
        forward(make, 1, batch=30, step=30, out=make.INF),
    ]
    report = report_of(facts_of(make, *ranks))
    assert "rank 0: every frame received of its batch 33, of the same step, was finite" in report.verdict.evidence
    lines = [line.split() for line in render_text(report).splitlines()]
    assert ["module", "rank", "1", "batch", "33"] in lines or ["batch", "33"] in lines
    assert ["head", "Linear", "inf", "1.00e+00"] in lines
    assert [rank.frames[-1].batch for rank in report.ranks] == [33, 30]


def test_an_evaluation_does_not_stand_beside_a_training(make):
    """nanoGPT evaluates before its first step: batch 0 of rank 0 is an evaluation, and of rank 1 a training."""
    ranks = [
        forward(make, 0, batch=0, step=0, trained=False, page=0),
        forward(make, 0, batch=200, step=0, page=200),
        forward(make, 1, batch=0, step=0, out=make.INF),
    ]
    ends = [make.ended(0, -15, "torchrun", batch=200, step=0), make.ended(1, 1, batch=0, step=0)]
    report = report_of(facts_of(make, *ranks, ends=ends))
    assert "rank by rank" not in render_text(report)
    assert not report.ranks[0].frames_comparable


def test_a_forward_that_did_not_return_is_compared_by_its_first_call(make):
    """FSDP gathers when the root begins. The root's own frame is there only where its forward has returned."""

    def gathered(rank, out):
        batch = make.Batch(rank, batch=2, seq=5)
        x = batch.tensor()
        batch.call("fc", "Linear", given=[x], returned=[batch.tensor(out)], seq=5)
        if out == 1.0:
            batch.call("", "Net", given=[x], returned=[batch.tensor(out)], seq=6, collectives=2)
        return batch

    assert point(facts_of(make, gathered(0, 1.0), gathered(1, make.INF))) == 2


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"step": 2, "seq": 4}, "Both ranks overflowed alike: "),
        ({"step": 1, "seq": 4}, "concurrently, rank 1 met a non-finite value elsewhere"),
    ],
)
def test_the_same_place_is_the_same_place_although_rank_0_has_evaluated_alone(make, other, words):
    ranks = [
        forward(make, 0, batch=8, step=2, seq=4, out=make.INF, clock={"0": 4}),
        forward(make, 1, batch=2, out=make.INF, clock={"0": 4}, **other),
    ]
    ends = [make.ended(0, 1, batch=8, step=2), make.ended(1, 1, batch=2, step=2)]
    verdict = report_of(facts_of(make, *ranks, ends=ends)).verdict
    assert words in verdict.statement
    numbered = "rank 1 numbers that batch 2: it ran extra batches, or skipped some"
    assert (numbered in verdict.evidence) == (words.startswith("Both"))
