"""Remarks on steps, from what several ranks have found: all of them, or none."""

from __future__ import annotations

import struct

import pytest
from gpuwatch.collector.assemble.step_remarks import gradients_zeroed, weights_unmoved
from gpuwatch.collector.facts.rank_facts import RankFacts
from gpuwatch.core.events.across_ranks import ReplicaHashes
from gpuwatch.core.events.agent_events import UnmovedWeights, ZeroedGradients
from gpuwatch.core.events.own_limits import LooseParameters
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.wire.beat import RankState
from msgspec.structs import replace

TABLE = ["w fc1.weight float32 [4, 4]", "w fc2.weight float32 [4, 4]", "b mean float32 [8]"]
ZEROED = ZeroedGradients(
    *(RunPosition(0, 0, 3, 3, "Net"), 2, 20, 9, "fc1", "Linear", "grad weight", "float32", 3e19, 4e19, 5e19)
)
UNMOVED = UnmovedWeights(
    *(RunPosition(0, 0, 0, 0, "Net"), 16, 40, 2, "fc1", "Linear", "weight", "float32", 0.5, 0.001, True)
)


def rank(number, *found, step=40):
    facts = RankFacts(number, 0, state=RankState(number, number, 0, 7, "finished", step, step, -1))
    for each in found:
        {
            ZeroedGradients: facts.zeroed_gradients,
            UnmovedWeights: facts.unmoved_weights,
            LooseParameters: facts.loose_parameters,
        }[type(each)].append(each)
    return facts


def hashed(facts, *rows, steps=(0, 20, 40)):
    for at, row in zip(steps, rows, strict=True):
        where = RunPosition(facts.rank, step=at, batch=at, root="Net")
        table = TABLE if at == steps[0] else []
        facts.hashes.append(ReplicaHashes(where, 1, struct.pack("<III", *row), bytes(3), table))
    return facts


def test_one_remark_for_all_ranks():
    (found,) = gradients_zeroed([rank(0, ZEROED), rank(1, ZEROED)])
    assert (found.ranks, found.modules, found.since) == ([0, 1], ["fc1"], 3)
    assert "on both ranks in 2 of the 20 batches that were read (batch 3 the first, batch 9 the last)" in found.text


def test_a_rank_whose_shard_has_no_gradient_is_not_alone_told():
    assert list(gradients_zeroed([rank(0, ZEROED), rank(1)])) == []
    assert list(weights_unmoved([rank(0, UNMOVED), rank(1)])) == []


def test_a_rank_that_never_stepped_has_no_say():
    (found,) = gradients_zeroed([rank(0, ZEROED), rank(1, step=0)])
    assert found.ranks == [0] and "on rank 0" in found.text
    assert list(gradients_zeroed([rank(0, step=0)])) == []


@pytest.mark.parametrize(
    ("least", "most", "dtype", "words"),
    [
        (4e19, 5e19, "float32", "their norm is inf in float32"),
        (1e19, 5e19, "bfloat16", "their norm may be inf in bfloat16"),
        (1e19, 1.8e19, "float32", ""),
        (7e4, 8e4, "float16", "their norm is inf in float16"),
        (6e4, 8e4, "float16", "their norm may be inf in float16"),
        (6e4, 6.5e4, "float16", ""),
        (1e150, 1e155, "float64", "their norm may be inf in float64"),
    ],
)
def test_a_norm_is_blamed_if_it_can_be_inf(least, most, dtype, words):
    zeroed = replace(ZEROED, norm_least=least, norm_most=most, dtype=dtype)
    (found,) = gradients_zeroed([rank(0, zeroed)])
    assert words in found.text and ("norm" in found.text) == bool(words)
    (found,) = gradients_zeroed([rank(0, replace(zeroed, is_scaled=True))])
    assert "norm" not in found.text


def test_the_numbers_of_weights_look_so_and_their_hashes_prove_it():
    (found,) = weights_unmoved([rank(0, UNMOVED)])
    assert found.text == (
        "the weights of Net look unmoved on rank 0: abs max and abs min of all 2 weights with a gradient are the same "
        "after each of 16 of 40 steps (up to 5.00e-01 in weight of `fc1` (Linear))"
    )
    (found,) = weights_unmoved([hashed(rank(0, UNMOVED), (1, 2, 3), (1, 2, 4), (1, 2, 5))])
    assert found.text == (
        "no step has moved a weight of Net on rank 0: abs max and abs min of all 2 weights with a gradient are the "
        "same after each of 16 of 40 steps (up to 5.00e-01 in weight of `fc1` (Linear)), and so are their hashes"
    )


def test_hashes_that_differ_contradict():
    assert list(weights_unmoved([hashed(rank(0, UNMOVED), (1, 2, 3), (1, 7, 3), (1, 2, 3))])) == []


def test_hashes_of_a_few_steps_or_of_other_tensors_prove_nothing():
    early = hashed(rank(0, UNMOVED), (1, 2, 3), (1, 2, 3), (1, 2, 3), steps=(0, 1, 8))
    for facts in (early, hashed(rank(0, replace(UNMOVED, weights=3)), (1, 2, 3), (1, 2, 3), (1, 2, 3))):
        (found,) = weights_unmoved([facts])
        assert "look unmoved" in found.text


def test_what_trains_tensors_of_its_own_is_not_told():
    loose = LooseParameters(RunPosition(0), "Adam", 1)
    assert list(weights_unmoved([rank(0, UNMOVED, loose)])) == []
