"""Models of transformers under torch.compile: which module is named, and what is said where nobody looked.

With `use_cache=True`, their default, torch.compile breaks the outer call, and nobody looks into the graphs below.
"""

from __future__ import annotations

import gpuwatch
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
]


def verdict_of(use_cache: bool, faulty: bool):
    torch.compiler.reset()
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **tokens, use_cache=use_cache))
    graph = torch.compile(model, backend="aot_eager")
    ids = torch.randint(0, 64, (2, 8))
    with gpuwatch.watch(model, on_overflow="continue") as handle:
        for batch in range(3):
            if faulty and batch == 2:
                with torch.no_grad():
                    model.transformer.h[1].mlp.c_fc.weight.fill_(3e38)
            graph(input_ids=ids).logits.square().mean().backward()
        return handle.verdict()


def test_with_a_cache_it_is_said_that_nobody_looked_into_the_compiled_code():
    found = verdict_of(use_cache=True, faulty=True)
    assert (found.kind, found.module, found.certainty) == ("overflow", "", "supported")
    assert any("compiled code was not looked into" in line for line in found.evidence)
    assert "use_cache=False" in found.next[0]


def test_with_a_cache_a_run_without_a_fault_says_it_too():
    found = verdict_of(use_cache=True, faulty=False)
    assert found.kind == "clean"
    assert "compiled code was not looked into" in found.statement


def test_without_a_cache_the_module_is_named():
    found = verdict_of(use_cache=False, faulty=True)
    assert (found.module, found.phase) == ("transformer.h.1.mlp.c_fc", "forward")
    assert not any("not looked into" in line for line in found.evidence)
