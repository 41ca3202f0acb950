from __future__ import annotations

import itertools

from gpuwatch.collector.facts.kept_pages import START, RankNames, SharedNames
from gpuwatch.core.events.definitions import ModuleDef, RootDef, SlotDef
from hypothesis import given
from hypothesis import strategies as st

ENTRIES = [RootDef(0, "Net"), *(ModuleDef(n, 0, f"fc{n}", "Linear") for n in range(6)), SlotDef(0, 1, "weight")]


@given(st.lists(st.sampled_from(ENTRIES), max_size=12), st.sets(st.integers(0, 12)))
def test_how_definitions_are_cut_into_messages_does_not_matter(entries, cuts):
    shared, place = SharedNames(), START
    at = [0, *sorted(cut for cut in cuts if cut < len(entries)), len(entries)]
    for first, last in itertools.pairwise(at):
        place = shared.after(place, entries[first:last])
    assert place == shared.after(START, entries)
    names = shared.at(place)
    assert set(names.modules.values()) == {entry for entry in entries if isinstance(entry, ModuleDef)}
    assert shared.depth(place) == len(entries)


def test_ranks_with_the_same_definitions_have_one_table_and_others_their_own():
    shared = SharedNames()
    first, second, other = (RankNames(shared) for _ in range(3))
    first.add("a", ENTRIES)
    second.add("b", ENTRIES[:3])
    second.add("b", ENTRIES[3:])
    other.add("c", [*ENTRIES[:-1], SlotDef(0, 1, "bias")])
    assert first.names is second.names
    assert (first.names.slots[0].role, other.names.slots[0].role) == ("weight", "bias")


def test_an_agent_that_was_started_again_tells_all_once_more():
    names = RankNames(SharedNames())
    names.add("a.0", ENTRIES[:4])
    place = names.place
    names.add("a.1", ENTRIES[:2])
    assert names.place == place, "what is known stays"
    names.add("a.1", ENTRIES[2:])
    assert set(names.names.slots) == {0}
