"""Exceptions of a signal's handler, which runs wherever the main thread is: often within gpuwatch."""

from __future__ import annotations

import json
import sys

import pytest

PLACES = ["forward", "backward", "step", "collective", "reduction"]


def signalled(bench, *options: str, launched: bool = False, code: int = 0) -> dict:
    """What scripts/signalled.py prints. `code`: what the command may end with, beside 0."""
    command = [bench.script("signalled.py"), *options]
    if launched:
        command = ["-m", "gpuwatch.cli.main", "launch", "--nproc-per-node", "1", "--preflight", "off", *command]
    run = bench.finish(bench.start_program(sys.executable, *command))
    assert run.code in (0, code), run.stderr
    found = json.loads(run.stdout.splitlines()[0])
    if launched:
        found["report"] = run.verdict["kind"]
    return found


def check(found: dict, places: list[str], signals: int) -> None:
    assert found["ended in"] == [], "such an exception did not reach the script; it came this far"
    assert found["caught"] == dict.fromkeys(places, signals)
    assert found["elsewhere"] == [], "the traceback leads from the script to its handler"
    assert found["without gradients"] == []
    assert found.get("same bits", True)


@pytest.mark.slow
@pytest.mark.comes_first
@pytest.mark.sample(1)
@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize("without_c", [[], ["--without-c"]])
def test_what_a_handler_raises_reaches_the_script(bench, launched, without_c):
    found = signalled(bench, "--places", *PLACES, "--signals", "15", *without_c, launched=launched)
    check(found, PLACES, 15)
    assert found["verdict"][0] == "clean"
    assert found.get("report", "clean") == "clean"


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize("without_c", [[], ["--without-c"]])
def test_on_a_device_numbers_on_their_way_may_be_lost_and_no_exception(bench, launched, without_c):
    found = signalled(bench, "--places", *PLACES, "--signals", "15", "--late", *without_c, launched=launched, code=6)
    check(found, PLACES, 15)
    assert {found["verdict"][0], found.get("report", "clean")} <= {"clean", "unknown"}
    assert "no room" not in found["verdict"][1]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("without_c", [[], ["--without-c"]])
def test_a_handler_may_evaluate_and_save_within_any_hook(bench, without_c):
    found = signalled(bench, "--places", *PLACES, "--signals", "15", "--saves", *without_c)
    check(found, PLACES, 15)
    assert found["verdict"][0] == "clean"


@pytest.mark.soak
@pytest.mark.parametrize("without_c", [[], ["--without-c"]])
@pytest.mark.parametrize("late", [[], ["--late"]])
@pytest.mark.parametrize("place", PLACES)
def test_a_thousand_of_them(bench, place, without_c, late):
    found = signalled(bench, "--places", place, "--signals", "1000", *without_c, *late)
    check(found, [place], 1000)
    in_c = place == "collective" and not late and not without_c  # what stands around it then has no Python
    assert in_c or found["in gpuwatch"] > 10


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("without_c", [[], ["--without-c"]])
@pytest.mark.parametrize("late", [[], ["--late"]])
@pytest.mark.parametrize("signals", [40, pytest.param(1000, marks=pytest.mark.soak)])
def test_one_that_comes_in_a_second_run(bench, signals, late, without_c):
    """Trials with other samples included. The model is then as one forward leaves it."""
    found = signalled(bench, "--places", "second run", "--signals", str(signals), *late, *without_c)
    check(found, ["second run"], signals)
    assert found["left changed"] == []
    assert found["in a second run"] > signals // 20


@pytest.mark.soak
@pytest.mark.parametrize("without_c", [[], ["--without-c"]])
def test_one_that_comes_in_compiled_code(bench, without_c):
    """torch loses one there now and then, without gpuwatch, too: in guards."""
    found = signalled(bench, "--places", "compiled", "--signals", "30", *without_c)
    assert found["ended in gpuwatch"] == 0, found["ended in"]
    assert found["caught"]["compiled"] >= 5
    assert found["elsewhere"] == found["without gradients"] == []
    assert found.get("same bits", True)
