"""The preflight wherever a launch may be: beside another one on the same host, in a folder with an unfriendly name."""

import shutil

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["quick", "full"])
def test_two_launches_on_one_host_do_not_disturb_each_other(bench, mode):
    command = ("gpuwatch.cli.main", "launch", "--nproc-per-node", "2", "--preflight", mode, bench.script("clean.py"))
    launches = [bench.start(*command) for _ in range(2)]
    runs = [bench.finish(launch) for launch in launches]

    assert [run.code for run in runs] == [0, 0]
    reports = list((bench.cwd / "gpuwatch-runs").glob("*-*/report.json"))
    assert len(reports) == 2
    assert all("rank 1 step 9" in run.stdout for run in runs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["a path with spaces", 'it\'s "quoted"; $HOME'])
def test_a_folder_with_an_unfriendly_name(bench, name):
    bench.cwd = bench.cwd / name
    bench.cwd.mkdir()
    script = bench.cwd / "my script.py"
    shutil.copy(bench.script("clean.py"), script)
    run = bench.gpuwatch("launch", "--nproc-per-node", "2", "--preflight", "quick", "--nccl-debug", str(script))

    assert run.code == 0
    assert {rank["preflight"]["outcome"] for rank in run.report["ranks"]} == {"ok"}
    facts = run.report["preflight"]["inventory"][0]["facts"]
    assert facts["script"] == str(script)
    assert len(facts["script_digest"]) == 64
