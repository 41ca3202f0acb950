"""A module and a role that are named together belong together, in the text and in report.json."""

from __future__ import annotations

import json

from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.model import to_json
from gpuwatch.collector.report.text_report import render_text


def report_of(make, *batches):
    bodies = [make.hello(nproc=len(batches)), *(body for batch in batches for body in batch.messages())]
    return build_report(fold(("a0", n, body) for n, body in enumerate(bodies)), run_id="run", started=None, ended=None)


def attention(make, rank):
    """The code of `attn` makes nan between two calls: `self.c_proj(softmax(self.c_attn(x)))`."""
    batch = make.Batch(rank, root="GPT", batch=2, seq=4)
    x, h, bad, y = batch.tensor(), batch.tensor(), batch.tensor(make.NAN), batch.tensor(make.NAN)
    batch.call("attn.c_attn", "Linear", given=[x], returned=[h], parent="attn")
    batch.call("attn.c_proj", "Conv1D", given=[bad], returned=[y], parent="attn")
    batch.call("attn", "Attention", given=[x], returned=[y])
    batch.call("", "GPT", given=[x], returned=[y])
    return batch


def test_what_is_made_between_two_calls_is_told_with_the_row_that_shows_it(make):
    report = report_of(make, attention(make, 0), attention(make, 1))
    text = " ".join(render_text(report, width=300).split())
    assert "in `attn` (Attention)'s own forward, after `attn.c_attn` returned" in report.verdict.statement
    assert "input[0] of `attn`" not in text
    assert "attn input[0]" not in text
    assert "rank 1 on h0: nan in input[0] of `attn.c_proj` (Conv1D), made in `attn` (Attention)'s own code" in text
    assert "batch 2: nan, attn.c_proj input[0]" in text


def test_the_json_gives_no_role_to_a_module_that_has_no_such_row(make):
    report = json.loads(to_json(report_of(make, attention(make, 0), attention(make, 1))))
    seen_in = {"module": "attn.c_proj", "class": "Conv1D", "role": "input[0]"}
    for told in (report["verdict"], report["verdict"]["concurrent"][0], report["ranks"][0]["first_anomaly"]):
        assert (told["module"], told["class"], told["role"], told["seen_in"]) == ("attn", "Attention", None, seen_in)


def test_a_modules_own_row_keeps_its_role(make):
    batch = make.Batch(0)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    verdict = report_of(make, batch).verdict
    assert (verdict.module, verdict.role, verdict.seen_in) == ("fc", "output", None)


def own_loss(make, rank):
    """The root computes its loss after its last module has returned."""
    batch = make.Batch(rank, root="GPT", batch=2, seq=4)
    x, h = batch.tensor(), batch.tensor()
    batch.call("head", "Linear", given=[x], returned=[h])
    batch.call("", "GPT", given=[x], returned=[batch.tensor(make.NAN)])
    return batch


def test_the_root_has_a_name_in_every_line(make):
    report = report_of(make, own_loss(make, 0), own_loss(make, 1))
    text = render_text(report, width=300)
    assert "``" not in text
    assert "rank 1 on h0: nan in output of the root module (GPT)" in text
    assert "batch 2: nan, (root) GPT output" in text
    assert all("of GPT (GPT)" not in entry.what for entry in report.timeline)


def test_ranks_that_met_a_bad_weight_of_the_root_name_the_root(make):
    def rooted(rank):
        batch = make.Batch(rank, root="Net", seq=1)
        weights = {"scale": batch.tensor(make.NAN)}
        batch.call("", "Net", given=[batch.tensor()], returned=[batch.tensor(make.NAN)], weights=weights)
        return batch

    statement = report_of(make, rooted(0), rooted(1)).verdict.statement
    assert "``" not in statement
    assert "scale of the root module (Net)" in statement


def test_ranks_that_met_the_same_share_a_line(make):
    """Of hundreds of ranks that overflow alike, the report says so once."""

    def alike(rank):
        batch = make.Batch(rank, seq=1)
        given, weights = [batch.tensor()], {"weight": batch.tensor()}
        batch.call("fc", "Linear", given=given, returned=[batch.tensor(make.INF)], weights=weights)
        return batch

    report = report_of(make, *map(alike, range(4)))
    text = render_text(report, width=300)
    assert "All 4 ranks overflowed alike" in report.verdict.statement
    assert "ranks 1-3: +inf in output of `fc` (Linear)" in text
