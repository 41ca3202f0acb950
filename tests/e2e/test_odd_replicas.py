"""A flipped bit, a garbage buffer, a missed broadcast on one of four ranks: told with rank, name and batch."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

_RANDOM = ["table.weight", "conv.weight", "conv.bias", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight"]
"""Weights that each rank has drawn from a seed of its own."""
_BUFFERS = ["rotary.inv_freq", "biased.slopes"]
_BATCHES = [0, 0, 0, 1, 2, 3, 5, 6, 7, 8]
_HASHED_IN = [0, 1, 2, 4, 8]

Fault = tuple[str, str, int, int]
"""kind, tensor, rank, batch"""


def _faults(kind: str) -> list[Fault]:
    """Ten faults in different tensors; the same in every run."""
    draw = random.Random(kind)
    names = _BUFFERS if kind == "garbage" else _RANDOM
    tensors = draw.sample([f"blocks.{block}.{name}" for block in range(5) for name in names], 10)
    if kind == "missed":  # later, buffers are sent anew, too
        tensors[7:] = [f"blocks.{block}.{_BUFFERS[block % 2]}" for block in range(3)]
    least = 1 if kind == "missed" else 0  # rank 0 sends
    return [(kind, name, draw.randrange(least, 4), batch) for name, batch in zip(tensors, _BATCHES, strict=True)]


KINDS = ["flip", "garbage", "missed"]
SEED = random.Random(7)
SAMPLE = [SEED.choice(_faults(kind)) for kind in KINDS]


def untold(report: dict, faults: list[Fault]) -> list[Fault]:
    """The faults of which no insight has the rank, the name and the batch."""
    insights = [each for each in report["insights"] if each["kind"] == "replica_odd"]
    told = {(name, each["ranks"][0], each["since"]) for each in insights for name in each["text"].split("`")[1::2]}
    seen = [next(batch for batch in _HASHED_IN if batch >= fault[3]) for fault in faults]
    left = [fault for fault, since in zip(faults, seen, strict=True) if (fault[1], fault[2], since) not in told]
    assert len(told) <= len(faults), told
    return left


def run_with(bench, faults: list[Fault]):
    run = bench.launch("odd_replicas.py", "--preflight", "off", nproc=4, args=(json.dumps(faults),))
    assert (run.code, run.verdict["kind"]) == (0, "clean"), run.verdict["statement"]
    assert not any(rank["faults"] for rank in run.report["ranks"])
    return run.report


@pytest.mark.slow
def test_a_fault_of_each_kind_is_told(bench):
    assert untold(run_with(bench, SAMPLE), SAMPLE) == []


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_ten_faults_of_a_kind_are_told(bench, kind):
    assert untold(run_with(bench, _faults(kind)), _faults(kind)) == []


@pytest.mark.slow
def test_nothing_is_told_of_replicas_without_a_fault(bench):
    """Each rank's BatchNorm has statistics of its own, and masks hold -inf."""
    assert run_with(bench, [])["insights"] == []


@pytest.mark.slow
def test_nothing_is_told_where_ranks_are_meant_to_differ(bench):
    run = bench.launch("own_weights.py", "--preflight", "off", nproc=4)
    assert (run.code, run.verdict["kind"]) == (0, "clean"), run.verdict["statement"]
    assert run.report["insights"] == []


FOLDER = Path(__file__).parents[1] / "architectures"


@pytest.mark.soak
@pytest.mark.parametrize("tenth", range(6))
def test_of_healthy_architectures_nothing_is_told_but_a_flipped_bit(bench, tenth):
    """Sixty architectures of transformers, ten in each run."""
    pytest.importorskip("transformers")
    sys.path.insert(0, str(FOLDER))
    from models import ARCHITECTURES

    names = [each.name for each in ARCHITECTURES[10 * tenth : 10 * tenth + 10]]
    args = (str(FOLDER), *names)
    run = bench.launch("replicas_of_architectures.py", "--preflight", "off", nproc=3, args=args)
    assert (run.code, run.verdict["kind"]) == (0, "clean"), run.verdict["statement"]
    (told,) = [each for each in run.report["insights"] if each["kind"] == "replica_odd"]
    assert (told["ranks"], told["since"]) == ([1], 2)
    assert not any("buffer" in each["text"] for each in run.report["insights"])
