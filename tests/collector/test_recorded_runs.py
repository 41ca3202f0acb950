"""Recorded runs (tests/scenarios/record.py): each verdict is the truth, and no message that is missing, damaged or out
of place makes it another one. It is the same, less sure, or unknown; it is never clean, and never names another place.

That these stores are read is a promise, too: a report can be made of them by any later version.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.model import to_json
from gpuwatch.collector.report.verdict import Verdict
from gpuwatch.collector.store import RunStore, Stored
from gpuwatch.core.errors import GpuwatchError
from gpuwatch.core.recorder import layout
from gpuwatch.core.wire.messages import PageMessage, ranks_of

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))  # its files are scripts, and find each other like this

from record import DATA, file_of, recorded
from runner import Ended, Grade, judge

SCENARIOS = recorded()
SURENESS = ["unknown", "supported", "established"]
SEED = 0


@dataclass(frozen=True)
class Run:
    """What a store holds, and the verdict of all of it."""

    file: bytes
    messages: list[Stored]
    verdict: Verdict


@cache
def run_of(name: str) -> Run:
    data = lzma.decompress(file_of(name).read_bytes())
    messages = messages_of(data)
    return Run(data, messages, decide(fold(messages)))


def messages_of(data: bytes) -> list[Stored]:
    """What is in a store's file."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "run.sqlite"
        path.write_bytes(data)
        store = RunStore(path)
        try:
            return list(store.messages())
        finally:
            store.close()


MANY = "many lost: "
"""Begins what more than one message is lost in. What is left may show a rank that only came later."""


def trouble(run: Run, found: Verdict, what: str = "") -> str:
    """What a verdict says that it may not, in place of the undamaged run's; "" if nothing."""
    truth = run.verdict
    if found.kind == "clean" != truth.kind:
        return "clean"
    if found.certainty == "established" and place(found) != place(truth):
        return f"established: {found.statement}"
    if found.kind == truth.kind and SURENESS.index(found.certainty) > SURENESS.index(truth.certainty):
        return f"surer than before: {found.statement}"
    others = {truth.rank, None, *(other.rank for other in truth.concurrent)}
    if found.kind == "overflow" and found.rank not in others and not what.startswith(MANY):
        return f"another rank: {found.statement}"
    return ""


def place(verdict: Verdict) -> tuple[object, ...]:
    return verdict.kind, verdict.rank, verdict.attempt, verdict.module, verdict.cls, verdict.phase, verdict.batch


Mutant = tuple[str, list[Stored]]


def mutants(messages: list[Stored]) -> Iterator[Mutant]:
    """The messages of a run, each time with one of them lost, damaged, or out of place."""
    for at, (agent, n, body) in enumerate(messages):
        what = f"{type(getattr(body, 'event', body)).__name__} at {at}"
        before, behind = messages[:at], messages[at + 1 :]
        yield f"{what} lost", before + behind
        yield f"{MANY}all from {what} on", before
        yield f"{what} twice", [*messages, messages[at]]
        yield f"{what} last", [*before, *behind, messages[at]]
        yield f"{what} first", [messages[at], *before, *behind]
        if isinstance(body, PageMessage):
            for how, damaged in damaged_pages(body):
                yield f"{what} {how}", [*before, (agent, n, damaged), *behind]
    yield "all in reverse", messages[::-1]
    for rank in sorted({rank for _, _, body in messages for rank in ranks_of(body)}):
        yield f"{MANY}all of (attempt, rank) {rank}", [each for each in messages if rank not in ranks_of(each[2])]


def damaged_pages(page: PageMessage) -> Iterator[tuple[str, PageMessage]]:
    """As an agent may send it: the ring has overwritten a part, or the rank was ended while it wrote."""
    for number in range(len(page.segments)):
        rest = [segment for other, segment in enumerate(page.segments) if other != number]
        yield f"without segment {number}", msgspec.structs.replace(page, segments=rest, complete=False)
    *before, last = page.segments
    for name, size in (("frames", layout.FRAME.size), ("rows", layout.ROW.size), ("values", layout.VALUE.size)):
        table = getattr(last, name)
        for thirds in range(3):
            cut = msgspec.structs.replace(last, **{name: table[: len(table) // size * thirds // 3 * size]})
            yield (
                f"with {thirds}/3 of its {name}",
                msgspec.structs.replace(page, segments=[*before, cut], complete=False),
            )


def flipped_bits(run: Run, number: int) -> Iterator[Mutant]:
    """The store's file, each time with one bit flipped. A file that is refused is no verdict."""
    draw = random.Random(SEED)
    for _ in range(number):
        damaged = bytearray(run.file)
        at, bit = draw.randrange(len(damaged)), draw.randrange(8)
        damaged[at] ^= 1 << bit
        try:
            yield f"{MANY}bit {bit} of byte {at} flipped", messages_of(bytes(damaged))  # of SQLite's own, maybe
        except GpuwatchError:
            continue


def troubles(run: Run, damaged: list[Mutant]) -> list[str]:
    return [f"{what}: {text}" for what, messages in damaged if (text := trouble(run, decide(fold(messages)), what))]


@pytest.mark.parametrize("scenario", [pytest.param(scenario, id=scenario.name) for scenario in SCENARIOS])
def test_the_report_of_a_recorded_run_is_the_truth(scenario):
    report = build_report(fold(run_of(scenario.name).messages), run_id="x", started=None, ended=None)

    bare = dataclasses.replace(scenario, stdout="", stdout_without="")  # what the script printed was not recorded
    outcome = judge(bare, Ended(scenario.code, "", "", 0.0), json.loads(to_json(report)))
    assert outcome.grade is Grade.RIGHT, outcome.differences


def test_thirty_of_them_have_an_overflow_and_all_are_small():
    kinds = [run_of(scenario.name).verdict.kind for scenario in SCENARIOS]

    assert kinds.count("overflow") >= 30
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 1 << 20


def test_one_message_lost_or_damaged_makes_no_verdict_wrong():
    """A few of each run; the next test has all."""
    draw = random.Random(SEED)
    for scenario in SCENARIOS:
        run = run_of(scenario.name)
        drawn = draw.sample(list(mutants(run.messages)), 4)
        assert troubles(run, [*drawn, *flipped_bits(run, 1)]) == [], scenario.name


@pytest.mark.slow
@pytest.mark.sample(1, turns=True)
@pytest.mark.parametrize("scenario", [pytest.param(scenario, id=scenario.name) for scenario in SCENARIOS])
def test_no_message_lost_or_damaged_makes_a_verdict_wrong(scenario):
    run = run_of(scenario.name)

    assert troubles(run, [*mutants(run.messages), *flipped_bits(run, 300)]) == []
