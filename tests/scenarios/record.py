"""Records runs for tests/data/runs: `python tests/scenarios/record.py FOLDER [--only NAME]`, then `--pack FOLDER`.

FOLDER keeps each run's store as it was written. `--pack` writes what the tests read: the same store, compressed,
without the machine's names, paths and figures.
"""

from __future__ import annotations

import argparse
import lzma
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from gpuwatch.collector.store import RunStore
from gpuwatch.core.wire.messages import AgentMessage, TelemetryMessage, decode_agent, encode
from runner import SCRIPTS, start_watched
from truths import LEAF, SCENARIOS, Scenario

DATA = Path(__file__).parents[1] / "data" / "runs"
SUFFIX = ".sqlite.xz"
NAMES = (
    "leaf",
    "leaf, trained on",
    "leaf, one of four ranks",
    "leaf, --every 5, a watched batch",
    "leaf, --every 5, an idle batch",
    "residual add",
    "between two children",
    "LSTM",
    "two models and optimizers",
    "two ranks in one batch",
    "autocast in float16",
    "bad batch",
    "weight bad at the start, on one rank",
    "bit flip to inf",
    "a weight changed through .data",
    "a buffer that nobody has initialised",
    "all ranks alike",
    "activation's gradient",
    "activation's gradient, --guard-optimizer",
    "weight's gradient in float16",
    "the script's own loss",
    "between two children, backward",
    "no_sync",
    "sum of accumulated gradients",
    "checkpointing, not reentrant, forward",
    "checkpointing, reentrant, backward",
    "optimizer step",
    "Adam without eps",
    "the script's own clipping",
    "all-reduce in float16",
    "FSDP2, forward",
    "FSDP2, backward",
    "tensor parallel, a shard's weight",
    "pipeline, forward",
    "pipeline, backward",
    "rows masked whole, kept",
    "GradScaler's scale collapses",
    "leaf, of a module that is not watched",
    "a process that leaves in a forward with exit code 0",
    "evaluation between training",
)
OTHERS = (Scenario("leaf, restarted once", "forward_leaf.py", LEAF, options=("--max-restarts", "1")),)
"""More than the scenarios of truths.py."""


def file_of(name: str) -> Path:
    """Where a run is kept."""
    return DATA / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + SUFFIX)


def recorded() -> list[Scenario]:
    """The scenarios that runs are kept of."""
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    return [*(by_name[name] for name in NAMES), *OTHERS]


def pack(store: Path, target: Path) -> None:
    """Write a run's store once more: compressed, and without this machine's names, paths and figures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sqlite"
        source, copy = RunStore(store), RunStore(path, create=True)
        hidden = _of_this_machine()
        for agent, n, body in source.messages():
            if isinstance(body, TelemetryMessage):
                body = msgspec.structs.replace(body, series=[], samples=b"", troubles=[])
            message = AgentMessage(n, body, max(0, n - 1))
            data = msgspec.msgpack.encode(_replaced(msgspec.msgpack.decode(encode(message)), hidden))
            if n:
                copy.add(agent, decode_agent(data), data)
            else:
                copy.beat(agent, data)
        copy.set("started", "2026-01-01T00:00:00Z")
        for key in ("lost_agents", "max_frames"):
            value = source.get(key)
            if value is not None:
                copy.set(key, value)
        source.close()
        copy.close()
        target.write_bytes(lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME))


def _of_this_machine() -> list[tuple[str, str]]:
    root = str(Path(__file__).parents[2])
    return [(root, "/gpuwatch"), (sys.prefix, "/python"), (sys.base_prefix, "/python"), (socket.gethostname(), "node0")]


def _replaced(found: Any, hidden: list[tuple[str, str]]) -> Any:
    if isinstance(found, str):
        for text, instead in hidden:
            found = found.replace(text, instead)
        return re.sub(r"/tmp/[^/ :\"']+", "/tmp/run", found)
    if isinstance(found, list):
        return [_replaced(each, hidden) for each in found]
    if isinstance(found, dict):
        return {_replaced(key, hidden): _replaced(value, hidden) for key, value in found.items()}
    return found


def record(scenario: Scenario, target: Path) -> None:
    """Run it, and keep its store."""
    with tempfile.TemporaryDirectory(prefix="scenario-") as folder:
        start_watched(scenario, folder)
        shutil.copy(Path(folder) / "gpuwatch-runs" / "latest" / "run.sqlite", target)


def _chosen(only: str) -> Iterator[tuple[Scenario, str]]:
    for scenario in recorded():
        assert (SCRIPTS / scenario.script).exists()
        if only in scenario.name:
            yield scenario, file_of(scenario.name).name.removesuffix(".xz")


def main() -> None:
    parser = argparse.ArgumentParser(description="Records runs for the tests.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--pack", action="store_true", help="write what was recorded before for the tests")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    DATA.mkdir(exist_ok=True)
    for scenario, name in _chosen(arguments.only):
        path = arguments.folder / name
        if arguments.pack and path.exists():
            pack(path, file_of(scenario.name))
        elif not arguments.pack and not path.exists():
            record(scenario, path)
            print(scenario.name, flush=True)


if __name__ == "__main__":
    main()
