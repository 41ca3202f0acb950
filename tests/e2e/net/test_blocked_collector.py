"""A node that reaches the others, and not the collector: its records stay on it until somebody reads them."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sample(1, of="a blocked collector")]

COLLECTOR_PORT = 29401
WITHIN_S = 600


@pytest.mark.parametrize(
    ("bad", "codes", "told", "found"),
    [
        ("1", [5, 4], ("lost", "unknown", None), ("overflow", 1)),
        ("-1", [6, 6], ("unknown", "unknown", None), ("clean", None)),
    ],
)
def test_the_report_says_who_was_not_heard_and_reads_what_it_left(job, bad, codes, told, found):
    job = job(2)
    head, other = job.network.nodes
    job.network.block(head, other, COLLECTOR_PORT)
    for node in (head, other):
        job.start(node, "launch", script="ddp_overflow.py", args=("--rank", bad, "--batch", "2"))
    first, second = job.finish(WITHIN_S)

    assert [first.code, second.code] == codes
    assert "preflight warn: 2 ranks on 2 nodes" in first.stderr
    there = f"{other.host} gets no answer from gpuwatch's collector at tcp://{head.address}:{COLLECTOR_PORT}"
    assert f"{there}: the report will lack its ranks [GW602]" in first.stderr
    verdict = first.verdict
    assert (verdict["kind"], verdict["certainty"], verdict["rank"]) == told
    assert f"{other.host} was never heard from" in " ".join([verdict["statement"], *verdict["evidence"]])
    assert verdict["next"][0].startswith(f"What {other.host} recorded is there in a .spool file")

    made_again = job.bench.gpuwatch("report", "--format", "json")
    report = json.loads(made_again.stdout)
    assert (report["verdict"]["kind"], report["verdict"]["rank"]) == found
    assert report["verdict"]["certainty"] == "established"
    assert made_again.report == report
    spools = {node["host"]: node["spool"] for node in report["nodes"]}
    assert spools[head.host] == ""
    assert (job.bench.cwd / "gpuwatch-runs" / spools[other.host]).is_file()
