"""The trace of a run: on one clock, nested as Perfetto needs it, with what happened on each rank."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from itertools import pairwise

import pytest
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.views.trace_export import write_trace
from gpuwatch.core.events.agent_events import RankLook, StepTimes
from gpuwatch.core.events.preflight_events import PreflightStage
from gpuwatch.core.events.rank_standing import GroupState, IssuedOperation, StackLine
from gpuwatch.core.recorder.layout import PARTS, TimedStep
from gpuwatch.core.wire.beat import NodeBeat
from gpuwatch.core.wire.columns import pack_starts, pack_steps, unpack_starts
from gpuwatch.core.wire.messages import EventMessage
from gpuwatch.launcher.agent.batch_history import RankStepTimes
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

BEGAN_NS = 1_795_000_000_000_000_000
STEPS = [TimedStep(n, (1_000_333, 20_000_000 + n, 30_000_999, 0, 4_000_000)) for n in range(1, 9)]


def timed(make, rank: int, **changes) -> EventMessage:
    starts, at = [], 0
    for step in STEPS:
        starts.append(at)
        at += sum(step.parts)
    times = StepTimes(make.where(rank), 8, [1.0] * 5, pack_steps(STEPS), BEGAN_NS, pack_starts(starts))
    return EventMessage(replace(times, **changes))


def at(make, rank: int, seconds: float):
    return replace(make.where(rank), time_ns=BEGAN_NS + int(seconds * 1e9))


def trace_of(facts) -> str:
    out = io.StringIO()
    write_trace(facts, "night", out)
    return out.getvalue()


def trace(bodies) -> dict:
    return json.loads(trace_of(fold(("a0", n, body) for n, body in enumerate(bodies, 1))))


def named(events, *, cat: str) -> list[dict]:
    return [event for event in events if event.get("cat") == cat]


def assert_well_formed(events) -> None:
    """As the Trace Event Format demands: slices of a thread are nested, and what has begun has an end."""
    open_until = defaultdict(list)
    begun = {}
    for event in events:
        assert {"ph", "name", "pid"} <= event.keys()
        if event["ph"] == "X":
            stack = open_until[event["pid"], event["tid"]]
            while stack and stack[-1] <= event["ts"]:
                stack.pop()
            end = event["ts"] + event["dur"]
            assert event["dur"] >= 0 and (not stack or end <= stack[-1]), event
            stack.append(end)
        elif event["ph"] == "b":
            begun[event["id"]] = event["ts"]
        elif event["ph"] == "e":
            assert begun.pop(event["id"]) <= event["ts"]
        elif event["ph"] == "s":
            begun[event["cat"], event["id"]] = event["ts"]
        elif event["ph"] in "tf":
            assert begun[event["cat"], event["id"]] <= event["ts"]
            if event["ph"] == "f":
                del begun[event["cat"], event["id"]]
        elif event["ph"] == "i":
            assert event["s"] in ("t", "g")
    assert not begun


def test_steps_have_their_parts_inside_and_follow_each_other(make):
    found = trace([make.hello(), timed(make, 0), timed(make, 1), *make.finished(0)])["traceEvents"]
    assert_well_formed(found)
    steps = [event for event in named(found, cat="step") if event["tid"] == 1]
    assert [event["name"] for event in steps] == [f"step {n}" for n in range(1, 9)]
    assert [b["ts"] - a["ts"] - a["dur"] for a, b in pairwise(steps)] == pytest.approx([0] * 7, abs=5)
    parts = [event["name"] for event in named(found, cat="part") if event["tid"] == 1][:4]
    assert parts == [part for part in PARTS if part != "waiting"], "a part of no length is left out"


def test_nodes_are_put_on_the_collectors_clock(make):
    bodies = [
        make.hello("a0"),
        make.hello("a1", host="beta"),
        timed(make, 0),
        timed(make, 1),
        NodeBeat([], {}, 5, 0, 1000),
        NodeBeat([], {}, 5, 7_000_000_000, 1000),
    ]
    facts = fold((f"a{n % 2}", n // 2 + 1, body) for n, body in enumerate(bodies))
    events = json.loads(trace_of(facts))["traceEvents"]
    first = {event["pid"]: event["ts"] for event in reversed(named(events, cat="step"))}
    assert first == {1: 0, 2: 7_000_000}
    hosts = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert hosts == {1: "h0", 2: "beta"}


def test_what_happened_is_a_moment_on_its_rank_and_the_verdict_one_of_all(make):
    batch = make.Batch(1, batch=3)
    batch.call("fc2", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    bodies = [make.hello(), *batch.messages(), make.raised(1, "ValueError", "no", batch=3), make.ended(1, 1, batch=3)]
    moved = [
        EventMessage(replace(body.event, where=replace(body.event.where, time_ns=BEGAN_NS + n * 1000)))
        if isinstance(body, EventMessage)
        else body
        for n, body in enumerate(bodies)
    ]
    stage = EventMessage(PreflightStage(at(make, 1, -1.0), "memory", 2.0))
    found = trace([*moved, stage])
    events = found["traceEvents"]
    assert_well_formed(events)
    (overflow,) = named(events, cat="overflow")
    assert (overflow["name"], overflow["tid"]) == ("+inf in output of `fc2` (Linear)", 2)
    assert [event["name"] for event in named(events, cat="error")] == ["raised ValueError"]
    (memory,) = named(events, cat="preflight")
    assert (memory["dur"], memory["ts"]) == (2_000_000, 0)
    (verdict,) = named(events, cat="verdict")
    assert verdict["s"] == "g" and verdict["name"] == "verdict: overflow"
    assert found["otherData"]["run"] == "night" and found["otherData"]["verdict"].startswith("overflow, ")


def test_a_stall_lasts_from_when_the_rank_moved_last_and_has_its_stack(make):
    stack = [StackLine("/home/me/train.py", 20, "forward", "time.sleep(60)")]
    look = RankLook(at(make, 0, 100.0), 1, 40.0, "forward", module="fc", cls="Linear", stack=stack)
    events = trace([make.hello(), timed(make, 0), EventMessage(look)])["traceEvents"]
    assert_well_formed(events)
    begin, end = named(events, cat="stall")
    assert (begin["ph"], end["ph"], end["ts"] - begin["ts"]) == ("b", "e", 40_000_000)
    assert begin["name"] == "has not moved: `fc` (Linear)"
    assert begin["args"]["stack"] == ["/home/me/train.py:20 in forward: time.sleep(60)"]


def inside(make, rank: int, number: int, since_s: float, *, phase: str = "waiting", group: str = "0") -> EventMessage:
    """It is inside of a collective when the ranks are asked, 100 s after the first step began."""
    state = GroupState(group, "0-2", 3, number, phase=phase, at=number, since_s=since_s)
    recent = [IssuedOperation(number, "all_reduce" if number > 0 else "send")]
    return EventMessage(RankLook(at(make, rank, 100.0), 1, since_s, "backward", groups=[replace(state, recent=recent)]))


def test_an_arrow_goes_through_the_ranks_inside_of_one_collective(make):
    """Rank 2 has begun the one before, and waits for nobody: no arrow."""
    looks = [inside(make, 0, 18, 40.0), inside(make, 1, 18, 30.0, phase="issuing"), inside(make, 2, 17, 50.0)]
    events = trace([make.hello(nproc=3), timed(make, 0), *looks, inside(make, 0, -3, 1.0)])["traceEvents"]
    assert_well_formed(events)
    found = named(events, cat="collective")
    slices = {event["tid"]: event for event in found if event["ph"] == "X"}
    assert [(slices[tid]["name"], slices[tid]["dur"]) for tid in sorted(slices)] == [
        ("all_reduce 18 of group 0", 40_000_000),
        ("all_reduce 18 of group 0", 30_000_000),
        ("all_reduce 17 of group 0", 50_000_000),
    ]
    arrow = [(event["ph"], event["tid"], event["ts"]) for event in found if event["ph"] != "X"]
    first, second = sorted(slices)[:2]
    assert arrow == [("s", first, 60_000_000), ("f", second, 70_000_000)]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [threads[tid] for tid in sorted(slices)] == [f"rank {rank}, collectives" for rank in range(3)]


def went_well(make, rank: int, began_s: dict[int, float], *, name: str = "0", took_s: float = 0.5) -> EventMessage:
    """It ends, and these were the last collectives of its group."""
    recent = [
        IssuedOperation(number, "all_reduce", "float32", 64, -1, BEGAN_NS + int(at_s * 1e9), int(took_s * 1e9))
        for number, at_s in began_s.items()
    ]
    ended = make.ended(rank, 0).event
    where = replace(ended.where, time_ns=BEGAN_NS + 100_000_000_000)
    return EventMessage(replace(ended, where=where, groups=[GroupState(name, "0-1", 2, 18, 18, recent=recent)]))


def test_the_last_collectives_of_a_job_that_went_well_have_arrows_too(make):
    """One that another one outlasts is drawn to the beginning of that."""
    ends = [went_well(make, 0, {17: 10.0, 18: 11.0}), went_well(make, 1, {18: 11.2, 19: 11.5})]
    events = trace([make.hello(), timed(make, 0), *ends])["traceEvents"]
    assert_well_formed(events)
    found = named(events, cat="collective")
    first, second = sorted({event["tid"] for event in found})
    slices = [event for event in found if event["ph"] == "X"]
    assert {(event["tid"], event["name"].split()[1]): (event["ts"], event["dur"]) for event in slices} == {
        (first, "17"): (10_000_000, 500_000),
        (first, "18"): (11_000_000, 500_000),
        (second, "18"): (11_200_000, 300_000),
        (second, "19"): (11_500_000, 500_000),
    }
    assert {event["args"]["seconds"] for event in slices} == {0.5}
    arrow = [(event["ph"], event["tid"], event["ts"]) for event in found if event["ph"] != "X"]
    assert arrow == [("s", first, 11_000_000), ("f", second, 11_200_000)]


def test_what_a_device_has_not_completed_lasts_until_the_ranks_were_asked(make):
    """Its host has gone on, to the next one."""
    recent = [IssuedOperation(number, "all_reduce", began_ns=at(make, 0, 60.0 + number).time_ns) for number in (5, 6)]
    state = GroupState("0", "0-2", 3, 6, phase="on_device", at=6, recent=recent, pending=5, pending_s=34.9)
    look = RankLook(at(make, 0, 100.0), 1, 30.0, "backward", groups=[state])
    events = trace([make.hello(), timed(make, 0), EventMessage(look)])["traceEvents"]
    drawn = [(event["name"], event["dur"], event["args"]["seconds"]) for event in named(events, cat="collective")]
    assert drawn == [("all_reduce 5 of group 0", 35_000_000, 35.0), ("all_reduce 6 of group 0", 0, 0.0)]


def test_what_the_host_saw_no_end_of_has_no_length(make):
    events = trace([make.hello(), went_well(make, 0, {17: 10.0, 18: 11.0}, took_s=0.0)])["traceEvents"]
    assert_well_formed(events)
    assert [event["dur"] for event in named(events, cat="collective")] == [0, 0]


@given(st.dictionaries(st.integers(1, 99), st.tuples(st.integers(1, 9_999), st.integers(0, 9_999)), max_size=8))
def test_collectives_never_overlap_without_being_inside_of_one_another(make, times):
    """Times in nanoseconds, drawn in whole microseconds."""
    recent = [IssuedOperation(number, "", "", 0, -1, BEGAN_NS + at, took) for number, (at, took) in times.items()]
    exit_ = went_well(make, 0, {}).event
    exit_ = replace(exit_, groups=[replace(exit_.groups[0], recent=recent)])
    events = trace([make.hello(), timed(make, 0), EventMessage(exit_)])["traceEvents"]
    assert_well_formed(events)
    assert len(named(events, cat="collective")) == len(times)


def test_a_nodes_figures_are_counters(make):
    events = trace(
        [make.hello(), make.telemetry({("", "cpu"): [0.0, 0.5, 1.5], ("GPU-1", "power"): [300.0, 310.0, 5.0]})]
    )
    counters = defaultdict(list)
    for event in events["traceEvents"]:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"][""])
    assert counters["power, GPU-1"] == pytest.approx([300.0, 310.0, 5.0])
    assert len(counters["processor in use"]) == 2, "a count is shown as its growth"


@pytest.mark.parametrize("changes", [{"steps": b"no"}, {"starts": b"no"}, {"began_ns": 0, "starts": b""}])
def test_steps_without_a_time_are_left_out(make, changes):
    events = trace([make.hello(), timed(make, 0, **changes)])["traceEvents"]
    assert named(events, cat="step") == []


def test_an_agent_that_missed_steps_gives_them_no_time(make):
    times = RankStepTimes()
    times.add(STEPS[0])
    assert times.event(make.where(0)).began_ns == 0, "it was read by no look"


@given(st.lists(st.integers(0, 1 << 60), max_size=512))
def test_starts_travel_whole(starts_ns):
    assert unpack_starts(pack_starts(starts_ns)) == [ns // 1000 for ns in starts_ns]
