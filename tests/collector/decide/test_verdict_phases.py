"""Which rank was first, by what was bad: gradients, steps, sums over ranks, weights, masks, skipped batches."""

from __future__ import annotations

import random

import msgspec
import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.alarm_evidence import BadOperation, SecondRun
from gpuwatch.core.events.looked_again import LookedAgain, OptimizerStep
from gpuwatch.core.events.own_limits import NotLookedInto, OwnFault
from gpuwatch.core.events.read_tensors import OperandNumbers
from gpuwatch.core.events.script_events import OverflowRaised
from gpuwatch.core.frames import RowMark
from gpuwatch.core.wire.messages import EventMessage, NameDefinitions, PageMessage
from hypothesis import given
from hypothesis import strategies as st


def judge(make, *batches, before="", more=(), **hello):
    """The verdict over these pages, and `more` messages; `before`: what the batch before held where they hold -inf,
    `masks` or `finite`."""
    bodies = [make.hello(nproc=hello.pop("nproc", len(batches)), host="alpha", **hello)]
    bodies += [body for batch in batches for body in batch.messages()]
    bodies += [batch.page_before(masks=before == "masks") for batch in batches if before]
    bodies += more
    return decide(fold(("a0", n, body) for n, body in enumerate(bodies, 1)))


def forward(make, rank=0, *, weight=1.0, embed=2.0, out=1.0, names=("embed", "length", "head"), **place):
    """`return self.head(self.length(self.embed(x)))`, in a page that the rest of the step can be added to."""
    batch = make.Batch(rank, **place)
    x, h, y, z = batch.tensor(), batch.tensor(), batch.tensor(), batch.tensor(out)
    batch.call(names[0], "Linear", given=[x], returned=[h], weights={"weight": batch.tensor(embed)})
    batch.call(names[1], "Length", given=[h], returned=[y])
    batch.call(names[2], "Linear", given=[y], returned=[z], weights={"weight": batch.tensor(weight)})
    batch.call("", "Net", given=[x], returned=[z])
    return batch


def backward(make, rank=0, *, bad=1.0, local=None, mark=0, **place):
    """`bad` is the gradient of what `embed` returned, `local` that of its weight."""
    batch = forward(make, rank, **place)
    for name, cls in (("head", "Linear"), ("length", "Length")):
        batch.backward(name, cls, "output", 1.0, mark=mark)
    batch.backward("embed", "Linear", "output", bad, mark=mark)
    batch.backward("embed", "Linear", "weight", bad if local is None else local, mark=mark)
    return batch


def reduced(make, rank=0, *, got, own=1.0, head=0.5, **place):
    """A whole step, in which the gradient of `embed` was `own`, and `got` when the optimizer got it."""
    batch = backward(make, rank, local=own, **place)
    batch.got("embed", "Linear", {"weight": got})
    batch.got("head", "Linear", {"weight": head})
    return batch


def whole(make, rank=0, *, stepped=1.0, **place):
    batch = reduced(make, rank, got=1.0, **place)
    batch.stepped("embed", "Linear", {"weight": stepped, "state exp_avg weight": 0.5})
    return batch


def outside(make, rank=0, **place):
    batch = forward(make, rank, **place)
    batch.backward("head", "Linear", "output", make.INF)
    return batch


# -- backward -----------------------------------------------------------------------------------------------------


def test_a_gradient_of_an_activation_on_one_rank(make):
    verdict = judge(make, backward(make, 0, batch=2, seq=9), backward(make, 1, bad=make.NAN, batch=2, seq=9))
    assert (verdict.kind, verdict.rank, verdict.certainty) == ("overflow", 1, "established")
    assert (verdict.module, verdict.cls, verdict.phase, verdict.role) == (
        "length",
        "Length",
        "backward",
        "grad input[0]",
    )
    assert verdict.statement == (
        "Rank 1 on alpha overflowed first: nan in the grad input[0] of `length` (Length), backward, batch 2."
    )
    assert "`length` (Length) alone used that tensor" in verdict.evidence[1]


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["train.py", "--rank", "x"], "--explain 2 --rank 1 train.py --rank x"),
        (["--explain", "auto", "--nnodes", "2", "my train.py"], "--explain 2 --rank 1 --nnodes 2 'my train.py'"),
        (["--explain", "7", "--rank", "0", "train.py"], "--explain 2 --rank 1 train.py"),
    ],
)
def test_the_command_that_finds_the_line_of_a_backward(make, typed, shown):
    batches = backward(make, 0, batch=2, seq=9), backward(make, 1, bad=make.NAN, batch=2, seq=9)
    verdict = judge(make, *batches, command=["gpuwatch", "launch", *typed])
    assert verdict.next[-1].endswith(f"run it again with that batch watched: gpuwatch launch {shown}")
    again = judge(make, *batches, command=["gpuwatch", "launch", "--explain", "2", "train.py"])
    assert not any("--explain" in step for step in again.next)


def test_local_gradients_name_the_rank_though_all_are_bad_one_step_later(make):
    guilty = backward(make, 1, bad=make.NAN, batch=2, clock={"0": 8})
    peers = [reduced(make, rank, got=make.NAN, batch=2, clock={"0": 9}) for rank in (0, 2)]
    verdict = judge(make, guilty, *peers)
    assert (verdict.rank, verdict.module, verdict.phase) == (1, "length", "backward")
    (later,) = (line for line in verdict.evidence if "first saw a non-finite value later" in line)
    assert later.startswith("ranks 0 and 2 first saw a non-finite value later: batch 2, ")


def test_ranks_that_were_later_in_many_places_are_counted(make):
    guilty = backward(make, 1, bad=make.NAN, batch=2, clock={"0": 8})
    peers = [reduced(make, rank, got=make.NAN, batch=rank + 2, clock={"0": rank + 9}) for rank in range(2, 13)]
    lines = judge(make, guilty, *peers, reduced(make, 0, got=make.NAN, batch=4, clock={"0": 11})).evidence
    later = [line for line in lines if "later: batch" in line]
    assert len(later) == 8
    assert later[0].startswith("ranks 0 and 2 first saw a non-finite value later: batch 4, ")
    assert "3 more ranks likewise, in other places" in lines


def test_the_scripts_own_loss(make):
    verdict = judge(make, outside(make, 1, seq=9, batch=2), backward(make, 0, seq=9, batch=2))
    assert (verdict.rank, verdict.module, verdict.cls, verdict.phase) == (1, "", "Net", "backward")
    assert (verdict.between, verdict.certainty) == (("", "head"), "established")
    assert "passed in from outside the model" in verdict.statement
    assert "the loss" in verdict.next[0]


def test_the_scripts_own_loss_is_not_certain_where_other_ranks_are_not_known(make):
    assert judge(make, outside(make, 1), nproc=2).certainty == "supported"


def test_the_scripts_own_loss_is_not_certain_where_other_ranks_run_another_model(make):
    """The next stage of a pipeline may have sent it."""
    bodies = [make.hello(nproc=2), *outside(make, 0, root="First").messages(), make.ended(0, 1)]
    bodies += [*backward(make, 1, root="Second").messages(), make.ended(1, -15, "torchrun")]
    verdict = decide(fold(("a0", n, body) for n, body in enumerate(bodies)))
    assert (verdict.rank, verdict.certainty) == (0, "supported")
    assert any("another stage may have sent that gradient" in line for line in verdict.evidence)


def test_a_stage_that_was_handed_a_bad_gradient_is_not_first(make):
    """Pipeline: what comes out of the second stage's backward goes into that of the first one."""
    first = outside(make, 0, root="First", batch=4, clock={"0": 2}, names=("a", "b", "head"))
    second = backward(make, 1, root="Second", bad=make.NAN, batch=4, clock={"0": 2})
    verdict = judge(make, first, second)
    assert (verdict.rank, verdict.module, verdict.concurrent) == (1, "length", [])
    assert any("rank 0" in line and "outside its model" in line for line in verdict.evidence)


def test_a_stage_that_was_handed_a_bad_activation_is_not_first(make):
    second = make.Batch(1, root="Second", batch=5, clock={"0": 2})
    bad = second.tensor(make.INF)
    second.call("enter", "Linear", given=[bad], returned=[second.tensor(make.INF)])
    second.call("", "Second", given=[bad], returned=[second.tensor(make.INF)])
    first = forward(make, 0, root="First", out=make.INF, batch=5, clock={"0": 2})
    verdict = judge(make, second, first)
    assert (verdict.rank, verdict.module, verdict.phase, verdict.concurrent) == (0, "head", "forward", [])


def test_own_code_in_the_backward_is_said_in_words(make):
    batch = make.Batch(0, batch=1)
    x, h, w, y = (batch.tensor(number) for number in (1.0, 2.0, 3.0, 4.0))
    batch.call("block.enter", "Linear", given=[x], returned=[h], parent="block")
    batch.call("block.leave", "Linear", given=[w], returned=[y], parent="block")
    batch.call("block", "Block", given=[x], returned=[y])
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("block.leave", "Linear", "output", 1.0)
    batch.backward("block.enter", "Linear", "output", make.NAN)
    verdict = judge(make, batch)
    assert (verdict.module, verdict.between, verdict.certainty) == (
        "block",
        ("block.leave", "block.enter"),
        "supported",
    )
    assert verdict.statement.endswith(
        "nan in the gradient of what `block.enter` (Linear) returned, made in `block` (Block)'s backward, "
        "by `block.leave` or its own code, batch 1."
    )


def test_gradients_that_ranks_hand_each_other_name_nobody(make):
    """Tensor parallel: an all-reduce in the backward brought it to both."""

    def spread(rank):
        batch = make.Batch(rank, seq=3, clock={"0": 5})
        x, h, y = batch.tensor(), batch.tensor(), batch.tensor()
        batch.call("embed", "Linear", given=[x], returned=[h], seq=3)
        batch.call("mlp", "Mlp", given=[h], returned=[y], seq=4, collectives=1)
        batch.call("", "Net", given=[x], returned=[y], seq=4, collectives=1)
        batch.backward("mlp", "Mlp", "output", 1.0, seq=4)
        batch.backward("embed", "Linear", "output", make.NAN, seq=5)
        return batch

    verdict = judge(make, spread(0), spread(1))
    assert (verdict.rank, verdict.certainty, verdict.phase) == (None, "unknown", "collective")
    assert "may have come from any rank" in verdict.statement
    assert "share a collective with it" in verdict.next[0]
    assert not any("--sync" in text for text in verdict.next)


@pytest.mark.parametrize("bad", [(1,), (0, 1)])
def test_a_gradient_that_was_left_there_is_of_no_backward_of_this_run(make, bad):
    batches = [backward(make, rank, local=make.NAN if rank in bad else 1.0, batch=0) for rank in (0, 1)]
    for batch in batches:
        if batch.anomaly is not None:
            batch.anomaly = msgspec.structs.replace(batch.anomaly, again=LookedAgain(left=True))
    verdict = judge(make, *batches)
    assert (verdict.rank, verdict.phase, verdict.role, verdict.certainty) == (
        bad[0],
        "backward",
        "grad weight",
        "established" if len(bad) == 1 else "supported",
    )
    who = "Rank 1 on alpha" if len(bad) == 1 else "Both ranks"
    assert verdict.statement.startswith(f"{who} had nan in the grad weight of `embed` (Linear) before the backward")
    assert not any("derivative" in text for text in verdict.next)


def test_a_script_that_caught_the_error_and_went_on_is_told_so(make):
    batch = forward(make, 0, out=make.INF, batch=3)
    raised = [EventMessage(OverflowRaised(make.where(0, batch=3, step=3)))]
    evaluated = judge(make, batch, more=[*raised, *make.finished(0, batch=11, step=3)])
    went_on = "the script caught OverflowDetected, which was to end it, and went on to batch 11"
    assert f"{went_on} without an optimizer step" in evaluated.evidence
    caught = judge(make, batch, more=[*raised, *make.finished(0, batch=11, step=8)])
    assert went_on in caught.evidence
    unseen = [EventMessage(OverflowRaised(make.where(0, batch=3)))]
    assert went_on in judge(make, batch, more=[*unseen, *make.finished(0, batch=11)]).evidence, "it may step by itself"
    assert "let OverflowDetected pass where the script catches errors" in caught.next[-1]
    saved = judge(make, batch, more=[*raised, *make.finished(0, batch=3)])
    assert (
        "the script caught OverflowDetected, which was to end it, and ended with exit code 0 in that batch"
        in saved.evidence
    )
    assert not any("let OverflowDetected pass" in step for step in saved.next)
    ended = judge(make, batch, more=[*raised, make.raised(0, "OverflowDetected", batch=3), make.ended(0, 94, batch=3)])
    assert not any("caught" in line for line in [*ended.evidence, *ended.next])


# -- GradScaler ---------------------------------------------------------------------------------------------------


def test_a_scale_that_collapsed_names_the_rank_with_the_bad_gradient(make):
    scaled = make.RowMark.SCALED
    guilty = backward(make, 1, bad=make.INF, mark=scaled, batch=7, clock={"0": 9})
    peer = backward(make, 0, mark=scaled, batch=7, clock={"0": 9})
    peer.got("embed", "Linear", {"weight": make.INF}, mark=scaled)
    for batch in (guilty, peer):
        batch.skipped("GradScaler skipped 12 steps in a row, the last at scale 1")
    verdict = judge(make, peer, guilty)
    assert (verdict.rank, verdict.phase, verdict.module, verdict.role) == (1, "backward", "length", "grad input[0]")
    assert verdict.statement.endswith("(GradScaler skipped 12 steps in a row, the last at scale 1).")


def test_gradients_that_a_scaler_skips_are_no_overflow(make):
    batch = backward(make, 0, bad=make.INF, mark=make.RowMark.SCALED)
    bodies = [make.hello(nproc=1), *batch.messages(), *make.finished(0), make.NodeBye("ok")]
    assert decide(fold(("a0", n, body) for n, body in enumerate(bodies))).kind == "clean"


# -- the reduction and the step -----------------------------------------------------------------------------------


def test_a_sum_over_ranks_is_nobodys_own(make):
    verdict = judge(make, *(reduced(make, rank, own=2e38, got=make.INF, batch=2, clock={"0": 9}) for rank in range(2)))
    assert (verdict.rank, verdict.phase, verdict.certainty) == (None, "collective", "established")
    assert (verdict.module, verdict.cls, verdict.role, verdict.value) == ("embed", "Linear", "grad weight", "+inf")
    assert "every rank's own gradient was finite, but their sum was not" in verdict.statement
    assert (
        "abs max of each rank's own gradient: 2.00e+38 on rank 0, 2.00e+38 on rank 1; their sum is at most 4.00e+38; "
        "float32 holds at most 3.40e+38"
    ) in verdict.evidence
    assert verdict.next[0].startswith("Divide gradients before they are summed")


@pytest.mark.parametrize(
    ("own", "got", "said"),
    [
        ((0.065, 0.0), ("nan", "nan"), "no sum of them gives that value"),
        ((0.065, 0.0), ("inf", "inf"), "no sum of them gives that value"),
        ((2e38, 2e38), ("nan", "nan"), "no sum of them gives that value"),
        ((4e4, 4e4), ("inf", "inf"), "unless it is reduced in float16"),
    ],
    ids=["nan", "small", "nan, though large", "inf of a reduction in float16"],
)
def test_what_no_sum_over_the_ranks_gives_was_made_by_code_of_the_scripts_own(make, own, got, said):
    ranks = [reduced(make, rank, own=own[rank], got=float(got[rank]), batch=2, clock={"0": 9}) for rank in range(2)]
    verdict = judge(make, *ranks)
    assert (verdict.rank, verdict.phase, verdict.certainty) == (None, "collective", "supported")
    assert said in verdict.statement
    assert "made between the backward and the step of batch 2" in verdict.statement
    assert not any("Divide gradients" in line for line in verdict.next)
    assert verdict.next[0].startswith("Look at what the script does with gradients between backward() and step()")
    assert any("nan is no sum of finite numbers" in line for line in verdict.evidence) == (got[0] == "nan")


def test_where_every_gradient_was_zero_a_norm_of_them_is(make):
    ranks = [reduced(make, rank, own=0.0, got=make.NAN, batch=2, clock={"0": 9}) for rank in range(2)]
    assert "dividing by their norm divides by 0" in judge(make, *ranks).next[0]


def test_a_sum_is_the_same_on_all_ranks(make):
    """Of two that got inf and one that did not, the sum of their gradients is no full account."""
    ranks = [
        reduced(make, rank, own=2e38, got=make.INF if rank else 3e38, batch=2, clock={"0": 9}) for rank in range(3)
    ]
    verdict = judge(make, *ranks)
    assert (verdict.rank, verdict.certainty) == (None, "supported")
    assert any("rank 0: what the optimizer got was finite" in line for line in verdict.evidence)


def test_a_sum_over_ranks_of_which_one_was_not_seen_is_unknown(make):
    verdict = judge(make, reduced(make, 0, got=make.INF), nproc=2)
    assert (verdict.rank, verdict.phase, verdict.certainty) == (None, "collective", "unknown")
    assert any("1 rank was never heard from" in line for line in verdict.evidence)


def test_a_sum_over_ranks_of_which_one_has_shown_no_gradient_is_unknown(make):
    verdict = judge(make, reduced(make, 0, got=make.INF, batch=2), forward(make, 1, batch=2))
    assert verdict.certainty == "unknown"
    assert any("rank 1: no finite gradient of its own was seen" in line for line in verdict.evidence)
    assert verdict.next[0].startswith("Look at what rank 1 computed in that step")


def test_own_code_before_the_step_of_one_rank(make):
    """The others got the same gradients, and theirs are finite."""
    verdict = judge(make, reduced(make, 0, got=0.5, batch=2), reduced(make, 1, got=make.INF, batch=2))
    assert (verdict.rank, verdict.phase, verdict.module, verdict.role) == (1, "optimizer", "embed", "grad weight")
    assert verdict.certainty == "established"
    assert "clipping" in verdict.statement


def test_ranks_that_hold_shards_get_gradients_of_their_own(make):
    """FSDP: the others' being finite says nothing of this rank's shard."""
    mine, other = reduced(make, 1, got=make.INF), backward(make, 0)
    other.got("embed", "Linear", {"weight": 0.5})
    other.got("head", "Linear", {"weight": 0.25})
    assert judge(make, mine, other).rank is None


def test_one_rank_alone_has_nothing_to_reduce(make):
    verdict = judge(make, reduced(make, 0, got=make.NAN))
    assert (verdict.rank, verdict.phase, verdict.role, verdict.certainty) == (
        0,
        "optimizer",
        "grad weight",
        "established",
    )


def stepped_by(batch, lr):
    """The anomaly of `batch` says that SGD with this learning rate has stepped."""
    step = OptimizerStep("torch.optim.sgd.SGD", {"lr": lr})
    batch.anomaly = msgspec.structs.replace(batch.anomaly, optimizer=step)


def test_a_step_on_one_rank(make):
    bad = whole(make, 1, batch=2, stepped=make.NEGINF)
    verdict = judge(make, whole(make, 0, batch=2), bad)
    assert (verdict.rank, verdict.phase, verdict.module, verdict.role) == (1, "optimizer", "embed", "weight")
    assert verdict.certainty == "supported"
    assert "the step made it, or something else changed the weight after the forward" in verdict.statement

    stepped_by(bad, lr=3e38)
    verdict = judge(make, whole(make, 0, batch=2), bad)
    assert (verdict.phase, verdict.certainty) == ("optimizer", "established")
    assert any("exp_avg" in line for line in verdict.evidence)
    assert "the step after batch 2 made -inf" in verdict.statement
    assert "the optimizer's state: its extremes are in the evidence" in verdict.next[0]

    stepped_by(bad, lr=1e-3)
    verdict = judge(make, whole(make, 0, batch=2), bad)
    assert (verdict.rank, verdict.phase, verdict.certainty) == (1, "weight", "established")
    assert "changed outside of forward, backward and step" in verdict.statement


def test_a_step_on_all_ranks_is_everybodys(make):
    verdict = judge(make, *(whole(make, rank, stepped=make.NAN, clock={"0": 9}) for rank in range(2)))
    assert {verdict.rank, *(c.rank for c in verdict.concurrent)} == {0, 1}
    assert (verdict.phase, verdict.certainty) == ("optimizer", "supported")


def test_weights_whose_gradients_nobody_looked_at_name_nobody(make):
    def blind(rank):
        batch = forward(make, rank, batch=2)
        batch.stepped("embed", "Linear", {"weight": make.NAN})
        return batch

    verdict = judge(make, blind(0), blind(1))
    assert (verdict.rank, verdict.phase, verdict.module, verdict.certainty) == (None, "weight", "embed", "unknown")
    assert verdict.next[0] == "Watch the gradients, too: --watch forward,grads,weights."


def test_where_other_gradients_were_looked_at_it_is_not_said_to_watch_them(make):
    """The weight itself had none: no step changes it."""
    batch = forward(make, 0, batch=2)
    batch.backward("head", "Linear", "weight", 1.0)
    batch.got("head", "Linear", {"weight": 1.0})
    batch.stepped("embed", "Linear", {"weight": make.NAN})
    verdict = judge(make, batch)
    assert (verdict.phase, verdict.module) == ("weight", "embed")
    assert not any("--watch" in text for text in verdict.next)
    assert "that batch shows no gradient of it, but shows others" in verdict.next[0]


# -- one rank's copy of a weight ----------------------------------------------------------------------------------


def history(make, head, *, stepped=None, rank=None, **place):
    """A batch of two ranks, in which the gradient of `head` was `head`, and its weight `stepped` after the step."""
    batches = [reduced(make, each, got=1.0, head=head, page=0, **place) for each in (0, 1)]
    for batch in batches:
        if stepped is not None:
            batch.stepped("head", "Linear", {"weight": stepped if batch.rank == rank else 1.0})
    return batches


def test_a_weight_that_one_rank_overwrote_is_the_cause_in_a_module_behind_it(make):
    """Its own output is finite. The copies agreed in the batch before."""

    def batch_of(rank, weight=1.0, out=1.0, **place):
        batch = make.Batch(rank, **place)
        x, h, y = batch.tensor(), batch.tensor(weight), batch.tensor(out)
        batch.call("body", "Linear", given=[x], returned=[h], weights={"weight": batch.tensor(weight)})
        batch.call("head", "Linear", given=[h], returned=[y], weights={"weight": batch.tensor(0.5)})
        batch.call("", "Net", given=[x], returned=[y])
        return batch

    before = [batch_of(rank, batch=2) for rank in (0, 1)]
    now = [batch_of(0, batch=3, page=1), batch_of(1, 1e22, make.INF, batch=3, page=1)]
    verdict = judge(make, *before, *now, nproc=2)
    assert (verdict.rank, verdict.module) == (1, "head")
    assert (verdict.cause.kind, verdict.cause.certainty) == ("replica", "supported")
    assert verdict.cause.statement == (
        "weight of `body` (Linear) has abs max 1.00e+22 on rank 1 alone, against 1.00e+00 on rank 0, and agreed in "
        "batch 2"
    )
    assert "trains or changes that weight on this rank alone" in verdict.next[0]
    alike = [batch_of(0, 1e22, batch=3, page=1), batch_of(1, 1e22, make.INF, batch=3, page=1)]
    cause = judge(make, *before, *alike, nproc=2).cause
    assert cause is None or cause.kind != "replica"


@pytest.mark.parametrize("stepped", [None, 1.0], ids=["its gradient was small", "its step has left another"])
def test_a_weight_that_has_changed_on_one_of_two_ranks(make, stepped):
    """Their copies agreed in the batch before."""
    before = history(make, 0.5, stepped=stepped, batch=2)
    flipped = forward(make, 1, weight=1e38, out=make.INF, batch=3, page=1)
    verdict = judge(make, *before, forward(make, 0, batch=3, page=1), flipped, nproc=2)
    assert (verdict.rank, verdict.phase, verdict.module, verdict.role) == (1, "weight", "head", "weight")
    assert verdict.certainty == "established"
    assert "this rank's copy differs from the others', but agreed with them in batch 2: a bit flip" in verdict.statement
    assert any("abs max 1.00e+38, theirs has abs max 1.00e+00" in line for line in verdict.evidence)
    assert "memory" in verdict.next[0]
    why = "no step turns it into that number" if stepped is None else "differs from what its last step left"
    assert any(why in line for line in verdict.evidence)


@pytest.mark.parametrize("stepped", [None, 1e38], ids=["its step was not seen", "its step has left it so"])
def test_a_weight_that_a_step_on_this_rank_alone_can_have_made_is_no_bit_flip(make, stepped):
    before = history(make, 1e36, stepped=stepped, rank=1, batch=2)
    trained = forward(make, 1, weight=1e38, out=make.INF, batch=3, page=1)
    verdict = judge(make, *before, forward(make, 0, batch=3, page=1), trained, nproc=2)
    assert (verdict.rank, verdict.phase, verdict.module) == (1, "weight", "head")
    assert "a step on this rank alone, or code that changes it there" in verdict.statement
    assert not any(word in text for text in [verdict.statement, *verdict.next] for word in ("memory", "bit flip"))


def test_an_expert_that_is_trained_on_one_rank_is_not_blamed_for_what_it_returns(make):
    """0.259 against 0.250: such a weight explains no overflow."""
    ranks = (0, 1, 2)
    before = [reduced(make, rank, got=1.0, weight=0.25, batch=2, page=0) for rank in ranks]
    for batch in before:
        batch.stepped("head", "Linear", {"weight": 0.259 if batch.rank == 1 else 0.25})
    now = [
        forward(make, rank, weight=0.259 if rank == 1 else 0.25, out=make.INF if rank == 1 else 1.0, batch=3, page=1)
        for rank in ranks
    ]
    verdict = judge(make, *before, *now)
    assert (verdict.rank, verdict.phase, verdict.module, verdict.role) == (1, "forward", "head", "output")
    assert any("differs from that of ranks 0 and 2" in line for line in verdict.evidence)
    assert any("a step on this rank alone can have made it" in line for line in verdict.evidence)
    assert not any(word in text for text in [verdict.statement, *verdict.next] for word in ("memory", "bit flip"))


def test_what_the_script_does_with_the_weights_of_all_ranks_is_no_bit_flip(make):
    """It halves them after each step: none is what its step has left."""
    before = history(make, 0.5, stepped=4.0, batch=2)
    for batch in before:
        batch.stepped("head", "Linear", {"weight": 8.0 if batch.rank == 1 else 4.0})
    now = [
        forward(make, rank, weight=4.0 if rank else 2.0, out=make.INF if rank else 1.0, batch=3, page=1)
        for rank in (0, 1)
    ]
    verdict = judge(make, *before, *now)
    assert (verdict.rank, verdict.phase, verdict.module) == (1, "forward", "head")
    assert not any("differs from what its last step left" in line for line in verdict.evidence)


def test_of_two_ranks_without_a_history_none_is_the_odd_one(make):
    """Another seed would look the same: the output overflowed, and the weights differ."""
    flipped = forward(make, 1, weight=1e38, out=make.INF, batch=3)
    verdict = judge(make, forward(make, 0, batch=3), flipped)
    assert (verdict.rank, verdict.phase, verdict.role, verdict.certainty) == (1, "forward", "output", "supported")
    assert any("differs from that of rank 0" in line for line in verdict.evidence)
    assert any("unknown when they began to differ" in line for line in verdict.evidence)
    assert not any("memory" in text for text in [verdict.statement, *verdict.evidence, *verdict.next])


def test_a_weight_that_differed_before_is_a_weight_of_its_own(make):
    """A head outside of DDP."""
    before = [forward(make, rank, weight=1.0 + rank, batch=2, page=0) for rank in (0, 1)]
    bad = forward(make, 1, weight=1e38, out=make.INF, batch=3, page=1)
    verdict = judge(make, *before, forward(make, 0, batch=3, page=1), bad, nproc=2)
    assert (verdict.phase, verdict.role) == ("forward", "output")
    assert not any("copy" in text for text in [verdict.statement, *verdict.evidence, *verdict.next])


def test_a_small_difference_of_two_ranks_blames_no_weight(make):
    verdict = judge(make, forward(make, 0), forward(make, 1, weight=1.5, out=make.INF))
    assert (verdict.phase, verdict.certainty) == ("forward", "supported")


def test_a_weight_that_is_not_finite_on_one_rank_alone(make):
    verdict = judge(make, forward(make, 0, batch=3), forward(make, 1, weight=make.INF, out=make.INF, batch=3))
    assert (verdict.rank, verdict.phase, verdict.role, verdict.certainty) == (1, "weight", "weight", "established")
    assert any("differs from that of rank 0" in line for line in verdict.evidence)
    assert "memory" not in verdict.statement


def test_weights_that_differ_anyway_are_no_evidence(make):
    verdict = judge(make, forward(make, 0), forward(make, 1, weight=1e38, embed=3.0, out=make.INF))
    assert (verdict.phase, verdict.module) == ("forward", "head")


def test_a_bad_shard_beats_what_a_collective_made_of_it(make):
    """Tensor parallel: rank 1's shard is nan, and the all-reduce at the end of the call brings that to rank 0."""

    def shard(rank, weight):
        batch = make.Batch(rank, seq=4, clock={"0": 4})
        x, y = batch.tensor(), batch.tensor(make.NAN)
        weights = {"weight": batch.tensor(weight)}
        batch.call("down", "Linear", given=[x], returned=[y], weights=weights, collectives=1)
        return batch

    verdict = judge(make, shard(0, 1.0), shard(1, make.NAN))
    assert (verdict.rank, verdict.phase, verdict.module) == (1, "weight", "down")


def test_a_collective_inside_of_a_call_names_nobody(make):
    def parts(rank):
        batch = make.Batch(rank, seq=4, clock={"0": 4})
        batch.call("down", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)], collectives=1)
        return batch

    verdict = judge(make, parts(0), parts(1))
    assert (verdict.rank, verdict.module, verdict.phase, verdict.certainty) == (None, "down", "collective", "unknown")
    assert judge(make, parts(0)).certainty == "unknown"


def test_an_origin_elsewhere_beats_what_a_collective_brought(make):
    received = make.Batch(0, seq=4, clock={"0": 4})
    received.call(
        "norm", "SyncBatchNorm", given=[received.tensor()], returned=[received.tensor(make.NAN)], collectives=1
    )
    verdict = judge(make, received, forward(make, 1, out=make.INF, seq=4, clock={"0": 4}))
    assert (verdict.rank, verdict.module, verdict.concurrent) == (1, "head", [])


# -- masks, and skipped batches -----------------------------------------------------------------------------------


def test_the_verdict_names_where_a_neginf_came_in_and_what_turned_it_into_nan(make):
    batch = make.Batch(1, batch=2)
    x, mask = batch.tensor(), batch.tensor(make.NEGINF)
    batch.call("padding", "Padding", given=[x], returned=[mask])
    weights = {"weight": batch.tensor()}
    batch.call("attend", "Attend", given=[x, mask], returned=[batch.tensor(make.NAN)], weights=weights)
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.NAN)])
    verdict = judge(make, batch, before="finite")
    assert (verdict.module, verdict.role, verdict.value, verdict.phase) == ("padding", "output", "-inf", "forward")
    assert verdict.statement == (
        "Rank 1 on alpha met nan that came from an expected -inf: -inf in the output of `padding` (Padding), forward, "
        "batch 2; `attend` (Attend) turned it into nan."
    )
    assert "mask" in verdict.next[0]


def test_the_verdict_names_the_call_that_made_nan_of_a_mask_that_every_batch_has(make):
    batch = make.Batch(1, batch=2)
    x, mask = batch.tensor(), batch.tensor(make.NEGINF)
    marks = {"input[1]": RowMark.CLOSED}
    batch.call("attend", "Attend", given=[x, mask], returned=[batch.tensor(make.NAN)], marks=marks)
    batch.call("", "Net", given=[x, mask], returned=[batch.tensor(make.NAN)])
    verdict = judge(make, batch, before="masks")
    assert (verdict.module, verdict.role, verdict.value, verdict.phase) == ("attend", "output", "nan", "forward")
    assert verdict.certainty == "established"
    assert verdict.statement == (
        "Rank 1 on alpha overflowed first: nan in the output of `attend` (Attend), forward, batch 2; a row of input[1] "
        "is -inf throughout."
    )
    assert "mask" in verdict.next[0]
    assert judge(make, batch).certainty == "established", "the row is known to be -inf throughout"


def left_out(make, rank, **place):
    batch = make.Batch(rank, **place)
    batch.call("", "Net", returned=[batch.tensor(make.NAN)])
    batch.skipped_batch("not inspected: --every 5")
    return batch


def test_a_batch_that_was_left_out_gives_the_rank_and_no_module(make):
    verdict = judge(make, left_out(make, 1, batch=7), nproc=1)
    assert (verdict.rank, verdict.module, verdict.cls, verdict.certainty) == (1, None, None, "supported")
    assert (verdict.phase, verdict.batch) == ("forward", 7)
    assert "not inspected: --every 5" in verdict.statement
    assert "--every 1" in verdict.statement


def test_an_origin_elsewhere_beats_a_batch_that_was_left_out(make):
    verdict = judge(make, left_out(make, 0, seq=5), forward(make, 1, out=make.INF, seq=5))
    assert (verdict.rank, verdict.module) == (1, "head")


def test_the_same_batch_left_out_on_two_ranks_names_nobody(make):
    verdict = judge(make, left_out(make, 0, seq=5), left_out(make, 1, seq=5))
    assert (verdict.rank, verdict.certainty) == (None, "unknown")


# -- any order, any duplicates, any rank missing ------------------------------------------------------------------


def _stages(make):
    return [
        outside(make, 0, root="First", batch=4, clock={"0": 2}, names=("a", "b", "head")),
        backward(make, 1, root="Second", bad=make.NAN, batch=4, clock={"0": 2}),
        backward(make, 2, root="Second", batch=4, clock={"0": 2}),
    ]


SCENARIOS = {
    "backward": lambda make: [
        backward(make, 1, bad=make.NAN, batch=2, clock={"0": 8}, seq=8),
        *(reduced(make, rank, got=make.NAN, batch=2, clock={"0": 9}, seq=9) for rank in (0, 2)),
    ],
    "backward, two groups": lambda make: [
        backward(make, 1, bad=make.NAN, batch=2, clock={"0": 8, "dp": 3}, seq=11),
        backward(make, 0, batch=2, clock={"0": 8}, seq=8),
        reduced(make, 2, got=make.NAN, batch=2, clock={"0": 8, "dp": 4}, seq=12),
    ],
    "pipeline": _stages,
    "sum": lambda make: [reduced(make, rank, own=2e38, got=make.INF, batch=2, clock={"0": 9}) for rank in range(3)],
    "clipping": lambda make: [
        reduced(make, rank, got=make.INF if rank == 1 else 0.5, batch=2, clock={"0": 9}) for rank in range(3)
    ],
    "step": lambda make: [whole(make, rank, stepped=make.NAN if rank == 1 else 1.0, batch=2) for rank in range(3)],
    "flipped bit": lambda make: [
        forward(make, rank, weight=1e38 if rank == 1 else 1.0, out=make.INF if rank == 1 else 1.0) for rank in range(3)
    ],
    "loss": lambda make: [outside(make, rank) if rank == 1 else backward(make, rank) for rank in range(3)],
    "left out": lambda make: [left_out(make, 1, seq=5), forward(make, 0, seq=5), forward(make, 2, seq=5)],
}
SOURCES = {name: {1} for name in SCENARIOS} | {"sum": {None}}


def messages_of(make, batches):
    """Rank r runs on node r % 2."""
    agents = ["a0", "a1"]
    found = [(agent, make.hello(agent, f"h{n}", 2 - n, 2)) for n, agent in enumerate(agents)]
    for batch in batches:
        agent = agents[batch.rank % 2]
        place = {"seq": batch.seq, "batch": batch.batch}
        found += [(agent, body) for body in batch.messages()]
        if batch.anomaly is not None:
            found.append((agent, make.raised(batch.rank, "OverflowDetected", "inf", **place)))
        found.append((agent, make.ended(batch.rank, 1, "itself" if batch.anomaly else "torchrun", **place)))
    found += [(agent, make.NodeBye("failed")) for agent in agents]
    return [(agent, 0, body) for agent, body in found]  # without a number: what is missing leaves no gap


def rank_of(body) -> int | None:
    if isinstance(body, NameDefinitions | PageMessage):
        return body.rank
    if isinstance(body, EventMessage) and hasattr(body.event, "where"):
        return body.event.where.rank
    return None


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_the_source_is_named(make, name):
    assert decide(fold(messages_of(make, SCENARIOS[name](make)))).rank in SOURCES[name]


@pytest.mark.slow
@given(st.sampled_from(sorted(SCENARIOS)), st.randoms(use_true_random=False), st.data())
def test_any_order_and_any_duplicates_give_the_same_verdict(make, name, dice: random.Random, data):
    messages = messages_of(make, SCENARIOS[name](make))
    expected = decide(fold(messages))
    again = [message for message in messages for _ in range(data.draw(st.integers(1, 3)))]
    dice.shuffle(again)
    assert decide(fold(again)) == expected


@pytest.mark.parametrize("name", sorted(SCENARIOS))
@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
def test_a_missing_rank_never_makes_a_wrong_name_an_established_one(make, name, missing):
    messages = [m for m in messages_of(make, SCENARIOS[name](make)) if rank_of(m[2]) not in missing]
    verdict = decide(fold(messages))
    assert verdict.rank in SOURCES[name] or verdict.certainty != "established", verdict.statement


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_missing_pages_never_make_a_wrong_name_an_established_one(make, name):
    messages = messages_of(make, SCENARIOS[name](make))
    pages = [m for m in messages if isinstance(m[2], PageMessage)]
    for left_out_page in pages:
        verdict = decide(fold(m for m in messages if m is not left_out_page))
        assert verdict.rank in SOURCES[name] or verdict.certainty != "established", verdict.statement
    verdict = decide(fold(m for m in messages if m not in pages))
    assert verdict.certainty != "established"


# -- a weight that is wild and finite -----------------------------------------------------------------------------


@pytest.mark.parametrize("history", [True, False])
def test_a_wild_weight_further_up_is_the_first_wild_number(make, history):
    """Rank 1's `embed` was multiplied by 1e30. What overflows is `head`, whose own weight is as it was."""
    pages = [forward(make, 1, batch=2, page=0)] if history else []
    bad = forward(make, 1, embed=2e30, out=make.INF, batch=3, page=1)
    verdict = judge(make, *pages, forward(make, 0, batch=3, page=1), bad, nproc=2)
    against = "2.00e+00 in batch 2" if history else "2.00e+00 on rank 0"
    line = f"first unusual value: weight of `embed` (Linear), abs max 2.00e+30, against {against}"
    assert line in verdict.evidence
    assert (verdict.module, verdict.certainty) == ("head", "supported")
    assert verdict.next[0].startswith("Look first for what made the weight of `embed` (Linear) so large, 2.00e+30")
    assert not any("learning rate" in text for text in verdict.next)


@pytest.mark.parametrize("where", ["in the backward of a module", "in the loss"])
def test_a_wild_weight_is_looked_for_where_a_gradient_is_bad_too(make, where):
    """A weight of 5e29 against 0.5: no derivative at 0 is to be clamped."""
    made = outside if where == "in the loss" else lambda *args, **place: backward(*args, bad=make.NAN, **place)
    bad = made(make, 1, embed=5e29, batch=3, page=1)
    verdict = judge(
        make, backward(make, 1, embed=0.5, batch=2, page=0), backward(make, 0, batch=3, page=1), bad, nproc=2
    )
    assert (verdict.rank, verdict.phase, verdict.certainty) == (1, "backward", "supported")
    assert (
        "first unusual value: weight of `embed` (Linear), abs max 5.00e+29, against 5.00e-01 in batch 2"
    ) in verdict.evidence
    assert verdict.next[0].startswith("Look first for what made the weight of `embed` (Linear) so large")
    assert not any("clamp" in text or "Look at the loss" in text for text in verdict.next)


def test_a_weight_that_has_grown_from_zero_is_not_wild(make):
    pages = [forward(make, rank, embed=0.0, batch=2, page=0) for rank in (0, 1)]
    bad = forward(make, 1, embed=0.5, out=make.INF, batch=3, page=1)
    verdict = judge(make, *pages, forward(make, 0, embed=0.5, batch=3, page=1), bad, nproc=2)
    assert not any("wild" in line for line in verdict.evidence)
    assert verdict.certainty == "established"


@pytest.mark.parametrize("hidden", [True, False])
def test_compiled_code_that_was_not_looked_into_leaves_the_maker_open(make, hidden):
    batch = make.Batch(0, batch=2)
    x = batch.tensor()
    weights = {"weight": batch.tensor()}
    batch.call("model", "LlamaModel", given=[x], returned=[batch.tensor(make.NAN)], weights=weights)
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.NAN)])
    bodies = [make.hello(nproc=1), *batch.messages()]
    if hidden:
        bodies.append(EventMessage(NotLookedInto(make.where(0), "model", "LlamaModel")))
    verdict = decide(fold(("a0", n, body) for n, body in enumerate(bodies, 1)))
    assert (verdict.module, verdict.certainty) == ("model", "supported" if hidden else "established")
    assert (
        any("compiled code inside `model` (LlamaModel) was not inspected" in line for line in verdict.evidence)
        == hidden
    )
    assert ("use_cache=False" in verdict.next[0]) == hidden


# -- faults of gpuwatch's own -------------------------------------------------------------------------------------


def judge_with_fault(make, batches, rank, part="forward hook", **place):
    bodies = [make.hello(nproc=len(batches), host="alpha"), *(body for batch in batches for body in batch.messages())]
    bodies.append(EventMessage(OwnFault(make.where(rank, **place), part, "RuntimeError: not computed yet")))
    return decide(fold(("a0", n, body) for n, body in enumerate(bodies, 1)))


@pytest.mark.parametrize(
    ("place", "part", "rank", "certainty"),
    [
        ({"batch": 1, "page": 0}, "forward hook", 1, "supported"),
        ({"batch": 2, "page": 1}, "parameter hook", 1, "supported"),
        ({"batch": -1, "page": -1}, "attach", 1, "supported"),
        ({"batch": 3, "page": 2}, "forward hook", 1, "established"),
        ({"batch": 1, "page": 0}, "collectives", 1, "established"),
        ({"batch": 1, "page": 0}, "forward hook", 0, "established"),
    ],
)
def test_what_gpuwatch_failed_to_record_before_the_place_is_not_excluded(make, place, part, rank, certainty):
    batches = [backward(make, number, bad=make.NAN if number else 1.0, batch=2, page=1, seq=9) for number in (0, 1)]
    verdict = judge_with_fault(make, batches, rank, part, **place)
    assert (verdict.rank, verdict.module, verdict.certainty) == (1, "length", certainty)
    said = [line for line in verdict.evidence if f"({part}: " in line]
    assert bool(said) == (certainty == "supported")
    assert all("RuntimeError: not computed yet" in line for line in said)


def test_faults_whose_records_were_lost_leave_the_maker_open(make):
    """The header counts them, and does not say when they were."""
    batches = [backward(make, number, bad=make.NAN if number else 1.0, batch=2, page=1, seq=9) for number in (0, 1)]
    bodies = [make.hello(nproc=2), *(body for batch in batches for body in batch.messages())]
    bodies.append(make.NodeBeat([make.state(1, faults=3)], {}))
    verdict = decide(fold(("a0", n, body) for n, body in enumerate(bodies, 1)))
    assert (verdict.rank, verdict.module, verdict.certainty) == (1, "length", "supported")
    assert "rank 1: parts of gpuwatch failed 3 times more" in " ".join(verdict.evidence)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sum_over_the_ranks_is_not_established_where_a_gradient_may_be_missing(make, rank):
    batches = [reduced(make, number, own=2e38, got=make.INF, batch=2, page=1) for number in (0, 1)]
    verdict = judge_with_fault(make, batches, rank, "gradient hook", batch=2, page=1)
    assert (verdict.phase, verdict.certainty) == ("collective", "supported")
    assert f"rank {rank}: a part of gpuwatch failed in batch 2 (gradient hook: " in " ".join(verdict.evidence)


@pytest.mark.parametrize(("ranks", "certainty", "rank"), [(1, "supported", 0), (2, "unknown", None)])
def test_of_a_parameter_that_no_module_has_nobody_has_looked_at_the_gradient(make, ranks, certainty, rank):
    """It may have been a sum of all ranks' gradients, as in ZeRO."""
    batch = make.Batch(0)
    x = batch.tensor()
    batch.call("", "Net", given=[x], returned=[batch.tensor()])
    batch.stepped("optimizer.param_groups[0]", "Adam", {"params[3]": make.NAN})
    ends = [body for number in range(1, ranks) for body in make.finished(number)]
    bodies = [make.hello(nproc=ranks), *batch.messages(), make.ended(0, 94), *ends, make.NodeBye("failed")]
    verdict = decide(fold(("a0", n, body) for n, body in enumerate(bodies, 1)))
    assert (verdict.kind, verdict.certainty, verdict.rank) == ("overflow", certainty, rank)
    assert "params[3] of `optimizer.param_groups[0]` (Adam)" in " ".join([verdict.statement, *verdict.evidence])


def second_run(batch, module="attend", cls="Attend"):
    number = OperandNumbers("float32", [4], 1e30, "finite")
    operation = BadOperation("aten.mul.Tensor", module, "model.py", 7, "x * y", [number], number, "everything")
    return EventMessage(SecondRun(batch.anomaly.where, operation, cls=cls))


def test_a_second_run_gives_the_module_of_a_batch_that_was_left_out(make):
    batch = left_out(make, 1, batch=7)
    bodies = [make.hello(nproc=1, host="alpha"), *batch.messages(), second_run(batch)]
    verdict = decide(fold(("a0", n, body) for n, body in enumerate(bodies, 1)))
    assert (verdict.rank, verdict.module, verdict.cls, verdict.certainty) == (1, "attend", "Attend", "supported")
    assert "in a second run of that forward `attend` (Attend) made it" in verdict.statement
    assert not any("--every 1" in step for step in verdict.next)
