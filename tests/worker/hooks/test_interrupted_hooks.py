"""A signal's handler that runs a model while a hook of ours writes: the frames of both are whole."""

from __future__ import annotations

from functools import partial

import gpuwatch.worker.hooks.optimizer as optimizer_hooks
import pytest
import torch
from gpuwatch.core.recorder.recorder_file import RecorderFile
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.tests.interruptions import all_of, interrupt
from gpuwatch.worker.hooks.backward import BackwardHooks
from gpuwatch.worker.hooks.gradient_frames import GradientFrames
from gpuwatch.worker.record.frame_writer import FrameWriter
from gpuwatch.worker.record.named_rows import NamedRows
from gpuwatch.worker.record.rows import RowWriter
from gpuwatch.worker.record.unmeasured_rows import UnmeasuredRows
from torch import nn

from ..models import tanh_net as net

pytestmark = pytest.mark.quick_here(12)

CODES = all_of(RecorderWriter, RecorderFile, RowWriter, NamedRows, UnmeasuredRows, FrameWriter, BackwardHooks)
CODES |= all_of(GradientFrames, optimizer_hooks.OptimizerHooks)
X = torch.ones(3, 4)


class Other(nn.Sequential):
    """The handler's."""


def step(model, optimizer):
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def validate(other):
    with torch.no_grad():
        other(torch.full((2, 4), 2.0))


def frames_of(watched, *roots):
    """(phase, module, rows) of each frame in the pages of these roots, in their order."""
    return [
        (frame.phase, frame.module, [(row.role, row.abs_min, row.abs_max) for row in frame.rows])
        for page in watched.pages
        if page.root in roots
        for frame in page.frames
    ]


def run(watch, at, handler=validate):
    """A step that is interrupted at this place. Returns the frames of the model and the handler's, and the place."""
    torch.manual_seed(0)
    watched = watch()
    model, other = net(), Other(nn.Linear(4, 3), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    where = interrupt(CODES, partial(step, model, optimizer), partial(handler, other), at)
    found = frames_of(watched, "Sequential"), frames_of(watched, "Other"), where
    assert watched.faults == watched.anomalies == [], where
    watched.close()
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", ["native", "python"], indirect=True)
def test_a_model_that_is_called_within_a_hook(watch, way):
    alone = run(watch, 1_000_000)[0]
    assert {phase for phase, *_ in alone} >= {"forward", "backward", "optimizer"}
    at, seen = 0, set()
    while True:
        frames, others, where = run(watch, at)
        if not where:
            break
        # within a forward the handler's calls count as calls in that forward
        own = [each for each in frames if each in alone]
        assert own == alone, where
        assert len(others) + len(frames) - len(own) == 3, where
        at += 29  # a sample of them
        seen.add(where.partition(":")[0])
    assert len(seen) > 5
