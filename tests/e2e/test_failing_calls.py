"""A call of gpuwatch's own fails in a real launch: tests/sweep does the same to light ranks, for every call."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sweep"))  # its files are scripts' neighbours

from disturbed_run import Failure, compile_shim, counts_of, environment, new_counts

CALLS = {
    "recorder": {"write": 2, "open": 4, "map": 2},
    "agent": {"write": 15, "open": 30, "map": 7, "send": 10, "alloc": 1000, "thread": 3},
    "collector": {"write": 90, "open": 60, "map": 14, "sync": 16, "send": 10, "alloc": 40000, "thread": 5},
    "launcher": {"write": 1, "open": 16, "send": 5},
}
"""How many there are at least; which one fails is drawn."""
EACH = [pytest.param(role, kind, id=f"{role} {kind}") for role, kinds in CALLS.items() for kind in kinds]


@pytest.fixture
def failing(bench, tmp_path, request):
    """`failing(role, kind)`: what makes one such call of a launch fail."""

    def drawn(role: str, kind: str) -> dict[str, str]:
        seed = request.config.getoption("turn") or request.config.getoption("seed")
        n = random.Random(f"{seed} {request.node.name}").randint(1, CALLS[role][kind])
        failure = Failure(role, "work", kind, n)
        print(failure)
        (tmp_path / "tmp").mkdir()
        new_counts(tmp_path)
        return {"LD_PRELOAD": str(compile_shim(tmp_path)), **environment(tmp_path, failure)}

    yield drawn
    print(counts_of(tmp_path)[1:])
    made = [Path(line) for line in (tmp_path / "made").read_text().splitlines()]
    assert not [path for path in made if path.exists() and str(path).startswith("/dev/shm")]


def verdict_of(run) -> dict:
    """No report is as good as one that says unknown."""
    try:
        return run.verdict
    except FileNotFoundError:
        return {"kind": "unknown", "certainty": "unknown"}


@pytest.mark.slow
@pytest.mark.sample(1, of="calls that fail in a launch", turns=True)
@pytest.mark.parametrize(("role", "kind"), EACH)
def test_a_rank_that_overflows_is_named_or_none_is(bench, failing, role, kind):
    run = bench.launch(
        "ddp_overflow.py",
        "--standalone",
        "--preflight",
        "off",
        args=("--rank", "1", "--batch", "3"),
        **failing(role, kind),
    )
    verdict = verdict_of(run)
    assert run.code == 4, "rank 0 meets it in the gradients, should rank 1 not be watched"
    assert verdict["kind"] in ("overflow", "unknown")
    if verdict["certainty"] != "unknown":
        assert (verdict["rank"], verdict["module"], verdict["batch"]) == (1, "block.widen", 3)


@pytest.mark.soak
@pytest.mark.parametrize(("role", "kind"), EACH)
def test_a_healthy_script_trains_as_under_torchrun(bench, failing, role, kind):
    run = bench.launch("clean.py", "--standalone", "--preflight", "off", **failing(role, kind))
    plain = bench.torchrun("--standalone", "--nproc-per-node", "2", bench.script("clean.py"))
    assert sorted(run.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert (run.code, verdict_of(run)["kind"]) in ((0, "clean"), (6, "unknown"))
