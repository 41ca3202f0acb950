"""Where in one page the first bad value came from. Calls are in the order in which they return."""

from __future__ import annotations

from gpuwatch.collector.facts import fold
from gpuwatch.collector.origin import analyze, from_event
from gpuwatch.core.messages import EventMessage


def find(batch, **page):
    """The finding of a batch, by way of its messages."""
    messages = [batch.definitions(), EventMessage(batch.anomaly), batch.page_message(**page)]
    facts = fold(("a", n, body) for n, body in enumerate(messages))
    (rank,) = facts.ranks.values()
    return analyze(rank.pages[batch.page], rank.anomalies[0])


def test_a_leaf_that_made_it_out_of_finite_values(make):
    batch = make.Batch(rank=2, batch=7, seq=5)
    x, h, y = batch.tensor(), batch.tensor(), batch.tensor(make.INF)
    batch.call("fc1", "Linear", given=[x], returned=[h], weights={"weight": batch.tensor()})
    batch.call("fc2", "Linear", given=[h], returned=[y], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[x], returned=[y])
    found = find(batch)
    assert (found.rank, found.batch, found.step, found.root, found.seq) == (2, 7, 7, "Net", 5)
    assert (found.module, found.cls, found.phase, found.role) == ("fc2", "Linear", "forward", "output")
    assert (found.value, found.dtype, found.shape, found.between) == ("+inf", "float32", (2, 3), None)
    assert found.is_origin
    assert found.from_page


def test_a_containers_own_code_after_its_last_child(make):
    """`return x + self.fc2(h)` is where residual adds overflow."""
    batch = make.Batch()
    x, h, y = batch.tensor(), batch.tensor(), batch.tensor(make.INF)
    batch.call("layer.fc1", "Linear", given=[x], returned=[h], parent="layer")
    batch.call("layer.fc2", "Linear", given=[h], returned=[batch.tensor()], parent="layer")
    batch.call("layer", "Block", given=[x], returned=[y])
    found = find(batch)
    assert (found.module, found.cls, found.phase, found.between) == ("layer", "Block", "forward", ("layer.fc2", None))


def test_a_containers_own_code_between_two_children(make):
    batch = make.Batch()
    x, h, bad = batch.tensor(), batch.tensor(), batch.tensor(make.NAN)
    batch.call("layer.fc1", "Linear", given=[x], returned=[h], parent="layer")
    batch.call("layer.fc2", "Linear", given=[bad], returned=[batch.tensor(make.NAN)], parent="layer")
    batch.call("layer", "Block", given=[x], returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.cls, found.phase) == ("layer", "Block", "forward")
    assert found.between == ("layer.fc1", "layer.fc2")
    assert found.value == "nan"


def test_between_looks_past_the_children_of_the_call_before(make):
    batch = make.Batch()
    x, h = batch.tensor(), batch.tensor()
    batch.call("a.inner", "Linear", given=[x], returned=[h], parent="a")
    batch.call("a", "Block", given=[x], returned=[h])
    bad = batch.tensor(make.INF)
    batch.call("b.inner", "Linear", given=[bad], returned=[batch.tensor(make.INF)], parent="b")
    batch.call("b", "Block", given=[bad], returned=[batch.tensor(make.INF)])
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.INF)])
    found = find(batch)
    assert (found.module, found.phase, found.between) == ("", "forward", ("a", "b"))


def test_code_before_the_first_child(make):
    batch = make.Batch()
    x, bad = batch.tensor(), batch.tensor(make.INF)
    batch.call("layer.fc1", "Linear", given=[bad], returned=[batch.tensor(make.INF)], parent="layer")
    batch.call("layer", "Block", given=[x], returned=[batch.tensor(make.INF)])
    found = find(batch)
    assert (found.module, found.phase) == ("layer", "forward")
    assert not found.between[0]
    assert found.between[1] == "layer.fc1"


def test_a_bad_weight(make):
    batch = make.Batch()
    x = batch.tensor()
    weights = {"weight": batch.tensor(make.NAN), "bias": batch.tensor()}
    batch.call("fc1", "Linear", given=[x], returned=[batch.tensor(make.NAN)], weights=weights)
    found = find(batch)
    assert (found.module, found.phase, found.role, found.is_origin) == ("fc1", "weight", "weight", False)


def test_the_models_own_input_was_bad(make):
    batch = make.Batch()
    bad = batch.tensor(make.NAN)
    batch.call("layer.fc", "Linear", given=[bad], returned=[batch.tensor(make.NAN)], parent="layer")
    batch.call("layer", "Block", given=[bad], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[batch.tensor(), bad], returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.cls, found.phase, found.role) == ("", "Net", "input", "input[1]")


def test_an_input_that_was_bad_at_the_start_keeps_the_place_where_it_was_first_seen(make):
    """The root's frame ends after the collectives of the whole forward: that must not make its input look late."""
    batch = make.Batch(seq=3)
    bad = batch.tensor(make.NAN)
    batch.call("fc", "Linear", given=[bad], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[bad], returned=[batch.tensor(make.NAN)], seq=9)
    assert find(batch).seq <= 3


def test_a_value_between_two_calls_keeps_the_place_where_it_was_first_seen(make):
    batch = make.Batch(seq=3)
    x, bad = batch.tensor(), batch.tensor(make.INF)
    batch.call("a", "Linear", given=[x], returned=[batch.tensor()])
    batch.call("b.fc", "Linear", given=[bad], returned=[batch.tensor(make.INF)], parent="b")
    batch.call("b", "Block", given=[bad], returned=[batch.tensor(make.INF)], seq=9)
    found = find(batch)
    assert found.between == ("a", "b")
    assert found.seq <= 3


def test_a_bad_input_is_chased_through_the_call_that_returned_it(make):
    """The first alarm is at `fc`; the embedding's -inf output alone raised none and was turned into nan."""
    batch = make.Batch()
    ids, masked = batch.tensor(), batch.tensor(make.NEGINF)
    batch.call("mask", "Mask", given=[ids], returned=[masked])
    batch.call("fc", "Linear", given=[masked], returned=[batch.tensor(make.NAN)], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[ids], returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.cls, found.phase, found.value) == ("mask", "Mask", "forward", "-inf")


def test_a_call_that_only_hands_a_tensor_on_is_not_its_maker(make):
    batch = make.Batch()
    bad = batch.tensor(make.NAN)
    batch.call("drop", "Dropout", given=[bad], returned=[bad])
    batch.call("fc", "Linear", given=[bad], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[bad], returned=[batch.tensor(make.NAN)])
    assert (find(batch).module, find(batch).phase) == ("", "input")


def test_a_mask_of_neginf_is_no_anomaly(make):
    batch = make.Batch()
    x, mask = batch.tensor(), batch.tensor(make.NEGINF)
    batch.call("attention", "Attention", given=[x], returned=[batch.tensor()], kwargs={"mask": mask})
    batch.call("", "Net", given=[x, mask], returned=[batch.tensor()])
    assert batch.anomaly is None


def test_a_mask_that_turned_into_nan_is_named_as_the_cause(make):
    batch = make.Batch()
    x, mask = batch.tensor(), batch.tensor(make.NEGINF)
    batch.call("attention", "Attention", given=[x], returned=[batch.tensor(make.NAN)], kwargs={"mask": mask})
    batch.call("", "Net", given=[x, mask], returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.phase, found.role, found.value) == ("", "input", "input[1]", "-inf")


def test_a_mask_is_not_blamed_for_an_overflow_to_plus_inf(make):
    batch = make.Batch()
    x, mask = batch.tensor(), batch.tensor(make.NEGINF)
    batch.call("block.attn", "Attention", given=[x], returned=[batch.tensor()], kwargs={"mask": mask}, parent="block")
    batch.call("block", "Block", given=[x, mask], returned=[batch.tensor(make.INF)])
    batch.call("", "Net", given=[x, mask], returned=[batch.tensor(make.INF)])
    found = find(batch)
    assert (found.module, found.phase, found.value) == ("block", "forward", "+inf")
    assert found.between == ("block.attn", None)


def test_of_a_mask_and_a_nan_the_nan_is_followed(make):
    batch = make.Batch()
    x, mask, bad = batch.tensor(), batch.tensor(make.NEGINF), batch.tensor(make.NAN)
    batch.call("norm", "LayerNorm", given=[x], returned=[batch.tensor()])
    batch.call("attention", "Attention", given=[mask, bad], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[x, mask], returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.phase, found.value, found.between) == ("", "forward", "nan", ("norm", "attention"))


def test_without_the_page_the_event_alone_speaks(make):
    cases = (
        (1.0, 1.0, "forward", "made"),
        (make.NAN, 1.0, "forward", "carried"),
        (1.0, make.NAN, "weight", "weight"),
    )
    for number, weights, phase, source in cases:
        batch = make.Batch()
        batch.call(
            "fc",
            "Linear",
            given=[batch.tensor(number)],
            returned=[batch.tensor(make.NAN)],
            weights={"weight": batch.tensor(weights)},
        )
        found = from_event(batch.anomaly)
        assert (found.module, found.phase, found.source, found.from_page) == ("fc", phase, source, False)


def test_the_models_input_is_told_from_the_event_too(make):
    batch = make.Batch()
    batch.call("", "Net", given=[batch.tensor(make.NAN)], returned=[batch.tensor(make.NAN)])
    assert from_event(batch.anomaly).phase == "input"


def test_a_page_that_has_lost_frames_is_not_trusted(make):
    batch = make.Batch()
    bad = batch.tensor(make.NAN)
    batch.call("a", "Linear", given=[batch.tensor()], returned=[bad])
    batch.call("b", "Linear", given=[bad], returned=[batch.tensor(make.NAN)])
    found = find(batch, first_frame=1)
    assert not found.from_page
    assert found.module == "a"
