"""Coverage-guided fuzzing of everything that reads bytes: the wire, a recorder, a spool, a store, a report.json.

    python tests/fuzz/readers.py {wire,recorder,spool,store,report} [options of libFuzzer, -max_total_time=600]

Needs atheris (`pip install atheris`); `make fuzz` runs each target for ten minutes. A target fails for an error that
is not one clear sentence, for an input that takes more than a minute, and for memory that grows with a number in the
file. The seeds are what the product itself writes about a small job.
"""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gpuwatch"]):
    from gpuwatch.collector.assemble.build import build_report
    from gpuwatch.collector.facts.fold import fold
    from gpuwatch.collector.finish import merged_report, report_from_store
    from gpuwatch.collector.protocol import RunProtocol, StoreMessage
    from gpuwatch.collector.report.model import to_json
    from gpuwatch.collector.report.text_report import render_text
    from gpuwatch.collector.run_files import RunPaths
    from gpuwatch.collector.store import RunStore
    from gpuwatch.collector.written_report import read_report
    from gpuwatch.core.errors import GpuwatchError
    from gpuwatch.core.events.alarms import Anomaly
    from gpuwatch.core.events.definitions import ModuleDef, RootDef, ShapeDef, SlotDef
    from gpuwatch.core.events.run_position import RunPosition
    from gpuwatch.core.events.script_events import ScriptExit
    from gpuwatch.core.recorder.layout import NOTHING, file_name
    from gpuwatch.core.recorder.writer import RecorderWriter
    from gpuwatch.core.values import ValueEncoding
    from gpuwatch.core.wire.messages import (
        AgentBody,
        AgentHello,
        AgentMessage,
        NodeBye,
        WireError,
        decode_agent,
        decode_collector,
        encode,
    )
    from gpuwatch.core.wire.spool import SpoolWriter
    from gpuwatch.launcher.agent.rank_watch import RankWatch

LOG_BYTES, SEGMENTS = 1 << 14, 4
MOST_JSON = 4 << 20
RUN = "20261121-000000-aaaa"


class Seeds:
    """What the product writes about one rank that overflows."""

    def __init__(self, folder: Path) -> None:
        path = folder / file_name(0, 0)
        writer = RecorderWriter(
            path, rank=0, local_rank=0, world_size=1, attempt=0, log_bytes=LOG_BYTES, segments=SEGMENTS
        )
        for name in (RootDef(0, "Net"), ModuleDef(0, 0, "fc", "Linear"), SlotDef(0, 0, "output"), ShapeDef(0, (2, 3))):
            writer.append(name, name=True)
        for batch in range(3):
            page = writer.begin_page(0, batch, batch)
            for _ in range(2):
                value = writer.value(0, 0x7F800000, ValueEncoding.FLOAT32 << 8 | 2)
                writer.frame(0, NOTHING, 0, 0, batch, [(0, value, 0, 1, 0, 0)])
            writer.end_page(page)
        where = RunPosition(0, 0, 2, 2, "Net", 2)
        writer.append(Anomaly(where, 0, "fc", "Linear", "forward", "output", "+inf", "float32"))
        writer.append(ScriptExit(RunPosition(0, 0), 1))
        writer.close()
        self.recorder = path.read_bytes()
        hello = AgentHello("a", "host", 1, 1, 1, ["gpuwatch", "launch"], {}, "job")
        bodies: list[AgentBody] = [hello, *of_recorder(folder), NodeBye("failed")]
        self.messages = [AgentMessage(n, body, n - 1) for n, body in enumerate(bodies, 1)]
        self.wire = [encode(message) for message in self.messages]
        spool = SpoolWriter(folder / "agent-a.spool")
        for data in self.wire:
            spool.append(data, is_page=False)
        spool.close()
        self.spool = (folder / "agent-a.spool").read_bytes()
        (folder / RUN).mkdir()
        paths = RunPaths(folder / RUN)
        store = RunStore(paths.store, create=True)
        for message, data in zip(self.messages, self.wire, strict=True):
            store.add("a", message, data)
        store.close()
        self.store = paths.store.read_bytes()
        report = report_from_store(paths)
        assert report.verdict.kind == "overflow", report.verdict
        self.report = to_json(report)


def of_recorder(folder: Path) -> list[AgentBody]:
    """What an agent makes of the recorder that lies there."""
    watch = RankWatch(folder, 0, 0, 1, [1])
    try:
        bodies = watch.poll(0)
        watch.state()
        bodies += watch.poll(100)
        bodies += watch.end(1, "itself", 101)
    finally:
        watch.close()
    return bodies


def report_of(bodies: list[AgentBody]) -> None:
    report = build_report(
        fold(("a", n, body) for n, body in enumerate(bodies, 1)), run_id="x", started=None, ended=None
    )
    assert len(to_json(report)) < MOST_JSON
    render_text(report)


def targets(folder: Path, seeds: Seeds) -> dict[str, tuple[list[bytes], Callable[[bytes], None]]]:
    """By name: seeds, and the function that takes an input."""
    run = RunPaths(folder / RUN)

    def wire(data: bytes) -> None:
        try:
            decode_collector(data)
        except WireError:
            pass
        try:
            message = decode_agent(data)
        except WireError:
            return
        protocol, kept = RunProtocol("run", "job"), []
        for each in (*seeds.messages[:-1], message, seeds.messages[-1]):
            kept += [each.body for act in protocol.on_message("a", each, 0.0) if isinstance(act, StoreMessage)]
        protocol.tick(1000.0)
        report_of(kept)

    def recorder(data: bytes) -> None:
        (folder / file_name(0, 0)).write_bytes(data)
        bodies = of_recorder(folder)
        wires = [encode(AgentMessage(n, body)) for n, body in enumerate(bodies, 1)]
        assert sum(map(len, wires)) < 8 * len(seeds.recorder) + 4 * len(data), "it grows with a number in the file"
        report_of([decode_agent(each).body for each in wires])

    def spool(data: bytes) -> None:
        path = folder / "agent-b.spool"
        path.write_bytes(data)
        told(lambda: merged_report([path]))

    def store(data: bytes) -> None:
        for name in (run.store, run.store.with_name(run.store.name + "-wal"), run.report_json):
            name.unlink(missing_ok=True)
        run.store.write_bytes(data)
        told(lambda: report_from_store(run))

    def report(data: bytes) -> None:
        run.report_json.write_bytes(data)
        told(lambda: read_report(run))

    return {
        "wire": (seeds.wire, wire),
        "recorder": ([seeds.recorder], recorder),
        "spool": ([seeds.spool], spool),
        "store": ([seeds.store], store),
        "report": ([seeds.report], report),
    }


def told(read: Callable[[], object]) -> None:
    """The input is read, or the error is one sentence."""
    try:
        found = read()
    except GpuwatchError as error:
        assert "\n" not in str(error)
    else:
        assert len(to_json(found)) < MOST_JSON  # type: ignore[arg-type]  # all of them give a report
        render_text(found)  # type: ignore[arg-type]


def main() -> None:
    names = ("wire", "recorder", "spool", "store", "report")
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        sys.exit(f"expected a target, one of {', '.join(names)}; found {' '.join(sys.argv[1:]) or 'none'}")
    name = sys.argv.pop(1)
    folder = Path(tempfile.mkdtemp(prefix="gpuwatch-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
    seeds, target = targets(folder, Seeds(folder))[name]
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, data in enumerate(seeds):
        (corpus / f"{number}").write_bytes(data)
    limits = ["-max_len=300000", "-timeout=60", "-rss_limit_mb=2048", f"-artifact_prefix={tempfile.gettempdir()}/"]
    try:
        for data in seeds:
            target(data)
        atheris.Setup([sys.argv[0], *limits, *sys.argv[1:], str(corpus)], target)
        atheris.Fuzz()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
