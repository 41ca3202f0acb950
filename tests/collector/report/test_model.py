"""The report and its text form, of hand-made facts; and made again from the store."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner
from gpuwatch.cli.report import report as command
from gpuwatch.collector.assemble import stragglers as step_report
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.finish import merged_report, report_from_store, write_report
from gpuwatch.collector.report.html.page import render_html
from gpuwatch.collector.report.model import RunReport, to_json
from gpuwatch.collector.report.notices_text import trouble_lines
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.collector.run_files import RunPaths, new_run
from gpuwatch.collector.store import RunStore
from gpuwatch.collector.written_report import read_report
from gpuwatch.core.errors import GpuwatchError
from gpuwatch.core.events.agent_events import StepTimes
from gpuwatch.core.events.node_events import NodeSignal
from gpuwatch.core.events.own_limits import SELF_CHECK, OwnFault
from gpuwatch.core.wire.columns import pack_steps
from gpuwatch.core.wire.messages import AgentMessage, EventMessage, encode
from gpuwatch.core.wire.spool import SpoolWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def overflow(make, frames=3) -> list:
    """Rank 1 of two overflowed in batch 7; rank 0 was finite."""
    bodies = [make.hello(host="alpha", trace_batches=[])]
    for rank, number in ((0, 1.0), (1, make.INF)):
        batch = make.Batch(rank, batch=7, seq=14)
        x = batch.tensor()
        for index in range(frames):
            batch.call(f"layer.{index}", "Linear", given=[x], returned=[x], weights={"w": batch.tensor(0.5)}, depth=1)
        batch.call("head", "Linear", given=[x], returned=[batch.tensor(number)], weights={"weight": batch.tensor()})
        batch.call("", "Net", given=[x], returned=[batch.tensor(number)])
        bodies += batch.messages()
    bodies += [
        EventMessage(make.RankInventoryEvent(make.where(1), "NVIDIA H100", {"torch": "2.13.0"})),
        make.raised(1, "OverflowDetected", "inf", batch=7, seq=14),
        make.ended(1, 1, batch=7, step=7, seq=14),
        make.ended(0, -15, "torchrun", batch=7, step=7, seq=14),
        make.NodeBeat([make.state(0), make.state(1, local_rank=1, records_lost=2)], {1: 3}),
        make.NodeBye("failed"),
    ]
    return bodies


def report_of(bodies, **more) -> RunReport:
    facts = fold(("a0", n, body) for n, body in enumerate(bodies, 1))
    return build_report(
        facts, run_id="20250101-000000-abcd", started="2025-01-01T00:00:00Z", ended="2025-01-01T00:09:00Z", **more
    )


@pytest.mark.parametrize("width", [80, 120])
def test_a_path_or_a_command_is_not_broken_where_it_is_longer_than_a_line(make, width):
    folder = f"/home/me/{'a folder of runs/' * 8}20250101-000000-abcd"
    shows = f"gpuwatch report '{folder}' --rank 1"
    log = f"/var/log/{'deep/' * 40}x.log"
    report = report_of(overflow(make))
    verdict = msgspec.structs.replace(report.verdict, next=[f"Its frames are in the report: {shows}, or see {log}."])
    lines = render_text(msgspec.structs.replace(report, verdict=verdict), width=width).splitlines()
    assert f"    {shows}," in lines
    assert f"    {log}." in lines
    assert "  - Its frames are in the report:" in lines


def test_a_word_that_is_longer_than_a_line_is_folded(make):
    report = report_of(overflow(make))
    verdict = msgspec.structs.replace(report.verdict, next=[f"Look at {'x.y' * 60} there."])
    lines = render_text(msgspec.structs.replace(report, verdict=verdict), width=80).splitlines()
    first = lines.index("  - Look at")
    assert "".join(line.strip() for line in lines[first + 1 : first + 4]) == f"{'x.y' * 60} there."
    assert max(map(len, lines)) <= 80


def test_the_json_is_valid_and_has_the_fields_of_schema_1(make):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    report = json.loads(to_json(report_of(overflow(make))), parse_constant=refuse)
    assert report["schema"] == 1
    assert set(report["run"]) >= {"id", "command", "world_size", "nnodes", "started", "ended", "versions"}
    assert set(report["run"]["versions"]) == {"gpuwatch", "torch", "cuda", "nccl", "python"}
    verdict = report["verdict"]
    assert set(verdict) >= {
        "kind", "rank", "host", "device", "module", "class", "phase", "role", "value", "dtype", "attempt", "step",
        "batch", "between", "certainty", "statement", "evidence", "next", "concurrent", "cascade",
    }  # fmt: skip
    assert (verdict["kind"], verdict["rank"], verdict["module"], verdict["class"]) == ("overflow", 1, "head", "Linear")
    assert verdict["device"] == "NVIDIA H100"
    rank = report["ranks"][1]
    assert set(rank) >= {
        "rank", "local_rank", "host", "device", "pid", "state", "exit", "step", "batch", "preflight", "first_anomaly",
        "frames", "lost",
    }  # fmt: skip
    assert rank["lost"] == {"pages": 3, "messages": 2, "frames": 0, "rows": 0}
    assert (rank["local_rank"], rank["pid"], rank["exit"], rank["state"]) == (1, 101, 1, "aborted")
    last = rank["frames"][-1]
    assert set(last) >= {"batch", "index", "module", "class", "phase", "rows"}
    output = last["rows"][-1]
    assert (output["role"], output["abs_max"], output["posinf"], output["nan"]) == ("output", None, True, False)


def test_the_report_is_read_back_as_it_was(make):
    report = report_of(overflow(make))
    assert to_json(msgspec.json.decode(to_json(report), type=RunReport)) == to_json(report)


def test_frames_end_with_the_verdicts_on_every_rank(make):
    report = report_of(overflow(make, frames=30), max_frames=5)
    for rank in report.ranks:
        assert [frame.module for frame in rank.frames] == [*(f"layer.{n}" for n in range(26, 30)), "head"]


def test_the_text_says_the_statement_first_and_shows_the_frames(make):
    report = report_of(overflow(make))
    text = render_text(report)
    assert report.verdict.statement in " ".join(text.split())
    assert "VERDICT  overflow, established" in text
    assert text.index("VERDICT") < text.index("abs min  abs max  metadata")
    assert "1.00e+00      inf output" not in text
    assert "     inf      inf output" in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_ranks_stand_side_by_side(make):
    lines = render_text(report_of(overflow(make))).splitlines()
    assert any(line.split() == ["head", "Linear", "inf", "1.00e+00"] for line in lines), lines


def test_another_ranks_frames_can_be_asked_for(make):
    text = render_text(report_of(overflow(make)), rank=0)
    assert "Rank 0, batch 7: last 4 forward frames" in text


def test_traced_batches_are_shown_whole(make):
    bodies = overflow(make, frames=30)
    bodies[0] = make.hello(host="alpha", trace_batches=[7])
    report = report_of(bodies, max_frames=3)
    assert [len(page.frames) for rank in report.ranks for page in rank.traces] == [32, 32]
    assert "traced: all frames" in render_text(report)


def test_faults_of_gpuwatch_itself_are_shown(make):
    bodies = [*overflow(make), EventMessage(OwnFault(make.where(0), "hook", "KeyError: [bold]x[/nope]"))]
    report = report_of(bodies)
    assert report.ranks[0].faults == ["hook: KeyError: [bold]x[/nope]"]
    assert "KeyError: [bold]x[/nope]" in " ".join(render_text(report, width=200).split())


def test_a_kernel_that_is_off_has_a_code_of_its_own(make):
    bodies = [*overflow(make), EventMessage(OwnFault(make.where(0), SELF_CHECK, "torch's operations read"))]
    lines = list(trouble_lines(report_of(bodies)))
    assert lines == ["gpuwatch's own fault on rank 0: self-check: torch's operations read [GW614]"]


@pytest.mark.parametrize("name", ["[red]x[/]", "a\nb", "[/nope]", "ü" * 300])
def test_names_with_markup_or_newlines_do_not_break_the_text(make, name):
    batch = make.Batch(0, root=name)
    batch.call(name, name, given=[batch.tensor()], returned=[batch.tensor(make.NAN)])
    report = report_of([make.hello(host=name, nproc=1, command=[name]), *batch.messages(), make.raised(0, name, name)])
    json.loads(to_json(report))
    assert render_text(report, width=2000)


def test_a_report_of_nothing_is_a_report():
    report = report_of([])
    json.loads(to_json(report))
    assert "VERDICT" in render_text(report)


def test_events_stand_in_the_runs_own_order(make):
    bodies = [make.raised(0, seq=9, time_ns=1), make.raised(1, seq=4, time_ns=2), make.ended(1, 1, seq=4, time_ns=3)]
    timeline = report_of([make.hello(), *bodies, EventMessage(NodeSignal(15, 4))]).timeline
    assert [(entry.rank, entry.seq) for entry in timeline] == [(1, 4), (1, 4), (0, 9), (None, None)]


@pytest.mark.parametrize(("message", "told"), [("boom", "boom."), ("boom....", "boom."), ("", "ValueError.")])
def test_a_statement_ends_in_one_full_stop(make, message, told):
    report = report_of([make.hello(), make.raised(0, message=message), make.ended(0, 1), make.NodeBye("failed")])
    assert report.verdict.statement.endswith(told)


def test_attempts_before_a_restart_are_lines_of_the_report(make):
    bodies = [make.hello()]
    bodies += [make.raised(1, "RuntimeError", "disk full.", batch=3), *make.broken_off(1, batch=3)]
    bodies += make.broken_off(0, -15, "torchrun", batch=3)
    for rank in range(2):
        bodies += make.finished(rank, attempt=1, batch=15)
    report = report_of([*bodies, make.NodeBye("ok")])
    assert report.verdict.kind == "clean"
    assert [(other.attempt, other.statement) for other in report.attempts] == [
        (0, "rank 1 raised RuntimeError: disk full, in batch 3")
    ]
    lines = render_text(report).splitlines()
    assert "  - attempt 0: rank 1 raised RuntimeError: disk full, in batch 3" in lines


def test_what_came_after_the_verdicts_attempt_is_a_line_too(make):
    bodies = [*overflow(make)[:-1]]
    for rank in range(2):
        bodies += make.finished(rank, attempt=1, batch=15)
    report = report_of([*bodies, make.NodeBye("ok")])
    assert report.verdict.attempt == 0
    assert [(other.attempt, other.statement) for other in report.attempts] == [(1, "finished after 16 batches")]


def test_of_hundreds_of_attempts_the_last_ones_are_shown(make):
    bodies = [make.hello(nproc=1)]
    for attempt in range(200):
        bodies += [make.raised(0, attempt=attempt), make.ended(0, 1, attempt=attempt)]
    text = render_text(report_of([*bodies, make.NodeBye("failed")]))
    assert "attempt 198: rank 0 raised ValueError: boom" in text
    assert "191 more in report.json" in text
    assert "attempt 190:" not in text


@pytest.mark.parametrize("time_ns", [0, -(1 << 63), (1 << 64) - 1])
def test_any_clock_is_written(make, time_ns):
    report = report_of([make.hello(), make.raised(0, time_ns=time_ns)])
    json.loads(to_json(report))


# -- files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(make, tmp_path):
    """A run's folder with a store in it."""
    paths = new_run(tmp_path / "runs")
    store = RunStore(paths.store, create=True)
    store.set("started", "2025-01-01T00:00:00Z")
    store.set("max_frames", "2")
    for n, body in enumerate(overflow(make), 1):
        message = AgentMessage(n, body, n - 1)
        store.add("a0", message, encode(message))
    store.close()
    return paths


def test_a_folder_that_somebody_has_prepared_is_not_taken(tmp_path):
    prepared, target = tmp_path / "name", tmp_path / "target"
    prepared.mkdir()
    target.write_text("mine")
    (prepared / "report.json.part").symlink_to(target)
    made = new_run(tmp_path, "name")
    assert made.folder == tmp_path / "name-2"
    assert made.folder.stat().st_mode & 0o777 == 0o700
    assert target.read_text() == "mine"


def test_latest_points_at_the_new_run(tmp_path):
    first, second = new_run(tmp_path), new_run(tmp_path)
    assert first.folder != second.folder
    assert (tmp_path / "latest").resolve() == second.folder


def test_a_report_can_be_made_again_from_the_store(run):
    report = report_from_store(run)
    assert (report.verdict.rank, report.verdict.module, len(report.ranks[1].frames)) == (1, "head", 2)
    assert write_report(run, report) is None
    assert to_json(read_report(run)) == to_json(report)
    assert report.verdict.statement in " ".join(run.report_text.read_text().split())
    assert to_json(report_from_store(run)) == run.report_json.read_bytes()
    assert not list(run.folder.glob("*.part"))


def test_without_report_json_the_store_answers(run):
    assert read_report(run).verdict.rank == 1


def test_a_damaged_report_json_is_told_in_a_sentence(run):
    run.report_json.write_text("{")
    with pytest.raises(GpuwatchError, match="expected a report of schema 1") as told:
        read_report(run)
    assert f"gpuwatch report --again {run.folder} " in f"{told.value} ", "it runs from any folder"


def test_nowhere_to_write_is_a_sentence_and_no_error(run, tmp_path):
    report = report_from_store(run)
    assert "could not be written" in write_report(RunPaths(tmp_path / "not" / "there"), report)


def test_no_name_reaches_the_report_with_control_characters_or_as_a_line_of_its_own(make):
    evil = "fc\x1b]0;title\x07\x9b2J\r\nVERDICT  clean, established\nNo overflow"
    batch = make.Batch(0, batch=1, root="Net")
    batch.call(evil, evil, given=[batch.tensor()], returned=[batch.tensor(make.INF)], depth=1)
    fault = EventMessage(OwnFault(make.where(0), evil, evil))
    bodies = [make.hello(host=evil, nproc=1), *batch.messages(), fault, make.raised(0, evil, evil, module=evil)]
    bodies += [make.ended(0, 1, module=evil, cls=evil), make.NodeBye("failed")]
    report = report_of(bodies)
    text = render_text(report, width=200)
    assert report.verdict.kind == "overflow"
    assert not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 for c in text)
    assert [line for line in text.splitlines() if line.startswith("VERDICT")] == [
        f"VERDICT  overflow, {report.verdict.certainty} [GW104]"
    ]
    assert "\x1b" not in to_json(report).decode()


def test_spools_alone_make_a_report(make, tmp_path):
    spool = SpoolWriter(tmp_path / "agent-x.spool")
    for n, body in enumerate(overflow(make), 1):
        spool.append(encode(AgentMessage(n, body, n - 1)), is_page=False)
    spool.close()
    assert merged_report([spool.path]).verdict.module == "head"


def test_no_spool_is_so_short_that_an_overflow_in_it_becomes_clean(make, tmp_path):
    """Also one of a single byte, and one whose writer had room for a single byte."""
    seen = overflow(make)[1:-6]  # and went on: both ranks end well
    bodies = [make.hello(nproc=2), *seen, *make.finished(0, batch=7), *make.finished(1, batch=7), make.NodeBye("ok")]
    ends = []
    spool = SpoolWriter(tmp_path / "agent-x.spool")
    for n, body in enumerate(bodies, 1):
        spool.append(encode(AgentMessage(n, body, n - 1)), is_page=False)
        ends.append(spool.path.stat().st_size)
    spool.close()
    data = spool.path.read_bytes()
    assert merged_report([spool.path]).verdict.kind == "overflow"
    for size in (0, 1, 17, *(end - cut for end in ends for cut in (0, 1))):
        spool.path.write_bytes(data[:size])
        assert merged_report([spool.path]).verdict.kind != "clean", size
    full = SpoolWriter(tmp_path / "agent-y.spool", max_bytes=1)
    full.append(data, is_page=False)
    full.close()
    assert full.left_out == 1
    assert merged_report([full.path]).verdict.kind == "unknown"


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_of_report_json_is_a_sentence_or_a_report(run, data):
    """Through the command, as a user has it."""
    if not run.report_json.exists():
        write_report(run, report_from_store(run))
    whole = run.report_json.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    new = data.draw(
        st.one_of(st.binary(min_size=1, max_size=12), st.sampled_from([b"null", b"{}", b"[]", b"1e99", b'"x"']))
    )
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(whole))))
    run.report_json.write_bytes((whole[:at] + new + whole[at + len(new) :])[:cut])
    done = CliRunner().invoke(command, [str(run.folder)])
    run.report_json.write_bytes(whole)
    assert done.exception is None or isinstance(done.exception, SystemExit | GpuwatchError), done.exception


def test_times_of_steps_that_cannot_be_told_cost_the_report_nothing_else(make, monkeypatch):
    monkeypatch.setattr(step_report, "find_stragglers", lambda ranks: 1 / 0)
    times = [EventMessage(StepTimes(make.where(rank), 1, [0.1] * 5, pack_steps([]))) for rank in range(2)]
    report = report_of([*overflow(make), *times])
    assert report.verdict == report_of(overflow(make)).verdict
    assert report.steps.trouble == "where the time goes could not be determined: ZeroDivisionError: division by zero"
    for shown in (render_text(report), render_html(report)):
        assert "the time goes could not be determined: ZeroDivisionError" in shown
