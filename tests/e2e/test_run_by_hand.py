"""A script that starts each rank of its host by itself, each below a `gpuwatch run`: one report."""

import sys

import pytest

pytestmark = pytest.mark.slow
PYTHON = sys.executable


def ranks(bench, port, *arguments, **more):
    command = (PYTHON, bench.script("ddp_overflow.py"), *arguments)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), **more}
    return [
        bench.start("gpuwatch.cli.main", "run", "--", *command, **place, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(2)
    ]


@pytest.mark.parametrize(("bad", "code", "kind", "rank"), [("1", 4, "overflow", 1), ("-1", 0, "clean", None)])
def test_they_have_one_report(bench, port, bad, code, kind, rank):
    ended = [bench.finish(process) for process in ranks(bench, port, "--rank", bad, "--batch", "2")]

    assert [run.code for run in ended] == [code, code]
    assert len(list((bench.cwd / "gpuwatch-runs").glob("*/report.json"))) == 2, "one, and the link to the latest"
    report = ended[0].report
    assert (report["verdict"]["kind"], report["verdict"]["rank"]) == (kind, rank)
    assert report["verdict"]["certainty"] == "established"
    assert [one["rank"] for one in report["ranks"]] == [0, 1]
    assert len(report["nodes"]) == 1


@pytest.mark.parametrize("options", [(), ("--other-hosts",)])
def test_srun_behind_it_would_leave_the_other_hosts_unwatched(bench, options):
    folder = bench.cwd / "a bin"
    folder.mkdir()
    srun = folder / "srun"
    srun.write_text("#!/bin/sh\nexec true\n")
    srun.chmod(0o755)
    job = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[0-1]", "SLURMD_NODENAME": "n0"}
    path = f"{folder}:/usr/bin:/bin"
    run = bench.gpuwatch("run", *options, "--", "srun", "python", "train.py", PATH=path, **job)

    refused = "expected srun in front of gpuwatch run, found it behind" in run.stderr
    assert refused == (options == ())
    if refused:
        assert run.code == 2
        assert (
            "write srun OPTIONS gpuwatch run -- COMMAND for srun python train.py, or pass --other-hosts" in run.stderr
        )
        assert "Traceback" not in run.stderr
