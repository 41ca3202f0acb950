"""A weight that is bad in a forward: when it was finite, and whether a step can have changed it since."""

from __future__ import annotations

import msgspec
import pytest
from gpuwatch.collector.decide.overflow_verdict import overflow_verdict
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.facts.rank_origin import origin_in_page
from gpuwatch.core.events.looked_again import LookedAgain, OptimizerStep
from gpuwatch.core.frames import RowKind
from gpuwatch.core.recorder import layout


def trained(make, number, *, weight=1.0, step=None, gradient=0.5, stepped=1.0, seq=0, **more):
    """One batch of `fc` and `other`: the forward, the backward, the step. None leaves a part of `fc`'s out."""
    batch = make.Batch(batch=number, page=number, step=number if step is None else step, seq=seq, **more)
    x, y = batch.tensor(), batch.tensor(1.0 if weight == weight else make.NAN)
    if weight is not None:
        batch.call("fc", "Linear", given=[x], returned=[y], weights={"weight": batch.tensor(weight)})
    batch.call("other", "Linear", given=[y], returned=[y], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("other", "Linear", "weight", 0.5)
    if gradient is not None:
        batch.backward("fc", "Linear", "weight", gradient)
    if stepped is not None:
        batch.stepped("fc", "Linear", {"weight": stepped})
    batch.stepped("other", "Linear", {"weight": 1.0})
    return batch


def bad(make, number, **more):
    return trained(make, number, weight=make.NAN, **more)


def find(last, *earlier):
    return origin_in_page(last.decoded(), last.anomaly, [batch.decoded() for batch in earlier])


SCRIPT = "the script, a load or memory changed it"


def test_finite_after_the_last_step_is_changed_by_no_step(make):
    found = find(bad(make, 3), trained(make, 2), trained(make, 1))
    assert (found.module, found.phase, found.source, found.role) == ("fc", "weight", "weight", "weight")
    assert (found.weight.changed_since, found.sure) == (True, False)
    assert found.weight.history == f"it was finite after step 3, and no optimizer step was seen in between: {SCRIPT}"
    assert found.notes[0] == ("weight was finite when it was last read, after the step of batch 2: abs max 1.00e+00")


def test_several_batches_of_one_step_hold_no_step(make):
    """Gradient accumulation."""
    found = find(bad(make, 3, step=1), trained(make, 2, step=1, stepped=None))
    assert found.weight.history == f"it was finite in batch 2, and no optimizer step was seen in between: {SCRIPT}"
    assert found.weight.changed_since


def test_before_the_first_step_a_weight_that_was_finite_is_no_matter_of_initialisation(make):
    """The script steps by itself, without an optimizer."""
    found = find(bad(make, 2, step=0), trained(make, 1, step=0, stepped=None))
    assert found.weight.changed_since
    verdict = overflow_verdict(
        fold(
            ("a0", n, body)
            for n, body in enumerate(
                [
                    make.hello(nproc=1),
                    *trained(make, 1, step=0, stepped=None).messages(),
                    *bad(make, 2, step=0).messages(),
                ]
            )
        )
    )
    assert verdict.certainty == "supported"
    assert verdict.statement.endswith(
        f"at the start of its forward in batch 2 (step 0); it was finite in batch 1, and no optimizer step was seen in "
        f"between: {SCRIPT}."
    )
    assert verdict.next[0].startswith(
        "Look at what the script does with weights between two steps: an update of its own or a compiled step, "
    )


def test_two_calls_of_one_forward(make):
    batch = make.Batch(batch=1, page=1)
    x, y = batch.tensor(), batch.tensor()
    for number in (1.0, make.NAN):
        batch.call("fc", "Linear", given=[x], returned=[y], weights={"weight": batch.tensor(number)})
    batch.call("", "Net", given=[x], returned=[y])
    assert find(batch).weight.history.startswith("it was finite earlier in that batch, and no optimizer step")


def test_steps_after_which_it_was_not_read_leave_it_open(make):
    """Its master copy in float32 is what the optimizer holds: gradients are its own, no step reads it."""
    found = find(bad(make, 3), trained(make, 2, stepped=None))
    assert (found.weight.changed_since, found.sure) == (False, False)
    assert found.weight.history == (
        "it was finite in batch 2; 1 optimizer step ran in between, and it was not read after that: whether a step or "
        "something else changed it is unknown"
    )


def test_a_weight_without_a_gradient_that_no_step_touches(make):
    """It is frozen: other weights have gradients, and are read after their step."""
    found = find(bad(make, 3), trained(make, 2, stepped=None, gradient=None))
    assert found.weight.changed_since
    assert found.weight.history == (
        f"it was finite in batch 2, had no gradient since, and no step on it was seen: {SCRIPT}"
    )


def test_a_batch_that_is_missing_may_have_held_a_step(make):
    frozen = {"stepped": None, "gradient": None}
    found = find(bad(make, 5), trained(make, 2, **frozen))
    assert not found.weight.changed_since
    assert "3 optimizer steps ran in between" in found.weight.history


@pytest.mark.parametrize(("missing", "changed"), [(False, True), (True, False)])
def test_steps_of_other_optimizers_do_not_touch_it(make, missing, changed):
    """A GAN: two steps in each batch, and one of them is on this model."""
    last, before = bad(make, 5 if missing else 3, step=6), trained(make, 2, step=4)
    found = find(last, before)
    assert found.weight.changed_since is changed
    assert (
        missing
        or found.weight.history
        == f"it was finite after the step of batch 2, and no later step on it was seen: {SCRIPT}"
    )


def test_a_collective_in_between_may_have_brought_it(make):
    found = find(bad(make, 3, seq=9), trained(make, 2, seq=7))
    assert found.weight.history.endswith(": the script, a load, a collective or memory changed it")


def test_a_shard_is_not_the_whole_weight(make):
    """FSDP1: the optimizer steps on a part of it."""
    batch = make.Batch(batch=2, page=2)
    x = batch.tensor()
    whole = {"weight": 1}
    batch.call("fc", "Linear", given=[x], returned=[x], weights={"weight": batch.tensor()}, shapes=whole)
    batch.stepped("fc", "Linear", {"weight": 1.0})
    last = make.Batch(batch=3, page=3)
    x, y = last.tensor(), last.tensor(make.NAN)
    last.call("fc", "Linear", given=[x], returned=[y], weights={"weight": last.tensor(make.NAN)}, shapes=whole)
    found = find(last, batch)
    assert not found.weight.changed_since
    assert found.weight.history.startswith("it was finite in batch 2; 1 optimizer step ran in between")


def test_nothing_from_before(make):
    found = find(bad(make, 3))
    assert (found.weight.history, found.weight.changed_since, found.sure) == ("", False, True)


def test_a_weight_whose_output_led_to_a_second_look(make):
    """`.data`: the page holds its numbers of after the last step."""
    batch = make.Batch(batch=3, page=3)
    x, y = batch.tensor(), batch.tensor(make.NAN)
    batch.call("fc", "Linear", given=[x], returned=[y], weights={"weight": batch.tensor()})
    batch.anomaly = msgspec.structs.replace(batch.anomaly, again=LookedAgain(weights={"weight": "nan"}))
    found = find(batch, trained(make, 2))
    assert found.weight.changed_since
    assert (
        found.weight.history
        == f"it was finite when it was last read, and no optimizer step was seen in between: {SCRIPT}"
    )


# -- after a step -------------------------------------------------------------------------------------------------


def without_gradient(make, **more):
    batch = trained(make, 3, gradient=None, stepped=None, **more)
    batch.stepped("fc", "Linear", {"weight": make.NAN, "state grad weight": 1.0})
    slot = next(n for (_, role), n in batch._slots.items() if role == "state grad weight" and n == batch._rows[-1][0])
    batch._rows[-1] = (slot, layout.NOTHING, layout.NOTHING, 0, RowKind.NONE.number, 0)
    return batch


@pytest.mark.parametrize(
    ("cls", "sure"), [("torch.optim.sgd.SGD", True), ("lookahead.Lookahead", False), (None, False)]
)
def test_a_weight_that_had_no_gradient_was_not_changed_by_the_step(make, cls, sure):
    batch = without_gradient(make)
    if cls is not None:
        batch.anomaly = msgspec.structs.replace(batch.anomaly, optimizer=OptimizerStep(cls, {"lr": 3e38}))
    found = find(batch, trained(make, 2))
    assert (found.module, found.phase, found.source, found.sure) == ("fc", "weight", "changed", sure)
    assert found.weight.history == "it had no gradient, and a step changes no weight without one"


def test_what_went_into_a_step_is_the_weight_as_it_was_last_read(make):
    """It is called by no forward of this batch, and was read after the step before."""
    batch = trained(make, 3, weight=None, stepped=None)
    batch.stepped("fc", "Linear", {"weight": make.INF})
    step = OptimizerStep("torch.optim.sgd.SGD", {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0})
    batch.anomaly = msgspec.structs.replace(batch.anomaly, optimizer=step)
    assert (find(batch).source, find(batch).sure) == ("made", False)
    assert (find(batch, trained(make, 2)).source, find(batch, trained(make, 2)).sure) == ("changed", True)


def test_of_two_steps_in_one_batch_the_first_is_where_the_second_began(make):
    batch = trained(make, 3, stepped=3e38)
    batch.stepped("fc", "Linear", {"weight": make.INF})
    step = OptimizerStep("torch.optim.sgd.SGD", {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0})
    batch.anomaly = msgspec.structs.replace(batch.anomaly, optimizer=step)
    assert (find(batch).source, find(batch).sure) == ("made", True)
