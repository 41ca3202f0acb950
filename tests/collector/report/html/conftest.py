"""A report of each kind, made of the messages of its job."""

from __future__ import annotations

import numpy
import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.html.page import render_html
from gpuwatch.core.events.agent_events import LimitForecast, RankLook, WorkerExit
from gpuwatch.core.events.alarms import RangeWarning
from gpuwatch.core.events.rank_standing import StackLine
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.values import DTYPE_CODES
from gpuwatch.core.wire.columns import pack
from gpuwatch.core.wire.messages import EventMessage, NodeBye, RankHistoryMessage

KINDS = ("forward", "growing", "backward", "hang", "lost", "crash", "preflight", "clean", "hostile", "thousand")
SLOTS = {"encoder.fc1": 2, "encoder.fc2": 5}
"""The slots of their outputs, as the batches below define them."""
HOSTILE = "<script>alert(1)</script>"


def batch_of(make, rank, out=1.0, *, page=0, seq=1, dtype="float16", name="encoder.fc"):
    """Two layers below the root; `out` is what the second returns."""
    batch = make.Batch(rank, batch=page, page=page, seq=seq)
    x, h, y = batch.tensor(3.0), batch.tensor(600.0 + rank), batch.tensor(out)
    batch.call(f"{name}1", "Linear", given=[x], returned=[h], weights={"weight": batch.tensor(0.5)}, dtype=dtype)
    batch.call(f"{name}2", "Linear", given=[h], returned=[y], weights={"weight": batch.tensor(0.25)}, dtype=dtype)
    batch.call("", "Net", given=[x], returned=[y], dtype=dtype)
    return batch


def figures(port="mlx5_0/1", *, num_gpus=2):
    """A node's telemetry for ten minutes: one GPU is hot, and other virtual machines steal its processors."""
    grows = [5.0 * n for n in range(120)]
    found = {("", "cpu"): [0.8 * at for at in grows], ("", "steal"): [0.3 * at for at in grows]}
    found |= {("", "memory_used"): [9e9 + at for at in grows], ("", "memory_total"): [64e9] * 120}
    found |= {(port, "ib_received"): [7e9 * at for at in grows], (port, "ib_errors"): [0.0] * 120}
    for gpu in range(num_gpus):
        held = 0.5 if gpu == 1 else 0.0
        values = {"temperature": 60.0 + 20 * held, "sm_clock": 1980 - 900 * held, "sm_clock_max": 1980, "power": 600.0}
        found |= {(f"GPU-{gpu}", what): [value + (n % 3) for n in range(120)] for what, value in values.items()}
        found[f"GPU-{gpu}", "clocks_sw_thermal"] = [held * at for at in grows]
        found[f"GPU-{gpu}", "clocks_hw_slowdown"] = [0.0] * 120
        found[f"rank {gpu}", "rss"] = [3e9 + 1e7 * at for at in grows]
    return found


def forward(make):
    bodies = [make.hello(nproc=2)]
    bodies += batch_of(make, 0, 50_000.0, page=7).messages() + batch_of(make, 1, make.INF, page=7).messages()
    near = RangeWarning(
        make.where(0, batch=7), "near overflow", "encoder.fc2", "Linear", "forward", "output", "float16", 5e4, 0.4
    )
    bodies += [EventMessage(near), make.raised(1, batch=7), make.ended(1, 94, batch=7), make.ended(0, -15, "torchrun")]
    return [*bodies, NodeBye("failed")]


def growing(make):
    """The second layer overflows; a forecast said so 22 batches before."""
    told = LimitForecast(
        make.where(1, batch=-22), "encoder.fc2", "Linear", "float16", 65504.0, 1.0 + 2.0 ** (37 / 4), 26, 18, 40, -50
    )
    bodies = [make.hello(nproc=2), EventMessage(told)]
    for rank, last in enumerate((50_000.0, make.INF)):
        bodies += [*batch_of(make, rank, last).messages(), grown(rank, last)]
    return [*bodies, make.ended(1, 94), make.ended(0, -15, "torchrun"), NodeBye("failed")]


def backward(make):
    bodies = [make.hello(nproc=2)]
    for rank in range(2):
        batch = batch_of(make, rank, 2.0)
        batch.backward("encoder.fc2", "Linear", "output", 1.0)
        batch.backward("encoder.fc2", "Linear", "weight", make.NAN if rank else 0.5)
        bodies += batch.messages()
    return [*bodies, make.ended(1, 94), make.ended(0, -15, "torchrun"), NodeBye("failed")]


def hang(make):
    waits = [
        StackLine("/lib/torch/distributed/distributed_c10d.py", 3007, "all_reduce", "work.wait()"),
        StackLine("/home/me/train.py", 41, "step", "dist.all_reduce(loss)"),
    ]
    loads = [
        StackLine("/home/me/data.py", 7, "load", "time.sleep(1)"),
        StackLine("/home/me/train.py", 60, "main", "batch = load()"),
    ]
    bodies = [make.hello(nproc=3), make.telemetry(figures(HOSTILE), began_s=1000.0)]
    for rank, stack in enumerate((waits, loads, waits)):
        where = RunPosition(rank, step=4, batch=4, seq=9, time_ns=1500 * 10**9)
        bodies.append(EventMessage(RankLook(where, 1, 300.0, "script", state="S", stack=stack)))
        bodies.append(EventMessage(WorkerExit(where, -15, "torchrun", "script")))
    return [*bodies, NodeBye("failed")]


def lost(make):
    """The kernel kills rank 1, whose memory has grown for a minute, in the 600th second of the telemetry."""
    grows = [4e9 + 1.3e8 * max(0, n - 60) ** 1.5 for n in range(120)]
    found = {("", "memory_used"): grows, ("", "memory_total"): [64e9] * 120, ("rank 1", "rss"): grows}
    found |= {("rank 0", "rss"): [1e9] * 120, ("", "cpu"): [0.4 * 5 * n for n in range(120)]}
    bodies = [make.hello(nproc=2), make.telemetry(found, began_s=1000.0)]
    bodies += batch_of(make, 0).messages() + batch_of(make, 1).messages()
    end_ns = 1590 * 10**9
    return [*bodies, make.ended(1, -9, times_ns=(end_ns, end_ns)), make.ended(0, -15, "torchrun"), NodeBye("failed")]


def crash(make):
    return [
        make.hello(nproc=2),
        make.raised(1, "KeyError", "'labels'", batch=3),
        make.ended(1, 1, batch=3),
        make.ended(0, -15, "torchrun"),
        NodeBye("failed"),
    ]


def preflight(make):
    bad = make.found("compute", ranks=[1], hosts=["h0"], sentence="rank 1 on h0 gets a different matmul result")
    bodies = [make.hello(nproc=2)]
    for rank in range(2):
        bodies += [make.began(rank, "inventory"), make.stage(rank, "inventory"), make.began(rank, "compute")]
        bodies += [make.stage(rank, "compute", 0.4), make.concluded(rank, [bad], "failed", "compute", "other bits")]
        bodies.append(make.ended(rank, 3, phase="preflight"))
    return [*bodies, NodeBye("failed")]


def clean(make):
    bodies = [make.hello(nproc=2)]
    for rank in range(2):
        bodies += batch_of(make, rank, 2.0).messages() + make.finished(rank)
    return [*bodies, NodeBye("ok")]


def hostile(make):
    """A script chooses these names."""
    bodies = [make.hello(host=f"h{HOSTILE}", nproc=2)]
    bodies += batch_of(make, 0, 2.0, name=f"a{HOSTILE}").messages()
    bodies += batch_of(make, 1, make.INF, name=f"a{HOSTILE}").messages()
    bodies += [make.raised(1, "ValueError", f"no {HOSTILE} & '\"", batch=0), make.ended(1, 1)]
    return [*bodies, NodeBye("failed")]


def messages_of(make, kind):
    bodies = {
        "forward": forward,
        "growing": growing,
        "backward": backward,
        "hang": hang,
        "lost": lost,
        "crash": crash,
        "preflight": preflight,
        "clean": clean,
        "hostile": hostile,
    }[kind](make)
    return [("a0", n, body) for n, body in enumerate(bodies, 1)]


def grown(rank, last, *, batches=60):
    """The history of two modules' outputs up to batch 0, which is the batch of the pages."""
    numbers = numpy.array([[600.0, 1.0 + 2.0 ** (n / 4)] for n in range(batches)], numpy.float32)
    numbers[-1, 1] = last
    codes = (numbers.view(numpy.uint32) >> 16).astype(numpy.uint16)
    counted = list(range(1 - batches, 1))
    slots = [SLOTS["encoder.fc1"], SLOTS["encoder.fc2"]]
    return RankHistoryMessage(rank, 0, 0, counted, counted, slots, bytes([DTYPE_CODES["float16"]] * 2), pack(codes))


def thousand(make):
    """128 nodes with 8 ranks each; rank 77 overflows."""
    found = []
    for node in range(128):
        bodies = [make.hello(f"a{node}", f"host-{node}", nproc=8, nodes=128)]
        bodies.append(make.telemetry(figures(num_gpus=8), began_s=0.0))
        for rank in range(8 * node, 8 * node + 8):
            bodies += batch_of(make, rank, make.INF if rank == 77 else 1.0).messages()
            bodies.append(grown(rank, make.INF if rank == 77 else 1.0))
            bodies += [make.ended(rank, 94)] if rank == 77 else [make.ended(rank, -15, "torchrun")]
        found += [(f"a{node}", n, body) for n, body in enumerate([*bodies, NodeBye("failed")], 1)]
    return found


@pytest.fixture(scope="session")
def report_of(make):
    """kind -> its report, made once."""
    made = {}

    def report(kind):
        if kind not in made:
            messages = thousand(make) if kind == "thousand" else messages_of(make, kind)
            made[kind] = build_report(fold(messages), run_id=f"run-{kind}", started=None, ended=None)
        return made[kind]

    return report


@pytest.fixture(scope="session")
def page_of(report_of):
    """kind -> its page."""
    return lambda kind: render_html(report_of(kind))


class Opened:
    """A page that is shown, and what happened beside that."""

    def __init__(self, context, address):
        self.context, self.address = context, address
        self.troubles, self.requests = [], []
        self.page = context.new_page()
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def go(self, fragment=""):
        self.page.goto(self.address + fragment)
        return self.page


@pytest.fixture
def opened(chromium, page_of, tmp_path):
    """(kind, options of the context) -> the page of that kind."""
    contexts = []

    def open_(kind, **options):
        path = tmp_path / f"{kind}.html"
        path.write_text(page_of(kind), encoding="utf-8")
        context = chromium.new_context(viewport={"width": 1280, "height": 800}, **options)
        contexts.append(context)
        return Opened(context, path.as_uri())

    yield open_
    for context in contexts:
        context.close()
