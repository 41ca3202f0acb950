"""A seeded sample of the jobs of ends.py: nobody innocent is named, and nothing that is not right is established."""

from __future__ import annotations

import pytest

from . import on_slurm
from .ends import run, why_no_cgroup, why_no_two_nodes
from .named_after import fault_s, named_after_s
from .ways import OUT_OF_MEMORY, SLURM_WAYS, WAYS, EndedJob, grade, grade_node, jobs, times_to_name

ONE_OF_EACH = jobs(1, len(WAYS))
ON_TWO_NODES = jobs(2, len(WAYS), (2, 4))
ON_SLURM = jobs(3, len(SLURM_WAYS), (2, 4), SLURM_WAYS)


@pytest.mark.slow
@pytest.mark.sample(3, of="an end of a job")
@pytest.mark.parametrize(("way", "guilty", "nproc"), ONE_OF_EACH, ids=[way.how for way, _, _ in ONE_OF_EACH])
def test_nobody_innocent_is_named(way, guilty, nproc):
    if way.how == OUT_OF_MEMORY and (reason := why_no_cgroup()):
        pytest.skip(reason)
    ended = run(way, guilty, nproc)
    assert ended.grade in ("right", "less"), ended


@pytest.mark.slow
@pytest.mark.sample(2, of="an end of a job on two nodes")
@pytest.mark.parametrize(("way", "guilty", "nproc"), ON_TWO_NODES, ids=[way.how for way, _, _ in ON_TWO_NODES])
def test_nobody_innocent_is_named_on_two_nodes(way, guilty, nproc):
    if reason := why_no_two_nodes() or (way.how == OUT_OF_MEMORY and why_no_cgroup()):
        pytest.skip(reason)
    ended = run(way, guilty, nproc, two_nodes=True)
    assert ended.grade in ("right", "less"), ended


@pytest.fixture(scope="module")
def slurm():
    if reason := on_slurm.why_not():
        pytest.skip(reason)
    with on_slurm.cluster() as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.xdist_group("slurm")
@pytest.mark.sample(1, of="an end of a job of SLURM")
@pytest.mark.parametrize(("way", "guilty", "nproc"), ON_SLURM, ids=[way.how for way, _, _ in ON_SLURM])
def test_nobody_innocent_is_named_on_slurm(slurm, way, guilty, nproc):
    ended = on_slurm.run(slurm, way, guilty, nproc)
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


@pytest.mark.parametrize(
    ("statement", "expected"),
    [("Rank 1 was killed: its memory cgroup was out of memory", "right"), ("Rank 1 was killed by SIGKILL", "less")],
)
def test_a_verdict_on_a_lack_of_memory_says_so(statement, expected):
    verdict = {"kind": "lost", "certainty": "established", "rank": 1, "concurrent": [], "statement": statement}
    assert grade(next(way for way in WAYS if way.how == OUT_OF_MEMORY), 1, 2, verdict) == expected


@pytest.mark.parametrize(
    ("kind", "rank", "expected"),
    [("interrupted", None, "right"), ("unknown", None, "less"), ("crash", None, "wrong"), ("crash", 1, "wrong")],
)
def test_how_a_verdict_on_a_preempted_job_is_graded(kind, rank, expected):
    verdict = {"kind": kind, "certainty": "supported", "rank": rank, "concurrent": [], "statement": ""}
    assert grade(next(way for way in WAYS if way.how == "preempted: ranks"), 1, 2, verdict) == expected


@pytest.mark.parametrize(
    ("kind", "host", "rank", "certainty", "expected"),
    [
        ("lost", "node-1", None, "supported", "right"),
        ("lost", "node-1", 1, "established", "right"),
        ("lost", "node-0", 0, "supported", "wrong"),
        ("lost", None, 0, "supported", "wrong"),
        ("lost", None, None, "unknown", "less"),
        ("crash", "node-1", 1, "supported", "wrong"),
        ("interrupted", None, None, "established", "less"),
        ("lost", None, 1, "established", "over-sure"),
    ],
)
def test_how_a_verdict_on_a_lost_node_is_graded(kind, host, rank, certainty, expected):
    verdict = {"kind": kind, "certainty": certainty, "rank": rank, "host": host, "concurrent": [], "statement": ""}
    assert grade_node(next(way for way in SLURM_WAYS if way.how == "power off"), "node-1", {1}, verdict) == expected


REPORT = [
    (20.0, "VERDICT  crash, established [GW102]"),
    (20.1, "Rank 1 on vm raised ValueError: no such shard, and ranks 0 and 2"),
    (20.2, "ended because of it."),
    (20.3, "Why"),
]


@pytest.mark.parametrize(
    ("lines", "at_fault", "expected"),
    [
        (REPORT, {1}, 10.3),
        ([(12.0, "gpuwatch: hang: rank 1 never reached all_reduce, in which rank 0 waits"), *REPORT], {1}, 2.0),
        ([(12.0, "[rank1]: ValueError: no such shard"), *REPORT], {1}, 10.3),
        ([(12.0, "gpuwatch: rank 0: connection closed by peer, by rank 1"), *REPORT], {1}, 10.3),
        ([(9.0, "gpuwatch: rank 1 is late"), *REPORT], {1}, 10.3),
        (REPORT, {0}, None),
        (REPORT, set(), 10.3),
        ([], {1}, None),
        ([(12.0, "gpuwatch: ranks 1-3 and 5 raised")], {1, 2, 3, 5}, 2.0),
    ],
    ids=["report", "live", "not ours", "a victim", "before", "never", "nobody", "nothing", "several"],
)
def test_how_long_after_its_fault_a_rank_is_named(lines, at_fault, expected):
    named = named_after_s(lines, 10.0, at_fault)
    assert named == (pytest.approx(expected) if expected is not None else None)


def test_the_first_fault_of_a_job_counts(tmp_path):
    assert fault_s(tmp_path) is None
    for rank, when in enumerate(("12.5", "11.25")):
        (tmp_path / f"fault-{rank}").write_text(when)
    assert fault_s(tmp_path) == 11.25


def test_the_times_are_those_of_jobs_that_were_right():
    def job(grade, seconds, kind="crash"):
        return EndedJob(WAYS[0], 0, 2, grade, 9.0, "", kind, seconds)

    ended = [job("right", 1.0), job("right", 4.0), job("right", 2.0), job("less", 90.0), job("right", None, "hang")]
    assert list(times_to_name(ended)) == ["crash: named after 2.0 s (median), at most 4.0 s, in 3 jobs"]


def test_each_way_comes_once_before_any_comes_again():
    assert len({way for way, _, _ in ONE_OF_EACH}) == len(WAYS)
