"""What the judge's caller tells of a device, beside its judgements."""

from __future__ import annotations

import math

import pytest
import torch
from gpuwatch.core.events.preflight_events import RankInventoryEvent
from gpuwatch.core.recorder.own_pages import OwnPages
from torch import nn


def test_a_graph_that_was_captured_is_told_once(watch, late):
    watched = watch(on_overflow="continue")
    model = nn.Linear(4, 4)
    model(torch.randn(2, 4))
    late.capturing = True
    for _ in range(3):
        model(torch.randn(2, 4))
    late.capturing = False
    model(torch.randn(2, 4))
    assert [fault.part for fault in watched.faults] == ["graph"]
    assert watched.faults[0].message.startswith("not seen. A CUDA graph was captured")
    why = f"torch {torch.__version__} does not say when a graph is captured or replayed"
    assert watched.faults[0].message.endswith(f"its replays compute: {why}")


def test_the_device_is_recorded_once_a_tensor_on_it_was_read(watch, late):
    watched = watch(on_overflow="continue")
    model = nn.Linear(4, 4)
    for _ in range(3):
        model(torch.randn(2, 4))
    said = [event for event in watched.events if isinstance(event, RankInventoryEvent)]
    assert [(event.device, event.facts) for event in said] == [("cpu", None)]


def test_a_graph_that_is_captured_before_anything_was_read(watch, late):
    """Registering memory with the driver would break the capture."""
    watched = watch(on_overflow="continue")
    model = nn.Linear(4, 4)
    late.capturing = True
    model(torch.randn(2, 4))
    late.capturing = False
    assert [fault.part for fault in watched.faults] == ["graph"]
    assert watched.faults[0].message.endswith(
        "its replays compute: it was captured before a tensor on the device was read"
    )
    model(torch.randn(2, 4))
    assert watched.row("", "output").kind == "measured"
    assert len(watched.faults) == 1


def test_numbers_leave_when_a_collective_was_issued_and_when_the_forward_ends(watch, late, monkeypatch):
    """Both may hang, or be the last of the rank: what was read before them is on its way by then."""
    here = []
    watched = watch(on_overflow="continue", watch=("forward",))
    layers = [nn.Linear(4, 4) for _ in range(3)]
    seq = [0]
    monkeypatch.setattr("gpuwatch.worker.record.device_rows.issued", lambda: seq[0])

    def at_the_second(module, args):
        here.append(late.copies)
        seq[0] += 1

    layers[1].register_forward_pre_hook(at_the_second)
    layers[2].register_forward_pre_hook(lambda *_: here.append(late.copies))
    nn.Sequential(*layers)(torch.randn(2, 4))
    here.append(late.copies)
    assert here[0] < here[1] < here[2]
    buffer = watched.hooks.rows.device_buffer
    assert buffer is not None
    assert (buffer._queued, watched.faults) == (0, [])


def test_under_sync_the_traceback_points_at_the_failing_module(watch, late):
    from gpuwatch.core.errors import OverflowDetected

    watched = watch(on_overflow="abort", sync=True)
    layers = [nn.Linear(4, 4) for _ in range(3)]
    with torch.no_grad():
        layers[1].weight[0, 0] = float("inf")
    seen = []
    layers[2].register_forward_pre_hook(lambda *_: seen.append("the next one was called"))
    with pytest.raises(OverflowDetected, match=r"in weight of `1` \(Linear\), forward of batch 0"):
        nn.Sequential(*layers)(torch.randn(2, 4))
    assert seen == []
    assert len(watched.anomalies) == 1


def test_every_n_misses_no_overflow_in_a_skipped_batch(watch, late):
    watched = watch(on_overflow="continue", every=5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for batch in range(8):
        with torch.no_grad():
            model[0].bias[0] = math.nan if batch == 3 else 0.0
        model(torch.randn(2, 4))
    watched.settle()
    (anomaly,) = watched.anomalies
    assert (anomaly.where.batch, anomaly.module, anomaly.role) == (3, "", "output")
    assert anomaly.cause == "not inspected: --every 5"


@pytest.mark.parametrize("on_overflow", ["abort", "continue"])
def test_the_guard_lets_no_bad_gradient_into_a_weight(watch, late, on_overflow):
    from gpuwatch.core.errors import OverflowDetected

    watch(on_overflow=on_overflow, guard_optimizer=True)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    (model(torch.randn(2, 4)).sum() * float("inf")).backward()
    if on_overflow == "abort":
        with pytest.raises(OverflowDetected):
            optimizer.step()
    else:
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_skips_of_a_fused_optimizer_that_never_end_are_an_alarm(watch, late):
    watched = watch(on_overflow="continue", scaler_skips=3)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(8):
        optimizer.zero_grad()
        (scaler.scale(model(torch.randn(2, 4)).sum()) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    watched.settle()
    assert watched.anomalies, watched.events
    assert watched.anomalies[0].cause.startswith("GradScaler skipped")
    assert watched.anomalies[0].phase == "loss"


def test_what_a_rule_covers_is_hidden(watch, late):
    watched = watch(on_overflow="abort", ignore=["1"])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].bias[0] = float("inf")
    model(torch.randn(2, 4))
    watched.settle()
    assert watched.anomalies == []
    assert {event.role for event in watched.events if type(event).__name__ == "IgnoredAlarm"} == {"bias", "output"}


class Attends(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x + mask).softmax(-1)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attends() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.full((4, 4), -math.inf).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return x


def test_a_mask_in_every_batch_has_no_frame_decoded(watch, late, monkeypatch):
    decoded = []
    real = OwnPages.frame
    monkeypatch.setattr(OwnPages, "frame", lambda own, page, index: decoded.append(index) or real(own, page, index))
    watched = watch(on_overflow="continue")
    model = Blocks()
    for _ in range(6):
        model(torch.randn(4, 4))
    watched.settle()
    assert decoded == []
    assert any(row.neginf for frame in watched.frames("forward") for row in frame.rows), "it was read"
    with torch.no_grad():
        model(torch.full((4, 4), math.nan))
    watched.settle()
    assert [anomaly.module for anomaly in watched.anomalies] == ["blocks.0"]
