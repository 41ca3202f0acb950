"""What can have made a bad gradient, from what autograd's graph and the frames show."""

from __future__ import annotations

import pytest
from gpuwatch.collector.facts.gradient_makers import largest_gradient, makers_of
from gpuwatch.core.events.looked_again import GraphNode
from gpuwatch.core.frames import Frame, Row

X = GraphNode("MmBackward0", "embed", 0, [1, 2])
ADD = GraphNode("AddBackward0", "block", 1, output=True, passes=True)
NORM = GraphNode("NativeLayerNormBackward0", "block.norm", 2, output=True)


def all_finite(module, outputs):
    return True


def made(graph, finite=all_finite):
    found = makers_of(graph, finite)
    return [(maker.module, maker.ops) for maker in found.makers] if found is not None else None


def test_what_passes_a_finite_gradient_on_has_not_made_it():
    assert made([X, ADD, NORM]) == [("block.norm", ("NativeLayerNormBackward0",))]
    assert makers_of([X, ADD, NORM], all_finite).passed == (ADD,)


def test_what_passes_on_a_gradient_that_nobody_saw_is_looked_behind():
    inner = GraphNode("AddBackward0", "block", 1, [2], passes=True)
    assert made([GraphNode("MmBackward0", "up", 0, [1]), inner, NORM]) == [
        ("block.norm", ("NativeLayerNormBackward0",))
    ]


def test_two_that_can_have_made_it_are_both_told():
    product = GraphNode("MulBackward0", "block", 1, output=True)
    assert made([X, product, NORM]) == [("block", ("MulBackward0",)), ("block.norm", ("NativeLayerNormBackward0",))]


def test_a_sum_that_handed_a_finite_gradient_to_another_operand_was_handed_a_finite_one():
    """h = x + f(norm(x)); h + g(norm_2(h)): nobody has seen the gradient of h, but f's is the same."""
    first = GraphNode("AddBackward0", "block", 1, [3], passes=True, operands=["embed", "block.f"])
    later = GraphNode("NativeLayerNormBackward0", "block.norm_2", 3, output=True)
    graph = [GraphNode("MmBackward0", "embed", 0, [1, 2]), first, NORM, later]
    f_is_finite = {"block.norm", "block.norm_2", "block.f"}
    assert made(graph, lambda module, outputs: module in f_is_finite) == [("block.norm", ("NativeLayerNormBackward0",))]
    assert len(made(graph, lambda module, outputs: module in f_is_finite - {"block.f"})) == 2


def test_a_product_of_finite_tensors_makes_no_nan():
    product = GraphNode("MulBackward0", "block", 1, output=True, operands=["embed", "block.norm"], product=True)
    graph = [X, product, NORM]

    def named(returned_finite):
        return [maker.module for maker in makers_of(graph, all_finite, returned_finite).makers]

    assert named(lambda module: True) == ["block.norm"]
    assert named(lambda module: module == "embed") == ["block", "block.norm"]
    assert named(None) == ["block", "block.norm"], "an inf can be made of large numbers"


def test_what_began_the_backward_can_have_made_it():
    assert made([GraphNode("MmBackward0", "head", 0, [1]), GraphNode("ViewBackward0", "", -1, passes=True)]) == [
        ("", ("ViewBackward0",))
    ]


@pytest.mark.parametrize("graph", [[], [X, ADD, NORM]])
def test_without_the_gradients_above_nothing_is_known(graph):
    assert made(graph, lambda module, outputs: False) is None


def test_a_graph_that_goes_round_ends():
    """What comes from the network may be anything."""
    assert made([GraphNode("A", "a", 0, [1, 7, -3]), GraphNode("B", "b", 1, [1, 0])]) == [("b", ("B",))]


def row(role, largest, shape, kind="measured"):
    return Row(role, 0.0, largest, False, False, False, "float32", shape, kind)


def test_a_product_is_bounded_by_its_numbers():
    call = Frame(
        batch=0,
        index=0,
        module="fc",
        cls="Linear",
        phase="forward",
        rows=[row("weight", 2.0, [8, 4]), row("input[0]", 3.0, [5, 4]), row("output", 1.0, [5, 8])],
    )
    gradients = [row("grad output", 10.0, [5, 8])]
    assert largest_gradient(call, ["AddmmBackward0"], gradients, of_parameter=False) == 8 * 2.0 * 10.0
    assert largest_gradient(call, ["MmBackward0"], gradients, of_parameter=True) == 5 * 3.0 * 10.0
    assert largest_gradient(call, ["EmbeddingBackward0"], gradients, of_parameter=True) == 5 * 10.0
    assert largest_gradient(call, ["MulBackward0"], gradients, of_parameter=False) is None
    assert largest_gradient(call, ["MmBackward0"], [], of_parameter=False) is None
