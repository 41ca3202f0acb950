"""Whether a node has saved a packed tensor, by its number. The truth is what a newer torch tells of each tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from gpuwatch.worker.explain.packed_nodes import PackedNodes
from gpuwatch.worker.patches import PatchLedger
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ...needs import needs

of_newer_torch = needs("torch._C._autograd.SavedTensor.unpack_hook")
X = torch.ones(2, requires_grad=True)


class Followed:
    """Follows hooks within a `with`."""

    def __enter__(self) -> PackedNodes:
        self._patches, nodes = PatchLedger(), PackedNodes()
        nodes.attach(self._patches)
        return nodes

    def __exit__(self, *error: object) -> None:
        self._patches.undo()


def hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)


def run(steps: list[Any], made: list[torch.Tensor]) -> None:
    """`steps`: what runs, in this order; a list runs under hooks, a tuple as a checkpoint, a dict in a thread."""
    for step in steps:
        if isinstance(step, list):
            with hooks():
                run(step, made)
        elif isinstance(step, tuple):
            made.append(checkpoint(lambda x: x.exp() * x, made[-1] if made else X, use_reentrant=False))
        elif isinstance(step, dict):
            thread = threading.Thread(target=run, args=(step["steps"], made))
            thread.start()
            thread.join()
        elif step == "backward" and made:
            made[-1].sum().backward(retain_graph=True)
        else:
            made.append(X * X)


STEPS: Any = st.recursive(
    st.sampled_from(["make", "backward", ()]),
    lambda inner: st.lists(inner, max_size=4) | st.fixed_dictionaries({"steps": st.lists(inner, max_size=4)}),
    max_leaves=12,
)


def saved_of(tensor: torch.Tensor) -> Iterator[tuple[Any, Any]]:
    """(node, a tensor that it has saved)"""
    node: Any = tensor.grad_fn
    while node is not None:
        for name in ("self", "other", "result"):
            raw = getattr(node, f"_raw_saved_{name}", None)
            if raw is not None:
                yield node, raw
        node = node.next_functions[0][0] if node.next_functions else None


@of_newer_torch
@given(st.lists(STEPS, max_size=6))
def test_a_packed_tensor_is_never_taken_for_one_that_is_not(steps):
    made: list[torch.Tensor] = []
    with Followed() as nodes:
        run(steps, made)
        for tensor in made:
            for node, raw in saved_of(tensor):
                assert raw.unpack_hook is None or nodes.may_have(node)


def is_packed(nodes: PackedNodes, make: Callable[[], torch.Tensor] = lambda: X * X) -> bool:
    return nodes.may_have(make().grad_fn)


def test_only_nodes_made_under_hooks_may_be():
    with Followed() as nodes:
        before = X * X
        with hooks():
            within = X * X
            with save_on_cpu():
                assert is_packed(nodes)
            assert is_packed(nodes)
        assert not is_packed(nodes)
        assert not nodes.may_have(before.grad_fn)
        assert nodes.may_have(within.grad_fn)
        after = checkpoint(torch.exp, X, use_reentrant=False)
        assert nodes.may_have(after.grad_fn)
        assert not is_packed(nodes)


def test_another_threads_nodes_have_numbers_of_their_own():
    found: list[bool] = []

    def in_thread(run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    def first() -> None:
        with Followed() as nodes:
            in_thread(lambda: second(nodes))
            found.append(is_packed(nodes))

    def second(nodes: PackedNodes) -> None:
        for _ in range(200):
            X * X
        with hooks():
            found.append(is_packed(nodes))
        found.append(is_packed(nodes))

    in_thread(first)  # a thread begins with 0, the one of all tests is further on
    assert found == [True, False, False]


def test_nothing_is_known_of_what_was_made_before():
    made = X * X
    with Followed() as nodes:
        assert nodes.may_have(made.grad_fn)


def test_nor_of_what_was_made_until_hooks_are_taken_away_that_nobody_saw_put_in_place():
    with Followed() as nodes:
        made = X * X
        with hooks():
            nodes._depth.clear()
            nodes._open.clear()
        assert nodes.may_have(made.grad_fn)
        assert not is_packed(nodes)


@needs("torch._C._autograd._top_saved_tensors_default_hooks")
def test_nor_while_hooks_are_in_place_that_nobody_has_seen():
    with hooks(), hooks(), Followed() as nodes:
        assert is_packed(nodes)
        with hooks():
            pass
        assert is_packed(nodes)


def test_nor_once_a_single_saved_tensor_has_got_hooks():
    with Followed() as nodes:
        made: Any = X * X
        made.grad_fn._raw_saved_self.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
        assert nodes.may_have(made.grad_fn)
    made.sum().backward()


def test_of_very_many_spans_the_last_ones_are_known():
    with Followed() as nodes:
        with hooks():
            first = X * X
        between = X * X
        for _ in range(1100):
            with hooks():
                last = X * X
        assert nodes.may_have(first.grad_fn)
        assert nodes.may_have(between.grad_fn)  # no longer known
        assert nodes.may_have(last.grad_fn)
        assert not is_packed(nodes)


def test_torch_has_its_functions_back_afterwards():
    before = torch._C._autograd._push_saved_tensors_default_hooks
    with Followed():
        assert torch._C._autograd._push_saved_tensors_default_hooks is not before
    assert torch._C._autograd._push_saved_tensors_default_hooks is before


def test_what_a_push_raises_goes_to_the_script_and_counts_for_nothing():
    with Followed() as nodes:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            with pytest.raises(RuntimeError, match="not here"), ExitStack() as stack:
                stack.enter_context(hooks())
        assert not is_packed(nodes)
