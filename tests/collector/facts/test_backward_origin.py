"""Who made the first bad gradient of one page. Gradients are in the order in which the backward makes them."""

from __future__ import annotations

import pytest
from gpuwatch.collector.facts.diagnosis import from_event
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.wire.messages import EventMessage


def find(batch):
    """The diagnosis of a batch, by way of its messages."""
    messages = [batch.definitions(), EventMessage(batch.anomaly), batch.page_message()]
    (rank,) = fold(("a", n, body) for n, body in enumerate(messages)).ranks.values()
    return rank.diagnosis


def chain(make, *, head=True, **place):
    """`return self.head(self.length(self.embed(x)))`; without a head, of a block in a larger model."""
    batch = make.Batch(**place)
    x, h, y, z = (batch.tensor() for _ in range(4))
    weight = {"weight": batch.tensor()}
    batch.call("embed", "Linear", given=[x], returned=[h], weights=weight)
    batch.call("length", "Length", given=[h], returned=[y])
    batch.call("head", "Linear", given=[y], returned=[z], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[x], returned=[z])
    if head:
        batch.backward("head", "Linear", "output", 1.0)
    return batch


def block(make, own_code, **place):
    """A block between two modules: what `enter` returned goes through `act`, and maybe through the block's own code."""
    batch = make.Batch(**place)
    x, a, b, c, d = (batch.tensor(number) for number in (1.0, 1.0, 2.0, 3.0, 4.0))
    batch.call("embed", "Linear", given=[x], returned=[a])
    batch.call("block.enter", "Linear", given=[a], returned=[b], parent="block", weights={"weight": batch.tensor()})
    batch.call("block.act", "GELU", given=[b], returned=[c], parent="block")
    out = batch.tensor(7.0) if own_code == "after" else d
    mixed = batch.tensor(6.0) if own_code == "between" else c
    batch.call("block.leave", "Linear", given=[mixed], returned=[d], parent="block")
    batch.call("block", "Block", given=[a], returned=[out])
    y = batch.tensor()
    batch.call("head", "Linear", given=[out], returned=[y])
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("head", "Linear", "output", 1.0)
    if own_code == "after":
        batch.backward("block", "Block", "output", 1.0)
    batch.backward("block.leave", "Linear", "output", 1.0)
    batch.backward("block.act", "GELU", "output", 1.0)
    return batch


# -- the gradient of what a module returned -----------------------------------------------------------------------


def test_the_one_module_that_used_it(make):
    batch = chain(make, rank=1, batch=2, seq=4)
    batch.backward("length", "Length", "output", 1.0)
    batch.backward("embed", "Linear", "output", make.NAN)
    batch.backward("embed", "Linear", "weight", make.NAN)
    found = find(batch)
    assert (found.module, found.cls, found.phase, found.role) == ("length", "Length", "backward", "grad input[0]")
    assert (found.row.value, found.source, found.sure, found.between) == ("nan", "made", True, None)
    assert (found.rank, found.batch, found.row.frame) == (1, 2, 6)
    assert (found.row.module, found.row.cls, found.row.role) == ("embed", "Linear", "grad output")


def test_the_role_of_a_keyword(make):
    batch = make.Batch()
    x, h, y = (batch.tensor() for _ in range(3))
    batch.call("embed", "Linear", given=[x], returned=[h])
    batch.call("attend", "Attend", kwargs={"query": h}, returned=[y])
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("attend", "Attend", "output", 1.0)
    batch.backward("embed", "Linear", "output", make.INF)
    assert (find(batch).module, find(batch).role) == ("attend", "grad kwargs.query")


def test_a_module_whose_own_gradient_was_not_seen_is_not_named(make):
    """The bad value may have come through it."""
    batch = chain(make)
    batch.backward("embed", "Linear", "output", make.NAN)
    found = find(batch)
    assert (found.module, found.cls, found.between, found.sure) == ("", "Net", ("head", "embed"), False)


@pytest.mark.parametrize("reached", [False, True])
def test_a_parameter_whose_gradient_comes_before_that_of_any_output_was_used_outside_of_the_model(make, reached):
    batch = make.Batch()
    x, y = batch.tensor(), batch.tensor()
    batch.call("fc", "Linear", given=[x], returned=[y])
    batch.call("", "Net", given=[x], returned=[y])
    if reached:
        batch.backward("fc", "Linear", "output", make.NAN)
    batch.backward("", "Net", "temperature", make.NAN)
    found = find(batch)
    assert found.source == "outside"
    assert not found.sure or reached
    assert any("reached no module's output" in note for note in found.notes) is not reached


def test_a_closed_block_is_looked_into(make):
    batch = block(make, None)
    batch.backward("block.enter", "Linear", "output", make.NAN)
    assert (find(batch).module, find(batch).role, find(batch).between) == ("block.act", "grad input[0]", None)


@pytest.mark.parametrize("own_code", ["between", "after"])
def test_a_call_is_named_if_own_code_had_something_else_to_work_on(make, own_code):
    """Own code needs what `act`, or `leave`, has returned: no call was handed that. It may have used b, too."""
    batch = block(make, own_code)
    batch.backward("block.enter", "Linear", "output", make.NAN)
    found = find(batch)
    assert (found.module, found.cls, found.phase, found.role) == ("block.act", "GELU", "backward", "grad input[0]")
    assert (found.sure, found.makers.own_code) == (False, ("block",))
    assert found.is_origin


def test_a_mask_that_own_code_made_cannot_have_used_it(make):
    batch = make.Batch()
    x, a, b = (batch.tensor() for _ in range(3))
    batch.call("embed", "Linear", given=[x], returned=[a])
    batch.call("attend", "Attend", given=[a], returned=[b])
    batch.call("pool", "Pool", given=[batch.tensor()], returned=[batch.tensor()], dtype="int64")
    batch.call("", "Net", given=[x], returned=[b])
    batch.backward("attend", "Attend", "output", 1.0)
    batch.backward("embed", "Linear", "output", make.NAN)
    assert find(batch).module == "attend"


def test_the_leaf_of_a_residual_block_is_named(make):
    """`x + self.inner(x)`: own code needs what `inner` returned. That it used x as well is not shown by the frames."""
    batch = make.Batch()
    x, a, b, c = (batch.tensor(number) for number in (1.0, 2.0, 3.0, 4.0))
    batch.call("embed", "Linear", given=[x], returned=[a])
    batch.call("block.inner", "Linear", given=[a], returned=[b], parent="block")
    batch.call("block", "Block", given=[a], returned=[c])
    batch.call("", "Net", given=[x], returned=[c])
    batch.backward("block", "Block", "output", 1.0)
    batch.backward("block.inner", "Linear", "output", 1.0)
    batch.backward("embed", "Linear", "output", make.NAN)
    found = find(batch)
    assert (found.module, found.role, found.between) == ("block.inner", "grad input[0]", None)
    assert (found.sure, found.makers.own_code) == (False, ("block",))


def _block_of_gpt(make, root_loss=False):
    """`x = x + attn(ln_1(x)); return x + mlp(ln_2(x))`, in a model that may compute its own loss."""
    batch = make.Batch()
    x, e, n1, a, x1, n2, m, y, logits, loss = (batch.tensor(float(number)) for number in range(1, 11))
    batch.call("wte", "Embedding", given=[x], returned=[e])
    batch.call("h.ln_1", "LayerNorm", given=[e], returned=[n1], parent="h")
    batch.call("h.attn", "Attention", given=[n1], returned=[a], parent="h")
    batch.call("h.ln_2", "LayerNorm", given=[x1], returned=[n2], parent="h")
    batch.call("h.mlp", "MLP", given=[n2], returned=[m], parent="h")
    batch.call("h", "Block", given=[e], returned=[y])
    batch.call("head", "Linear", given=[y], returned=[logits])
    batch.call("", "GPT", given=[x], returned=[logits, loss] if root_loss else [logits])
    for name in ("head", "h", "h.mlp", "h.ln_2"):
        batch.backward(name, "Module", "output", 1.0)
    return batch


@pytest.mark.parametrize("root_loss", [True, False])
def test_the_leaf_of_a_pre_norm_block_is_named(make, root_loss):
    batch = _block_of_gpt(make, root_loss)
    batch.backward("h.attn", "Attention", "output", 1.0)
    batch.backward("h.ln_1", "LayerNorm", "output", 1.0)
    batch.backward("wte", "Embedding", "output", make.NAN)
    found = find(batch)
    assert (found.module, found.cls, found.role, found.sure) == ("h.ln_1", "LayerNorm", "grad input[0]", False)
    assert found.makers.own_code == (("", "h") if root_loss else ("h",))


def test_a_sum_that_own_code_handed_on_leaves_its_user_open(make):
    batch = _block_of_gpt(make)
    batch.backward("h.attn", "Attention", "output", make.NAN)
    found = find(batch)
    assert (found.module, found.sure, found.makers.suspects, found.makers.own_code) == ("h", False, ("h.ln_2",), ("h",))


def test_the_activation_of_a_gated_feed_forward_is_named(make):
    """`self.wo(self.act(self.wi_0(x)) * self.wi_1(x))`"""
    batch = make.Batch()
    x, a, b, c, product, y = (batch.tensor(float(number)) for number in range(1, 7))
    batch.call("ff.wi_0", "Linear", given=[x], returned=[a], parent="ff")
    batch.call("ff.act", "Act", given=[a], returned=[b], parent="ff")
    batch.call("ff.wi_1", "Linear", given=[x], returned=[c], parent="ff")
    batch.call("ff.wo", "Linear", given=[product], returned=[y], parent="ff")
    batch.call("ff", "Gated", given=[x], returned=[y])
    batch.call("", "Net", given=[x], returned=[y])
    for name in ("ff.wo", "ff.wi_1", "ff.act"):
        batch.backward(name, "Module", "output", 1.0)
    batch.backward("ff.wi_0", "Linear", "output", make.NAN)
    found = find(batch)
    assert (found.module, found.role, found.sure, found.makers.own_code) == ("ff.act", "grad input[0]", False, ("ff",))


def test_an_inf_may_be_a_sum_of_large_gradients(make):
    batch = make.Batch()
    x, a, b, c = (batch.tensor(number) for number in (1.0, 2.0, 3.0, 4.0))
    batch.call("embed", "Linear", given=[x], returned=[a])
    batch.call("block.inner", "Linear", given=[a], returned=[b], parent="block")
    batch.call("block", "Block", given=[a], returned=[c])
    batch.call("", "Net", given=[x], returned=[c])
    batch.backward("block", "Block", "output", 3e38)
    batch.backward("block.inner", "Linear", "output", 3e38)
    batch.backward("embed", "Linear", "output", make.INF)
    found = find(batch)
    assert (found.module, found.sure, found.makers.suspects, found.makers.own_code) == (
        "block",
        False,
        ("block.inner",),
        ("block",),
    )


def test_a_leaf_inside_of_a_closed_block_that_was_handed_it(make):
    batch = make.Batch()
    x, a, b, c = (batch.tensor() for _ in range(4))
    batch.call("embed", "Linear", given=[x], returned=[a])
    batch.call("block.root", "Root", given=[a], returned=[b], parent="block")
    batch.call("block.leave", "Linear", given=[b], returned=[c], parent="block")
    batch.call("block", "Block", given=[a], returned=[c])
    batch.call("", "Net", given=[x], returned=[c])
    batch.backward("block.leave", "Linear", "output", 1.0)
    batch.backward("block.root", "Root", "output", 1.0)
    batch.backward("embed", "Linear", "output", make.NAN)
    assert (find(batch).module, find(batch).role) == ("block.root", "grad input[0]")


def test_two_modules_that_used_it(make):
    """Each may have made it, or their sum."""
    batch = make.Batch(rank=1)
    x, h, left, right = (batch.tensor() for _ in range(4))
    batch.call("block.enter", "Linear", given=[x], returned=[h], parent="block")
    batch.call("block.left", "Linear", given=[h], returned=[left], parent="block")
    batch.call("block.right", "Linear", given=[h], returned=[right], parent="block")
    batch.call("block", "Block", given=[x], returned=[left, right])
    batch.call("", "Net", given=[x], returned=[left, right])
    batch.backward("block.right", "Linear", "output", 1.0)
    batch.backward("block.left", "Linear", "output", 1.0)
    batch.backward("block.enter", "Linear", "output", make.INF)
    found = find(batch)
    assert (found.module, found.between, found.is_origin) == ("block", ("block.left", "block.enter"), True)


def test_only_the_modules_own_code_used_it(make):
    """`torch.where(x > 0, x.sqrt(), 0)` between two calls."""
    batch = make.Batch()
    x, h, w, y = (batch.tensor(number) for number in (1.0, 2.0, 3.0, 4.0))
    batch.call("block.enter", "Linear", given=[x], returned=[h], parent="block")
    batch.call("block.leave", "Linear", given=[w], returned=[y], parent="block")
    batch.call("block", "Block", given=[x], returned=[y])
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("block.leave", "Linear", "output", 1.0)
    batch.backward("block.enter", "Linear", "output", make.NAN)
    found = find(batch)
    assert (found.module, found.between, found.sure) == ("block", ("block.leave", "block.enter"), False)
    assert (found.makers.suspects, found.makers.own_code) == (("block.leave",), ("block",))


@pytest.mark.parametrize("others", ["none", "weights", "what it received"])
def test_what_a_module_has_returned_beside_something_else_it_may_have_used_itself(make, others):
    """Attention returns its weights, and nobody outside uses them: `self.out` and its own code have.

    Without autograd's graph the frames alone are known, as of a device whose numbers came late.
    """
    batch = make.Batch()
    x, v, w, mixed, o, y = (batch.tensor(number) for number in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    beside = {"none": [], "weights": [o], "what it received": [x]}[others]
    batch.call("block.attn.v", "Linear", given=[x], returned=[v], parent="block.attn")
    batch.call("block.attn.out", "Linear", given=[mixed], returned=[o], parent="block.attn")
    batch.call("block.attn", "Attention", given=[x], returned=[*beside, w], parent="block")
    batch.call("block.norm", "LayerNorm", given=[o if others == "weights" else w], returned=[y], parent="block")
    batch.call("block", "Block", given=[x], returned=[y])
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("block.norm", "LayerNorm", "output", 1.0)
    batch.backward("block.attn.out", "Linear", "output", 1.0)
    batch.backward("block.attn", "Attention", "output[1]" if others != "none" else "output", make.NAN)
    found = find(batch)
    if others == "weights":
        assert (found.module, found.sure) == ("block.attn", False)
        assert "block.attn.out" in found.makers.suspects
        assert "block.attn" in found.makers.own_code
    else:
        assert "block.attn" not in found.makers.own_code


def test_what_the_model_returned_gets_its_gradient_from_outside(make):
    batch = chain(make, head=False)
    batch.backward("head", "Linear", "output", make.INF)
    found = find(batch)
    assert (found.module, found.cls, found.phase, found.source) == ("", "Net", "backward", "outside")
    assert found.between == ("", "head")
    assert not found.is_origin


def test_a_tensor_that_the_model_returned_and_a_module_used(make):
    batch = make.Batch()
    x, h, y = (batch.tensor() for _ in range(3))
    batch.call("body", "Linear", given=[x], returned=[h])
    batch.call("head", "Linear", given=[h], returned=[y])
    batch.call("", "Net", given=[x], returned=[y, h])
    batch.backward("head", "Linear", "output", 1.0)
    batch.backward("body", "Linear", "output", make.NAN)
    found = find(batch)
    assert (found.module, found.between, found.source) == ("", ("head", "body"), "made")


def test_a_module_that_only_hands_it_on_did_not_use_it(make):
    batch = make.Batch()
    x, h, y = (batch.tensor() for _ in range(3))
    batch.call("embed", "Linear", given=[x], returned=[h])
    batch.call("drop", "Dropout", given=[h], returned=[h])
    batch.call("length", "Length", given=[h], returned=[y])
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("length", "Length", "output", 1.0)
    batch.backward("embed", "Linear", "output", make.NAN)
    assert find(batch).module == "length"


def test_a_module_that_was_called_twice_is_not_told_apart(make):
    batch = make.Batch()
    x, a, b, y = (batch.tensor() for _ in range(4))
    batch.call("cell", "Cell", given=[x], returned=[a])
    batch.call("cell", "Cell", given=[a], returned=[b])
    batch.call("head", "Linear", given=[b], returned=[y])
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("head", "Linear", "output", 1.0)
    batch.backward("cell", "Cell", "output", make.NAN)
    found = find(batch)
    assert (found.module, found.between) == ("", ("head", "cell"))


def test_a_module_that_was_called_twice_of_which_one_output_was_dropped(make):
    """The gradient may be about the other call: that tensor may have been used where nobody looked."""
    batch = make.Batch()
    x, a, y = (batch.tensor() for _ in range(3))
    batch.call("cell", "Cell", given=[x], returned=[a])
    batch.call("head", "Linear", given=[a], returned=[y])
    batch.call("cell", "Cell", given=[x], returned=[batch.tensor()])
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("head", "Linear", "output", 1.0)
    batch.backward("cell", "Cell", "output", make.NAN)
    assert (find(batch).module, find(batch).between) == ("", ("head", "cell"))


def test_a_tensor_with_the_numbers_of_another_one_is_not_that_one(make):
    """A dropout that drops nothing, between two layers: the second one, or the dropout, made the gradient."""
    batch = make.Batch()
    x, h = batch.tensor(), batch.tensor(2.0, low=0.5)
    batch.call("block.act", "GELU", given=[x], returned=[h], parent="block")
    batch.call("block.down", "Linear", given=[batch.tensor(2.0, low=0.5)], returned=[batch.tensor()], parent="block")
    batch.call("block", "Block", given=[x], returned=[batch.tensor()])
    batch.backward("block.down", "Linear", "output", 1.0)
    batch.backward("block.act", "GELU", "output", make.NAN)
    found = find(batch)
    assert (found.module, found.makers.suspects, found.makers.own_code, found.sure) == (
        "block",
        ("block.down",),
        ("block",),
        False,
    )


def test_the_calls_of_a_compiled_region_are_as_deep_as_what_is_around_it(make):
    batch = make.Batch()
    x, h, y = batch.tensor(), batch.tensor(), batch.tensor()
    batch.call("embed", "Linear", given=[x], returned=[h], depth=1)
    batch.call("length", "Length", given=[h], returned=[y], depth=1)
    batch.call("", "Net", given=[x], returned=[y], depth=1)
    batch.backward("length", "Length", "output", 1.0)
    batch.backward("embed", "Linear", "output", make.NAN)
    assert find(batch).module == "length"


def test_a_gradient_of_a_module_that_is_not_in_the_page(make):
    batch = chain(make)
    batch.backward("other", "Other", "output", make.NAN)
    found = find(batch)
    assert (found.module, found.between, found.sure) == ("", ("head", "other"), False)


def test_calls_that_were_run_again_do_not_count_twice(make):
    """Checkpointing: the recomputed forward has tensors of its own."""
    batch = chain(make)
    again = [batch.tensor() for _ in range(3)]
    for name, cls, given, returned in (("embed", "Linear", 0, 1), ("length", "Length", 1, 2)):
        batch.call(name, cls, given=[again[given]], returned=[again[returned]], phase=make.Phase.RECOMPUTE)
    batch.backward("length", "Length", "output", 1.0)
    batch.backward("embed", "Linear", "output", make.NAN)
    assert (find(batch).module, find(batch).role) == ("length", "grad input[0]")


# -- the gradient of a parameter ----------------------------------------------------------------------------------


def test_a_weights_gradient_after_a_finite_one_of_the_output(make):
    batch = chain(make)
    batch.backward("length", "Length", "output", 1.0)
    batch.backward("embed", "Scaled", "output", 1.0)
    batch.backward("embed", "Scaled", "weight", make.INF)
    found = find(batch)
    assert (found.module, found.cls, found.phase, found.role) == ("embed", "Scaled", "backward", "grad weight")
    assert (found.between, found.sure, found.is_origin) == (None, True, True)


@pytest.mark.parametrize(("handed", "sure"), [(1.0, False), (3e38, True)])
def test_a_weights_gradient_that_a_linear_cannot_have_made_may_come_from_the_loss(make, handed, sure):
    """A penalty on the weight, or on a gradient (create_graph=True), adds to it."""
    batch = chain(make)
    batch.backward("length", "Length", "output", 1.0)
    batch.backward("embed", "Linear", "output", handed)
    batch.backward("embed", "Linear", "weight", make.NAN)
    found = find(batch)
    assert (found.module, found.role, found.sure) == ("embed", "grad weight", sure)
    assert bool(found.notes) != sure


def test_a_weights_gradient_without_one_of_the_output(make):
    batch = chain(make)
    batch.backward("length", "Length", "output", 1.0)
    batch.backward("embed", "Linear", "weight", make.INF)
    found = find(batch)
    assert (found.module, found.role, found.sure) == ("", "grad weight", False)
    assert found.between == ("length", "embed")


def test_a_weight_that_two_modules_share(make):
    batch = make.Batch()
    x, h, y, shared = (batch.tensor() for _ in range(4))
    batch.call("embed", "Embedding", given=[x], returned=[h], weights={"weight": shared})
    batch.call("head", "Linear", given=[h], returned=[y], weights={"weight": shared})
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("head", "Linear", "output", 1.0)
    batch.backward("embed", "Embedding", "output", 1.0)
    batch.backward("embed", "Embedding", "weight", make.INF)
    found = find(batch)
    assert (found.module, found.sure) == ("embed", False)
    assert "`head`" in found.notes[0]


def test_a_parameter_of_a_module_with_children(make):
    """A class token: the children's backward is between the output's gradient and its own."""
    batch = make.Batch()
    x, mixed, y = (batch.tensor() for _ in range(3))
    batch.call("body", "Linear", given=[mixed], returned=[y])
    batch.call("", "Net", given=[x], returned=[y], weights={"token": batch.tensor()})
    batch.backward("body", "Linear", "output", 1.0)
    batch.backward("", "Net", "token", make.NAN)
    found = find(batch)
    assert (found.module, found.role, found.between) == ("", "grad token", ("body", "Net"))


def test_a_parameter_of_a_module_without_a_frame_is_not_named_for_sure(make):
    """Code that was compiled, and not inspected, has no frames but those of its parameters' gradients."""
    batch = make.Batch()
    x, y = batch.tensor(), batch.tensor()
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("", "Net", "output", 1.0)
    batch.backward("embed", "Linear", "weight", make.NAN)
    found = find(batch)
    assert (found.module, found.sure, found.between) == ("", False, ("", "embed"))
    assert "compiled code that was not inspected" in found.notes[0]


def test_a_parameter_of_a_module_that_is_never_called(make):
    """MultiheadAttention uses `out_proj`'s weight itself."""
    batch = make.Batch()
    x, y = batch.tensor(), batch.tensor()
    batch.call("attn", "MultiheadAttention", given=[x], returned=[y], weights={"in_proj_weight": batch.tensor()})
    batch.call("", "Net", given=[x], returned=[y])
    batch.backward("attn", "MultiheadAttention", "output", 1.0)
    batch.backward("attn.out_proj", "Linear", "weight", make.INF)
    found = find(batch)
    assert (found.module, found.role, found.sure) == ("attn.out_proj", "grad weight", True)


# -- collectives in the backward ----------------------------------------------------------------------------------


def test_ddps_own_collectives_do_not_bring_gradients_of_activations(make):
    batch = chain(make, seq=3)
    batch.backward("length", "Length", "output", 1.0, seq=4)
    batch.backward("embed", "Linear", "output", make.NAN, seq=5)
    assert find(batch).source == "made"


@pytest.mark.parametrize("where", ["in the call", "after it", "before the next"])
def test_where_ranks_hand_each_other_activations_they_hand_back_gradients(make, where):
    """Tensor parallel: the forward's collectives tell."""
    batch = make.Batch(seq=3)
    x, h, y, z = (batch.tensor() for _ in range(4))
    batch.call("embed", "Linear", given=[x], returned=[h], seq=3)
    batch.call("mlp.up", "Linear", given=[h], returned=[y], seq=3, parent="mlp")
    inside = {"seq": 4, "collectives": 1} if where == "in the call" else {"seq": 4 if "before" in where else 3}
    batch.call("mlp.down", "Linear", given=[y], returned=[z], parent="mlp", **inside)
    batch.call("mlp", "Mlp", given=[h], returned=[z], seq=4, collectives=1)
    batch.call("", "Net", given=[x], returned=[z], seq=4, collectives=1)
    batch.backward("mlp.down", "Linear", "output", 1.0, seq=4)
    batch.backward("mlp.up", "Linear", "output", 1.0, seq=4)
    batch.backward("embed", "Linear", "output", make.NAN, seq=5)
    found = find(batch)
    assert (found.source, found.phase) == ("received", "collective")


def test_a_sharded_parameters_gradient_comes_out_of_a_collective(make):
    """FSDP gathers before the block runs, and its hooks see gradients that are reduced already."""
    batch = make.Batch(seq=3)
    x, y = batch.tensor(), batch.tensor()
    batch.call("block.fc", "Linear", given=[x], returned=[y], weights={"weight": batch.tensor()}, parent="block", seq=4)
    batch.call("block", "Block", given=[x], returned=[y], seq=4, collectives=1)
    batch.call("", "Net", given=[x], returned=[y], seq=4, collectives=1)
    batch.backward("block.fc", "Linear", "output", 1.0, seq=4)
    batch.backward("block.fc", "Linear", "weight", make.INF, seq=5)
    assert find(batch).source == "received"


# -- GradScaler ---------------------------------------------------------------------------------------------------


def test_a_scalers_alarm_starts_at_the_first_gradient_that_it_was_to_catch(make):
    batch = chain(make)
    scaled = make.RowMark.SCALED
    batch.backward("length", "Length", "output", 1.0, mark=scaled)
    batch.backward("embed", "Linear", "output", make.INF, mark=scaled)
    batch.backward("embed", "Linear", "weight", make.INF, mark=scaled)
    assert batch.anomaly is None
    batch.skipped()
    found = find(batch)
    assert (found.module, found.phase, found.role) == ("length", "backward", "grad input[0]")
    assert found.cause.startswith("GradScaler skipped 12")


# -- without the page ---------------------------------------------------------------------------------------------


def test_a_backward_event_alone_does_not_name_the_module(make):
    batch = chain(make)
    batch.backward("length", "Length", "output", 1.0)
    batch.backward("embed", "Linear", "output", make.NAN)
    event = from_event(batch.anomaly)
    assert (event.module, event.cls, event.between, event.sure) == ("", "Net", ("", "embed"), False)
