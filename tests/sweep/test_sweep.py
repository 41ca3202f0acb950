"""The n-th write, open, mmap, fsync, send, thread and allocation of gpuwatch's processes fails, for every n.

The answer stays right, becomes less sure, or unknown. Training and exit code are as they should be, and nothing is left
behind. `python tests/sweep/sweep.py` does the same and prints a line for each.
"""

from __future__ import annotations

import errno
import platform
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gpuwatch.core.wire.pipe import CannotBind, CollectorBound, CollectorConfig
from gpuwatch.launcher.head_collector import HeadCollector

sys.path.insert(0, str(Path(__file__).parent))  # sweep.py is a script, and finds its neighbours like this

from disturbed_run import BATCHES, JOBS, ROLES, Failure, Launches, Outcome, compile_shim, counts_of, new_counts
from sweep import failures
from wrongs import wrongs

from ..known_keys import KEYS

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or platform.libc_ver()[0] != "glibc", reason="the library needs gcc and glibc"
)
DRAWN = 2
"""Of a role's failures, in a sample."""
GOOD = " ".join(str(1 / (1 + batch)) for batch in range(BATCHES))
BAD = GOOD.replace("0.25", "inf")


@pytest.mark.slow
@pytest.mark.timeout(12 * 3600)  # the soak fails each call of a role, which is thousands of runs
@pytest.mark.parametrize(
    ("job", "role"),
    [
        pytest.param(job, role, marks=pytest.mark.sample(1, of="calls that fail", turns=True))
        for job in JOBS
        for role in ROLES
    ],
)
def test_whichever_call_fails_the_answer_is_right_or_less_sure(job, role, tmp_path, request):
    is_sample = request.config.getoption("sample")
    rng = random.Random(f"{request.config.getoption('turn') or request.config.getoption('seed')} {job} {role}")
    found = {}
    came_to_it = 0
    with Launches(tmp_path) as launches:
        plain = launches.run(job, Failure())
        assert wrongs(plain) == [], plain.said
        assert plain.failed == 0
        assert plain.report["verdict"]["certainty"] == "established", "what a failure is to make less sure"
        calls = {key: count for key, count in plain.calls.items() if key[0] == role}
        chosen = list(failures(calls, rng))
        for failure in rng.sample([one for one in chosen if not one.lasting], DRAWN) if is_sample else chosen:
            outcome = launches.run(job, failure)
            came_to_it += outcome.failed > 0
            if wrong := wrongs(outcome):
                found[f"{failure}: {outcome.first}"] = wrong, outcome.said[-2000:]
    assert found == {}
    assert came_to_it, "no call has failed"


# -- that the test itself can fail ------------------------------------------------------------------------------------


def overflow(**changed) -> Outcome:
    """As it should be."""
    verdict = {"kind": "overflow", "rank": 1, "module": "fc2", "batch": 3, "certainty": "established"}
    verdict["statement"] = "Rank 1 overflowed first."
    right = Outcome("overflow", Failure(), 4, "", {"verdict": verdict}, {}, [], {}, 1, "", 1.0)
    fields = {name: value for name, value in changed.items() if name in Outcome.__dataclass_fields__}
    told = {name: value for name, value in changed.items() if name not in fields}
    return replace(right, **{"report": {"verdict": {**verdict, **told}}, **fields})


@pytest.mark.parametrize(
    "outcome",
    [
        overflow(),
        overflow(certainty="supported"),
        overflow(certainty="supported", module=None),
        overflow(kind="unknown"),
        overflow(report=None),
        overflow(job="goes on", losses={0: GOOD, 1: BAD}),
        overflow(said="rank 1 goes on unwatched", code=6, kind="unknown", losses={0: GOOD, 1: BAD}),
        overflow(job="clean", kind="clean", code=0, losses={0: GOOD, 1: GOOD}),
        overflow(job="clean", report=None, code=6, losses={0: GOOD, 1: GOOD}),
        overflow(job="clean", kind="clean", code=6, losses={0: GOOD, 1: GOOD}, said="no verdict: the collector at x"),
    ],
)
def test_nothing_is_wrong_with_an_answer_that_is_right_or_less_sure(outcome):
    assert wrongs(outcome) == []


@pytest.mark.parametrize(
    "outcome",
    [
        overflow(code=0),
        overflow(code=6),
        overflow(code=1, kind="crash"),
        overflow(code=None),
        overflow(kind="clean"),
        overflow(code=0, kind="clean"),
        overflow(rank=0),
        overflow(module="fc1", certainty="supported"),
        overflow(module=None),
        overflow(losses={0: GOOD}),
        overflow(left=["a process"]),
        overflow(job="goes on"),
        overflow(job="goes on", losses={0: GOOD, 1: GOOD}),
        overflow(job="clean", code=0, losses={0: GOOD, 1: GOOD}),
        overflow(job="clean", kind="clean", code=0, losses={0: GOOD}),
        overflow(job="clean", kind="clean", code=6, losses={0: GOOD, 1: GOOD}),
        overflow(said="rank 1 goes on unwatched", kind="clean", code=0, losses={0: GOOD, 1: BAD}),
    ],
)
def test_what_is_wrong_is_found(outcome):
    assert wrongs(outcome) != []


PROGRAM = """
import os, sys
os.read(0, 1)
for number in range(4):
    try:
        os.close(os.open("gpuwatch.collector", os.O_CREAT | os.O_WRONLY))
        print(number, end=" ")
    except OSError as error:
        print(error.errno, end=" ")
"""


@pytest.mark.parametrize(
    ("n", "lasting", "said"),
    [(0, False, "0 1 2 3"), (2, False, f"0 {errno.EMFILE} 2 3"), (3, True, f"0 1 {errno.EMFILE} {errno.EMFILE}")],
)
def test_the_library_fails_the_call_that_it_is_told_to(n, lasting, said, tmp_path):
    failure = Failure("collector", "work", "open", n, lasting)
    new_counts(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM, "gpuwatch.collector"],
        env={"LD_PRELOAD": str(compile_shim(tmp_path)), "SWEEP_COUNTS": str(tmp_path / "counts"), **failure.env()},
        input="x",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split() == said.split()
    calls, failed, first = counts_of(tmp_path)
    assert calls["collector", "work", "open"] == 4
    assert failed == (0 if not n else 2 if lasting else 1)
    assert first == ("open gpuwatch.collector" if n else "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "answer"),
    [
        (Failure("collector", "work", "open", 1), CollectorBound),
        (Failure("collector", "work", "open", 1, lasting=True), CannotBind),
    ],
    ids=str,
)
def test_a_collector_is_tried_again_and_what_the_machine_lacks_is_no_wrong_option(
    failure, answer, tmp_path, monkeypatch
):
    new_counts(tmp_path)
    env = {"LD_PRELOAD": str(compile_shim(tmp_path)), "SWEEP_COUNTS": str(tmp_path / "counts"), **failure.env()}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    pairs = KEYS.collector.public, KEYS.collector.private, KEYS.agent.public, KEYS.viewer.public
    config = CollectorConfig("tcp://127.0.0.1:*", *(key.decode() for key in pairs), str(tmp_path / "runs"), "job")
    said: list[str] = []
    collector = HeadCollector(config, said.append, print)
    collector._ending.set()
    collector._child.end(0.01)
    assert isinstance(collector.answer, answer)
    assert answer is CollectorBound or collector.answer.may_pass, collector.answer.reason
    assert counts_of(tmp_path)[1] > 0


WITHOUT_MEMORY = """
import ctypes, os
from gpuwatch.core.guest import threads
threads.BEGINS_S = 0.1
ctypes.CDLL(os.environ["LD_PRELOAD"]).sweep_begin(2)
print(threads.start_thread(print, 0.1), threads.OneThread().submit(lambda: "done").result(0))
"""


def test_who_starts_a_thread_that_finds_no_memory_does_not_wait_for_it(tmp_path):
    new_counts(tmp_path)
    failure = Failure("agent", "start", "map", 1, lasting=True)
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY],
        env={"LD_PRELOAD": str(compile_shim(tmp_path)), "SWEEP_COUNTS": str(tmp_path / "counts"), **failure.env()},
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "False done\n", ended.stderr
    assert counts_of(tmp_path)[1] > 0
