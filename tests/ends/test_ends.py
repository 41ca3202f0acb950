"""A seeded sample of the jobs of ends.py: nobody innocent is named, and nothing that is not right is established."""

from __future__ import annotations

import pytest

from .ends import WAYS, grade, jobs, run, why_no_two_nodes

ONE_OF_EACH = jobs(1, len(WAYS))
ON_TWO_NODES = jobs(2, len(WAYS), (2, 4))


@pytest.mark.slow
@pytest.mark.sample(3, of="an end of a job")
@pytest.mark.parametrize(("way", "guilty", "nproc"), ONE_OF_EACH, ids=[way.how for way, _, _ in ONE_OF_EACH])
def test_nobody_innocent_is_named(way, guilty, nproc):
    ended = run(way, guilty, nproc)
    assert ended.grade in ("right", "less"), ended


@pytest.mark.slow
@pytest.mark.sample(2, of="an end of a job on two nodes")
@pytest.mark.parametrize(("way", "guilty", "nproc"), ON_TWO_NODES, ids=[way.how for way, _, _ in ON_TWO_NODES])
def test_nobody_innocent_is_named_on_two_nodes(way, guilty, nproc):
    if reason := why_no_two_nodes():
        pytest.skip(reason)
    ended = run(way, guilty, nproc, two_nodes=True)
    assert ended.grade in ("right", "less"), ended


@pytest.mark.parametrize(
    ("rank", "concurrent", "certainty", "expected"),
    [
        (1, [], "established", "right"),
        (None, [], "unknown", "less"),
        (None, [0, 1], "supported", "less"),
        (None, [0, 1], "established", "over-sure"),
        (0, [], "supported", "wrong"),
    ],
)
def test_how_a_verdict_is_graded(rank, concurrent, certainty, expected):
    verdict = {
        "kind": "crash",
        "certainty": certainty,
        "rank": rank,
        "concurrent": [{"rank": each} for each in concurrent],
        "statement": "",
    }
    assert grade(next(way for way in WAYS if way.how == "raises"), 1, 2, verdict) == expected


def test_each_way_comes_once_before_any_comes_again():
    assert len({way for way, _, _ in ONE_OF_EACH}) == len(WAYS)
