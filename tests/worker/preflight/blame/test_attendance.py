"""Who is missing, and on which node that is."""

from __future__ import annotations

import pytest
from gpuwatch.worker.preflight.blame.conclude import missing_findings
from gpuwatch.worker.preflight.steps import RankAttendance, RankRoster

HOSTS = ["gpu-000", "gpu-001", "gpu-002"]


def present(*ranks: int, size: int = 4, device: str = "cuda:0") -> dict[int, RankAttendance]:
    """Of nodes with `size` ranks each."""
    return {rank: RankAttendance(HOSTS[rank // size], rank // size, rank % size, size, device) for rank in ranks}


@pytest.mark.parametrize(
    ("missing", "known_hosts", "sentences"),
    [
        ([5], [], ["rank 5 (node gpu-001) did not arrive within 60 s"]),
        ([9, 10, 11], [], ["ranks 9-11 (node gpu-002) did not arrive within 60 s"]),
        ([4, 5, 6, 7], HOSTS, ["ranks 4-7 (node gpu-001) did not arrive within 60 s"]),
        ([4, 5, 6, 7], [], ["ranks 4-7 (node number 1) did not arrive within 60 s"]),
        (
            [0, 8, 9, 10, 11],
            HOSTS,
            [
                "rank 0 (node gpu-000) did not arrive within 60 s",
                "ranks 8-11 (node gpu-002) did not arrive within 60 s",
            ],
        ),
    ],
)
def test_the_missing_are_named_by_node(missing, known_hosts, sentences):
    here = present(*(rank for rank in range(12) if rank not in missing))
    found = missing_findings(missing, here, 12, known_hosts, 60.0)
    assert [finding.sentence for finding in found] == sentences
    assert [rank for finding in found for rank in finding.ranks] == missing
    assert [finding.subject for finding in found] == [
        "node" if len(finding.ranks) == 4 else "rank" for finding in found
    ]


def test_nodes_of_different_sizes_are_not_guessed():
    here = {
        0: RankAttendance("a", 0, 0, 1, "cpu"),
        1: RankAttendance("b", 1, 0, 2, "cpu"),
        2: RankAttendance("b", 1, 1, 2, "cpu"),
    }
    (found,) = missing_findings([3, 4, 5], here, 6, [], 60.0)
    assert found.sentence == "ranks 3-5 did not arrive within 60 s"


def test_nccl_only_if_every_rank_has_a_gpu():
    assert RankRoster(list(present(*range(12)).values())).backend == "nccl"
    roster = RankRoster(list({**present(*range(12)), 7: RankAttendance("gpu-001", 1, 3, 4, "cpu")}.values()))
    assert roster.backend == "gloo"
    assert roster.ranks_of(0, 2) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert roster.hosts_by_node == dict(enumerate(HOSTS))
