"""What to do next follows from why: what the second look has found bad comes first."""

from __future__ import annotations

import msgspec
import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.looked_again import LookedAgain


def judged(make, again=None, *, step=3, weights=True, later=(), **place):
    """A module that has made a bad value, and what the second look at it has found."""
    batch = make.Batch(0, batch=3, step=step, **place)
    x, h, y = batch.tensor(), batch.tensor(), batch.tensor(make.INF)
    read = {"weight": batch.tensor()} if weights else None
    batch.call("embed", "Linear", given=[x], returned=[h], weights=read)
    batch.call("rotary", "Rotary", given=[h], returned=[y])
    batch.call("", "Net", given=[x], returned=[y])
    if again is not None:
        batch.anomaly = msgspec.structs.replace(batch.anomaly, again=again)
    bodies = [make.hello(nproc=1), *batch.messages(), *later]
    return decide(fold(("a0", n, body) for n, body in enumerate(bodies)))


@pytest.mark.parametrize("step", [0, 3])
def test_a_bad_buffer_is_looked_at_and_no_weight(make, step):
    verdict = judged(make, LookedAgain(buffers={"inv_freq": "nan"}), step=step)
    assert "buffer inv_freq of `rotary` (Rotary) is nan" in verdict.evidence
    assert verdict.next[0].startswith("Look at what fills buffer inv_freq of `rotary` (Rotary)")
    assert not any("weight" in text or "learning rate" in text for text in verdict.next)


def test_a_weight_that_no_step_has_changed_is_looked_at_and_no_learning_rate(make):
    changed = ["weight of `embed` (Linear), abs max 1.00e+00 then, 3.00e+38 now"]
    verdict = judged(make, LookedAgain(changed=changed))
    assert any("3.00e+38 now" in line for line in verdict.evidence)
    assert "what the script does with weights between two steps" in verdict.next[0]
    assert not any("learning rate" in text for text in verdict.next)


def test_where_nothing_is_found_the_growth_of_numbers_is(make):
    assert "learning rate" in judged(make, LookedAgain()).next[0]
    assert "initialisation" in judged(make, LookedAgain(), step=0).next[0]


def test_a_run_that_has_trained_past_it_is_not_told_how(make):
    assert judged(make).next[-1].endswith("to keep training past it: --on-overflow continue.")
    went_on = judged(make, later=make.finished(0, batch=9))
    assert went_on.next[-1] == "To see whole batches: gpuwatch launch --trace-batches 2,3."
    again = "For the operation and its line, run it again with that batch watched: gpuwatch launch --explain 3 --rank 0"
    assert went_on.next[0].startswith(again), "nothing ran again: this finds the cause"


def test_what_is_watched_already_is_not_advised(make):
    """No weight of the model was read at all; or those of other modules were."""
    assert judged(make, weights=False).next[0] == "Watch the weights, too: --watch forward,grads,weights."
    late = LookedAgain(weights={"weight": "nan"}, same_step=False)
    assert not any("--watch" in text for text in judged(make, late).next)
