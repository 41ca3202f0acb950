from __future__ import annotations

import random

from gpuwatch.core.events.node_events import GpuCounters, GpuHealth, GpuXid
from gpuwatch.core.gpu.counters import XIDS, difference, meaning_of, since_preflight

GPU, OTHER = "GPU-0000", "GPU-1111"
SECOND = 1_000_000_000


def counters(moment: str, at_s: int, device: str = GPU, **values: int) -> GpuCounters:
    return GpuCounters(device, moment, values, time_ns=at_s * SECOND, mig=["MIG-7777"] if device == GPU else [])


def test_what_has_not_changed_is_not_told():
    assert difference(counters("before", 0, pcie_replays=3), counters("end", 9, pcie_replays=3)) == []


def test_changes_are_told_with_both_numbers_the_worst_first():
    before = counters("before", 0, nvlink_replay_errors=0, ecc_uncorrected_volatile=1, pcie_replays=0)
    after = counters("end", 600, nvlink_replay_errors=4, ecc_uncorrected_volatile=3, pcie_replays=5)
    assert [(change.grade, change.sentence) for change in difference(before, after)] == [
        ("fail", "uncorrectable ECC errors: 1 -> 3"),
        ("warn", "NVLink replays: 0 -> 4"),
        ("ok", "PCIe replays: 0 -> 5"),
    ]


def test_of_replays_and_crc_errors_only_the_rate_matters():
    before = counters("before", 0, pcie_replays=10, nvlink_crc_errors=0)
    (slow,) = difference(before, counters("end", 600, pcie_replays=89, nvlink_crc_errors=0))
    assert slow.grade == "ok", "7.9 per minute"
    (fast,) = difference(before, counters("end", 600, pcie_replays=90, nvlink_crc_errors=0))
    assert (fast.grade, fast.sentence) == ("warn", "PCIe replays: 10 -> 90, 8 in 60 s")
    (burst,) = difference(before, counters("end", 10, pcie_replays=10, nvlink_crc_errors=1000))
    assert burst.grade == "warn"
    (few,) = difference(before, counters("end", 2, pcie_replays=14, nvlink_crc_errors=0))
    assert few.grade == "ok", "two seconds are no minute"


def test_a_counter_that_begins_anew_is_told_and_blamed_for_nothing():
    (change,) = difference(
        counters("before", 0, ecc_uncorrected_volatile=5), counters("end", 9, ecc_uncorrected_volatile=0)
    )
    assert (change.grade, change.sentence) == ("ok", "uncorrectable ECC errors: 5 -> 0, counter restarted")


def test_a_gpu_that_was_lost_meanwhile_is_a_failure():
    (change,) = difference(counters("before", 0), counters("end", 9, lost=1))
    assert change.grade == "fail"


def test_a_counter_that_could_be_read_only_once_is_unknown():
    before = counters("before", 0, pcie_replays=1)
    after = GpuCounters(GPU, "end", {}, {"pcie_replays": "GPU is lost"}, 9 * SECOND)
    found = since_preflight([before, after], GPU)
    assert (found.changes, found.unknown) == ([], {"pcie_replays": "GPU is lost"})


EVENTS = [
    GpuHealth("ok", "watching 2 GPU(s) for XIDs", devices={GPU: "H100", OTHER: "H100"}, time_ns=0),
    counters("before", 1, pcie_replays=0, ecc_uncorrected_volatile=0),
    counters("before", 1, OTHER, pcie_replays=0, ecc_uncorrected_volatile=0),
    GpuXid(GPU, 94, 5 * SECOND, "contained memory error", grade="fail"),
    GpuXid(OTHER, 13, 4 * SECOND, "graphics engine exception", grade="ok"),
    GpuXid(GPU, 48, 3 * SECOND, "double-bit ECC error", grade="fail"),
    counters("anomaly", 6, pcie_replays=0, ecc_uncorrected_volatile=1),
    counters("end", 9, pcie_replays=0, ecc_uncorrected_volatile=2),
    counters("end", 9, OTHER, pcie_replays=0, ecc_uncorrected_volatile=0),
]


def test_one_gpu_is_told_apart_from_the_others_in_any_order_of_the_events():
    events = list(EVENTS)
    for seed in range(20):
        random.Random(seed).shuffle(events)
        found = since_preflight(events, GPU)
        assert (found.known, found.grade, found.seconds) == (True, "fail", 8.0)
        assert [change.sentence for change in found.changes] == ["uncorrectable ECC errors: 0 -> 2"]
        assert [xid.number for xid in found.xids] == [48, 94]
        other = since_preflight(events, OTHER)
        assert (other.grade, other.changes, [xid.number for xid in other.xids]) == ("ok", [], [13])


def test_a_rank_may_call_its_gpu_by_a_mig_device_and_without_a_prefix():
    for name in ("0000", "MIG-7777", "7777"):
        assert since_preflight(EVENTS, name) == since_preflight(EVENTS, GPU)


def test_after_an_anomaly_the_newest_reading_counts_even_if_the_end_was_never_read():
    found = since_preflight([event for event in EVENTS if getattr(event, "moment", "") != "end"], GPU)
    assert [change.sentence for change in found.changes] == ["uncorrectable ECC errors: 0 -> 1"]


def test_without_two_readings_it_is_unknown_and_says_why():
    assert since_preflight([], GPU).grade == "unknown"
    assert since_preflight([], GPU).unknown == {"": "its counters were not read before the training"}
    assert since_preflight(EVENTS[1:2], GPU).unknown == {"": "its counters were not read after the training began"}
    absent = GpuHealth("unknown", "NVML is not on this host (libnvidia-ml.so.1)")
    assert since_preflight([absent], GPU).unknown == {"": absent.detail}


def test_an_xid_counts_even_where_no_counters_could_be_read():
    found = since_preflight([GpuXid(GPU, 79, 5, "fallen off the bus", grade="fail")], GPU)
    assert (found.known, found.grade) == (False, "fail")


def test_every_xid_has_a_meaning_a_grade_and_something_to_do():
    for number, found in XIDS.items():
        assert found.meaning, number
        assert found.next.endswith("."), number
        assert found.grade in ("ok", "warn", "fail"), number
    assert meaning_of(79).meaning == "GPU has fallen off the bus"
    assert (meaning_of(13).grade, meaning_of(48).grade, meaning_of(63).grade) == ("ok", "fail", "warn")


def test_an_xid_that_is_not_in_the_table_is_unknown_and_says_where_to_look():
    assert meaning_of(9999).grade == "unknown"
    assert "NVRM: Xid" in meaning_of(9999).next
