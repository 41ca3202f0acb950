"""A loss that was not finite when its backward began: which rank, how sure, and what the script's variables tell."""

from __future__ import annotations

import msgspec
import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.alarm_evidence import BadOperation, SecondRun
from gpuwatch.core.events.looked_again import HeldValue, LookedAgain, OwnCodeModule
from gpuwatch.core.events.read_tensors import OperandNumbers, ScriptTensor
from gpuwatch.core.frames import LOSS_CLASS, LOSS_MODULE, RowMark
from gpuwatch.core.wire.messages import EventMessage

SEARCHED = LookedAgain(own_code_of="output")
"""A second look that has found nothing."""


def numbers(value="finite", abs_max=None, shape=()):
    return OperandNumbers("float32", list(shape), abs_max, value)


def variable(name, value, line, *, uses=(), ops=(), shape=(), counts=False):
    given = numbers(value, 1.0 if value == "finite" else None, shape)
    return ScriptTensor(name, "main", "/x/train.py", line, f"{name} = ...", [*uses], [*ops], given, counts=counts)


def batch(make, rank=0, *, loss=1.0, out=1.0, mask=None, waived=None, again=SEARCHED, seq=9, loss_seq=None):
    """`model(x)`, whose parts are all finite, then the loss and a gradient."""
    made = make.Batch(rank, batch=3, seq=seq)
    x, y = made.tensor(), made.tensor(out)
    if mask is not None:
        made.call("mask", "Mask", given=[x], returned=[made.tensor(mask)])
    made.call("fc", "Linear", given=[x], returned=[y])
    returned = [y] if waived is None else [y, made.tensor(waived)]
    made.call("", "Net", given=[x], returned=returned, marks={"output[1]": int(RowMark.IGNORED)})
    made.call(
        LOSS_MODULE, LOSS_CLASS, returned=[made.tensor(loss)], phase=make.Phase.LOSS, parent=None, depth=0, seq=loss_seq
    )
    made.backward("fc", "Linear", "output", 1.0, seq=loss_seq)
    if made.anomaly is not None:
        made.anomaly = msgspec.structs.replace(made.anomaly, again=again)
    return made


def judged(make, *batches):
    bodies = [make.hello(nproc=len(batches), host="alpha"), *(body for each in batches for body in each.messages())]
    return decide(fold(("a0", n, body) for n, body in enumerate(bodies, 1)))


@pytest.mark.parametrize(("number", "value"), [("NAN", "nan"), ("INF", "+inf"), ("NEGINF", "-inf")])
def test_the_rank_and_the_loss_are_named_and_no_module(make, number, value):
    verdict = judged(make, batch(make), batch(make, 1, loss=getattr(make, number)))
    assert (verdict.kind, verdict.rank, verdict.phase, verdict.value) == ("overflow", 1, "loss", value)
    assert (verdict.module, verdict.cls, verdict.role, verdict.root, verdict.batch) == (None, None, None, "Net", 3)
    assert verdict.certainty == "established"
    assert verdict.statement == f"Rank 1 on alpha overflowed first: {value} in the loss, after the forward of batch 3."
    assert f"rank 1, batch 3, frame 2: the tensor on which backward was called was {value}" in verdict.evidence
    assert "rank 0: every frame received of that batch was finite" in verdict.evidence


@pytest.mark.parametrize("line", [0, 7])
def test_the_line_of_a_known_operation_is_to_be_had_by_another_run(make, line):
    """On a device the script may have gone on by the time the number arrives."""
    bad = batch(make, loss=make.INF)
    made = BadOperation(
        "aten.div.Tensor", "", "train.py" if line else "", line, "", [numbers()], numbers("+inf"), "all"
    )
    bodies = [make.hello(nproc=1), *bad.messages(), EventMessage(SecondRun(bad.anomaly.where, made))]
    told = decide(fold(("a0", n, body) for n, body in enumerate(bodies, 1))).next
    again = "For the line of this operation, run it again with that batch watched: gpuwatch launch --explain 3"
    assert any(text.startswith(again) for text in told) == (not line)


def test_a_module_that_was_bad_before_is_the_origin(make):
    verdict = judged(make, batch(make, out=make.INF, loss=make.NAN))
    assert (verdict.phase, verdict.module, verdict.value) == ("forward", "fc", "+inf")


@pytest.mark.parametrize(
    ("again", "said"),
    [
        (LookedAgain(), ""),
        (
            LookedAgain(own_code_of="output", own_code=[OwnCodeModule("moe", "MoE", "MulBackward0")]),
            "the loss used a tensor that `moe` (MoE) had not returned (MulBackward0)",
        ),
        (
            LookedAgain(own_code_of="output", held=[HeldValue("moe", "MoE", "aux_loss", "nan")]),
            "attribute aux_loss of `moe` (MoE) holds nan",
        ),
    ],
    ids=["the graph is not known", "by the graph", "by an attribute"],
)
def test_what_came_by_another_way_makes_it_less_sure(make, again, said):
    verdict = judged(make, batch(make, loss=make.NAN, again=again))
    assert (verdict.phase, verdict.certainty) == ("loss", "supported")
    assert any(said in line for line in verdict.evidence)


def test_a_waived_result_may_be_what_it_was_made_of(make):
    verdict = judged(make, batch(make, loss=make.NAN, waived=make.NAN))
    assert (verdict.phase, verdict.certainty, verdict.cause) == ("loss", "supported", None)
    assert any("the root module (Net) had returned nan, which is no alarm" in line for line in verdict.evidence)


def test_a_mask_inside_of_the_model_is_not(make):
    verdict = judged(make, batch(make, loss=make.NAN, mask=make.NEGINF))
    assert (verdict.phase, verdict.certainty, verdict.cause.kind) == ("loss", "established", "script")


def test_where_the_model_itself_is_not_watched_it_is_less_sure(make):
    made = make.Batch(0, batch=3)
    made.call("fc", "Linear", given=[made.tensor()], returned=[made.tensor()])
    made.call(LOSS_MODULE, LOSS_CLASS, returned=[made.tensor(make.NAN)], phase=make.Phase.LOSS, parent=None, depth=0)
    made.anomaly = msgspec.structs.replace(made.anomaly, again=SEARCHED)
    assert judged(make, made).certainty == "supported"


def test_a_collective_before_the_backward_may_have_brought_it(make):
    verdict = judged(make, batch(make), batch(make, 1, loss=make.NAN, loss_seq=10))
    assert (verdict.rank, verdict.phase, verdict.certainty) == (1, "loss", "supported")
    assert any("1 collectives, sends or receives between the forward's end" in line for line in verdict.evidence)


def test_a_loss_that_a_scaler_checks_is_no_alarm(make):
    bad = batch(make)
    scaled = make.Batch(0, batch=4, page=1)
    scaled.call(
        LOSS_MODULE,
        LOSS_CLASS,
        returned=[scaled.tensor(make.INF)],
        phase=make.Phase.LOSS,
        parent=None,
        depth=0,
        marks={"output": int(RowMark.SCALED)},
    )
    assert scaled.anomaly is None and bad.anomaly is None
    scaled.skipped()
    verdict = judged(make, scaled)
    assert (verdict.phase, verdict.value) == ("loss", "+inf")
    assert "GradScaler skipped 12 steps in a row" in verdict.statement


def test_the_variable_that_was_bad_first_and_its_line(make):
    script = [
        variable("loss", "nan", 14, uses=["adv"], counts=True),
        variable("adv", "nan", 12, ops=["std"], shape=(1,)),
    ]
    verdict = judged(make, batch(make, loss=make.NAN, again=LookedAgain(own_code_of="output", script=script)))
    assert verdict.statement.endswith(
        "in the loss, after the forward of batch 3; `adv`, assigned at train.py:12, was nan."
    )
    assert verdict.cause.kind == "domain"
    assert "std" in verdict.cause.next[0]


def test_a_mask_is_not_taken_for_the_cause_and_a_single_number_is(make):
    def said(shape):
        script = [
            variable("loss", "-inf", 14, uses=["term"], counts=True),
            variable("term", "-inf", 12, shape=shape, counts=not shape),
        ]
        again = LookedAgain(own_code_of="output", script=script)
        return judged(make, batch(make, loss=make.NEGINF, again=again)).statement

    assert "`loss`, assigned at train.py:14, was -inf" in said((4, 4))
    assert "`term`, assigned at train.py:12, was -inf" in said(())


@pytest.mark.parametrize(("ops", "named"), [((), False), (("log",), True)])
def test_a_line_of_a_framework_that_hands_the_loss_on_is_not_named(make, ops, named):
    loss = variable("closure_loss", "nan", 211, ops=ops, counts=True)
    loss = msgspec.structs.replace(loss, file="/opt/lib/site-packages/lightning/strategy.py")
    verdict = judged(make, batch(make, loss=make.NAN, again=LookedAgain(script=[loss])))
    assert ("closure_loss" in verdict.cause.statement) is named
    assert ("closure_loss" in verdict.statement) is named
    assert named or "the script's own loss has made it" in verdict.cause.statement
    assert named or verdict.next[0].startswith("Look at the code of the script that computes the loss")
