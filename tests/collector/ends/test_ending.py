"""Whether a job that stands still is ended for it."""

import pytest
from gpuwatch.collector.ends.hang_finding import ending_of
from gpuwatch.collector.ends.hang_model import HangFinding, HangPrognosis
from gpuwatch.core.events.agent_events import RankLook
from gpuwatch.core.events.run_position import RunPosition

LIMIT_S = 100.0
STUCK, WAIT, FREE = HangPrognosis("cannot go on"), HangPrognosis("all wait"), HangPrognosis("may go on", [1])


def ending(on_hang, outlook, still_s, *, busy=0.0, may_end=True, state="S"):
    found = HangFinding("Rank 1 did not come.", "established", [1], may_end=may_end, outlook=outlook)
    looks = [
        RankLook(RunPosition(rank), 1, still_s, "script", busy=busy if rank else 0.0, state=state if rank else "S")
        for rank in range(2)
    ]
    return ending_of(found, looks, on_hang, LIMIT_S)


@pytest.mark.parametrize(
    ("on_hang", "outlook", "ends_from_s"),
    [
        ("auto", STUCK, 100),
        ("auto", WAIT, 400),
        ("auto", FREE, None),
        ("abort", STUCK, 100),
        ("abort", WAIT, 100),
        ("abort", FREE, 100),
        ("report", STUCK, None),
        ("report", WAIT, None),
        ("report", FREE, None),
    ],
)
def test_when_it_is_ended(on_hang, outlook, ends_from_s):
    ended = [still_s for still_s in (100, 200, 400, 100_000) if ending(on_hang, outlook, still_s).now]

    assert ended == [still_s for still_s in (100, 200, 400, 100_000) if ends_from_s and still_s >= ends_from_s]


def test_a_rank_that_computes_has_four_times_the_limit_where_all_is_ended():
    assert "because rank 1 computes; it ends the job after 400 s" in ending("abort", FREE, 100, busy=1.0).text
    assert ending("abort", FREE, 400, busy=1.0).now


@pytest.mark.parametrize(("busy", "state"), [(0.26, "R"), (0.26, "S"), (0.0, "R"), (1.0, "S")])
def test_a_rank_that_computes_on_a_crowded_node_has_four_times_the_limit_as_well(busy, state):
    assert "it ends the job after 400 s" in ending("abort", FREE, 100, busy=busy, state=state).text
    assert ending("abort", FREE, 400, busy=busy, state=state).now


def test_a_rank_that_rests_has_the_limit():
    assert ending("abort", FREE, 100, busy=0.02, state="S").now


def test_where_nobody_waits_for_another_nothing_is_ended():
    assert not any(ending(on_hang, FREE, 100_000, may_end=False).now for on_hang in ("auto", "abort", "report"))


def test_what_is_left_to_the_process_group_is_said_with_the_option_that_changes_it():
    assert ending("auto", FREE, 100).text == (
        "gpuwatch leaves the job as it is, because rank 1 may still go on; the timeouts of its process groups still "
        "apply; to end it anyway: --on-hang abort"
    )
    assert "a rank that did not report may still go on" in ending("auto", HangPrognosis("may go on"), 100).text
    assert ending("auto", WAIT, 100).text == "if no rank moves, gpuwatch ends the job after 400 s"
