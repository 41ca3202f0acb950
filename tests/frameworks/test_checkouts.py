"""Scripts of other projects, from checkouts that the variable GPUWATCH_CHECKOUTS names: see checkouts.py."""

import os
import sys
from pathlib import Path

import pytest

from ..ports import ports_of_this_test

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

from checkouts import SCRIPTS, VARIABLE, Script, try_script
from rows import OVERFLOW


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_as_its_authors_wrote_it(script: Script):
    checkouts = os.environ.get(VARIABLE, "")
    if not Path(checkouts, script.project, script.folder).is_dir() or not checkouts:
        pytest.skip(f"{VARIABLE} names no folder with {script.project}")
    with ports_of_this_test((number,) for number in range(24000, 25000)) as (port,):
        trial = try_script(script, Path(checkouts), port)

    assert trial.plain.code == trial.watched.code == 0, trial.watched.text
    assert trial.plain.lines
    assert trial.same
    assert trial.clean["kind"] == "clean"
    assert trial.overflowed.code == OVERFLOW, trial.overflowed.text
    assert (trial.overflow["kind"], trial.overflow["module"]) == ("overflow", script.module)
    assert script.rank in (None, trial.overflow["rank"])
