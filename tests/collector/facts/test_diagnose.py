"""A rank's diagnosis: made once, and read by everything that needs it."""

from __future__ import annotations

from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts import rank_origin as module
from gpuwatch.collector.facts.fold import fold


def overflow(make, rank):
    batch = make.Batch(rank, batch=3, seq=7)
    x = batch.tensor()
    batch.call("fc", "Linear", given=[x], returned=[batch.tensor(make.INF)], weights={"weight": batch.tensor()})
    batch.call("", "Net", given=[x], returned=[batch.tensor(make.INF)])
    return batch


def test_a_report_diagnoses_each_rank_once(make, monkeypatch):
    diagnosed = []

    def counting(page, anomaly, earlier):
        diagnosed.append(page.rank)
        return real(page, anomaly, earlier)

    real = module.origin_in_page
    monkeypatch.setattr(module, "origin_in_page", counting)
    bodies = [make.hello(), *overflow(make, 0).messages(), *overflow(make, 1).messages()]
    report = build_report(fold(("a0", n, b) for n, b in enumerate(bodies)), run_id="r", started=None, ended=None)
    assert report.verdict.kind == "overflow"
    assert sorted(diagnosed) == [0, 1]


def test_a_rank_without_an_anomaly_has_no_diagnosis():
    assert module.diagnose([], {}) is None


def test_without_the_page_the_event_is_the_diagnosis(make):
    batch = overflow(make, 0)
    found = module.diagnose([batch.anomaly], {})
    assert (found.module, found.role, found.from_page) == ("fc", "output", False)
    assert module.diagnose([batch.anomaly], {batch.page: batch.decoded()}).from_page
