"""Made pictures of jobs."""

from __future__ import annotations

import pytest
from gpuwatch.core.wire.beat import HotModule
from gpuwatch.core.wire.view import JobView, NodeView, RankView, ViewEvent


def rank(number, *, batch=10, step=9, begun=40, still=0.1, phase="forward", module="net.fc1", host="node-a", **more):
    fields = {"overflow": False, "warned": 0, **more}
    return RankView(number, host, phase, step, batch, begun, module, still, **fields)


def view(ranks, *, time_s=100.0, **more) -> JobView:
    fields = {
        "nodes": [NodeView("node-a", False, "ok")],
        "hot": [HotModule(3, 10, "net.fc2", "float16", 3e4, 1.1, 0.05)],
        "events": [ViewEvent(5, "rank 1 raised ValueError", True)],
        **more,
    }
    return JobView(int(time_s * 1e9), "run-1", ["train.py", "--lr", "1"], len(ranks), 0, ranks=ranks, **fields)


@pytest.fixture(scope="session")
def picture():
    """`picture.rank(0, ...)`, `picture.view([...], ...)`."""

    class Made:
        pass

    made = Made()
    made.rank, made.view = rank, view
    return made
