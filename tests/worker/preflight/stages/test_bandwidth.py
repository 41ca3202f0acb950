"""Bandwidth as nccl-tests counts it, and the link that is slow."""

from __future__ import annotations

import pytest
from gpuwatch.core.preflight import BandwidthRow
from gpuwatch.worker.preflight.stages.bandwidth import (
    LinkSpeed,
    Measured,
    below,
    neighbours,
    row_of,
    sizes_up_to,
    slow_links,
    slowest,
)
from hypothesis import given
from hypothesis import strategies as st

HOSTS = {0: "a", 1: "b", 2: "c", 3: "d"}


def measured_of(outcomes):
    return {
        rank: Measured(
            [BandwidthRow(**row) for row in outcome["value"]["rows"]],
            [LinkSpeed(**link) for link in outcome["value"]["links"]],
        )
        for rank, outcome in outcomes.items()
    }


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [[0, 1], [0, 2, 5]])
def test_ranks_measure_every_size_and_their_links(run_ranks, ranks):
    outcomes = run_ranks("bandwidth", ranks, more=[1 << 20])
    measured = measured_of(outcomes)

    for one in measured.values():
        assert [row.size_bytes for row in one.rows] == [1 << 16, 1 << 18, 1 << 20]
        for row in one.rows:
            assert row.algbw_gbs == pytest.approx(row.size_bytes / row.time_us / 1e3, rel=0.02)
            assert row.busbw_gbs == pytest.approx(row.algbw_gbs * 2 * (len(ranks) - 1) / len(ranks), rel=0.01)
    links = {(link.first, link.second) for one in measured.values() for link in one.links}
    assert links == ({(0, 1)} if len(ranks) == 2 else {(0, 2), (2, 5), (5, 0)})
    assert slowest(measured)[1].size_bytes == 1 << 20
    assert outcomes[ranks[0]]["said"][:2] == ["init", "all_reduce of 64 KiB"]


@pytest.mark.slow  # the time is long, so that a slow machine comes to the links, too
def test_it_stops_at_the_size_that_would_take_too_long(run_ranks):
    measured = measured_of(run_ranks("bandwidth", [0, 1], timeout_s=8.0, more=[4 << 30]))

    assert 0 < len(measured[0].rows) == len(measured[1].rows) < len(sizes_up_to(4 << 30))
    assert measured[0].links


def test_one_rank_has_no_bandwidth(run_ranks):
    (outcome,) = run_ranks("bandwidth", [3]).values()

    assert outcome["value"] == {"rows": [], "links": []}


@given(st.integers(1, 1 << 40), st.integers(1, 10**6), st.integers(2, 5000))
def test_bus_bandwidth_is_that_of_nccl_tests(size, microseconds, count):
    row = row_of(size, microseconds / 1e6, count)

    assert row.algbw_gbs == pytest.approx(size / microseconds / 1e3, rel=1e-3)
    assert row.busbw_gbs == pytest.approx(size / microseconds / 1e3 * 2 * (count - 1) / count, rel=1e-3)


@given(st.integers(2, 60))
def test_every_link_of_the_ring_is_measured_once_and_no_rank_twice_at_a_time(count):
    rounds = neighbours(count)

    links = [frozenset(link) for one in rounds for link in one]
    assert set(links) == {frozenset((one, (one + 1) % count)) for one in range(count)}
    assert len(links) == len(set(links))
    assert len(rounds) <= 3
    for one in rounds:
        ranks = [rank for link in one for rank in link]
        assert len(ranks) == len(set(ranks))


@given(st.integers(1, 1 << 34))
def test_the_sizes_end_at_the_largest(largest):
    sizes = sizes_up_to(largest)

    assert sizes[-1] == largest
    assert sizes == sorted(set(sizes))


def of(*gbs, busbw=1.0):
    """Ranks in a ring whose links have these speeds."""
    row = BandwidthRow(1 << 20, 1000.0, busbw, busbw)
    count = len(gbs)
    return {rank: Measured([row], [LinkSpeed(rank, (rank + 1) % count, speed)]) for rank, speed in enumerate(gbs)}


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
    measured = {**of(1.0, 1.0), 1: Measured([BandwidthRow(1 << 16, 1.0, 9.0, 9.0), slow])}

    assert slowest(measured) == (1, slow)
    assert slowest({}) is None


def test_a_slow_link_is_named_beside_good_ones_of_its_kind():
    found = slow_links(of(1.0, 0.2, 1.1, 1.0), HOSTS)

    assert [(one.grade, one.subject, one.ranks) for one in found] == [("warn", "link", [1, 2])]


def test_where_none_is_slow_the_slowest_is_told():
    (of_four,) = slow_links(of(1.0, 0.5, 1.1, 1.0), HOSTS)
    (of_one,) = slow_links({0: Measured([], [LinkSpeed(0, 1, 0.5)]), 1: Measured([])}, HOSTS)

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
