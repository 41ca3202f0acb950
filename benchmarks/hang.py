"""From a stall to the complete report: R simulated ranks, 8 to a node agent, of which one does not come.

    python benchmarks/hang.py [--ranks 8,64,512] [--limit S]

The product's own agents and collector, sockets and messages. All ranks rest; all but one wait in an all_reduce. A rank
of this file stands where the agent's `RankWatch` stands, and answers with a stack of 20 lines where faulthandler
would. The launch of each node ends its ranks on request. Timed from the moment at which the first agent
tells that a rank has stalled.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import msgspec
from gpuwatch.core.events import GroupState, IssuedOperation, RunPosition, WorkerExit
from gpuwatch.core.wire.messages import AgentBody, EventMessage, NodeBeat, RankState
from gpuwatch.core.wire.pipe import LaunchDone
from gpuwatch.launcher.agent.agent import NodeAgentLoop
from gpuwatch.launcher.agent.stacks import LOOK_S
from simulated_ranks import Model, SimulatedRank

from collector import RANKS_PER_NODE, Collector, Nodes

BATCH = 5
PATIENCE_S = 300.0
_DEPTH = 20


class RestingRank(SimulatedRank):
    """Waits in collective 7, or is the one that never began it."""

    comes = True
    pid = -1
    """Process id of a sleeping process, which stands for a waiting rank."""

    def movement(self) -> tuple[int, ...]:
        return (BATCH,)

    def where(self, state: RankState) -> RunPosition:
        return RunPosition(self.rank, 0, BATCH, BATCH, "Net", -1, BATCH, time.time_ns())

    def groups(self) -> list[GroupState]:
        begun = 7 if self.comes else 6
        recent = [
            IssuedOperation(number, "all_reduce", "float32", 1024) for number in range(max(1, begun - 7), begun + 1)
        ]
        phase = "waiting" if self.comes else "none"
        return [GroupState("0", f"0-{self._world_size - 1}", self._world_size, begun, 6, phase, begun, 9.0, recent)]

    def stack(self) -> str:
        """What faulthandler writes."""
        inner = ("torch/distributed/distributed_c10d.py", "all_reduce") if self.comes else ("train.py", "load_batch")
        lines = [f'  File "/site/{inner[0]}", line 3112 in {inner[1]}', '  File "/home/me/train.py", line 41 in main']
        lines += [f'  File "/home/me/more.py", line {number} in call' for number in range(_DEPTH - 2)]
        return "Current thread 0x00007f (most recent call first):\n" + "\n".join(lines) + "\n"

    def end(self, code: int | None, by: str, now: float) -> list[AgentBody]:
        self.ended = True
        exit_ = WorkerExit(self.where(self.state()), -15, "torchrun", "forward", groups=self.groups())
        return [NodeBeat([self.state(final=True)], {}), EventMessage(exit_)]


def answer(agent: NodeAgentLoop, answered: set[int]) -> None:
    """What the signal brings about in each rank that is asked."""
    for _, watch, look in agent._stalls._looks:
        if id(look) not in answered:
            answered.add(id(look))
            with look._file.open("a") as file:
                file.write(cast(RestingRank, watch).stack())


def measure(ranks: int, limit_s: float, folder: Path) -> float:
    """Seconds from the first rank reported as stalled to the complete report at all agents."""
    missing = random.Random(ranks).randrange(ranks)
    collector = Collector(folder / "runs", on_hang="abort")
    nodes = Nodes(ranks, collector, folder / "nodes", Model(8), RestingRank, hang_timeout_s=limit_s)
    nodes.ranks[missing].comes = False  # type: ignore[attr-defined]
    for rank in nodes.ranks:
        rank.pages = BATCH + 1
    answered: set[int] = set()
    stalled = 0.0
    ended: set[int] = set()
    done = msgspec.json.encode(LaunchDone("failed"))
    deadline = time.monotonic() + PATIENCE_S
    try:
        nodes.settle()
        while not all(agent.finished(time.monotonic()) for agent in nodes.agents):
            if time.monotonic() > deadline:
                sys.exit(f"no report within {PATIENCE_S:.0f} s")
            for number, agent in enumerate(nodes.agents):
                if agent.finished(time.monotonic()):
                    continue
                agent.turn(time.monotonic())
                answer(agent, answered)
                if number not in ended and b'"stop"' in nodes.told(number):
                    ended.add(number)
                    agent.hear_launch(done, time.monotonic())
            if not stalled and any(
                rest._times_told for agent in nodes.agents for rest in agent._stalls._rests.values()
            ):
                stalled = time.monotonic()
            time.sleep(0.002)
        finished = time.monotonic()
    finally:
        nodes.close()
        collector.end()
    report = json.loads((collector.run / "report.json").read_text())
    verdict = report["verdict"]
    if (verdict["kind"], verdict["rank"], verdict["certainty"]) != ("hang", missing, "established"):
        sys.exit(f"expected rank {missing}, found: {verdict['statement']}")
    stacks = sum(bool(rank["stack"]) for rank in report["ranks"])
    if stacks != ranks:
        sys.exit(f"expected the stacks of {ranks} ranks, found {stacks}")
    return finished - stalled


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,512", metavar="N,N", help=f"multiples of {RANKS_PER_NODE} (8,64,512)")
    parser.add_argument(
        "--limit",
        type=float,
        default=5.0,
        metavar="S",
        help="report a rank that makes no progress for this many seconds (5)",
    )
    options = parser.parse_args()
    print(f"a rank has {LOOK_S:.0f} s to answer; that is in the figures")
    print("| ranks | job ended, report with all stacks complete (s) |\n|---|---|")
    sleeper = subprocess.Popen(["sleep", "infinity"])
    RestingRank.pid = sleeper.pid
    try:
        _measure_all(options.ranks, options.limit)
    finally:
        sleeper.kill()
        sleeper.wait()


def _measure_all(ranks: str, limit_s: float) -> None:
    for count in [int(number) for number in ranks.split(",")]:
        folder = Path(tempfile.mkdtemp(prefix="gpuwatch-benchmark-"))
        try:
            found = measure(count, limit_s, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"| {count} | {found:.1f} |", flush=True)


if __name__ == "__main__":
    main()
