"""Models of transformers under torch.compile: it makes the same graphs as without gpuwatch, and the module is named.

Their loss logs a warning, which breaks the outer call; `use_cache=True`, their default, makes an object in the graph.
"""

from __future__ import annotations

import gpuwatch
import pytest
import torch
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch, where it goes on after a break
]


def train(model, with_labels: bool, faulty: bool) -> int:
    """Three batches; the last may have a weight that is too large. Returns the number of graphs."""
    torch.compiler.reset()
    counters.clear()
    graph = torch.compile(model, backend="aot_eager")
    ids = torch.randint(0, 64, (2, 8))
    for batch in range(3):
        if faulty and batch == 2:
            with torch.no_grad():
                model.transformer.h[1].mlp.c_fc.weight.fill_(3e38)
        graph(input_ids=ids, **({"labels": ids} if with_labels else {}))[0].square().mean().backward()
    return counters["stats"]["unique_graphs"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("use_cache", [True, False], ids=["with a cache", "without a cache"])
@pytest.mark.parametrize("with_labels", [True, False], ids=["with the model's loss", "with a loss of its own"])
def test_the_graphs_stay_what_they_are_and_the_module_is_named(use_cache, with_labels):
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **tokens, use_cache=use_cache))
    alone = train(model, with_labels, faulty=False)
    with gpuwatch.watch(model, on_overflow="continue") as handle:
        assert train(model, with_labels, faulty=False) == alone
        verdict = handle.verdict()
        assert (verdict.kind, "not inspected" in verdict.statement) == ("clean", False), verdict.statement
    with gpuwatch.watch(model, on_overflow="continue") as handle:
        train(model, with_labels, faulty=True)
        found = handle.verdict()
    assert (found.module, found.phase) == ("transformer.h.1.mlp.c_fc", "forward")
    assert not any("not inspected" in line for line in found.evidence)
