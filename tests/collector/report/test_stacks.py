"""Where ranks stood: as they told it themselves, as py-spy saw it, and as the kernel knows it."""

from __future__ import annotations

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.html.page import render_html
from gpuwatch.collector.report.sentence_parts import thread_text
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.core.events.agent_events import RankLook, WorkerExit
from gpuwatch.core.events.rank_standing import StackLine, ThreadSeen
from gpuwatch.core.wire.messages import EventMessage

WAITS = [StackLine("/home/me/train.py", 41, "step", "dist.all_reduce(loss)")]
LOADS = [StackLine("/home/me/data.py", 7, "load", "read()")]


def hang(make, *before, **seen):
    """Rank 1 did not come; `seen` is what its look has shown, and `before` came before."""
    bodies = [make.hello(nproc=3), *before]
    for rank in range(3):
        where = make.where(rank, step=4, batch=4, seq=9)
        fields = seen if rank == 1 else {"stack": WAITS}
        bodies += [EventMessage(RankLook(where, 1, 300.0, "script", **{"state": "S", **fields}))]
        bodies += [EventMessage(WorkerExit(where, -15, "torchrun", "script"))]
    messages = [("a0", n, body) for n, body in enumerate([*bodies, make.NodeBye("failed")], 1)]
    return build_report(fold(messages), run_id="x", started=None, ended=None)


def test_native_calls_come_first_and_other_threads_last(make):
    native = [StackLine("/lib/libc.so.6", 0, "read"), StackLine("/lib/libpython3.11.so", 0, "_Py_read")]
    threads = [ThreadSeen("python3", "D", "wait_on_page", "read"), ThreadSeen("loader", at="data.py:90 in fill")]
    report = hang(make, stack=LOADS, native=native, threads=threads, state="D")
    assert report.ranks[1].stack == [
        "read of libc.so.6, native",
        "_Py_read of libpython3.11.so, native",
        "/home/me/data.py:7 in load: read()",
    ]
    assert report.ranks[1].threads == ["thread loader, at data.py:90 in fill"]
    for said in (render_text(report), render_html(report)):
        assert "read of libc.so.6, native" in said
        assert "other thread loader, at data.py:90 in fill" in said
    assert report.verdict == hang(make, stack=LOADS, state="D").verdict


def test_without_a_stack_the_kernels_words_stand_there_and_the_verdict_stays_the_same(make):
    threads = [ThreadSeen("python3", "D", "nfs_wait_bit_killable", "fsync"), ThreadSeen("pt_main", "S")]
    report, bare = hang(make, state="D", threads=threads), hang(make, state="D")
    assert report.verdict == bare.verdict
    assert report.ranks[1].stack == [
        "thread python3, which waits for a disk or a driver, and no signal reaches it, in fsync (nfs_wait_bit_killable "
        "of the kernel)",
        "thread pt_main, which sleeps",
    ]
    assert report.ranks[1].threads == []
    assert "nfs_wait_bit_killable of the kernel" in render_text(report)


@pytest.mark.parametrize(
    ("thread", "text"),
    [
        (ThreadSeen(""), "thread (no name)"),
        (ThreadSeen("a", "R"), "thread a, which runs"),
        (ThreadSeen("a", "I", "kfun"), "thread a, in state I, in kfun of the kernel"),
        (ThreadSeen("a", system_call="number 5"), "thread a, in number 5"),
    ],
)
def test_a_thread_in_words(thread, text):
    assert thread_text(thread) == text


def test_a_hang_shows_outputs_and_no_gradients(make):
    batch = make.Batch(1, batch=4)
    batch.call("net", "Linear", given=[batch.tensor()], returned=[batch.tensor()])
    batch.backward("net", "Linear", "weight", 1.0)
    report = hang(make, *batch.messages(), stack=LOADS, state="S")
    assert report.verdict.kind == "hang"
    assert [frame.phase for frame in report.ranks[1].frames] == ["forward"]
