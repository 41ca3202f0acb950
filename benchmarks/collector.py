"""What a collector takes: R simulated ranks, 8 to a node agent, with the product's own agents, sockets and messages.

    python benchmarks/collector.py [--ranks 8,64,512] [--pages N] [--rate R] [--frames N] [--anomalies N]
                                   [--stopped S] [--share F] [--at-once N]

Each rank sends N pages, R a second if the machine can. Then some ranks meet an overflow, one after another and each
earlier in the training than the one before, so that the verdict moves each time: the time from the event to the
verdict in the collector's log is measured. Then all ranks end, and the reports are made. The collector is the
product's own process; its processor time and memory are those that the system has counted.

With `--stopped S` the collector is stopped (SIGSTOP) for S seconds after a third of the pages. A rank meets an overflow
meanwhile, and the verdict is waited for once the collector goes on. With `--share F` the collector may run for F of
each tenth of a second, and is stopped for the rest. With `--at-once N`, N ranks overflow together after the pages.
With any of them the first overflow after the pages does not wait until the backlog is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import psutil
import zmq
from gpuwatch.core.guest.own_imports import own_command
from gpuwatch.core.text import from_json
from gpuwatch.core.wire.keys import derive_keys
from gpuwatch.core.wire.messages import AgentHello
from gpuwatch.core.wire.pipe import (
    AgentConfig,
    CollectorBound,
    CollectorConfig,
    FromCollector,
    LaunchDone,
    write_line,
)
from gpuwatch.launcher.agent.agent import NodeAgentLoop
from gpuwatch.launcher.agent.gpus import GpuWatch
from gpuwatch.launcher.agent.rank_watch import RankWatch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from simulated_ranks import Model, NoGpus, SimulatedRank

RANKS_PER_NODE = 8
JOB = "benchmark"
PATIENCE_S = 1800.0
PERIOD_S = 0.1
"""As the kernel counts a container's share of a processor."""
_VERDICT = re.compile(r"^(\S+) the verdict so far: .*?\brank (\d+)", re.IGNORECASE)


@dataclass
class Figures:
    """One line of the table. Seconds, bytes."""

    ranks: int
    pages: int = 0
    dropped: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0
    cpu_s: float = 0.0
    """The collector's, while pages arrived."""
    agents_cpu_s: float = 0.0
    peak_rss: int = 0
    """The collector's, including its report."""
    names_s: float = 0.0
    """Until every rank's definitions were acknowledged."""
    names_cpu_s: float = 0.0
    latency_p50: float | None = None
    latency_p99: float | None = None
    latencies: int = 0
    end_s: float = 0.0
    """From the end of the ranks to the verdict at the agents."""
    end_cpu_s: float = 0.0
    end_agents_cpu_s: float = 0.0
    """All simulated agents', one after the other in this process; of a real job each node has its own."""
    again_s: float = 0.0
    again_cpu_s: float = 0.0
    again_rss: int = 0
    show_s: float = 0.0
    show_cpu_s: float = 0.0
    store_bytes: int = 0
    report_bytes: int = 0
    verdict: str = ""
    recorded: int = 0
    """Pages, those around overflows included."""
    thinned: int = 0
    pages_stored: int = 0
    events_sent: int = 0
    events_stored: int = 0
    stopped_s: float = 0.0
    stopped_verdict_s: float | None = None
    """From when the collector goes on to the verdict over an overflow that came while it was stopped."""
    last_verdict_s: float | None = None
    """From the last overflow to the verdict over it."""
    agent_bytes: int = 0
    """The largest size of one agent's messages."""
    agents_rss: int = 0
    """By how much all agents together have made this process grow, divided by their number."""
    drain_s: float = 0.0
    """From the last page until everything was acknowledged."""


class Collector:
    """The product's collector process, with its folder."""

    def __init__(self, folder: Path) -> None:
        self.keys = derive_keys("a secret of the benchmark", JOB)
        self._child = subprocess.Popen(own_command("gpuwatch.collector"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        keys = self.keys
        write_line(
            cast(IO[bytes], self._child.stdin),
            CollectorConfig(
                "tcp://127.0.0.1:*",
                keys.collector.public.decode(),
                keys.collector.private.decode(),
                keys.agent.public.decode(),
                keys.viewer.public.decode(),
                str(folder),
                JOB,
            ),
        )
        bound = from_json(self._child.stdout.readline(), FromCollector)
        assert isinstance(bound, CollectorBound), bound
        self.address, self.run = bound.address, Path(bound.run_dir)
        self._process = psutil.Process(self._child.pid)
        self.peak_rss = 0
        self._last = 0.0
        self._holding: threading.Thread | None = None
        self._let_go = threading.Event()

    def cpu_s(self) -> float:
        """User and system time so far; notes its memory, too."""
        try:
            times = self._process.cpu_times()
            self.peak_rss = max(self.peak_rss, peak_memory(self._child.pid))
        except psutil.Error:
            return self._last
        self._last = times.user + times.system
        return self._last

    def signal(self, number: int) -> None:
        """Stop it, or let it go on."""
        self._process.send_signal(number)

    def hold_to(self, share: float) -> None:
        """From now on it runs for such a share of each period only; 1 is always."""
        if self._holding is not None:
            self._let_go.set()
            self._holding.join()
            self._holding = None
        if share < 1:
            self._let_go.clear()
            self._holding = threading.Thread(target=self._hold_to, args=(share,), daemon=True)
            self._holding.start()

    def _hold_to(self, share: float) -> None:
        while not self._let_go.is_set():
            self.signal(signal.SIGSTOP)
            self._let_go.wait((1 - share) * PERIOD_S)
            self.signal(signal.SIGCONT)
            time.sleep(share * PERIOD_S)

    def end(self) -> None:
        """After the verdict, or instead of one."""
        self.hold_to(1.0)
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()

    def await_verdict(self, rank: int, since: float, turn: Callable[[], None] = lambda: None) -> None:
        """Until its log names the rank, as it does from a time on. `turn` is done meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while self.first_named(rank, since) is None:
            turn()
            if self._child.poll() is not None:
                sys.exit(f"the collector has ended with {self._child.returncode}")
            if time.monotonic() > deadline:
                sys.exit(f"the collector has named rank {rank} in no verdict within {PATIENCE_S:.0f} s")
            time.sleep(0.02)

    def first_named(self, rank: int, since: float) -> float | None:
        """When its log has named the rank first, from a time on."""
        return min((when for when, named in self.verdicts() if named == rank and when >= since - 0.001), default=None)

    def verdicts(self) -> list[tuple[float, int]]:
        """(time, rank) of the verdicts in its log."""
        found = []
        for line in (self.run / "logs" / "collector.log").read_text().splitlines():
            match = _VERDICT.match(line)
            if match is not None:
                when = time.mktime(time.strptime(match[1][:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone
                found.append((when + float(f"0{match[1][19:].rstrip('Z')}"), int(match[2])))
        return found


class Nodes:
    """All simulated nodes, in this process."""

    def __init__(self, ranks: int, collector: Collector, folder: Path, model: Model) -> None:
        nodes = max(1, ranks // RANKS_PER_NODE)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, nodes + 16)
        self.agents: list[NodeAgentLoop] = []
        self.ranks: list[SimulatedRank] = []
        self._turns = 0
        self._rss = psutil.Process().memory_info().rss
        self.agent_bytes = self.agents_rss = 0
        for node in range(nodes):
            here = folder / f"node-{node}"
            here.mkdir(parents=True)
            config = AgentConfig(
                collector.address,
                collector.keys.collector.public.decode(),
                collector.keys.agent.public.decode(),
                collector.keys.agent.private.decode(),
                str(here),
                str(here),
                AgentHello(
                    "",
                    "",
                    RANKS_PER_NODE,
                    nodes,
                    nodes,
                    ["gpuwatch", "launch", "train.py"],
                    {"gpuwatch": "benchmark"},
                    JOB,
                ),
                identity=f"{node:08x}",
            )
            agent = NodeAgentLoop(config, io.BytesIO(), gpus=cast(GpuWatch, NoGpus()), context=self._context)
            for local in range(RANKS_PER_NODE):
                rank = SimulatedRank(model, node * RANKS_PER_NODE + local, local, ranks)
                rank.traces = agent.ranks.traces
                self.ranks.append(rank)
                agent.ranks._watches[rank.rank, 0] = cast(RankWatch, rank)
            self.agents.append(agent)

    def turn(self) -> None:
        """Every agent takes a turn, as it does fifty times a second."""
        for agent in self.agents:
            agent.turn(time.monotonic())
        self._turns += 1
        if self._turns % 32 == 0:
            self.weigh()

    def weigh(self) -> None:
        """Note how much the agents hold."""
        self.agent_bytes = max(self.agent_bytes, *(held_bytes(agent) for agent in self.agents))
        grown = (psutil.Process().memory_info().rss - self._rss) // len(self.agents)
        self.agents_rss = max(self.agents_rss, grown)

    def settle(self) -> None:
        """Until everything that was sent is acknowledged."""
        deadline = time.monotonic() + PATIENCE_S
        self.turn()
        while not all(agent.outbox.empty for agent in self.agents):
            self.turn()
            time.sleep(0.002)
            if time.monotonic() > deadline:
                sys.exit(f"the collector has not taken everything within {PATIENCE_S:.0f} s")

    def end(self) -> None:
        """All ranks end well; until every agent has the verdict."""
        done = msgspec.json.encode(LaunchDone("ok"))
        for agent in self.agents:
            agent.hear_launch(done, time.monotonic())
        while not all(agent.finished(time.monotonic()) for agent in self.agents):
            for agent in self.agents:
                if not agent.finished(time.monotonic()):
                    agent.turn(time.monotonic())
            time.sleep(0.002)

    def close(self) -> None:
        """Let go of all sockets."""
        for agent in self.agents:
            agent.close()
        self._context.term()


def held_bytes(agent: NodeAgentLoop) -> int:
    """All messages' that an agent has and the collector has not stored."""
    outbox = agent.outbox
    waiting = sum(map(len, outbox._names)) + outbox._page_bytes
    return waiting + sum(len(data) for data, *_ in outbox._kept.values())


def measure(
    ranks: int,
    pages: int,
    rate: float,
    frames: int,
    anomalies: int,
    folder: Path,
    stopped: float = 0.0,
    share: float = 1.0,
    at_once: int = 0,
) -> Figures:
    """One job of `ranks` ranks."""
    figures = Figures(ranks)
    model = Model(frames)
    collector = Collector(folder / "runs")
    nodes = Nodes(ranks, collector, folder / "nodes", model)
    try:
        began, cpu = time.monotonic(), collector.cpu_s()
        nodes.settle()
        figures.names_s, figures.names_cpu_s = time.monotonic() - began, collector.cpu_s() - cpu

        began, cpu, own = time.monotonic(), collector.cpu_s(), time.process_time()
        raised: list[tuple[float, int]] = []
        stop_at = began + pages / rate / 3 if stopped else math.inf
        collector.hold_to(share)
        goes_on = 0.0
        for number in range(pages):
            if time.monotonic() >= stop_at and not figures.stopped_s:
                if not raised:
                    collector.signal(signal.SIGSTOP)
                    raised.append((overflow(nodes, ranks - 1, 2_000_000), ranks - 1))
                elif time.monotonic() >= stop_at + stopped:
                    collector.signal(signal.SIGCONT)
                    goes_on = time.time()
                    figures.stopped_s = time.monotonic() - stop_at
            for place, rank in enumerate(nodes.ranks):
                while rate and time.monotonic() - began < (number + place / ranks) / rate:
                    nodes.turn()
                    time.sleep(0.002)
                rank.next_page()
                if place % 256 == 255:
                    nodes.turn()
            nodes.turn()
            collector.cpu_s()
        nodes.weigh()
        drained = time.monotonic()
        if stopped or share < 1 or at_once:
            collector.signal(signal.SIGCONT)
            first = ranks // 2 + 1
            others = [rank for rank in range(ranks) if rank != first][: max(0, at_once - 1)]
            last = overflow(nodes, first, 1_500_000, others)
            collector.await_verdict(first, last, nodes.turn)
            figures.last_verdict_s = (collector.first_named(first, last) or math.inf) - last
        collector.hold_to(1.0)
        nodes.settle()
        figures.drain_s = time.monotonic() - drained
        figures.seconds, figures.cpu_s = time.monotonic() - began, collector.cpu_s() - cpu
        figures.agents_cpu_s = time.process_time() - own
        figures.pages = pages * ranks
        figures.bytes_sent = figures.pages * len(msgspec.msgpack.encode(model.page(0, 0, 0)))

        for number in range(min(anomalies, ranks)):
            bad = nodes.ranks[number * (ranks // min(anomalies, ranks))]
            seq = 1_000_000 - number  # earlier in the training than the one before, whatever its batch
            raised.append((overflow(nodes, bad.rank, seq), bad.rank))
            nodes.settle()
            collector.await_verdict(bad.rank, raised[-1][0])

        figures.events_sent = sum(rank.events for rank in nodes.ranks) + 2 * ranks
        began, cpu, own = time.monotonic(), collector.cpu_s(), time.process_time()
        nodes.end()
        figures.end_s, figures.end_cpu_s = time.monotonic() - began, collector.cpu_s() - cpu
        figures.end_agents_cpu_s = time.process_time() - own
        figures.recorded = sum(rank.pages for rank in nodes.ranks)
        figures.dropped = sum(sum(agent.outbox.pages_dropped.values()) for agent in nodes.agents)
        figures.thinned = sum(rank.thinned for rank in nodes.ranks)
        figures.agent_bytes, figures.agents_rss = nodes.agent_bytes, nodes.agents_rss
    finally:
        nodes.close()
        collector.end()
    figures.peak_rss = collector.peak_rss
    named = [(when, after) for when, rank in raised if (after := collector.first_named(rank, when)) is not None]
    took = sorted(after - when for when, after in named)
    figures.latencies = len(took)
    if stopped and named:
        figures.stopped_verdict_s = named[0][1] - goes_on
    if took:
        figures.latency_p50, figures.latency_p99 = took[len(took) // 2], took[min(len(took) - 1, int(len(took) * 0.99))]
    read_again(collector.run, figures)
    return figures


def overflow(nodes: Nodes, number: int, seq: int, later: Sequence[int] = ()) -> float:
    """A rank meets one after so many collectives, in a batch that all others finish. Returns the time of the event.

    Ranks of `later` meet one in the same batch, after more collectives; they are heard of first.
    """
    for after, other in enumerate(later, 1):
        nodes.ranks[other].overflow(seq + after)
    when = nodes.ranks[number].overflow(seq) / 1e9
    nodes.turn()  # making the pages of the others here takes longer than on their own machines
    for rank in nodes.ranks:
        if rank.rank != number and rank.rank not in later:
            rank.next_page(seq)
    return when


def read_again(run: Path, figures: Figures) -> None:
    """`gpuwatch report`, and `gpuwatch report --again`."""
    report = json.loads((run / "report.json").read_text())
    figures.verdict = report["verdict"]["statement"]
    figures.report_bytes = (run / "report.json").stat().st_size
    figures.store_bytes = (run / "run.sqlite").stat().st_size
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as store:
        stored = dict(store.execute("SELECT kind, count(*) FROM message GROUP BY kind"))
    figures.pages_stored, figures.events_stored = stored.get("page", 0), stored.get("event", 0)
    command = [sys.executable, "-m", "gpuwatch.cli.main", "report", str(run)]
    figures.show_s, figures.show_cpu_s, _ = _run(command)
    figures.again_s, figures.again_cpu_s, figures.again_rss = _run([*command, "--again"])


def _run(command: list[str]) -> tuple[float, float, int]:
    """(seconds, seconds of the processor, peak memory) of a command."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    most = 0
    while child.poll() is None:  # what the system says at the end counts this process, too: it was a copy of it
        most = max(most, peak_memory(child.pid))
        time.sleep(0.005)
    if child.returncode:
        sys.exit(f"{' '.join(command)} ended with {child.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, most


def peak_memory(pid: int) -> int:
    """The most memory that a process has had so far; 0 once it has ended."""
    try:
        return 1024 * int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):
        return 0


def table(all_figures: list[Figures]) -> str:
    """Lines of a table in Markdown."""
    lines = [
        "| ranks | pages/s | MB/s | collector CPU per page (ms) | cores at 1 page/s each | dropped | "
        "peak memory (MB) | names (CPU s) | anomaly to verdict p50, p99 (s) | "
        "end to verdict (s; CPU s; CPU s of all agents) | report (s; CPU s) | "
        "report --again (s; CPU s; MB) | store (MB) | report.json (MB) |",
        "|" + "---|" * 14,
    ]
    for f in all_figures:
        per_page = f.cpu_s / f.pages if f.pages else 0.0
        latency = "-" if f.latency_p50 is None else f"{f.latency_p50:.2f}, {f.latency_p99:.2f} ({f.latencies})"
        lines.append(
            f"| {f.ranks} | {f.pages / f.seconds:.0f} | {f.bytes_sent / f.seconds / 1e6:.0f} | {per_page * 1e3:.2f} | "
            f"{per_page * f.ranks:.2f} | {f.dropped} | {f.peak_rss / 1e6:.0f} | {f.names_cpu_s:.1f} | {latency} | "
            f"{f.end_s:.1f}; {f.end_cpu_s:.1f}; {f.end_agents_cpu_s:.1f} | {f.show_s:.1f}; {f.show_cpu_s:.1f} | "
            f"{f.again_s:.1f}; {f.again_cpu_s:.1f}; {f.again_rss / 1e6:.0f} | "
            f"{f.store_bytes / 1e6:.0f} | {f.report_bytes / 1e6:.2f} |"
        )
    return "\n".join(lines)


def stopped_table(all_figures: list[Figures]) -> str:
    """What became of all when the collector was stopped."""
    lines = [
        "| ranks | stopped (s) | it goes on to verdict (s) | last anomaly to verdict (s) | drained after (s) | "
        "an agent's messages at most (MB) | an agent's memory (MB) | pages: recorded, stored, thinned, dropped | "
        "events: told, stored |",
        "|" + "---|" * 9,
    ]
    for f in all_figures:
        if f.last_verdict_s is not None:
            goes_on = "-" if f.stopped_verdict_s is None else f"{f.stopped_verdict_s:.2f}"
            lines.append(
                f"| {f.ranks} | {f.stopped_s:.1f} | {goes_on} | {f.last_verdict_s:.2f} | "
                f"{f.drain_s:.1f} | {f.agent_bytes / 1e6:.1f} | {f.agents_rss / 1e6:.1f} | "
                f"{f.recorded}, {f.pages_stored}, {f.thinned}, {f.dropped} | {f.events_sent}, {f.events_stored} |"
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def plot(all_figures: list[Figures], path: Path) -> None:
    """Draw how the figures grow with the ranks. Exits with a sentence where there is no matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    ranks = [f.ranks for f in all_figures]
    drawn: list[tuple[str, dict[str, list[float | None]]]] = [
        (
            "cores of the collector",
            {"a page a second from each rank": [f.cpu_s / f.pages * f.ranks if f.pages else None for f in all_figures]},
        ),
        ("memory of the collector (MB)", {"peak": [f.peak_rss / 1e6 for f in all_figures]}),
        (
            "seconds from an anomaly to the verdict",
            {"median": [f.latency_p50 for f in all_figures], "99 %": [f.latency_p99 for f in all_figures]},
        ),
        ("seconds to the report", {"at the job's end": [f.end_s for f in all_figures]}),
    ]
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), constrained_layout=True)
    for axis, (title, lines) in zip(axes.flat, drawn, strict=True):
        for name, values in lines.items():
            axis.plot(ranks, values, marker="o", label=name)
        axis.set(title=title, xlabel="ranks", xscale="log", yscale="log", xticks=ranks, xticklabels=map(str, ranks))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a collector takes.")
    parser.add_argument("--ranks", default="8,64", metavar="N,N", help="multiples of 8, from 8 to 8192 (8,64)")
    parser.add_argument("--pages", type=int, default=10, metavar="N", help="pages of each rank (10)")
    parser.add_argument("--rate", type=float, default=1.0, metavar="R", help="pages of a rank a second; 0: at once (1)")
    parser.add_argument(
        "--frames", type=int, default=1000, metavar="N", help="frames of a page, each with 3 rows (1000)"
    )
    parser.add_argument("--anomalies", type=int, default=20, metavar="N", help="ranks that meet an overflow (20)")
    parser.add_argument(
        "--stopped", type=float, default=0.0, metavar="S", help="stop the collector for so many seconds (0)"
    )
    parser.add_argument(
        "--share", type=float, default=1.0, metavar="F", help="let the collector run for F of each 0.1 s (1)"
    )
    parser.add_argument(
        "--at-once", type=int, default=0, metavar="N", help="ranks that overflow together at the end (0)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, too: .svg or .png; needs matplotlib")
    parser.add_argument(
        "--from-json", type=Path, action="append", metavar="FILE", help="measure nothing: the figures of these runs"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for the store; removed afterwards")
    options = parser.parse_args()
    counts = [int(number) for number in options.ranks.split(",")]
    if any(count < 8 or count > 8192 or count % RANKS_PER_NODE for count in counts):
        sys.exit(f"--ranks: expected multiples of 8 from 8 to 8192, found {options.ranks}")
    if options.stopped and not options.rate:
        sys.exit("--stopped needs a --rate: it is counted in the seconds of the pages")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    done: list[Figures] = []
    for path in options.from_json or ():
        done += msgspec.json.decode(path.read_bytes(), type=list[Figures])
    for count in counts if not options.from_json else ():
        folder = Path(tempfile.mkdtemp(prefix="gpuwatch-benchmark-", dir=options.folder))
        try:
            done.append(
                measure(
                    count,
                    options.pages,
                    options.rate,
                    options.frames,
                    options.anomalies,
                    folder,
                    options.stopped,
                    options.share,
                    options.at_once,
                )
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        figures: dict[str, Any] = asdict(done[-1])
        print(json.dumps(figures), file=sys.stderr, flush=True)
    print(table(done))
    print(stopped_table(done))
    if options.plot:
        plot(sorted(done, key=lambda figures: figures.ranks), options.plot)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in done], indent=1))


if __name__ == "__main__":
    main()
