"""The link that is slow, and a bandwidth that is too low."""

from __future__ import annotations

from gpuwatch.core.preflight import BandwidthRow
from gpuwatch.worker.preflight.blame.odd_ranks import below, slow_links, slowest
from gpuwatch.worker.preflight.steps import LinkSpeed, RankMeasurements

HOSTS = {0: "a", 1: "b", 2: "c", 3: "d"}


def of(*gbs, busbw=1.0):
    """Ranks in a ring whose links have these speeds."""
    row = BandwidthRow(1 << 20, 1000.0, busbw, busbw)
    count = len(gbs)
    return {
        rank: RankMeasurements([row], [LinkSpeed(rank, (rank + 1) % count, speed)]) for rank, speed in enumerate(gbs)
    }


def test_below_the_wanted_bandwidth_is_a_failure():
    measured = of(1.0, 0.9, 1.1, busbw=2.0)

    finding = below(measured, HOSTS, 2.5)

    assert below(measured, HOSTS, 2.0) is None
    assert (finding.grade, finding.subject, finding.ranks) == ("fail", "job", [0, 1, 2])
    assert "bus bandwidth of 2 GB/s, below the 2.5 GB/s of --min-busbw" in finding.sentence
    assert "the slowest link is between rank 1 (b) and rank 2 (c), with 0.9 GB/s" in finding.sentence


def test_a_slow_link_is_to_blame_for_it():
    finding = below(of(1.0, 0.1, 1.1, 1.0), HOSTS, 2.5)

    assert (finding.grade, finding.subject, finding.ranks, finding.hosts) == ("fail", "link", [1, 2], ["b", "c"])


def test_the_slowest_rank_counts():
    slow = BandwidthRow(1 << 20, 9000.0, 0.1, 0.2)
    measured = {**of(1.0, 1.0), 1: RankMeasurements([BandwidthRow(1 << 16, 1.0, 9.0, 9.0), slow])}

    assert slowest(measured) == (1, slow)
    assert slowest({}) is None


def test_a_slow_link_is_named_beside_good_ones_of_its_kind():
    found = slow_links(of(1.0, 0.2, 1.1, 1.0), HOSTS)

    assert [(one.grade, one.subject, one.ranks) for one in found] == [("warn", "link", [1, 2])]


def test_where_none_is_slow_the_slowest_is_told():
    (of_four,) = slow_links(of(1.0, 0.5, 1.1, 1.0), HOSTS)
    (of_one,) = slow_links({0: RankMeasurements([], [LinkSpeed(0, 1, 0.5)]), 1: RankMeasurements([])}, HOSTS)

    assert (of_four.grade, of_four.ranks) == ("ok", [1, 2])
    assert of_four.sentence.endswith("rank 1 (b) and rank 2 (c), with 0.5 GB/s each way (the fastest of 4: 1.1)")
    assert of_one.sentence == "the link between rank 0 (a) and rank 1 (b) moves 0.5 GB/s each way"
    assert slow_links({}, HOSTS) == []


def test_a_host_whose_links_are_all_slow_is_named():
    (finding,) = slow_links(of(1.0, 0.1, 0.1, 1.0), HOSTS)

    assert (finding.subject, finding.ranks, finding.hosts) == ("node", [2], ["c"])


def test_a_host_is_not_named_for_one_very_slow_link_beside_a_somewhat_slow_one():
    found = slow_links(of(1.0, 0.002, 0.2, 1.0), HOSTS)

    assert [(one.subject, one.ranks) for one in found] == [("link", [1, 2]), ("link", [2, 3])]


def test_links_inside_a_host_and_between_hosts_are_not_compared():
    (finding,) = slow_links(of(100.0, 1.0, 100.0, 1.0), {0: "a", 1: "a", 2: "b", 3: "b"})

    assert (finding.grade, finding.hosts) == ("ok", ["a", "b"])
