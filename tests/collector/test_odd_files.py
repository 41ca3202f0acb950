"""What stands where a report, a spool or a store should: one sentence each, and no wait."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from gpuwatch.cli.main import main
from gpuwatch.collector.store import RunStore

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
AS_MESSAGE = "'a' AS agent, i AS n, 0 AS received_ns, 'beat' AS kind, x'00' AS body, NULL AS crc FROM n"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_folder(path: Path) -> None:
    path.mkdir()


def sparse(path: Path) -> None:
    path.write_bytes(b"gpuwatch spool 1\n")
    os.truncate(path, 1 << 33)


def sparse_within_limits(path: Path) -> None:
    path.write_bytes(b"gpuwatch spool 1\n")
    os.truncate(path, 1 << 20)


def store(path: Path) -> None:
    RunStore(path, create=True).close()


def with_a_view(path: Path) -> None:
    store(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE message")
        db.execute(f"CREATE VIEW message AS {ENDLESS} {AS_MESSAGE}")


def with_a_view_of_facts(path: Path) -> None:
    store(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE run")
        db.execute(f"CREATE VIEW run AS {ENDLESS} 'schema' || i AS key, '3' AS value FROM n")


def with_a_computed_column(path: Path) -> None:
    store(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE beat")
        db.execute("CREATE TABLE beat (agent, received_ns, body, crc, slow AS (zeroblob(1 << 40)))")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("again", [[], ["--again"]], ids=["", "again"])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("report.json", fifo),
        ("report.json", endless_device),
        ("report.json", a_folder),
        ("report.json", sparse),
        ("report.json", sparse_within_limits),
        ("run.sqlite", fifo),
        ("run.sqlite", endless_device),
        ("run.sqlite", a_folder),
        ("run.sqlite", sparse),
        ("run.sqlite", with_a_view),
        ("run.sqlite", with_a_view_of_facts),
        ("run.sqlite", with_a_computed_column),
        ("agent-1.spool", fifo),
        ("agent-1.spool", endless_device),
        ("agent-1.spool", sparse),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_file_that_is_none_is_told_in_one_sentence(tmp_path, monkeypatch, capsys, name, make, again):
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    make(run / name)
    what = run / name if name.endswith("spool") else run
    monkeypatch.setattr(sys, "argv", ["gpuwatch", "report", *again, str(what), "--runs-dir", str(run.parent)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code in (1, 2)
    assert told.out == ""
    assert told.err.startswith("gpuwatch: expected ")
    assert len(told.err.splitlines()) == 1
    monkeypatch.setattr(sys, "argv", ["gpuwatch", "runs", "--runs-dir", str(run.parent)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
