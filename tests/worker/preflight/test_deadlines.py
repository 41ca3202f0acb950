"""No one is given up on before the news of its failure can have come."""

from __future__ import annotations

import pytest
from gpuwatch.core.preflight import STAGES
from gpuwatch.worker.preflight.preflight_run import _MARGIN_S
from gpuwatch.worker.preflight.steps import StageDeadlines


@pytest.mark.parametrize("timeout_s", [0.5, 6.0, 60.0, 1800.0])
@pytest.mark.parametrize("stage", STAGES)
def test_each_wait_is_longer_than_what_it_waits_for(stage, timeout_s):
    deadlines = StageDeadlines(timeout_s)
    assert deadlines.work(stage) <= timeout_s
    assert deadlines.inside_group(stage) < deadlines.work(stage)
    if stage != "arrive":  # a coordinator that hangs is ended by its worker, which then tells the others
        assert deadlines.work(stage) + _MARGIN_S < deadlines.reports(stage)
    assert deadlines.reports(stage) < deadlines.conclusion(stage) < deadlines.wait(stage)


def test_only_what_waits_for_an_import_of_torch_may_take_minutes():
    assert [stage for stage in STAGES if StageDeadlines(1800).work(stage) > 60] == ["inventory", "arrive"]
