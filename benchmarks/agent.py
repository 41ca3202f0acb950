"""What a node agent costs: memory and share of a core, while the recorders of its ranks are written.

    python benchmarks/agent.py [--ranks 8] [--seconds 60] [--batch-ms 10] [--frames 20]
                               [--trace-batches 1000000] [--telemetry 5] [--viewer]

The agent and the collector are those of a launch, in processes of their own. The recorders are written by the
product's own writer in this process: each rank a batch every so many milliseconds. Linux.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import psutil
from gpuwatch.collector.views.publisher import job_viewer
from gpuwatch.core.events.definitions import ModuleDef, RootDef, SlotDef
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.events.script_events import ScriptExit
from gpuwatch.core.recorder.layout import NOTHING, HeadField, HooksState, RankPhase, file_name
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.values import ValueEncoding
from gpuwatch.core.wire.keys import derive_keys, random_secret
from gpuwatch.core.wire.messages import AgentHello
from gpuwatch.core.wire.pipe import (
    AgentConfig,
    CollectorBound,
    CollectorConfig,
    LaunchDone,
    WorkersEnded,
    WorkersStarted,
)
from gpuwatch.launcher.head_collector import HeadCollector
from gpuwatch.launcher.helper_processes import NodeAgent

ONE = 0x3F800000


def make_rank(folder: Path, rank: int, ranks: int, frames: int) -> RecorderWriter:
    """A recorder with the names of a model of that many modules."""
    writer = RecorderWriter(folder / file_name(rank, 0), rank=rank, local_rank=rank, world_size=ranks, attempt=0)
    writer.fields[HeadField.HOOKS] = HooksState.ATTACHED
    writer.append(RootDef(0, "Net"), name=True)
    for module in range(frames):
        writer.append(ModuleDef(module, 0, f"layers.{module}.linear", "Linear"), name=True)
        for number, role in enumerate(("weight", "input[0]", "output")):
            writer.append(SlotDef(3 * module + number, module, role), name=True)
    return writer


def write_batch(writer: RecorderWriter, batch: int, frames: int) -> None:
    """One batch: a frame of three rows for each module."""
    page = writer.begin_page(0, batch, batch)
    for module in range(frames):
        rows = [
            (3 * module + n, writer.value(ONE, ONE, ValueEncoding.FLOAT32 << 8), NOTHING, 1, 0, 0) for n in range(3)
        ]
        writer.frame(module, NOTHING, 0, 0, batch, rows)
    writer.end_page(page)


def start(folder: Path, ranks: int, traced: list[int], telemetry_s: float) -> tuple[HeadCollector, NodeAgent]:
    """As a launch does on its head node."""
    keys = derive_keys(random_secret(), "benchmark")
    public, private = keys.collector.public.decode(), keys.collector.private.decode()
    collector = HeadCollector(
        CollectorConfig(
            bind="tcp://127.0.0.1:*",
            public_key=public,
            private_key=private,
            agent_public_key=keys.agent.public.decode(),
            viewer_public_key=keys.viewer.public.decode(),
            runs_dir=str(folder / "runs"),
            rdzv_id="benchmark",
            viewer_private_key=keys.viewer.private.decode(),
        ),
        print,
        lambda line: None,
    )
    assert isinstance(collector.answer, CollectorBound)
    agent = NodeAgent(
        AgentConfig(
            collector=collector.answer.address,
            server_key=public,
            public_key=keys.agent.public.decode(),
            private_key=keys.agent.private.decode(),
            recorder_dir=str(folder),
            spool_dir=str(folder),
            hello=AgentHello("", "", ranks, 1, 1, ["benchmark"], {}, "benchmark", trace_batches=traced),
            telemetry_s=telemetry_s,
        ),
        print,
        print,
    )
    return collector, agent


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--batch-ms", type=float, default=10)
    parser.add_argument("--frames", type=int, default=20)
    parser.add_argument("--trace-batches", type=int, nargs="*", default=[], help="as gpuwatch launch has it")
    parser.add_argument("--telemetry", type=float, default=5.0, help="as gpuwatch launch has it; 0: never")
    parser.add_argument("--viewer", action="store_true", help="somebody looks on, as with gpuwatch top")
    args = parser.parse_args()
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="gpuwatch-benchmark-", dir=base) as name:
        folder = Path(name)
        collector, agent = start(folder, args.ranks, args.trace_batches, args.telemetry)
        writers = [make_rank(folder, rank, args.ranks, args.frames) for rank in range(args.ranks)]
        agent.send(WorkersStarted(0, dict.fromkeys(range(args.ranks), 1)))
        assert isinstance(collector.answer, CollectorBound)
        viewer = job_viewer(Path(collector.answer.run_dir)) if args.viewer else None
        if viewer is not None:
            viewer.newest(0)
        write(writers, args, psutil.Process(agent.pid))
        if viewer is not None:
            view = viewer.newest(5)
            assert view is not None and view.hot
            viewer.close()
        for rank, writer in enumerate(writers):
            writer.append(ScriptExit(RunPosition(rank, 0), 0))
            writer.fields[HeadField.PHASE] = RankPhase.FINISHED
        agent.send(WorkersEnded(0, dict.fromkeys(range(args.ranks), 0), []))
        agent.send(LaunchDone("ok"))
        agent.wait()
        assert agent.verdict is not None
        print(f"verdict: {agent.verdict.kind}")
        agent.end(30)
        collector.end(30)
        for writer in writers:
            writer.close()


def write(writers: list[RecorderWriter], args: argparse.Namespace, agent: psutil.Process) -> None:
    """Write for so long, and print what the agent took meanwhile, tenth by tenth."""
    batch, began = 0, time.monotonic()
    at, cpu = began, sum(agent.cpu_times()[:2])
    for tenth in range(1, 11):
        while time.monotonic() < began + tenth * args.seconds / 10:
            for writer in writers:
                write_batch(writer, batch, args.frames)
            batch += 1
            time.sleep(max(0.0, began + batch * args.batch_ms / 1000 - time.monotonic()))
        now, used = time.monotonic(), sum(agent.cpu_times()[:2])
        rss, shared = agent.memory_info().rss, agent.memory_info().shared
        print(
            f"{now - began:6.0f} s  {batch / (now - began):5.0f} batches/s and rank  agent: "
            f"{100 * (used - cpu) / (now - at):.2f} % of a core, {rss / 1e6:.1f} MB ({shared / 1e6:.1f} of it shared)"
        )
        at, cpu = now, used


if __name__ == "__main__":
    main()
