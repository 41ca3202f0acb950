"""Every scenario's verdict is the truth. `python tests/scenarios/run.py` shows them as a table, with the score."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # run.py is a script, and finds its neighbours like this

from runner import LATE_DEVICE, SCRIPTS, Ended, Grade, judge, run
from truths import CLEAN, KINDS, LEAF, SCENARIOS, Scenario

NOT_SCENARIOS = {"common.py", "witness.py"}


LESS_ON_A_DEVICE = {
    "mask handed in with a closed row": "whether a row of a mask is closed is looked for in host memory only",
    "mask handed in and added to another one": "the same",
}


def each(number: int, family: str, less: dict[str, str] | None = None) -> pytest.MarkDecorator:
    """Every scenario; so many of a family are in CI's sample. Of those in `less`, less is known to be told."""

    def marks(kind: str, name: str) -> list[pytest.MarkDecorator]:
        drawn = pytest.mark.sample(number, of=family.format(kind=kind))
        return [drawn, pytest.mark.xfail(reason=less[name], strict=True)] if less and name in less else [drawn]

    return pytest.mark.parametrize(
        "scenario",
        [
            pytest.param(scenario, id=scenario.name, marks=marks(kind, scenario.name))
            for kind, scenarios in KINDS.items()
            for scenario in scenarios
        ],
    )


@pytest.mark.slow
@each(1, "scenarios in host memory: {kind}")
def test_the_verdict_is_the_truth(scenario):
    outcome = run(scenario)

    assert outcome.grade is Grade.RIGHT, "\n".join([*outcome.differences, outcome.log])


@pytest.mark.slow
@each(3, "scenarios on a late device", LESS_ON_A_DEVICE)  # each kind is drawn in host memory
def test_the_verdict_is_the_same_when_the_numbers_come_late(scenario, monkeypatch):
    monkeypatch.setenv(LATE_DEVICE, "7")
    outcome = run(scenario)

    assert outcome.grade is Grade.RIGHT, "\n".join([*outcome.differences, outcome.log])


def test_every_script_is_used_and_every_name_is_there_once():
    assert {scenario.script for scenario in SCENARIOS} == {p.name for p in SCRIPTS.glob("*.py")} - NOT_SCENARIOS
    assert [name for name, count in Counter(s.name for s in SCENARIOS).items() if count > 1] == []


def _judge(scenario, code=4, stdout="", **verdict):
    empty = dict.fromkeys(["rank", "module", "class", "phase", "role", "value", "dtype", "batch", "root", "between"])
    found = {**empty, "certainty": "established", "concurrent": [], "evidence": [], "statement": "", **verdict}
    return judge(scenario, Ended(code, stdout, "", 1.0), {"verdict": found, "ranks": []}).grade


def test_the_judge_tells_right_from_unknown_from_wrong():
    scenario = Scenario("a fault", "leaf.py", LEAF)

    assert _judge(scenario, **LEAF) is Grade.RIGHT
    assert _judge(scenario, **{**LEAF, "rank": 0}) is Grade.WRONG
    assert _judge(scenario, **{**LEAF, "module": "head"}) is Grade.WRONG
    assert _judge(scenario, **{**LEAF, "rank": None, "module": "head", "certainty": "unknown"}) is Grade.UNKNOWN
    assert _judge(scenario, **{**LEAF, "value": "nan"}) is Grade.UNKNOWN
    assert _judge(scenario, code=0, **CLEAN) is Grade.WRONG
    assert _judge(scenario, **LEAF, concurrent=[{"rank": 0, "module": "head"}]) is Grade.WRONG
    assert judge(scenario, Ended(1, "", "", 1.0), None).grade is Grade.WRONG
    assert judge(scenario, Ended(None, "", "", 1.0), None).grade is Grade.WRONG


def test_an_alarm_where_there_is_no_fault_is_wrong_even_if_it_names_nobody():
    assert (
        _judge(Scenario("no fault", "leaf.py", CLEAN), **{**LEAF, "rank": None, "certainty": "unknown"}) is Grade.WRONG
    )


def test_a_verdict_that_is_sure_of_an_open_question_is_counted():
    def judged(said, **truth):
        empty = dict.fromkeys(
            ["rank", "module", "class", "phase", "role", "value", "dtype", "batch", "root", "between"]
        )
        found = {**empty, "concurrent": [], "evidence": [], "statement": "", **LEAF, "certainty": said}
        scenario = Scenario("a fault", "leaf.py", {**LEAF, **truth})
        return judge(scenario, Ended(4, "", "", 1.0), {"verdict": found, "ranks": []}).over_sure

    assert judged("established", certainty="supported")
    assert judged("established", module="head")
    assert not judged("supported", certainty="supported")
    assert not judged("supported", module="head")
    assert not judged("established")


def test_a_fifth_of_the_scenarios_cannot_be_established():
    open_questions = [s for s in SCENARIOS if s.verdict.get("certainty") in ("supported", "unknown")]
    assert len(SCENARIOS) >= 100
    assert len(open_questions) >= 20


def test_the_judge_takes_one_of_several():
    scenario = Scenario("either", "leaf.py", {**LEAF, "batch": {2, 3}})

    assert _judge(scenario, **{**LEAF, "batch": 3}) is Grade.RIGHT
    assert _judge(scenario, **{**LEAF, "batch": 4}) is Grade.UNKNOWN


def test_the_judge_wants_all_origins_that_nothing_orders():
    verdict = {key: LEAF[key] for key in ("kind", "phase")}
    scenario = Scenario("two", "leaf.py", verdict, together={0: "a", 1: "b"})
    other = [{"rank": 1, "module": "b"}]

    assert _judge(scenario, **verdict, rank=0, module="a", concurrent=other) is Grade.RIGHT
    assert _judge(scenario, **verdict, rank=1, module="b", concurrent=[{"rank": 0, "module": "a"}]) is Grade.RIGHT
    assert _judge(scenario, **verdict, rank=0, module="a") is Grade.WRONG


def test_the_judge_takes_any_name_where_the_truth_leaves_one_open():
    verdict = {**LEAF, "between": ("any", "block.enter")}
    scenario = Scenario("between", "leaf.py", verdict)

    assert _judge(scenario, **{**verdict, "between": ["block.leave", "block.enter"]}) is Grade.RIGHT
    assert _judge(scenario, **{**verdict, "between": ["block.leave", "block.leave"]}) is Grade.UNKNOWN
    assert _judge(scenario, **{**verdict, "between": None}) is Grade.UNKNOWN
