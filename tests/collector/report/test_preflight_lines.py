"""What is told of the preflight while it runs."""

from __future__ import annotations

from gpuwatch.collector.facts.fold import FactFold
from gpuwatch.collector.stage_lines import StageLines
from gpuwatch.core.wire.pipe import PreflightOver, StageLine


class HeardLines(StageLines):
    """Each message is folded, as the collector does it."""

    def on_message(self, body):
        super().on_message(body)
        self._folded.add("a0", 0, body)


def heard(*bodies) -> StageLines:
    lines = HeardLines(FactFold())
    for body in bodies:
        lines.on_message(body)
    return lines


def test_a_stage_is_told_as_it_begins_as_ranks_end_it_and_when_it_is_over(make):
    lines = heard(make.hello(nproc=2), make.began(0, "health"))
    assert lines.due() == [StageLine("health", 0, 2)]
    assert lines.due() == []
    lines.on_message(make.stage(0, "health", 0.5))
    assert lines.due() == [StageLine("health", 1, 2, "", 0.5)]
    lines.on_message(make.stage(1, "health", 0.7, "warn"))
    assert lines.due() == [StageLine("health", 2, 2, "", 0.7)]
    lines.on_message(make.began(1, "compute"))
    assert lines.due() == [StageLine("health", 2, 2, "warn", 0.7), StageLine("compute", 0, 2)]


def test_who_waits_for_the_others_has_arrived(make):
    lines = heard(make.hello(nproc=3), make.began(0, "arrive"), make.began(2, "arrive"))
    assert lines.due() == [StageLine("arrive", 2, 3)]


def test_a_stage_after_which_the_preflight_stops_is_not_called_good_first(make):
    """What is wrong with it is only known when all ranks have been compared."""
    lines = heard(make.hello(nproc=1, check_only=True), make.stage(0, "bandwidth"))
    assert [line.grade for line in lines.due()] == [""]
    lines.on_message(make.concluded(0, [make.found("bandwidth", "fail", "job", [0], ["h"], "slow")]))
    assert [line.grade for line in lines.due()] == ["fail", "fail"]


def test_all_nodes_are_counted_before_they_are_heard(make):
    lines = heard(make.hello("a0", nproc=8, nodes=4), make.began(0, "arrive"))
    assert lines.due() == [StageLine("arrive", 1, 32)]


def test_stages_come_in_their_order(make):
    lines = heard(make.hello(), make.began(0, "compute"), make.began(1, "arrive"), make.began(0, "inventory"))
    assert [line.stage for line in lines.due()] == ["inventory", "arrive", "compute"]


def test_the_last_line_of_a_healthy_preflight_is_one_for_the_user(make):
    bodies = [make.hello(nproc=2)]
    for rank in (0, 1):
        bodies += [make.stage(rank, "arrive", 0.5 + rank), make.stage(rank, "compute", 1.0), make.concluded(rank)]
    last = heard(*bodies).due()[-1]
    assert last == PreflightOver("ok", "preflight ok: 2 ranks on 1 node in 2.5 s", [])


def test_it_is_over_once_and_nothing_comes_after_it(make):
    lines = heard(make.hello(nproc=1), make.stage(0, "arrive"), make.concluded(0))
    assert isinstance(lines.due()[-1], PreflightOver)
    lines.on_message(make.stage(0, "compute"))
    assert lines.due() == []
    assert lines.end() == []


def test_warnings_come_with_the_last_line(make):
    warning = make.found("health", "warn", "gpu", [0], ["h"], "4 ECC errors")
    lines = heard(make.hello(nproc=1), make.stage(0, "health"), make.concluded(0, [warning]))
    *stages, last = lines.due()
    assert stages == [StageLine("health", 1, 1, "warn", 0.1)]
    assert last.text.endswith(", with 1 finding")
    assert last.warnings == ["  health, warn: 4 ECC errors"]


def test_of_many_warnings_the_rest_is_counted(make):
    warnings = [make.found("health", "warn", "gpu", [n], ["h"], f"GPU {n}") for n in range(20)]
    last = heard(make.hello(nproc=1), make.concluded(0, warnings)).due()[-1]
    assert (len(last.warnings), last.warnings[-1]) == (9, "  and 12 more in the report")


def test_a_failed_preflight_is_left_to_the_report(make):
    finding = make.found("compute", "fail", "rank", [0], ["h"], "wrong")
    bodies = [make.hello(nproc=1), make.began(0, "compute"), make.concluded(0, [finding], "failed", "compute")]
    assert heard(*bodies).due() == [StageLine("compute", 0, 1, "fail"), PreflightOver("fail")]


def test_one_that_failed_and_is_to_be_ignored_is_told(make):
    finding = make.found("compute", "fail", "rank", [0], ["h"], "wrong")
    last = heard(make.hello(nproc=1), make.concluded(0, [finding], stops=False)).due()[-1]
    assert "training starts anyway" in last.text
    assert last.warnings == ["  compute, fail: wrong"]


def test_a_check_gets_its_answer_from_the_report_alone(make):
    lines = heard(make.hello(nproc=1, check_only=True), make.stage(0, "arrive"), make.concluded(0))
    assert lines.due()[-1] == PreflightOver("ok")


def test_stages_that_were_never_ended_are_closed_at_the_end(make):
    lines = heard(make.hello(nproc=2), make.began(0, "compute"), make.stage(1, "compute"))
    lines.due()
    assert lines.end() == [StageLine("compute", 1, 2, "unknown", 0.1), PreflightOver()]


def test_without_a_preflight_there_is_nothing_to_tell(make):
    assert heard(make.hello(), *make.finished(0)).end() == [PreflightOver()]


def test_a_restarted_jobs_preflight_is_not_told_again(make):
    assert heard(make.hello(), make.began(0, "arrive", attempt=1)).due() == []
