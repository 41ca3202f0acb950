"""`--notify`: the verdict leaves the job, to a real HTTP server and to a command."""

import json
import sys

import pytest

from ..webhooks import serve as serve

pytestmark = [pytest.mark.slow, pytest.mark.sample(1, of="a notification")]


def test_the_verdict_is_posted_and_the_address_is_nowhere_in_the_report(bench, serve):
    server, told = serve(), bench.cwd / "told"
    writes = f"{sys.executable} -c 'import sys; open(sys.argv[1], \"a\").write(sys.stdin.read())' {told}"

    run = bench.launch(
        "ddp_overflow.py",
        "--preflight",
        "off",
        "--notify",
        server.address,
        "--notify",
        writes,
        nproc=2,
        args=("--rank", "1", "--batch", "1"),
    )

    assert run.code == 4
    ((_, posted),) = server.heard
    assert posted == json.loads(told.read_text())
    assert (posted["event"], posted["verdict"], posted["certainty"]) == ("verdict", "overflow", "established")
    assert (posted["rank"], posted["module"], posted["exit_code"]) == (1, "block.widen", 4)
    assert run.verdict["statement"] in posted["text"]
    assert posted["run"] in posted["text"]
    folder = run.cwd / "gpuwatch-runs" / "latest"
    assert posted["folder"] == str(folder.resolve())
    for path in (folder / "report.json", folder / "report.html", folder / "report.txt"):
        assert "a-secret" not in path.read_text()


def test_a_stall_is_posted_while_the_job_hangs(bench, serve):
    server = serve()
    bench.extra = {"GPUWATCH_NOTIFY": server.address}

    run = bench.launch(
        "hang.py", "--hang-timeout", "8", "--on-hang", "abort", "--preflight", "off", nproc=2, args=("--how", "forward")
    )

    assert [posted["event"] for _, posted in server.heard] == ["stall", "verdict"]
    assert server.heard[1][1]["verdict"] == run.verdict["kind"] == "hang"
