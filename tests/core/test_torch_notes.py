"""What a run tells of its torch: a line at the start, and one in the report whatever the number of ranks."""

from __future__ import annotations

import msgspec
import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.core.torch_names import notes_on
from gpuwatch.launcher import life
from gpuwatch.worker.compile.region_parts import compiled_views

NEWER = "torch 9.1 is newer than the newest release that gpuwatch was tested with"


@pytest.mark.parametrize(("version", "line"), [("2.5.1+cu124", "torch 2.5: keyword"), ("9.1.0", NEWER), ("2.15.0", "")])
def test_it_is_in_the_report_once(version, line):
    report = build_report(fold([]), run_id="x", started=None, ended=None)
    run = msgspec.structs.replace(report.run, versions={"torch": version})
    text = " ".join(render_text(msgspec.structs.replace(report, run=run)).split())
    if line:
        assert text.count(line) == 1
    else:
        assert "torch 2.15" not in text


@pytest.mark.parametrize(("version", "lines"), [("2.5.1+cu124", 1), ("9.1.0", 1), ("2.15.0", 0), ("", 0)])
def test_it_is_a_line_at_the_start(monkeypatch, capsys, version, lines):
    monkeypatch.setattr(life.host, "installed_torch", lambda: version)
    life.tell_of_torch()
    found = capsys.readouterr().err.splitlines()
    assert found == [f"gpuwatch: {note} [GW515]" for note in notes_on(version)]
    assert len(found) == lines


@pytest.mark.parametrize("release", [f"2.{minor}" for minor in range(5, 16)])
def test_what_is_told_of_compiled_modules_is_what_is_traced_into_them(release):
    found = compiled_views(f"{release}.0").missing
    told = [part for note in notes_on(f"{release}.0") for part in note.removeprefix(f"torch {release}: ").split("; ")]
    assert [part for part in told if "compiled modules" in part] == [found.partition(": ")[2]] * bool(found)
