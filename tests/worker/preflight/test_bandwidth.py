"""Bandwidth as nccl-tests counts it."""

from __future__ import annotations

import pytest
from gpuwatch.core.preflight import BandwidthRow
from gpuwatch.worker.preflight.bandwidth import neighbours, row_of, sizes_up_to
from gpuwatch.worker.preflight.blame.odd_ranks import slowest
from gpuwatch.worker.preflight.steps import LinkSpeed, RankMeasurements
from hypothesis import given
from hypothesis import strategies as st


def measured_of(outcomes):
    return {
        rank: RankMeasurements(
            [BandwidthRow(**row) for row in outcome["value"]["rows"]],
            [LinkSpeed(**link) for link in outcome["value"]["links"]],
        )
        for rank, outcome in outcomes.items()
    }


@pytest.mark.slow
@pytest.mark.sample(1)
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
