"""Parts of a model that do not learn: remarks where that is a mistake, and none where it is meant."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sample(1)]


def found_in(bench, which):
    run = bench.launch("idle_parts.py", "--preflight", "off", args=(which,))
    assert (run.code, run.verdict["kind"]) == (0, "clean"), run.stderr
    return run, {each["kind"]: each for each in run.report["insights"]}


def test_what_does_not_learn_by_mistake_is_told(bench):
    run, found = found_in(bench, "faulty")

    assert found.keys() == {"dead_activation", "gradient_stopped", "parts_unmoved"}
    dead, flat, unmoved = (found[kind] for kind in ("dead_activation", "gradient_stopped", "parts_unmoved"))
    assert (dead["modules"], flat["modules"], unmoved["modules"]) == (
        ["dead.1", "dead.0"],
        ["flat.1", "flat.0"],
        ["body"],
    )
    assert all(each["ranks"] == [0, 1] and each["since"] is not None for each in (dead, flat, unmoved))
    assert "[GW213]" in run.stderr, "the first of them is on the screen at the end"


def test_what_is_meant_not_to_learn_is_not(bench):
    _, found = found_in(bench, "healthy")

    assert found == {}
