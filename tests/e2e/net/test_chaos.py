"""Collector, agents, connections and disks are killed, stopped, cut, filled and resumed at random while ranks train.

Four ranks on two nodes: network namespaces, each with a small /dev/shm of its own; the runs' folder is a small disk.
Whatever the seed, the verdict is right, no event is lost or told twice, and the losses are bit for bit those of the
undisturbed run.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

COLLECTOR_PORT = 29401
RANKS, PEAKS = 4, 8
KINDS = ("clean", "overflow", "killed")
CODES = {"clean": 0, "overflow": 4, "killed": 5}
WITHIN_S = 800
HELPERS = ("gpuwatch.collector", "gpuwatch.launcher.agent.agent")
PAUSE_S = (0.2, 4.0)
"""From one disturbance to the next."""
AFTER_S = 20.0
"""So long after the training it goes on."""


class Chaos:
    """A job on two nodes, and all that can be done to what is ours in it."""

    def __init__(self, job, rng):
        self.job, self.rng = job, rng
        self.bench, self.nodes, self.cwd = job.bench, job.network.nodes, job.bench.cwd
        self.runs_dir = self.cwd / "gpuwatch-runs"
        self.done = []
        """What was done, for whoever has to find out why a seed fails."""
        self._timers = []
        self._faulty = threading.Lock()
        """Held while packets are lost: one such fault at a time."""
        self._began = time.monotonic()

    def start(self, *args):
        """Both launches; what they say goes to files."""
        (self.cwd / "tmp").mkdir()
        variables = {"GPUWATCH_SECRET": "a secret that is long enough", "TMPDIR": str(self.cwd / "tmp")}
        mount = 'mount -t tmpfs -o size=48m tmpfs /dev/shm && exec "$@"'
        head = self.nodes[0].address
        options = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "a job"]
        options += [
            "--rdzv-endpoint",
            f"{head}:{COLLECTOR_PORT - 1}",
            "--preflight",
            "off",
            self.bench.script("chaos.py"),
        ]
        command = [sys.executable, "-m", "gpuwatch.cli.main", "launch", *options, *map(str, args)]
        for node in self.nodes:
            with self.said_of(node).open("w") as said:
                self.job.processes[node] = subprocess.Popen(
                    node.inside(["sh", "-c", mount, "sh", *command]),
                    cwd=self.cwd,
                    env={**self.bench.environment, **variables},
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
            self.bench.started.append(self.job.processes[node])

    def said_of(self, node):
        return self.cwd / f"said-by-{node.host}"

    @property
    def running(self):
        return any(process.poll() is None for process in self.job.processes.values())

    @property
    def training(self):
        """Whether all ranks have made a step."""
        files = [self.cwd / f"losses-{rank}" for rank in range(RANKS)]
        return all(file.exists() and file.stat().st_size for file in files)

    def disturb(self):
        """One thing after another, until the launches have ended or the training is over for a while."""
        over = None
        while self.running:
            if over is None and self.training and not self.ranks():
                over = time.monotonic()
            if over is not None and time.monotonic() - over > AFTER_S:
                return
            if self.training:
                self.rng.choice([self.kill, self.kill, self.stop, self.cut, self.drop, self.fill, self.part])()
            time.sleep(self.rng.uniform(*PAUSE_S))

    def undo(self):
        """Wait until all goes on."""
        for timer in self._timers:
            timer.join()

    def ranks(self):
        return self.bench.running("-mgpuwatch.worker")

    def _note(self, what):
        self.done.append(f"{time.monotonic() - self._began:.1f} s: {what}")

    def _for_a_while(self, resume, longest_s):
        """`resume` is called after a random time, from another thread; meanwhile the next thing may happen."""
        seconds = self.rng.uniform(0.1, longest_s)
        timer = threading.Timer(seconds, resume)
        self._timers.append(timer)
        timer.start()
        return f"for {seconds:.1f} s"

    def _helper(self):
        found = sorted((process for word in HELPERS for process in self.bench.running(word)), key=lambda p: p.pid)
        return self.rng.choice(found) if found else None

    def kill(self):
        helper = self._helper()
        if helper is not None:
            with contextlib.suppress(psutil.Error):
                self._note(f"kill {' '.join(helper.cmdline()[1:])} {helper.pid}")
                helper.kill()

    def stop(self):
        helper = self._helper()
        if helper is None:
            return

        def resume():
            with contextlib.suppress(psutil.Error):
                helper.resume()

        with contextlib.suppress(psutil.Error):
            helper.suspend()
            how_long = self._for_a_while(resume, 26.0 if self.rng.random() < 0.1 else 4.0)
            self._note(f"stop {' '.join(helper.cmdline()[1:])} {helper.pid} {how_long}")

    def cut(self):
        """Every connection with the collector is torn; both sides hear of it."""
        node = self.rng.choice(self.nodes)
        self._note(f"cut the connections of {node.host}")
        where = f"sport = :{COLLECTOR_PORT} or dport = :{COLLECTOR_PORT}"
        self._in(node, "ss", "--tcp", "--kill", *where.split())

    def drop(self):
        """Packets to and from the collector are lost; nobody hears of it."""
        if not self._faulty.acquire(blocking=False):
            return
        node = self.rng.choice(self.nodes)
        self._in(node, "nft", "add table inet chaos")
        self._in(node, "nft", "add chain inet chaos lost { type filter hook input priority 0; }")
        self._in(node, "nft", f"add rule inet chaos lost tcp sport {COLLECTOR_PORT} drop")
        self._in(node, "nft", f"add rule inet chaos lost tcp dport {COLLECTOR_PORT} drop")

        def resume():
            self._in(node, "nft", "flush ruleset")
            self._faulty.release()

        self._note(f"lose the collector's packets at {node.host} {self._for_a_while(resume, 15.0)}")

    def part(self):
        """The two nodes do not reach each other at all, which the training has to bear, too."""
        if not self._faulty.acquire(blocking=False):
            return
        self.job.network.cut_off(self.nodes[1])

        def resume():
            self.job.network.restore()
            self._faulty.release()

        self._note(f"part the nodes {self._for_a_while(resume, 1.5)}")

    def fill(self):
        """No disk has room: that of the runs, or the shared memory of a node."""
        disks = [self.runs_dir, *(Path(f"/proc/{p.pid}/root/dev/shm") for p in self.job.processes.values())]
        filler = self.rng.choice(disks) / "filler"

        def free():
            with contextlib.suppress(OSError):
                filler.unlink()

        with contextlib.suppress(OSError):
            fill_up(filler)
            self._note(f"fill {filler.parent} {self._for_a_while(free, 12.0)}")

    def _in(self, node, *command):
        subprocess.run(["ip", "netns", "exec", node.namespace, *command], capture_output=True)


def fill_up(path):
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


@pytest.fixture
def chaos(job):
    """The job, and a disk of few megabytes for its runs."""
    made = Chaos(job(2), random.Random())
    made.runs_dir.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(made.runs_dir)], capture_output=True)
    if mount.returncode:
        pytest.skip("cannot mount a small file system here")
    yield made
    made.undo()
    for process in made.job.processes.values():  # of a test that has failed
        process.kill()
        process.wait()
    subprocess.run(["umount", "--lazy", str(made.runs_dir)], check=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """`undisturbed(400)`: by rank, the losses of so many steps under torchrun alone."""
    known = {}

    def train(steps):
        if steps not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            script = str(Path(__file__).parents[1] / "scripts" / "chaos.py")
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), script]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            arguments = ["--steps", str(steps), "--peaks", str(PEAKS)]
            subprocess.run([sys.executable, *command, *arguments], cwd=folder, env=environment, check=True)
            known[steps] = [(folder / f"losses-{rank}").read_text().splitlines() for rank in range(RANKS)]
        return known[steps]

    return train


def holds(chaos, undisturbed, seed, seconds):
    """Train so long, disturbed, and check all that must hold."""
    rng = chaos.rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    steps = int(seconds / 0.05)
    guilty, batch = rng.randrange(RANKS), rng.randrange(steps // 4, steps) | 1
    plan = ["--kind", kind, "--rank", guilty, "--batch", batch]
    chaos.start("--steps", steps, "--pace", 0.05, "--peaks", PEAKS, *plan)
    try:
        chaos.disturb()
        codes = [process.wait(WITHIN_S) for process in chaos.job.processes.values()]
    finally:
        said = "\n\n".join(chaos.said_of(node).read_text() for node in chaos.nodes)
        print(said, *chaos.done, sep="\n")  # shown where the test fails

    assert codes == [CODES[kind]] * 2
    last = steps if kind == "clean" else batch
    for place in reports_of(chaos):
        check(json.loads(place.read_text()), chaos, kind, guilty, batch, last)

    expected = undisturbed(steps)
    for rank in range(RANKS):
        losses = (chaos.cwd / f"losses-{rank}").read_text().splitlines()
        assert losses == expected[rank][: len(losses)], f"rank {rank}"
        assert len(losses) == last, f"rank {rank}"
    (log,) = chaos.runs_dir.glob("*-*/logs/collector.log")
    assert "Traceback" not in log.read_text()


def check(report, chaos, kind, guilty, batch, last):
    verdict = report["verdict"]
    assert verdict["kind"] == kind.replace("killed", "lost")
    if kind != "clean":
        assert (verdict["rank"], verdict["batch"]) == (guilty, batch)
        assert verdict["module"] == {"overflow": "widen", "killed": "deadly"}[kind]

    assert [rank["batch"] for rank in report["ranks"]] == [last if kind != "clean" else last - 1] * RANKS
    assert [rank["state"] for rank in report["ranks"]].count("lost") == 0
    for rank, told in enumerate(report["ranks"]):
        happened = (chaos.cwd / f"peaks-{rank}").read_text().splitlines()
        assert [f"{one['module']} {one['batch']}" for one in told["warnings"]] == happened, f"rank {rank}"
        assert set(told["lost"].values()) == {0}, told["lost"]
    doubled = [
        entry for entry, times in Counter((e["rank"], e["what"]) for e in report["timeline"]).items() if times > 1
    ]
    assert doubled == []


def reports_of(chaos):
    """In the run's folder, or where it was kept as the runs' disk was full; both, if a collector that had made it was
    killed, and the next one found the disk full."""
    places = [*chaos.runs_dir.glob("*-*/report.json"), *(chaos.cwd / "tmp").glob("gpuwatch-*/report.json")]
    assert places
    return places


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_to_the_helpers_the_verdict_is_right(chaos, undisturbed, seed):
    holds(chaos, undisturbed, seed, 20)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_two_minutes_of_it(chaos, undisturbed, seed):
    holds(chaos, undisturbed, seed, 120)
