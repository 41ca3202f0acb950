"""What stands out around an event, over made figures: each thing is told, and what is usual is not."""

from __future__ import annotations

import pytest
from gpuwatch.collector.assemble.node_telemetry import stands_out
from gpuwatch.collector.assemble.timeline import node_series

GIB = 1 << 30
GPU = "GPU-0"
SAMPLES = 60
EVENT = 40
"""The number of the sample at which it happened; they are 5 s apart."""


def counts(rate, *, at=(), peak=0.0):
    """A count that grows by `rate` in a second, and by `peak` before the samples in `at`."""
    found, now = [], 1000.0
    for n in range(SAMPLES):
        now += 5 * (peak if n in at else rate)
        found.append(now)
    return found


def level(usual, *, at=(), peak=0.0):
    return [peak if n in at else usual for n in range(SAMPLES)]


HEALTHY = {
    ("", "cpu"): counts(0.7),
    ("", "steal"): counts(0.02),
    ("", "memory_used"): level(100 * GIB),
    ("", "memory_total"): level(256 * GIB),
    ("", "job_memory_used"): level(40 * GIB),
    ("", "job_memory_limit"): level(64 * GIB),
    ("", "job_cpu_held"): counts(0.01),
    ("", "swap_used"): level(2 * GIB),
    ("", "swap_in"): counts(4096),
    ("", "swap_out"): counts(0),
    ("", "net_errors"): counts(0),
    ("mlx5_0/1", "ib_errors"): counts(0),
    ("runs-dir", "disk_free"): level(3 * GIB),
    ("runs-dir", "disk_size"): level(100 * GIB),
    ("rank 1", "open_files"): level(300),
    ("rank 1", "open_files_limit"): level(1024),
    (GPU, "temperature"): level(70),
    (GPU, "sm_clock"): level(1755),
    (GPU, "sm_clock_max"): level(1980),
    (GPU, "clocks_sw_power_cap"): counts(0.9),
    (GPU, "clocks_sw_thermal"): counts(0),
    (GPU, "clocks_hw_thermal"): counts(0),
    (GPU, "clocks_hw_power_brake"): counts(0),
    (GPU, "clocks_hw_slowdown"): counts(0),
    (GPU, "ecc_corrected"): counts(0),
    (GPU, "ecc_uncorrected"): counts(0),
}


def told(make, **changed):
    """Sentences about a node whose figures are healthy but for these: `steal=...`, `GPU_clocks_sw_thermal=...`."""
    figures = dict(HEALTHY)
    for key, values in changed.items():
        (name,) = [name for name in HEALTHY if name[1] == key]
        figures[name] = values
    message = make.telemetry(figures)
    node = node_series("gpu-2", [message], message.began_ns + EVENT * 5 * 10**9)
    return [each.text.removeprefix("gpu-2: ") for each in stands_out(node, "the overflow")]


def test_a_healthy_node_at_full_load_is_not_told_of(make):
    assert told(make) == []


NEAR = (EVENT - 7,)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"steal": counts(0.02, at=NEAR, peak=0.23)},
            "other virtual machines took 23% of its processors (steal), 35 s before the overflow",
        ),
        (
            {"swap_in": counts(0, at=NEAR, peak=12 << 20)},
            "it read 12 MiB a second from swap, 2 GiB of it in use, 35 s before the overflow",
        ),
        (
            {"swap_out": counts(0, at=(EVENT,), peak=3 << 20)},
            "it wrote 3 MiB a second to swap, 2 GiB of it in use, at the overflow",
        ),
        (
            {"memory_used": level(100 * GIB, at=NEAR, peak=250 * GIB)},
            "250 GiB of 256 GiB of memory were in use, 35 s before the overflow",
        ),
        (
            {"job_memory_used": level(40 * GIB, at=(EVENT + 2,), peak=64 * GIB)},
            "the job used 64 GiB of the 64 GiB of memory that it may use, 10 s after the overflow",
        ),
        (
            {"job_cpu_held": counts(0.4)},
            "the job's own processor limit throttled it in 40% of the time around the overflow",
        ),
        (
            {"clocks_sw_thermal": counts(0, at=range(EVENT - 8, EVENT), peak=1.0), "temperature": level(91)},
            "GPU-0: the driver throttled its clocks because it was hot (up to 91 C, SM clock down to 1755 of 1980 "
            "MHz), for 40 s of the 155 s around the overflow",
        ),
        ({"ecc_uncorrected": counts(0, at=NEAR, peak=0.4)}, "2 new uncorrectable ECC errors on GPU-0, 35 s before"),
        ({"ecc_corrected": counts(0, at=NEAR, peak=0.2)}, "1 new corrected ECC error on GPU-0, 35 s before"),
        ({"ib_errors": counts(0, at=NEAR, peak=1.0)}, "5 new errors of its InfiniBand port mlx5_0/1, 35 s before"),
        ({"net_errors": counts(0, at=NEAR, peak=1.0)}, "5 new errors of its network interfaces, 35 s before"),
        ({"disk_free": level(3 * GIB, at=NEAR, peak=GIB)}, "1 GiB were left in its runs-dir, 35 s before"),
        ({"open_files": level(300, at=NEAR, peak=1000)}, "rank 1 had 1000 of at most 1024 files open, 35 s before"),
    ],
)
def test_what_is_far_from_healthy_is_told_with_its_number_and_when(make, changed, expected):
    (text,) = told(make, **changed)
    assert text.startswith(expected)


@pytest.mark.parametrize("at", [2, EVENT - 30, EVENT + 8])
def test_what_was_long_before_or_after_is_not_told(make, at):
    assert told(make, steal=counts(0.02, at=(at,), peak=0.5), memory_used=level(0, at=(at,), peak=255 * GIB)) == []


def test_the_reason_that_says_most_is_told_once(make):
    """The hardware's slowdown is set together with its reason."""
    found = told(make, clocks_hw_slowdown=counts(1.0), clocks_hw_thermal=counts(1.0), clocks_sw_thermal=counts(0.5))
    assert len(found) == 1
    assert "the hardware throttled its clocks because it was hot" in found[0]


def test_the_worst_is_told_first(make):
    found = told(make, steal=counts(0.5), ecc_uncorrected=counts(1.0), open_files=level(1024))
    assert ["ECC" in found[0], "steal" in found[1], "files" in found[2]] == [True, True, True]


def test_a_gap_in_which_nothing_was_read_is_averaged_over(make):
    """5 s of steal in a gap of 50 s: one tenth, as far as anybody knows."""
    steal = counts(0.0, at=(EVENT - 3,), peak=1.0)
    with_gap = [make.NAN if EVENT - 8 <= n < EVENT + 1 else value for n, value in enumerate(steal)]
    (text,) = told(make, steal=with_gap)
    assert "took 10% of its processors" in text
