"""Where in one page the first bad value came from. Calls are in the order in which they return."""

from __future__ import annotations

import msgspec
import pytest
from gpuwatch.collector.facts.diagnosis import from_event
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.looked_again import BadWeight, HeldValue, LookedAgain, OwnCodeModule
from gpuwatch.core.frames import RowMark
from gpuwatch.core.wire.messages import EventMessage


def find(batch, before="finite", **page):
    """The diagnosis of a batch, by way of its messages. `before`: what was where -inf is now, in the batch before."""
    messages = [batch.definitions(), EventMessage(batch.anomaly), batch.page_message(**page)]
    if before != "unknown":
        messages.append(batch.page_before(masks=before == "-inf"))
    facts = fold(("a", n, body) for n, body in enumerate(messages))
    (rank,) = facts.ranks.values()
    return rank.diagnosis


def test_a_leaf_that_made_it_out_of_finite_values(make):
    batch = make.Batch(rank=2, batch=7, seq=5)
    x, h, y = batch.tensor(), batch.tensor(), batch.tensor(make.INF)
    batch.call("fc1", "Linear", given=[x], returned=[h], weights={"weight": batch.tensor()})
    batch.call("fc2", "Linear", given=[h], returned=[y], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[x], returned=[y])
    found = find(batch)
    assert (found.rank, found.batch, found.step, found.root, found.issued.seq) == (2, 7, 7, "Net", 5)
    assert (found.module, found.cls, found.phase, found.role) == ("fc2", "Linear", "forward", "output")
    assert (found.row.value, found.row.dtype, found.row.shape, found.between) == ("+inf", "float32", (2, 3), None)
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
    assert found.row.value == "nan"


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
    assert find(batch).issued.seq <= 3


def test_a_value_between_two_calls_keeps_the_place_where_it_was_first_seen(make):
    batch = make.Batch(seq=3)
    x, bad = batch.tensor(), batch.tensor(make.INF)
    batch.call("a", "Linear", given=[x], returned=[batch.tensor()])
    batch.call("b.fc", "Linear", given=[bad], returned=[batch.tensor(make.INF)], parent="b")
    batch.call("b", "Block", given=[bad], returned=[batch.tensor(make.INF)], seq=9)
    found = find(batch)
    assert found.between == ("a", "b")
    assert found.issued.seq <= 3


def test_a_bad_input_is_chased_through_the_call_that_returned_it(make):
    """The first alarm is at `fc`; the embedding's -inf output alone raised none and was turned into nan."""
    batch = make.Batch()
    ids, masked = batch.tensor(), batch.tensor(make.NEGINF)
    batch.call("mask", "Mask", given=[ids], returned=[masked])
    batch.call("fc", "Linear", given=[masked], returned=[batch.tensor(make.NAN)], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[ids], returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.cls, found.phase, found.row.value) == ("mask", "Mask", "forward", "-inf")


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
    assert (found.module, found.phase, found.role, found.row.value) == ("", "input", "input[1]", "-inf")


def test_a_mask_is_not_blamed_for_an_overflow_to_plus_inf(make):
    batch = make.Batch()
    x, mask = batch.tensor(), batch.tensor(make.NEGINF)
    batch.call("block.attn", "Attention", given=[x], returned=[batch.tensor()], kwargs={"mask": mask}, parent="block")
    batch.call("block", "Block", given=[x, mask], returned=[batch.tensor(make.INF)])
    batch.call("", "Net", given=[x, mask], returned=[batch.tensor(make.INF)])
    found = find(batch)
    assert (found.module, found.phase, found.row.value) == ("block", "forward", "+inf")
    assert found.between == ("block.attn", None)


def test_of_a_mask_and_a_nan_the_nan_is_followed(make):
    batch = make.Batch()
    x, mask, bad = batch.tensor(), batch.tensor(make.NEGINF), batch.tensor(make.NAN)
    batch.call("norm", "LayerNorm", given=[x], returned=[batch.tensor()])
    batch.call("attention", "Attention", given=[mask, bad], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[x, mask], returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.phase, found.row.value, found.between) == ("", "forward", "nan", ("norm", "attention"))


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


def test_the_models_input_is_told_through_code_before_the_first_call(make):
    """`x = x * 2; self.fc(x)`: the tensor is another one, and the model was handed a bad one all the same."""
    batch = make.Batch()
    x, scaled = batch.tensor(make.NAN), batch.tensor(make.NAN)
    batch.call("fc", "Linear", given=[scaled], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.phase, found.role, found.source) == ("", "input", "input[0]", "outside")


def test_the_innermost_of_the_calls_that_returned_it_is_its_maker(make):
    batch = make.Batch()
    x, masked = batch.tensor(), batch.tensor(make.NEGINF)
    batch.call("masks.causal", "Causal", given=[x], returned=[masked], parent="masks")
    batch.call("masks", "Masks", given=[x], returned=[masked])
    batch.call("attend", "Attend", given=[masked], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.between, found.mask.turned) == ("masks.causal", None, ("attend", "Attend"))


# -- -inf that is expected, until it turns into nan ---------------------------------------------------------------


def test_where_neginf_turned_into_nan_is_told(make):
    batch = make.Batch()
    x, mask = batch.tensor(), batch.tensor(make.NEGINF)
    batch.call("attention", "Attention", given=[x], returned=[batch.tensor(make.NAN)], kwargs={"mask": mask})
    batch.call("", "Net", given=[x], kwargs={"mask": mask}, returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.phase, found.role, found.row.value) == ("", "input", "kwargs.mask", "-inf")
    assert found.mask.turned == ("attention", "Attention")


def test_a_mask_that_code_between_two_calls_made(make):
    batch = make.Batch()
    x, h, mask = batch.tensor(), batch.tensor(), batch.tensor(make.NEGINF)
    batch.call("layer.query", "Linear", given=[x], returned=[h], parent="layer")
    batch.call("layer.attend", "Attend", given=[h, mask], returned=[batch.tensor(make.NAN)], parent="layer")
    batch.call("layer", "Layer", given=[x], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.cls, found.phase, found.row.value) == ("layer", "Layer", "forward", "-inf")
    assert (found.between, found.mask.turned) == (("layer.query", "layer.attend"), ("layer.attend", "Attend"))


@pytest.mark.parametrize("outer", [True, False])
def test_a_mask_that_was_added_to_another_one(make, outer):
    """The model's own mask, else the one of the call before."""
    batch = make.Batch()
    x, given, padding, both = (batch.tensor(number) for number in (1.0, make.NEGINF, make.NEGINF, make.NEGINF))
    batch.call("padding", "Padding", given=[x], returned=[padding])
    batch.call("attend", "Attend", given=[both], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[x], kwargs={"mask": given if outer else x}, returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.role) == (("", "kwargs.mask") if outer else ("padding", "output"))
    assert found.mask.turned == ("attend", "Attend")


def test_a_call_that_hands_the_mask_on_is_not_where_it_came_in(make):
    batch = make.Batch()
    x, mask, wide = batch.tensor(), batch.tensor(make.NEGINF), batch.tensor(make.NEGINF)
    batch.call("widen", "Widen", given=[mask], returned=[wide])
    batch.call("attend", "Attend", given=[x, wide], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[x, mask], returned=[batch.tensor(make.NAN)])
    assert (find(batch).phase, find(batch).role, find(batch).mask.turned) == ("input", "input[1]", ("attend", "Attend"))


def _masked(make, closed):
    batch = make.Batch(batch=5)
    x, mask = batch.tensor(), batch.tensor(make.NEGINF)
    marks = {"kwargs.mask": RowMark.CLOSED} if closed else {}
    kwargs = {"mask": mask}
    batch.call("attn", "Attention", given=[x], returned=[batch.tensor(make.NAN)], kwargs=kwargs, marks=marks)
    batch.call("", "Net", given=[x, mask], returned=[batch.tensor(make.NAN)])
    return batch


@pytest.mark.parametrize("closed", [True, False])
def test_a_mask_that_is_neginf_in_every_batch_is_no_cause(make, closed):
    found = find(_masked(make, closed), before="-inf")
    assert (found.module, found.phase, found.role, found.row.value, found.source) == (
        "attn",
        "forward",
        "output",
        "nan",
        "made",
    )
    assert found.sure
    assert "kwargs.mask held -inf in batch 4 as well, and caused no nan" in found.notes
    assert found.mask.text == ("a row of kwargs.mask is -inf throughout" if closed else "kwargs.mask held -inf")


@pytest.mark.parametrize("closed", [True, False])
def test_in_the_first_batch_nobody_knows_whether_the_mask_is_new(make, closed):
    found = find(_masked(make, closed), before="unknown")
    assert (found.module, found.phase, found.source, found.sure) == ("attn", "forward", "made", closed)
    assert "the -inf in kwargs.mask came from input[1] of the root module (Net)" in found.notes


def test_a_mask_that_is_new_is_the_cause(make):
    found = find(_masked(make, True))
    assert (found.module, found.phase, found.role, found.source) == ("", "input", "input[1]", "outside")


def test_code_behind_a_call_that_always_returns_neginf_made_the_nan_itself(make):
    batch = make.Batch(batch=5)
    x, scores = batch.tensor(), batch.tensor(make.NEGINF)
    batch.call("attend.scores", "Scores", given=[x], returned=[scores], parent="attend")
    batch.call("attend", "Attend", given=[x], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.NAN)])
    found = find(batch, before="-inf")
    assert (found.module, found.role, found.row.value) == ("attend", "output", "nan")


def test_it_is_told_who_took_a_nan_away(make):
    batch = make.Batch()
    x = batch.tensor()
    batch.call("block.log", "Log", given=[x], returned=[batch.tensor(make.NAN)], parent="block")
    batch.call("block", "Block", given=[x], returned=[batch.tensor()], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[x], returned=[batch.tensor()])
    found = find(batch)
    assert (found.module, found.sure) == ("block.log", True)
    assert found.notes == ("`block` (Block) removed it: it returned no nan",)


def test_a_call_whose_output_was_not_read_took_nothing_away(make):
    """In tensor parallel a row-wise layer returns what a collective still writes."""
    batch = make.Batch()
    x = batch.tensor()
    batch.call("block.log", "Log", given=[x], returned=[batch.tensor(make.NAN)], parent="block")
    batch.call("block", "Block", given=[x], returned=[None], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[x], returned=[batch.tensor()])
    assert find(batch).notes == ()


def test_own_code_right_after_a_call_that_returned_neginf(make):
    batch = make.Batch()
    x, scores = batch.tensor(), batch.tensor(make.NEGINF)
    batch.call("attend.scores", "Scores", given=[x], returned=[scores], parent="attend")
    batch.call("attend", "Attend", given=[x], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.role, found.row.value) == ("attend.scores", "output", "-inf")
    assert found.mask.turned == ("attend", "Attend")


def test_own_code_that_had_a_mask_in_its_hands_is_the_maker_and_the_mask_is_mentioned(make):
    batch = make.Batch()
    x, h, mask, bad = (batch.tensor(number) for number in (1.0, 1.0, make.NEGINF, make.NAN))
    batch.call("query", "Linear", given=[x], returned=[h])
    batch.call("drop", "Dropout", given=[bad], returned=[batch.tensor(make.NAN)])
    batch.call("", "Net", given=[x, mask], returned=[batch.tensor(make.NAN)])
    found = find(batch)
    assert (found.module, found.between, found.mask.turned) == ("", ("query", "drop"), None)
    assert any("-inf in input[1]" in note for note in found.notes)


# -- rules and marks ----------------------------------------------------------------------------------------------


def test_a_hidden_row_that_went_on_is_the_origin(make):
    batch = make.Batch()
    x, hidden = batch.tensor(), batch.tensor(make.INF)
    marks = {"output": make.RowMark.IGNORED}
    batch.call("probe", "Probe", given=[x], returned=[hidden], marks=marks)
    weights = {"weight": batch.tensor()}
    batch.call("head", "Linear", given=[hidden], returned=[batch.tensor(make.INF)], weights=weights)
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.INF)])
    found = find(batch)
    assert (found.module, found.is_origin) == ("probe", True)
    assert any("--ignore" in note for note in found.notes)


def test_a_hidden_row_that_own_code_used_is_the_origin(make):
    batch = make.Batch()
    x = batch.tensor()
    batch.call("probe", "Probe", given=[x], returned=[batch.tensor(make.INF)], marks={"output": make.RowMark.IGNORED})
    batch.call("head", "Linear", given=[x], returned=[batch.tensor()])
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.INF)])
    assert find(batch).module == "probe"


def test_a_call_that_may_have_written_into_what_it_was_handed(make):
    batch = make.Batch()
    x, h, bad = batch.tensor(), batch.tensor(), batch.tensor(make.INF)
    batch.call("fc", "Linear", given=[x], returned=[h])
    batch.call("square", "Square", given=[bad], returned=[bad])
    batch.call("head", "Linear", given=[bad], returned=[batch.tensor(make.INF)])
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.INF)])
    found = find(batch)
    assert (found.module, found.between, found.sure) == ("", ("fc", "square"), False)
    assert "`square` (Square) returned the same tensor" in found.notes[0]


def test_what_is_around_it_is_not_watched(make):
    """`--modules 'body.*'`: a module that has no frame may have made it."""
    batch = make.Batch()
    batch.call("body.fc", "Linear", given=[batch.tensor(make.NAN)], returned=[batch.tensor(make.NAN)], parent="body")
    found = find(batch)
    assert (found.module, found.source) == ("body.fc", "carried")


def test_code_in_a_module_that_is_not_watched(make):
    """Between two calls that are: in the module around both, or handed to that."""
    batch = make.Batch()
    batch.module("body", "Body")
    bad = batch.tensor(make.NAN)
    batch.call("body.a", "Linear", given=[batch.tensor()], returned=[batch.tensor()], parent="body")
    batch.call("body.b", "Linear", given=[bad], returned=[batch.tensor(make.NAN)], parent="body")
    found = find(batch)
    assert (found.module, found.between, found.sure) == ("body", ("body.a", "body.b"), False)


# -- collectives in the forward, and a forward that is run again --------------------------------------------------


def test_a_call_with_collectives_in_it_may_have_got_it_from_another_rank(make):
    batch = make.Batch(seq=5)
    batch.call("norm", "SyncBatchNorm", given=[batch.tensor()], returned=[batch.tensor(make.NAN)], collectives=1)
    found = find(batch)
    assert (found.module, found.source, found.phase, found.is_origin) == ("norm", "received", "collective", False)
    assert from_event(batch.anomaly).source == "received"


@pytest.mark.parametrize(("seq", "source"), [(4, "made"), (5, "received")])
def test_own_code_after_the_last_child_with_collectives_in_it(make, seq, source):
    """What the children's calls have issued is theirs."""
    batch = make.Batch(seq=4)
    x = batch.tensor()
    batch.call("mlp.down", "Linear", given=[x], returned=[x], parent="mlp", seq=4, collectives=1)
    batch.call("mlp", "Mlp", given=[x], returned=[batch.tensor(make.INF)], seq=seq, collectives=seq - 3)
    assert (find(batch).module, find(batch).source) == ("mlp", source)


@pytest.mark.parametrize(("collectives", "source"), [(2, "made"), (1, "received")])
def test_code_between_two_calls_with_collectives_in_it(make, collectives, source):
    """The second call ended at 6. It began at 4, where the first had ended, or at 5."""
    batch = make.Batch(seq=6)
    x, bad = batch.tensor(), batch.tensor(make.INF)
    batch.call("a", "Linear", given=[x], returned=[batch.tensor()], seq=4)
    batch.call("b", "Linear", given=[bad], returned=[batch.tensor(make.INF)], seq=6, collectives=collectives)
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.INF)], seq=6, collectives=2)
    assert (find(batch).between, find(batch).source) == (("a", "b"), source)


def test_a_forward_that_is_run_again_is_looked_at_alone(make):
    """Checkpointing: its calls are deeper than nothing of the first forward."""
    batch = make.Batch()
    x, h, y = (batch.tensor() for _ in range(3))
    batch.call("block.fc1", "Linear", given=[x], returned=[h], parent="block")
    batch.call("block.fc2", "Linear", given=[h], returned=[y], parent="block")
    batch.call("block", "Block", given=[x], returned=[y])
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("block.fc2", "Linear", "output", 1.0)
    again = {"phase": make.Phase.RECOMPUTE, "parent": "block"}
    g, bad = batch.tensor(), batch.tensor(make.INF)
    batch.call("block.fc1", "Linear", given=[batch.tensor()], returned=[g], **again)
    batch.call("block.fc2", "Linear", given=[g], returned=[bad], **again)
    found = find(batch)
    assert (found.module, found.phase, found.row.phase, found.between) == ("block.fc2", "forward", "recompute", None)


def test_a_batch_that_was_left_out_names_no_module(make):
    batch = make.Batch()
    batch.call("", "Net", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    batch.skipped_batch()
    assert (find(batch).source, find(batch).from_page) == ("skipped", False)


def test_an_argument_as_it_was_before_the_call_is_no_weight_and_no_argument(make):
    """`relu_(x)`: x was nan when it was last seen, and the call has overwritten it."""
    batch = make.Batch()
    x, y = batch.tensor(), batch.tensor(make.INF)
    rows = {"before input[0]": batch.tensor(make.NAN)}
    batch.call("act", "Clamp", given=[x], returned=[y], weights=rows)
    batch.call("", "Net", given=[x], returned=[y])
    found = find(batch)
    assert (found.module, found.phase, found.role, found.row.value) == ("act", "forward", "output", "+inf")


# -- the second look that an alarm leads to -----------------------------------------------------------------------


def _looked_again(make, again, *, bad_weight=False):
    batch = make.Batch(batch=3)
    x, weight = batch.tensor(), batch.tensor(make.NAN if bad_weight else 1.0)
    batch.call("fc", "Linear", given=[x], returned=[batch.tensor(make.NAN)], weights={"weight": weight})
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.NAN)])
    batch.anomaly = msgspec.structs.replace(batch.anomaly, again=again)
    return find(batch)


def test_a_weight_that_was_changed_after_it_was_read_is_found(make):
    found = _looked_again(make, LookedAgain(weights={"weight": "nan"}))
    assert (found.module, found.phase, found.role, found.source) == ("fc", "weight", "weight", "weight")
    assert "weight was finite when it was read after the last step" in found.notes
    assert found.weight.changed_since


def test_a_weight_that_a_later_step_made_bad_says_nothing(make):
    found = _looked_again(make, LookedAgain(weights={"weight": "nan"}, same_step=False))
    assert (found.phase, found.source, found.weight.was_read) == ("forward", "made", False)


@pytest.mark.parametrize("again", [None, LookedAgain(weights={"weight": "finite"})])
def test_it_is_told_whether_the_weights_were_read_again(make, again):
    found = _looked_again(make, again)
    assert (found.phase, found.source, found.weight.was_read) == ("forward", "made", again is not None)


@pytest.mark.parametrize(("shard", "source"), [("nan", "weight"), ("finite", "received"), ("", "weight")])
def test_of_a_gathered_weight_the_ranks_own_shard_decides(make, shard, source):
    again = LookedAgain(shards={"weight": shard} if shard else {})
    assert _looked_again(make, again, bad_weight=True).source == source


def test_a_weight_that_the_script_has_computed_has_its_reason_elsewhere(make):
    found = _looked_again(make, LookedAgain(computed=["weight"]), bad_weight=True)
    assert (found.source, found.weight.computed, found.sure) == ("weight", True, False)
    other = _looked_again(make, LookedAgain(computed=["bias"]), bad_weight=True)
    assert not other.weight.computed and other == _looked_again(make, LookedAgain(), bad_weight=True)


@pytest.mark.parametrize("threads", [False, True])
def test_what_another_thread_has_called_may_have_made_it(make, threads):
    found = _looked_again(make, LookedAgain(threads=threads))
    assert (found.source, found.sure) == ("made", not threads)
    assert any("in another thread" in note for note in found.notes) == threads


def test_bad_buffers_and_autocast_are_evidence(make):
    again = LookedAgain(weights={"weight": "finite"}, buffers={"inv_freq": "nan"}, autocast="float16")
    assert _looked_again(make, again).notes == (
        "buffer inv_freq of `fc` (Linear) is nan",
        "autocast was on: float16",
    )


def test_a_weight_that_was_changed_upstream_leaves_the_maker_open(make):
    text = "weight of `enter` (Linear), abs max 1.00e+00 then, 1.00e+38 now"
    found = _looked_again(make, LookedAgain(weights={"weight": "finite"}, changed=[text]))
    assert (found.module, found.source, found.sure) == ("fc", "made", False)
    assert found.notes == (f"changed since it was last read, and not by a recorded step: {text}",)


@pytest.mark.parametrize(
    ("weights", "phase", "says"),
    [({"weight": "nan"}, "weight", "weights are not watched"), ({"weight": "finite"}, "forward", "")],
)
def test_weights_that_are_not_watched_are_those_that_the_alarm_found(make, weights, phase, says):
    batch = make.Batch()
    x, y = batch.tensor(), batch.tensor(make.NAN)
    batch.call("head", "Linear", given=[x], returned=[y])
    batch.anomaly = msgspec.structs.replace(batch.anomaly, again=LookedAgain(weights=weights))
    found = find(batch)
    assert (found.module, found.phase, found.weight.was_read) == ("head", phase, True)
    assert says in " ".join(found.notes)


def test_weights_that_nobody_watched_are_no_finite_ones_when_a_step_came_before_the_second_look(make):
    batch = make.Batch()
    x, y = batch.tensor(), batch.tensor(make.NAN)
    batch.call("head", "Linear", given=[x], returned=[y])
    again = LookedAgain(weights={"weight": "nan"}, same_step=False)
    batch.anomaly = msgspec.structs.replace(batch.anomaly, again=again)
    found = find(batch)
    assert (found.module, found.phase, found.source, found.role) == ("head", "forward", "unread", "output")
    assert found.notes[0] == "weights are not watched (--watch): after a later step, weight was nan"


@pytest.mark.parametrize(
    ("inside", "source", "module"),
    [("h.1.fc", "weight", "h.1.fc"), ("h.1", "weight", "h.1"), ("other.fc", "made", "h"), ("", "made", "h")],
)
def test_a_weight_inside_of_code_that_was_not_looked_into_is_named_if_it_is_not_finite_any_more(
    make, inside, source, module
):
    batch = make.Batch()
    x, y = batch.tensor(), batch.tensor(make.NAN)
    batch.call("h", "Blocks", given=[x], returned=[y])
    again = LookedAgain(changed=["weight of it"], bad_weight=BadWeight(inside, "Linear", "weight", "nan", "float32"))
    batch.anomaly = msgspec.structs.replace(batch.anomaly, again=again)
    found = find(batch)
    assert (found.source, found.module, found.sure) == (source, module, False)
    assert source == "made" or (found.phase, found.row.value, found.weight.changed_since) == ("weight", "nan", True)


def test_a_weight_that_is_not_finite_any_more_is_not_blamed_where_the_calls_inside_were_seen(make):
    batch = make.Batch()
    x, h, y = batch.tensor(), batch.tensor(), batch.tensor(make.NAN)
    batch.call("h.0", "Linear", given=[x], returned=[h], parent="h", depth=2)
    batch.call("h", "Blocks", given=[x], returned=[y])
    again = LookedAgain(changed=["weight of it"], bad_weight=BadWeight("h.1", "Linear", "weight", "nan", "float32"))
    batch.anomaly = msgspec.structs.replace(batch.anomaly, again=again)
    assert (find(batch).source, find(batch).module) == ("made", "h")


@pytest.mark.parametrize(("watched", "source"), [(True, "made"), (False, "unread")])
def test_weights_that_nobody_watched_are_no_finite_ones_where_the_rank_ended_before_its_second_look(
    make, watched, source
):
    """Where other weights of the batch were watched, the module has none."""
    batch = make.Batch()
    x, h, y = batch.tensor(), batch.tensor(), batch.tensor(make.NAN)
    batch.call("enter", "Linear", given=[x], returned=[h], weights={"weight": batch.tensor()} if watched else {})
    batch.call("act", "Exp", given=[h], returned=[y])
    found = find(batch)
    assert (found.module, found.source) == ("act", source)
    assert watched or found.notes[0].startswith("no weight was read in this batch")


def test_a_module_without_weights_has_made_it_however_late_the_second_look_came(make):
    batch = make.Batch()
    x, y = batch.tensor(), batch.tensor(make.NAN)
    batch.call("act", "Exp", given=[x], returned=[y])
    batch.anomaly = msgspec.structs.replace(batch.anomaly, again=LookedAgain(same_step=False))
    assert find(batch).source == "made"


# -- what a finite sentence must not be said of ---------------------------------------------------------------------


@pytest.mark.parametrize("before", ["unknown", "finite"])
def test_a_linear_that_makes_inf_of_the_logarithm_of_0_was_fed_it(make, before):
    batch = make.Batch()
    x, y = batch.tensor(make.NEGINF), batch.tensor(make.INF)
    batch.call("fc1", "Linear", given=[x], returned=[y], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[x], returned=[y])
    found = find(batch, before)
    assert (found.phase, found.role, found.row.value, found.source) == ("input", "input[0]", "-inf", "outside")


@pytest.mark.parametrize(("before", "sure"), [("-inf", True), ("finite", False), ("unknown", False)])
def test_inf_beside_a_mask_that_is_new_is_not_sure(make, before, sure):
    batch = make.Batch()
    x, mask, y = batch.tensor(), batch.tensor(make.NEGINF), batch.tensor(make.INF)
    batch.call("attn", "Attention", given=[x, mask], returned=[y], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[x, mask], returned=[y])
    found = find(batch, before)
    assert (found.module, found.role, found.sure) == ("attn", "output", sure)
    assert any("held -inf" in note for note in found.notes) != sure


def test_a_module_that_was_handed_the_tensor_before_may_have_written_into_it(make):
    """`norm_(h)` works in place and returns nothing."""
    batch = make.Batch()
    x, h, bad = batch.tensor(), batch.tensor(), batch.tensor(make.INF)
    batch.call("fc1", "Linear", given=[x], returned=[h])
    batch.call("norm_", "Norm", given=[bad], returned=[])
    batch.call("fc2", "Linear", given=[bad], returned=[batch.tensor(make.INF)])
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.INF)])
    found = find(batch)
    assert not found.sure
    assert any("`norm_` (Norm) received the same tensor before" in note for note in found.notes)


# -- by another way than frames show -------------------------------------------------------------------------------

ENCODER, TAKER = OwnCodeModule("encoder", "Encoder", "MulBackward0"), OwnCodeModule("taker", "Taker", "AddBackward0")


def taken(make, **again):
    """`taker` was handed a finite tensor, and returned a bad one."""
    batch = make.Batch()
    x, h, y = batch.tensor(), batch.tensor(), batch.tensor(make.INF)
    batch.call("encoder", "Encoder", given=[x], returned=[h])
    batch.call("taker", "Taker", given=[h], returned=[y])
    batch.call("", "Net", given=[x], returned=[y])
    batch.anomaly = msgspec.structs.replace(batch.anomaly, again=LookedAgain(**again))
    return find(batch)


def test_a_module_behind_the_one_that_frames_show_comes_into_question(make):
    found = taken(make, own_code=[ENCODER, TAKER], own_code_of="output")
    assert (found.module, found.cls, found.makers.own_code, found.sure) == ("", "Net", ("encoder", "taker"), False)
    assert (found.row.module, found.row.cls, found.row.role) == ("taker", "Taker", "output")


def test_of_several_the_one_that_holds_it_is_named(make):
    held = [HeldValue("encoder", "Encoder", "kept", "+inf")]
    found = taken(make, own_code=[ENCODER, TAKER], own_code_of="output", held=held)
    assert (found.module, found.cls, found.makers.own_code, found.sure) == ("encoder", "Encoder", ("encoder",), False)


@pytest.mark.parametrize(
    "again",
    [
        {},
        {"own_code": [TAKER], "own_code_of": "output"},
        {"own_code": [ENCODER, TAKER], "own_code_of": "input[0]"},
    ],
    ids=["nothing is known", "nobody else is behind it", "of another value"],
)
def test_else_what_frames_show_stands(make, again):
    found = taken(make, **again)
    assert (found.module, found.makers.own_code, found.sure) == ("taker", (), True)


def test_an_attribute_of_another_module_that_holds_it_leaves_a_doubt(make):
    found = taken(make, held=[HeldValue("encoder", "Encoder", "kept", "+inf")])
    assert (found.module, found.sure) == ("taker", False)
    assert "attribute kept of `encoder` (Encoder) holds +inf" in found.notes
    assert taken(make, held=[HeldValue("taker", "Taker", "last", "+inf")]).sure, "its own"
    kept = [HeldValue("encoder", "Encoder", "kept", "+inf")]
    assert taken(make, own_code=[TAKER], own_code_of="output", held=kept).sure, "the graph has nobody else behind it"
