"""What is said of a node that went silent, and of one whose processes were all killed."""

from __future__ import annotations

import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.wire.messages import NodeBye


def verdict_of(make, killed):
    hellos = [(f"a{n}", 1, make.hello(f"a{n}", f"h{n}", 1, 3)) for n in range(3)]
    beats = [(f"a{n}", 0, make.NodeBeat([make.state(n)], {})) for n in range(3)]
    return decide(fold([*hellos, *beats, ("a0", 2, NodeBye("failed"))], ["a1", "a2"], killed))


@pytest.mark.parametrize(
    ("killed", "words"), [([], "went silent"), (["a1"], "went silent"), (["a1", "a2"], "ended without a word")]
)
def test_killed_is_said_where_all_that_are_lost_were_seen_to_end(make, killed, words):
    verdict = verdict_of(make, killed)

    assert (verdict.kind, verdict.certainty, verdict.host) == ("lost", "supported", "h1, h2")
    assert f"h1, h2 (ranks 1 and 2) {words}: " in verdict.statement
    assert ("dmesg" in verdict.next[0]) == (words == "ended without a word")
    assert ("closed there, with no goodbye" in verdict.evidence[0]) == (words == "ended without a word")
