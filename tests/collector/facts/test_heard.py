"""What is missing of an agent's numbered messages, and what follows from that."""

from __future__ import annotations

import msgspec
import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.facts.heard_numbers import HeardNumbers
from gpuwatch.core.wire.messages import NameDefinitions, PageMessage
from hypothesis import given
from hypothesis import strategies as st


@given(st.sets(st.integers(1, 40)), st.randoms(use_true_random=False))
def test_what_is_missing_is_counted_in_any_order(numbers, dice):
    heard = HeardNumbers()
    told = [*numbers, *numbers, 0]
    dice.shuffle(told)
    for n in told:
        heard.add("a0.0", n)

    gap = max(numbers, default=0) - len(numbers)
    assert heard.lost() == ({"a0": gap} if gap else {})


def test_agents_of_one_launch_count_for_themselves():
    heard = HeardNumbers()
    for agent, numbers in {"a0.0": (1, 3), "a0.1": (1, 2, 5), "b0.0": (1, 2)}.items():
        for n in numbers:
            heard.add(agent, n)

    assert heard.lost() == {"a0": 3}


def clean_job(make):
    bodies = [make.hello(nproc=1), *make.finished(0, batch=4), make.NodeBye("ok")]
    return [("a0", n, body) for n, body in enumerate(bodies, 1)]


@pytest.mark.parametrize("lost", range(5))
def test_a_run_with_a_message_missing_is_not_clean(make, lost):
    messages = clean_job(make)
    assert decide(fold(messages)).kind == "clean"

    verdict = decide(fold(messages[:lost] + messages[lost + 1 :]))
    assert (verdict.kind, bool(verdict.missing)) == ("unknown", True)


def bad_job(make):
    batch = make.Batch(0)
    given, weight, bad = batch.tensor(), batch.tensor(), batch.tensor(make.INF)
    batch.call("fc", "Linear", given=[given], returned=[bad], weights={"weight": weight})
    batch.call("", "Net", given=[given], returned=[bad])
    bodies = [make.hello(nproc=1), *batch.messages(), make.ended(0, 94), make.NodeBye("failed")]
    return [("a0", n, body) for n, body in enumerate(bodies, 1)]


def test_an_overflow_is_not_established_where_a_message_is_missing(make):
    first, *rest = bad_job(make)
    assert decide(fold([first, *rest])).certainty == "established"

    verdict = decide(fold([first, *(("a0", n + 1, body) for _, n, body in rest)]))
    assert (verdict.module, verdict.certainty) == ("fc", "supported")
    assert "1 message of node h0 is missing, or damaged" in verdict.evidence


def test_a_page_whose_names_are_missing_names_nothing(make):
    messages = [m for m in bad_job(make) if not isinstance(m[2], NameDefinitions)]

    verdict = decide(fold(("a0", 0, body) for _, _, body in messages))
    assert (verdict.module, verdict.certainty) == ("fc", "supported")  # as the event has it
    assert not any("<" in line for line in [verdict.statement, *verdict.evidence])


def test_a_page_whose_names_are_missing_raises_no_alarm_of_its_own(make):
    _, definitions, _, page, *_ = bad_job(make)
    told = fold([*clean_job(make), ("b0", 0, page[2])])
    assert (decide(told).kind, told.unnamed_pages) == ("unknown", 1)

    assert decide(fold([*clean_job(make), ("b0", 0, definitions[2]), ("b0", 0, page[2])])).kind == "overflow"


def test_a_page_whose_rows_are_cut_off_is_not_followed(make):
    messages = bad_job(make)
    at = next(at for at, message in enumerate(messages) if isinstance(message[2], PageMessage))
    page = messages[at][2]
    (segment,) = page.segments
    cut = msgspec.structs.replace(segment, rows=segment.rows[: len(segment.rows) // 2])
    messages[at] = ("a0", messages[at][1], msgspec.structs.replace(page, segments=[cut]))

    assert decide(fold(messages)).certainty == "supported"
