"""A report whose verdict names an operation and its line."""

from __future__ import annotations

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.alarm_evidence import BadOperation, SecondRun
from gpuwatch.core.events.read_tensors import OperandNumbers
from gpuwatch.core.wire.messages import EventMessage, NodeBye


@pytest.fixture
def report_of_line(make):
    """(code, columns of the operation in it) -> the report: rank 1 overflows there, and a second run has found it."""

    def report(code, columns):
        batch = make.Batch(1)
        x, y = batch.tensor(1.0), batch.tensor(make.INF)
        batch.call("attend", "Attention", given=[x], returned=[y], weights={"weight": batch.tensor(0.5)})
        given = OperandNumbers("float32", [4, 4], 1e30, "finite")
        made = OperandNumbers("float32", [4, 4], None, "+inf")
        operation = BadOperation(
            "aten.mm.default", "attend", "/me/train.py", 12, code, [given, given], made, "everything", columns=columns
        )
        found = EventMessage(SecondRun(make.where(1), operation))
        bodies = [make.hello(nproc=2), *batch.messages(), found, make.ended(1, 94), make.ended(0, -15, "torchrun")]
        messages = [("a0", n, body) for n, body in enumerate([*bodies, NodeBye("failed")], 1)]
        made_report = build_report(fold(messages), run_id="x", started=None, ended=None)
        assert made_report.verdict.operation == operation
        return made_report

    return report
