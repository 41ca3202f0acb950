from __future__ import annotations

from pathlib import Path

import pytest
from gpuwatch.core.errors import UsageError
from gpuwatch.launcher.slurm_variables import expand_nodelist
from hypothesis import given
from hypothesis import strategies as st

RECORDED = Path(__file__).parents[1] / "data" / "slurm" / "hostnames.tsv"


def recorded() -> list[tuple[str, list[str]]]:
    lines = RECORDED.read_text().splitlines()[1:]
    return [(nodelist, hosts.split()) for nodelist, _, hosts in (line.partition("\t") for line in lines)]


@pytest.mark.parametrize(("nodelist", "hosts"), [(nodelist, hosts) for nodelist, hosts in recorded() if hosts])
def test_a_list_is_what_scontrol_makes_of_it(nodelist, hosts):
    ours = expand_nodelist(nodelist)
    assert ours[0] == hosts[0]
    if nodelist.count("[") - nodelist.count(",") < 3:
        assert ours == hosts
    else:  # with three brackets in one name, scontrol lets the second turn slowest
        assert sorted(ours) == sorted(hosts)


@pytest.mark.parametrize("nodelist", [nodelist for nodelist, hosts in recorded() if not hosts])
def test_what_scontrol_refuses_is_refused_in_one_sentence(nodelist):
    with pytest.raises(UsageError) as caught:
        expand_nodelist(nodelist)
    assert "expected a SLURM node list" in str(caught.value)
    assert nodelist in str(caught.value)


def test_the_recording_holds_both_kinds():
    assert {bool(hosts) for _, hosts in recorded()} == {True, False}
    assert len(recorded()) > 30


@pytest.mark.parametrize(
    "nodelist", ["", " ", ",", "n[1", "n]1", "n[1-2", "[", "[]", "n[1,]", "n[-1]", "n[1 2]", "n[²]"]
)
def test_halves_and_nothing_are_refused(nodelist):
    with pytest.raises(UsageError):
        expand_nodelist(nodelist)


@pytest.mark.parametrize(
    "nodelist", ["n[1-99999999999999999999999]", "n[0-999][0-999]", "n[1-60000,70000-130000]", f"n[{'9' * 5000}]"]
)
def test_a_list_without_end_costs_nothing(nodelist):
    with pytest.raises(UsageError) as caught:
        expand_nodelist(nodelist)
    assert len(str(caught.value)) < 400


def test_what_stands_behind_a_bracket_is_kept():
    """Later releases of SLURM write such lists."""
    assert expand_nodelist("n[1-2]-ib,m[3].example.org") == ["n1-ib", "n2-ib", "m3.example.org"]


LITERAL = st.text("abcxyz-._", min_size=1, max_size=4)
RANGE = st.tuples(st.integers(0, 300), st.integers(0, 4), st.integers(0, 5))


def written(ranges: list[tuple[int, int, int]]) -> tuple[str, list[str]]:
    """(what stands in a bracket, its numbers) of ranges that begin at a number, go on for some, in so many digits."""
    text, numbers = [], []
    for first, more, width in ranges:
        start = f"{first:0{width}}"
        text.append(start if not more else f"{start}-{first + more:0{width}}")
        numbers += [str(number).zfill(len(start)) for number in range(first, first + more + 1)]
    return ",".join(text), numbers


@st.composite
def entries(draw) -> tuple[str, list[str]]:
    """A name with up to three brackets and the hosts that it stands for."""
    text = draw(LITERAL)
    hosts = [text]
    for _ in range(draw(st.integers(0, 3))):
        inside, numbers = written(draw(st.lists(RANGE, min_size=1, max_size=3)))
        literal = draw(st.just("") | LITERAL)
        text += f"[{inside}]{literal}"
        hosts = [f"{host}{number}{literal}" for host in hosts for number in numbers]
    return text, hosts


@given(st.lists(entries(), min_size=1, max_size=4))
def test_what_was_written_short_is_written_out_again(chosen):
    nodelist = ",".join(text for text, _ in chosen)
    assert expand_nodelist(nodelist) == [host for _, hosts in chosen for host in hosts]


@given(st.text("ab1-[], ²", max_size=20))
def test_any_text_is_expanded_or_refused(text):
    try:
        hosts = expand_nodelist(text)
    except UsageError:
        return
    assert hosts
    assert all(host and not set(host) & set("[], ") for host in hosts)
