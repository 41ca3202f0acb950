"""The same bits from every rank of one kind, and the rank that has others."""

from __future__ import annotations

import pytest
import torch
from gpuwatch.worker.preflight.blame.odd_ranks import odd_digests, slow_devices
from gpuwatch.worker.preflight.device_tests import compute, digest_of, seeded
from gpuwatch.worker.preflight.steps import ComputeResult
from hypothesis import given
from hypothesis import strategies as st

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
HOSTS = {rank: f"node-{rank // 2}" for rank in range(8)}


def results_of(outcomes):
    return {rank: ComputeResult(**outcome["value"]) for rank, outcome in outcomes.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_the_factors_have_the_same_bits_on_every_device(device):
    factor = seeded(100, torch.device(device), 7)

    assert digest_of(factor) == "edbe1d2125044377"
    assert -1 <= factor.min() < -0.9 < 0.9 < factor.max() < 1
    assert len(factor.unique()) > 250
    assert not torch.equal(factor, seeded(100, torch.device(device), 8))


@pytest.mark.slow
def test_ranks_compute_the_same_bits_whatever_their_threads(run_ranks):
    results = results_of(run_ranks("compute", [0, 1, 2], {1: "four threads"}))

    assert len({result.digest for result in results.values()}) == 1
    assert odd_digests(results, HOSTS) == []
    assert results[0].device_type.startswith("cpu ")
    assert results[0].milliseconds > 0


@pytest.mark.slow
def test_a_rank_that_computes_another_matmul_is_named(run_ranks):
    (finding,) = odd_digests(results_of(run_ranks("compute", [0, 1, 2], {1: "another matmul"})), HOSTS)

    assert (finding.grade, finding.subject, finding.ranks, finding.hosts) == ("fail", "rank", [1], ["node-0"])
    assert finding.sentence.startswith("rank 1 on node-0 gets a different matmul result")


@pytest.mark.slow
@pytest.mark.sample(1)
def test_a_rank_that_contradicts_itself_needs_no_other(run_ranks):
    (outcome,) = run_ranks("compute", [0], {0: "now and then"}).values()

    assert (outcome["known"], outcome["peers"]) == (True, None)
    assert "gave different bits when it was repeated (1 of 589824 numbers differ, repetition 1)" in outcome["detail"]


@pytest.mark.slow
@pytest.mark.sample(1)
def test_a_slow_rank_is_named(run_ranks):
    found = slow_devices(results_of(run_ranks("compute", [0, 1, 2], {2: "slow"})), HOSTS, factor=4.0)

    assert [(finding.grade, finding.ranks) for finding in found] == [("warn", [2])]
    assert "times the median of all 3 ranks" in found[0].sentence


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_computes_the_same_bits_again():
    first, second = compute(torch.device("cuda", 0)), compute(torch.device("cuda", 0))

    assert first.digest == second.digest
    assert "SMs" in first.device_type
    assert first.uuid.startswith(("GPU-", "MIG-"))
    assert first.milliseconds > 0


def result(digest, kind="cpu X", milliseconds=1.0):
    return ComputeResult(digest, milliseconds, kind)


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=8),
    st.lists(st.sampled_from(["cpu X", "H100"]), min_size=8, max_size=8),
)
def test_only_a_minority_of_its_own_kind_is_named(digests, kinds):
    results = {rank: result(digest, kinds[rank]) for rank, digest in enumerate(digests)}

    found = odd_digests(results, HOSTS)

    for kind in set(kinds[: len(digests)]):
        camps: dict[str, list[int]] = {}
        for rank, one in results.items():
            if one.device_type == kind:
                camps.setdefault(one.digest, []).append(rank)
        sizes = sorted(map(len, camps.values()))
        of_kind = [finding for finding in found if results[finding.ranks[0]].device_type == kind]
        if len(sizes) == 1:
            assert of_kind == []
        elif sizes[-1] == sizes[-2]:
            assert [finding.subject for finding in of_kind] == ["job"]
            assert "undetermined" in of_kind[0].sentence
        else:
            majority = max(camps.values(), key=len)
            named = [rank for finding in of_kind for rank in finding.ranks]
            assert sorted(named + majority) == sorted(rank for ranks in camps.values() for rank in ranks)


@pytest.mark.parametrize(
    ("digests", "named"),
    [("ab", "job"), ("aab", [2]), ("abb", [0]), ("aabb", "job"), ("abc", "job"), ("aabc", [2, 3]), ("aaaa", [])],
)
def test_two_that_agree_are_right(digests, named):
    found = odd_digests({rank: result(digest) for rank, digest in enumerate(digests)}, HOSTS)

    if named == "job":
        assert [finding.subject for finding in found] == ["job"]
    else:
        assert [finding.ranks for finding in found] == [[rank] for rank in named]


def test_a_gpu_is_named_by_its_uuid():
    kind = "NVIDIA H100, 132 SMs, torch 2.13"
    results = {rank: ComputeResult("ab"[rank == 2], 1.0, kind, f"GPU-{rank}") for rank in range(3)}

    (finding,) = odd_digests(results, HOSTS)

    assert (finding.subject, finding.device) == ("gpu", "GPU-2")
    assert finding.next.startswith("Take GPU GPU-2 out of service")


@pytest.mark.parametrize(
    ("times", "slow"),
    [([1, 1], []), ([1, 2], [1]), ([1, 1.4], []), ([3, 3, 3, 10], [3]), ([1], []), ([5, 1, 1, 1, 5], [0, 4])],
)
def test_slow_is_above_a_factor_of_the_median(times, slow):
    found = slow_devices({rank: result("a", milliseconds=time) for rank, time in enumerate(times)}, HOSTS)

    assert [finding.ranks for finding in found] == [[rank] for rank in slow]
    assert all(finding.grade == "warn" for finding in found)


def test_a_slow_kind_of_device_is_told_as_such():
    results = {0: result("a", "H100"), 1: result("a", "H100"), 2: result("b", "A100", 3.0)}

    (finding,) = slow_devices(results, HOSTS)

    assert "(A100; the job has 2 kinds of device)" in finding.sentence
    assert odd_digests(results, HOSTS) == []
