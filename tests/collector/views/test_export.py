"""`gpuwatch export`, from a store to files that other readers read again."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import subprocess
import sys

import msgspec
import pytest
from click.testing import CliRunner
from gpuwatch.cli import export as cli
from gpuwatch.cli.export import export as command
from gpuwatch.cli.report import report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.run_files import RunPaths, new_run
from gpuwatch.collector.store import RunStore
from gpuwatch.collector.views.frame_export import COLUMNS, ExportRow, export_rows
from gpuwatch.core.errors import UsageError
from gpuwatch.core.events.script_events import MeshCoordinates
from gpuwatch.core.values import DTYPE_CODES
from gpuwatch.core.wire.columns import ABSENT, pack
from gpuwatch.core.wire.messages import AgentMessage, EventMessage, RankHistoryMessage, encode
from numpy import array, float32, uint16, uint32

HOSTILE = 'a,b"c\n=1+1'
"""A name with all that could break a line or a cell."""


def job(make):
    """Rank 1 of two overflows in batch 7."""
    bodies = [make.hello(nproc=2)]
    for rank, number in ((0, 4.0), (1, make.INF)):
        batch = make.Batch(rank, batch=7, page=7, seq=3)
        x, y = batch.tensor(), batch.tensor(number)
        batch.call("fc", "Linear", given=[x], returned=[y], weights={"weight": batch.tensor(0.5)}, dtype="float16")
        batch.call(HOSTILE, "Linear", given=[y], returned=[y])
        bodies += batch.messages()
        slot = next(d.id for d in batch._definitions if getattr(d, "role", "") == "output")
        numbers = array([[1.0], [2.0], [number]], float32)
        codes = (numbers.view(uint32) >> 16).astype(uint16)
        codes[0, 0] = ABSENT
        dtypes = bytes([DTYPE_CODES["float16"]])
        bodies.append(RankHistoryMessage(rank, 0, 0, [5, 6, 7], [5, 6, 7], [slot], dtypes, pack(codes)))
        for place in ({"dp": 0, "tp": rank}, {"both": 0}, {"both": 1}):  # two meshes have different places of one name
            bodies.append(EventMessage(MeshCoordinates(make.where(rank), place)))
    return [*bodies, make.ended(1, 1)]


@pytest.fixture
def run(make, tmp_path):
    paths = new_run(tmp_path / "gpuwatch-runs", "x")
    store = RunStore(paths.store, create=True)
    for n, body in enumerate(job(make), 1):
        message = AgentMessage(n, body, n - 1)
        store.add("a0", message, encode(message))
    store.close()
    return paths


def exported(run: RunPaths, *arguments: str):
    found = CliRunner().invoke(command, [str(run.folder), *arguments])
    if found.exception is not None:
        raise found.exception
    return found.stdout


def same(read: dict, row: ExportRow) -> bool:
    return read == dict(zip(COLUMNS, msgspec.structs.astuple(row), strict=True))


@pytest.fixture
def rows(make):
    return list(export_rows(fold(("a0", n, body) for n, body in enumerate(job(make), 1)), "x"))


def test_the_table_has_the_verdict_each_tensor_and_each_number_of_a_history(rows):
    verdict, *others = rows
    assert (verdict.table, verdict.kind, verdict.rank, verdict.module) == ("verdict", "overflow", 1, "fc")
    frames = [row for row in others if row.table == "frames" and (row.rank, row.module) == (1, "fc")]
    assert [(row.role, row.abs_max, row.nonfinite) for row in frames] == [
        ("weight", 0.5, None),
        ("input[0]", 1.0, None),
        ("output", None, "+inf"),
    ]
    assert {(row.batch, row.index, row.phase, row.cls, row.seq) for row in frames} == {(7, 0, "forward", "Linear", 3)}
    history = [(row.rank, row.batch, row.abs_max, row.nonfinite) for row in others if row.table == "history"]
    assert history == [(0, 6, 2.0, None), (0, 7, 4.0, None), (1, 6, 2.0, None), (1, 7, None, "inf")]
    assert any("=1+1" in row.module for row in others), "the name is there, and its line break is shown"


def test_json_lines_are_the_rows(run, rows):
    read = [json.loads(line) for line in exported(run).splitlines()]
    assert len(read) == len(rows)
    assert all(map(same, read, rows))


def test_csv_is_the_rows(run, rows, tmp_path):
    path = tmp_path / "run.csv"
    assert exported(run, "--format", "csv", "-o", str(path)) == ""
    with path.open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    assert header == COLUMNS
    for line, row in zip(lines, rows, strict=True):
        assert line == ["" if value is None else str(value) for value in msgspec.structs.astuple(row)]


def test_parquet_is_the_rows(run, rows, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "run.parquet"
    exported(run, "--format", "parquet", "-o", str(path))
    table = parquet.read_table(path)
    types = {name: str(table.schema.field(name).type) for name in ("rank", "abs_max", "module")}
    assert types == {"rank": "int64", "abs_max": "double", "module": "string"}
    read = table.to_pylist()
    assert len(read) == len(rows)
    assert all(map(same, read, rows))


@pytest.mark.parametrize("rank", ["1", "tp=1", "tp=1,dp=0"])
def test_what_is_asked_for_is_there_alone(run, rank):
    read = [json.loads(line) for line in exported(run, "--table", "history", "--rank", rank).splitlines()]
    assert {(row["table"], row["rank"]) for row in read} == {("history", 1)}


def test_a_place_may_be_that_of_several_ranks(run):
    read = [json.loads(line) for line in exported(run, "--table", "history", "--rank", "dp=0").splitlines()]
    assert {row["rank"] for row in read} == {0, 1}


def test_a_trace_of_one_rank_has_its_thread_alone(run):
    trace = json.loads(exported(run, "--format", "perfetto", "--rank", "0"))
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["rank 0"]
    assert trace["otherData"]["verdict"].startswith("overflow, "), "which is over all ranks"


def test_a_report_takes_the_place_of_one_rank(run):
    shown = CliRunner().invoke(report, ["--runs-dir", str(run.folder.parent), "--rank", "tp=1"], catch_exceptions=False)
    assert shown.exit_code == 0 and "Rank 1, batch 7" in shown.output
    with pytest.raises(UsageError, match="expected the place of one rank, found that of ranks 0, 1; add a dimension"):
        CliRunner().invoke(report, ["--runs-dir", str(run.folder.parent), "--rank", "dp=0"], catch_exceptions=False)


def test_without_its_library_parquet_is_refused_in_one_sentence(run, monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: importlib.util.find_spec(f"no_such.{name}"))
    with pytest.raises(UsageError, match=r"pip install pyarrow \[GW427\]$") as refused:
        exported(run, "--format", "parquet", "-o", "x")
    assert int(refused.value.exit_code) == 2


def test_a_text_format_needs_no_library():
    code = "import sys, gpuwatch.collector.views.frame_export; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rank", "7"], r"--rank: expected one of the ranks of this run \(ranks 0, 1\), found 7"),
        (["--rank", "ep=1"], r"of this run \(its meshes have dp of 1, tp of 2\), found ep=1"),
        (["--rank", "tp=1,dp=1"], r"of this run \(its meshes have dp of 1, tp of 2\), found tp=1,dp=1"),
        (["--rank", "tp"], "--rank: expected a number, or a place in a DeviceMesh as tp=2,dp=0, found 'tp'"),
        (["--rank", "both=0"], r"found both=0"),
        (["--format", "perfetto", "--table", "frames"], "found --format perfetto; leave --table out"),
        (["-o", "/nowhere/x"], "--output: expected a path that can be written, found /nowhere/x"),
        (["--format", "parquet"], "--format parquet: expected a file to write to, found none; add: -o FILE"),
    ],
)
def test_a_mistake_gets_one_sentence(run, arguments, said, monkeypatch):
    monkeypatch.setattr(cli, "_expect_pyarrow", lambda: None)
    with pytest.raises(UsageError, match=said):
        exported(run, *arguments)


def test_numbers_are_finite_or_null(rows):
    for row in rows:
        for number in (row.abs_min, row.abs_max, row.headroom):
            assert number is None or math.isfinite(number)
