"""Recorded outputs of real failures, each with the sentence that it must become."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from gpuwatch.core.known_errors import explain
from hypothesis import given, settings
from hypothesis import strategies as st

DATA = Path(__file__).parents[1] / "data" / "nccl"


class Case(NamedTuple):
    name: str
    own: bool
    sentence: str
    log: str


def read_case(path: Path) -> Case:
    head, log = path.read_text().split("\n---\n", 1)
    known = dict(line.split(": ", 1) for line in head.splitlines())
    assert known["source"]
    return Case(path.stem, {"yes": True, "no": False}[known["own"]], known["sentence"], log)


CASES = [read_case(path) for path in sorted(DATA.glob("*.txt"))]
HEALTHY = """\
node-a:13571:13571 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
node-a:13571:13571 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation
node-a:13571:13571 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]
node-a:13571:13571 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
node-a:13571:13571 [0] NCCL INFO GPU Direct RDMA Disabled for GPU 42000 / HCA 0 (distance 6 > 4)
node-a:13571:13571 [0] NCCL INFO NVLS multicast support is not available on dev 0
node-a:13571:13571 [0] NCCL INFO Connected all rings
node-a:13571:13571 [0] NCCL INFO comm 0x7ff1ec001060 rank 0 nranks 2 cudaDev 0 busId 100000 - Init COMPLETE
node-a:13571:13680 [0] NCCL INFO [Service thread] Connection closed by localRank 0
"""


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_recorded_failure_becomes_its_sentence(case):
    first = explain(case.log)[0]

    assert first.sentence == case.sentence
    assert first.own is case.own
    assert first.line in case.log
    assert first.next.endswith(".")


@pytest.mark.quick(12)
@pytest.mark.sample(6)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_it_is_found_between_the_lines_of_a_long_log(case):
    assert explain(HEALTHY * 50 + case.log + HEALTHY) == explain(case.log)


def test_every_known_cause_has_a_recorded_case():
    causes = {(found.own, found.next) for case in CASES for found in explain(case.log)}

    assert len(CASES) >= 15
    assert len(causes) >= 35


def test_a_healthy_log_says_nothing():
    assert explain(HEALTHY) == []


def test_each_cause_is_told_once_and_what_it_led_to_comes_after_it():
    log = next(case.log for case in CASES if case.name == "out_of_memory")

    sentences = [found.sentence for found in explain(log * 3)]

    assert sentences == ["the GPU had no memory left for NCCL's own buffers", "the rank at node-a-ib went away"]


def test_an_unknown_cuda_error_is_told_only_without_a_better_cause():
    other = "[1] enqueue.cc:54 NCCL WARN Cuda failure 400 'invalid resource handle'"
    known = "[1] enqueue.cc:43 NCCL WARN Cuda failure 2 'out of memory'"

    assert [found.sentence for found in explain(other)] == ["a CUDA call failed on this GPU (invalid resource handle)"]
    assert [found.line for found in explain(f"{other}\n{known}\n")] == [known]


@given(st.text())
@settings(max_examples=20)
def test_any_text_is_read(text):
    for found in explain(text):
        assert found.line in text
