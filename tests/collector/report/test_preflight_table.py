"""The table of the preflight: of events made by hand, up to 512 ranks on 64 nodes."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.decide.preflight_verdict import preflight_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.model import RunReport, to_json
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.core.events.preflight_events import BandwidthRows, RankInventoryEvent
from gpuwatch.core.preflight import STAGES, BandwidthRow, InventoryFacts
from gpuwatch.core.wire.messages import EventMessage


def check(make, nodes=2, nproc=2, findings=(), marks=None, outcomes=None, unended=(), silent=()):
    """The messages of a check: (agent, number, body). `marks` gives (stage, rank) a grade, `unended` ends none."""
    messages = []
    for node in range(nodes):
        bodies = [make.hello(f"a{node}", f"gpu-{node:03d}", nproc, nodes, check_only=True)]
        for rank in range(node * nproc, (node + 1) * nproc):
            if rank in silent:
                continue
            for stage in STAGES:
                bodies.append(make.began(rank, stage))
                if (stage, rank) in unended:
                    break
                bodies.append(
                    make.stage(rank, stage, round(0.1 + rank / 1000, 3), (marks or {}).get((stage, rank), "ok"))
                )
            outcome, at, detail = (outcomes or {}).get(rank, ("ok", "", ""))
            bodies.append(make.concluded(rank, findings, outcome, at, detail))
            bodies.append(make.ended(rank, 3 if findings else 0))
        bodies.append(make.NodeBye("failed" if any(f.grade == "fail" for f in findings) else "ok"))
        messages += [(f"a{node}", number, body) for number, body in enumerate(bodies, 1)]
    return messages


def report_of(messages) -> RunReport:
    return build_report(fold(messages), run_id="20250101-000000-abcd", started=None, ended=None)


def test_a_healthy_check_has_every_stage_of_every_node(make):
    preflight = report_of(check(make)).preflight

    assert preflight.outcome == "ok"
    assert [column.stage for column in preflight.stages] == list(STAGES)
    assert [(node.host, node.ranks, node.grade) for node in preflight.nodes] == [
        ("gpu-000", [0, 1], "ok"),
        ("gpu-001", [2, 3], "ok"),
    ]
    cell = preflight.nodes[1].stages["compute"]
    assert (cell.grade, cell.ranks, cell.seconds, cell.rank) == ("ok", 2, 0.103, 3)
    column = preflight.stages[0]
    assert (column.ranks, column.seconds, column.rank, column.host) == (4, 0.103, 3, "gpu-001")


def test_a_cell_has_the_worst_of_its_ranks_and_says_which(make):
    finding = make.found("health", "warn", "gpu", [2], ["gpu-001"], "4 ECC errors", device="GPU-7")
    preflight = report_of(check(make, findings=[finding], marks={("compute", 3): "unknown"})).preflight

    cell = preflight.nodes[1].stages["health"]
    assert (cell.grade, cell.rank, cell.detail) == ("warn", 2, "4 ECC errors")
    assert preflight.nodes[1].stages["compute"].grade == "unknown"
    assert preflight.nodes[1].grade == "warn"
    assert preflight.nodes[0].grade == "ok"
    assert preflight.findings == [finding]


def test_a_rank_that_was_dragged_along_is_a_victim_and_no_failure(make):
    finding = make.found("node group", "fail", "rank", [1], ["gpu-000"], "rank 1 sums wrong", victims=[0, 4])
    marks = {("node group", rank): "fail" for rank in (0, 1, 3, 4)}
    outcomes = {1: ("failed", "node group", "wrong sum"), 3: ("victim", "node group", "rank 1 went away")}
    preflight = report_of(check(make, 3, 2, [finding], marks, outcomes)).preflight

    cells = [node.stages["node group"] for node in preflight.nodes]
    assert [(cell.grade, cell.rank) for cell in cells] == [("fail", 1), ("victim", 3), ("victim", 4)]


def test_a_stage_that_was_not_ended_is_not_a_good_one(make):
    outcomes = {2: ("failed", "compute", "hung for 30 s"), 3: ("victim", "compute", "rank 2 did not answer")}
    unended = {("compute", 2), ("compute", 3)}
    report = report_of(check(make, outcomes=outcomes, unended=unended))

    cell = report.preflight.nodes[1].stages["compute"]
    assert (cell.grade, cell.rank, cell.detail, cell.ranks) == ("fail", 2, "hung for 30 s", 0)
    assert "cross group" not in report.preflight.nodes[1].stages
    assert report.ranks[2].preflight["unfinished"] == "compute"
    assert report.ranks[0].preflight["unfinished"] is None


def test_a_rank_that_was_killed_in_a_stage_leaves_it_open(make):
    messages = [("a0", 1, make.hello(host="h", nproc=1)), ("a0", 2, make.began(0, "compute"))]
    report = report_of([*messages, ("a0", 3, make.ended(0, -9, phase="preflight"))])

    assert report.preflight.nodes[0].stages["compute"].grade == "unknown"
    assert (report.ranks[0].preflight["outcome"], report.ranks[0].preflight["stage"]) == ("unfinished", "compute")


def test_what_is_of_the_whole_job_is_of_every_node(make):
    finding = make.found("bandwidth", "fail", "job", [], [], "too slow")
    preflight = report_of(check(make, findings=[finding])).preflight
    assert {node.stages["bandwidth"].grade for node in preflight.nodes} == {"fail"}
    assert preflight.stages[-1].grade == "fail"


def test_a_node_that_was_heard_and_whose_ranks_were_not_has_a_row(make):
    preflight = report_of(check(make, silent={2, 3})).preflight
    assert [(node.host, node.ranks, node.stages) for node in preflight.nodes][1] == ("gpu-001", [], {})


def test_bandwidth_is_that_of_the_slowest_rank(make):
    rows = {rank: [BandwidthRow(1 << 20, 100.0 + rank, 2.0 - rank, 3.0 - rank)] for rank in (0, 1)}
    messages = [("a0", 1, make.hello(host="h"))]
    messages += [("a0", 2 + rank, EventMessage(BandwidthRows(make.where(rank), rows[rank]))) for rank in rows]
    (size,) = report_of(messages).preflight.bandwidth

    assert (size.size_bytes, size.ranks, size.rank, size.host) == (1 << 20, 2, 1, "h")
    assert (size.time_us, size.algbw_gbs, size.busbw_gbs, size.best_busbw_gbs) == (101.0, 1.0, 2.0, 3.0)


def test_what_a_rank_runs_on_is_in_the_report(make):
    facts = InventoryFacts(host="h", uuid="GPU-1", versions={"torch": "2.13.0"})
    early = EventMessage(RankInventoryEvent(make.where(0), "cpu", {}))
    late = EventMessage(RankInventoryEvent(make.where(0), "cuda:0 H100", {"torch": "2.13.0"}, facts))
    for order in ([early, late], [late, early]):
        report = report_of([("a0", n, body) for n, body in enumerate([make.hello(), *order], 1)])
        assert [(entry.rank, entry.facts) for entry in report.preflight.inventory] == [(0, facts)]
        assert (report.ranks[0].device, report.run.versions["torch"]) == ("cuda:0 H100", "2.13.0")


def test_the_clock_of_a_node_is_that_of_its_best_exchange(make):
    messages = [("a0", 1, make.hello(host="h"))]
    for offset, round_trip in ((5_000_000_000, 2_000_000), (5_100_000_000, 400_000), (6_000_000_000, 9_000_000)):
        messages.append(
            ("a0", 0, make.NodeBeat([], {}, clock_offset_ns=offset, clock_round_trip_ns=round_trip)),
        )
    report = report_of(messages)
    (node,) = report.nodes
    assert (node.clock_offset_ns, node.clock_round_trip_ns) == (5_100_000_000, 400_000)
    assert "the clock of h is -5.1 s off" in render_text(report)


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_arrival_gives_the_same_report(make, seed):
    finding = make.found(
        "compute", "fail", "gpu", [3], ["gpu-001"], "rank 3 gets a different matmul result", victims=[0]
    )
    other = make.found("health", "warn", "gpu", [0], ["gpu-000"], "hot")
    messages = check(make, findings=[finding, other], marks={("compute", 3): "fail"}, unended={("bandwidth", 1)})
    shuffled = list(messages)
    random.Random(seed).shuffle(shuffled)
    again = preflight_report(fold([*shuffled, *shuffled[:20]]), 0)
    assert again == preflight_report(fold(messages), 0)


def test_the_report_is_read_back_as_it_was(make):
    finding = make.found(
        "compute", "fail", "gpu", [3], ["gpu-001"], "rank 3 gets a different matmul result", victims=[0]
    )
    report = report_of(check(make, findings=[finding]))
    assert msgspec.json.decode(to_json(report), type=RunReport) == report
    told = json.loads(to_json(report))["preflight"]
    assert set(told) >= {"outcome", "stages", "nodes", "findings", "bandwidth", "inventory"}


def test_a_report_of_the_first_schema_without_these_fields_is_still_read(make):
    told = json.loads(to_json(report_of(check(make))))
    told["preflight"] = {"outcome": "ok"}
    del told["run"]["check_only"]
    assert msgspec.json.decode(json.dumps(told), type=RunReport).preflight.stages == []


# -- as text ------------------------------------------------------------------------------------------------------


def rows_of(text: str) -> list[list[str]]:
    """The rows of the table, without its title and header, as words."""
    lines = text[text.index("Preflight: each stage") :].splitlines()[1:]
    table = lines[: lines.index("")]
    first = next(number for number, line in enumerate(table) if line.startswith("node ")) + 1
    return [line.split() for line in table[first:]]


def test_a_narrow_text_has_the_nodes_in_front_of_each_half_of_the_stages(make):
    finding = make.found("health", "warn", "node", [2, 3], ["gpu-001"])
    text = render_text(report_of(check(make, findings=[finding])), width=80)
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines() if line.startswith("gpu-001")]
    assert rows == [
        ["gpu-001", "2,", "3", *["ok", "0.1"] * 3, "warn", "0.1", "ok", "0.1"],
        ["gpu-001", "2,", "3", *["ok", "0.1"] * 4],
    ]


def test_a_row_per_node_and_a_column_per_stage(make):
    finding = make.found("health", "warn", "node", [2, 3], ["gpu-001"])
    text = render_text(report_of(check(make, findings=[finding])), width=110)
    header = next(line for line in text.splitlines() if line.startswith("node "))
    assert header.split()[2:] == [stage.split()[-1] for stage in STAGES]
    assert rows_of(text) == [
        ["gpu-000", "0,", "1", *["ok", "0.1"] * 9],
        ["gpu-001", "2,", "3", *["ok", "0.1"] * 3, "warn", "0.1", *["ok", "0.1"] * 5],
    ]


def test_a_node_whose_ranks_were_never_heard_has_a_dash_for_them(make):
    text = render_text(report_of(check(make, silent=(2, 3))), width=110)
    assert ["gpu-001", *["-"] * (1 + len(STAGES))] in rows_of(text)


def test_512_ranks_on_64_nodes_are_readable(make):
    finding = make.found(
        "compute", "fail", "gpu", [77], ["gpu-009"], "rank 77 gets a different matmul result", next="Look."
    )
    warning = make.found("health", "warn", "gpu", [3], ["gpu-000"], "4 ECC errors")
    text = render_text(report_of(check(make, 64, 8, [finding, warning], {("compute", 77): "fail"})), width=110)

    assert max(map(len, text.splitlines())) <= 110
    assert [(row[0], row[1]) for row in rows_of(text)] == [("gpu-009", "72-79"), ("gpu-000", "0-7"), ("62", "nodes")]
    assert "8-71, 80-511" in text
    assert text.index("gpu-009") < text.index("VERDICT  preflight, established") < text.index("4 ECC errors")
    assert "Next\n  - Look." in text


def test_many_nodes_with_the_same_trouble_share_a_row(make):
    ranks = list(range(20, 32))
    finding = make.found("arrive", "fail", "node", ranks, [f"gpu-{n:03d}" for n in range(20, 32)], "too late")
    text = render_text(report_of(check(make, 32, 1, [finding])))
    rows = rows_of(text)
    assert rows[0][:2] == ["12", "nodes:"]
    assert rows[-1][:3] == ["20", "nodes", "0-19"]


@pytest.mark.slow
def test_hundreds_of_victims_share_a_line(make):
    victims = [rank for rank in range(512) if rank != 77]
    finding = make.found("cross group", "fail", "rank", [77], ["gpu-009"], "rank 77 hangs", victims=victims)
    report = report_of(check(make, 64, 8, [finding]))
    assert len(report.verdict.cascade) == 511
    text = render_text(report)
    assert "  - ranks 0-76, 78-511 are victims of what failed in stage cross group" in text
    assert len(text.splitlines()) < 40


def test_what_the_verdict_says_is_not_said_twice(make):
    finding = make.found("compute", "fail", "rank", [1], ["gpu-000"], "rank 1 gets a different matmul result")
    difference = make.found("consistency", "warn", "node", [2, 3], ["gpu-001"], "NCCL_DEBUG differs")
    text = render_text(report_of(check(make, findings=[finding, difference])), width=160)
    assert text.count("rank 1 gets a different matmul result") == 1
    assert text.count("NCCL_DEBUG differs") == 1
    assert "Differences between ranks\n  - warn: NCCL_DEBUG differs." in text


def test_a_training_that_went_on_after_a_preflight_tells_its_warnings(make):
    finding = make.found("allocation", "fail", "rank", [0], ["h"], "no memory", next="Free it.")
    bodies = [make.hello(host="h"), make.stage(0, "allocation", 1.0, "fail")]
    bodies += [make.concluded(rank, [finding], stops=False) for rank in (0, 1)]
    bodies += [event for rank in (0, 1) for event in make.finished(rank)]
    report = report_of([("a0", n, body) for n, body in enumerate([*bodies, make.NodeBye("ok")], 1)])

    assert report.verdict.kind == "clean"
    text = render_text(report)
    assert "Also found by the preflight\n  - allocation, fail: no memory. Free it." in text
    assert "Preflight: each stage" not in text


@pytest.mark.parametrize("name", ["[red]x[/]", "a\nb", "[/nope]", "ü" * 200])
def test_markup_and_newlines_from_elsewhere_do_not_break_the_text(make, name):
    finding = make.found("health", "fail", "node", [0], [name], name, next=name)
    bodies = [make.hello(host=name, check_only=True), make.stage(0, "health"), make.concluded(0, [finding])]
    report = report_of([("a0", n, body) for n, body in enumerate(bodies, 1)])
    assert name.split("\n")[0] in render_text(report, width=2000)
