"""Scripts of other projects, from checkouts that the variable GPUWATCH_CHECKOUTS names: see checkouts.py."""

import os
import sys
from pathlib import Path

import pytest

from ..ports import ports_of_this_test

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

from checkouts import SCRIPTS, VARIABLE, Script, try_script
from rows import OVERFLOW

pytestmark = pytest.mark.slow


def marks(script: Script):
    """Ray starts three times, and its example is in a package that CI has: minutes in each run of CI."""
    return [pytest.mark.soak] if script.package else []


@pytest.mark.parametrize(
    "script", [pytest.param(script, marks=marks(script)) for script in SCRIPTS], ids=lambda script: script.name
)
def test_a_script_as_its_authors_wrote_it(script: Script):
    origin = script.origin(os.environ.get(VARIABLE, ""))
    if origin is None:
        pytest.skip(f"{VARIABLE} names no folder with {script.project}")
    with ports_of_this_test((number,) for number in range(24000, 25000)) as (port,):
        trial = try_script(script, origin, port)

    assert trial.plain.code == trial.watched.code == 0, trial.watched.text
    assert trial.plain.lines
    assert trial.same
    assert trial.clean["kind"] == "clean"
    assert trial.overflowed.code == OVERFLOW, trial.overflowed.text
    assert (trial.overflow["kind"], trial.overflow["module"]) == ("overflow", script.module)
    assert script.rank in (None, trial.overflow["rank"])
