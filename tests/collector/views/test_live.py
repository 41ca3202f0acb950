"""What is told while the job runs: an error in one of its parts costs nothing else."""

from __future__ import annotations

from gpuwatch.collector.facts.fold import FactFold
from gpuwatch.collector.so_far import LiveFindings

from .test_live_verdict import overflow


def test_an_error_is_logged_once_and_the_rest_goes_on(make, monkeypatch):
    def broken(facts):
        raise RuntimeError("no such thing")

    folded, said, logged = FactFold(), [], []
    live = LiveFindings(folded, said.append, logged.append, said.append)
    messages = overflow(make, 0, seq=1).messages()
    with monkeypatch.context() as patch:
        patch.setattr("gpuwatch.collector.so_far.overflow_verdict", broken)
        for body in messages:
            folded.add("a0", 1, body)
            live.on_message(body)
            live.tick()
            live.on_message(body)
            live.tick()
    assert logged == ["LiveVerdict has failed: RuntimeError: no such thing"]
    for body in messages:
        live.on_message(body)
    live.verdict._due = 0.0
    live.tick()
    assert "the verdict so far: " in logged[-1]
    assert said == []
