"""Jobs of the real SLURM: by the template, by `gpuwatch submit`, and by a launch that is told nothing."""

import json
import os
from pathlib import Path

import gpuwatch
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),  # one cluster for all of them
    pytest.mark.sample(3, of="jobs of SLURM"),  # of those without a mark of their own
]
sample = pytest.mark.sample

TEMPLATE = str(Path(gpuwatch.__file__).parent / "slurm" / "gpuwatch.sbatch")
TWO_NODES = ("--nodes=2", "--gpus-per-node=1")
STOPPED, OVERFLOW, LOST = 3, 4, 5  # gpuwatch's exit codes
LONG = ("--rank", "9", "--batch", "0", "--batches", "100000")
UNDER_WAY = "batch 3 loss"
"""What ddp_overflow.py says in its fourth batch."""


def overflow(rank, batch=2):
    return ("--rank", str(rank), "--batch", str(batch))


def blames(report, rank, host):
    verdict = report["verdict"]
    assert (verdict["kind"], verdict["rank"], verdict["host"]) == ("overflow", rank, host)
    assert (verdict["module"], verdict["batch"]) == ("block.widen", 2)
    assert (report["run"]["nnodes"], report["run"]["world_size"]) == (2, 2)


# -- a launch that is told nothing ------------------------------------------------------------------------------------


@sample(1, of="a launch in a job")
def test_a_launch_in_a_job_needs_no_options(user):
    command = f"srun --kill-on-bad-exit=1 --wait=60 gpuwatch launch {user.script('ddp_overflow.py')} --rank 1 --batch 2"
    job = user.sbatch(*TWO_NODES, "--ntasks-per-node=1", f"--wrap={command}")

    assert job.end() == f"{OVERFLOW}:0"
    blames(user.report(), 1, "node-1")


@sample(1, of="a launch in a job")
def test_a_launch_without_a_batch_script_has_one_rank_for_each_gpu(user):
    command = ("srun", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "gpuwatch", "launch")
    done = user.run(*command, "--preflight", "off", user.script("ddp_overflow.py"), *overflow(3))

    assert done.returncode == OVERFLOW, done.stderr
    report = user.report()
    assert (report["run"]["nnodes"], report["run"]["world_size"]) == (2, 4)
    assert (report["verdict"]["rank"], report["verdict"]["host"]) == (3, "node-1")


@sample(1, of="a launch in a job")
def test_what_is_given_wins_over_what_the_job_says(user):
    command = ("srun", *TWO_NODES, "--ntasks-per-node=1", "gpuwatch", "launch")
    given = ("--nproc-per-node", "2", "--rdzv-id", "mine", "--rdzv-endpoint", "node-0:31000", "--preflight", "off")
    done = user.run(*command, *given, user.script("ddp_overflow.py"), *overflow(9))

    assert done.returncode == 0, done.stderr
    assert user.report()["run"]["world_size"] == 4
    assert "rendezvous id 'mine'" in done.stderr


def test_several_tasks_on_a_node_are_one_sentence(user):
    done = user.run(
        "srun", "--nodes=2", "--ntasks-per-node=2", "gpuwatch", "launch", user.script("ddp_overflow.py"), *overflow(1)
    )

    assert done.returncode == 2
    sentences = {line for line in done.stderr.splitlines() if line.startswith("gpuwatch: ")}
    assert len(sentences) == 1
    assert "one task on each node" in sentences.pop()


# -- the template -----------------------------------------------------------------------------------------------------


@sample(1, of="the template")
def test_the_template_alone(user):
    job = user.sbatch(*TWO_NODES, TEMPLATE, user.script("ddp_overflow.py"), *overflow(1))

    assert job.end() == f"{OVERFLOW}:0"
    blames(user.report(), 1, "node-1")


@sample(1, of="the template")
def test_the_tasks_of_an_array_have_a_report_each(user):
    user.sbatch("--array=0-1", *TWO_NODES, TEMPLATE, user.script("ddp_overflow.py"), *overflow(1))
    user.until(lambda: len(user.jobs()) == 2, "two tasks of the array", 300)

    assert [job.end() for job in user.jobs()] == [f"{OVERFLOW}:0"] * 2
    reports = user.reports()
    assert len(reports) == 2
    for report in reports:
        blames(report, 1, "node-1")


@sample(1, of="the template")
def test_two_jobs_at_once_on_the_same_nodes_do_not_meet(user):
    jobs = [user.sbatch(*TWO_NODES, TEMPLATE, user.script("ddp_overflow.py"), *overflow(rank)) for rank in (0, 1)]

    assert [job.end() for job in jobs] == [f"{OVERFLOW}:0"] * 2
    reports = user.reports()
    assert len(reports) == 2
    for report in sorted(reports, key=lambda report: report["verdict"]["rank"]):
        blames(report, report["verdict"]["rank"], f"node-{report['verdict']['rank']}")
    assert {report["verdict"]["rank"] for report in reports} == {0, 1}


@sample(1, of="a job that SLURM ends")
def test_scancel_leaves_a_report_that_says_so(user):
    job = user.sbatch(*TWO_NODES, TEMPLATE, user.script("ddp_overflow.py"), *LONG)
    job.says(UNDER_WAY)
    user.run("scancel", job.number)
    job.end()

    assert job.state == "CANCELLED"
    verdict = user.report()["verdict"]
    assert (verdict["kind"], verdict["rank"]) == ("interrupted", None)
    assert "SIGTERM" in verdict["statement"]


@sample(1, of="a job that SLURM ends")
def test_the_time_limit_leaves_a_report_that_says_so(user):
    job = user.sbatch(*TWO_NODES, "--time=1", "--signal=USR2@10", TEMPLATE, user.script("ddp_overflow.py"), *LONG)
    job.says(UNDER_WAY)
    job.end()

    verdict = user.report()["verdict"]
    assert (verdict["kind"], verdict["rank"]) == ("interrupted", None)
    assert "time limit" in verdict["statement"]


@sample(1, of="a job that SLURM ends")
def test_the_time_limit_without_a_warning_leaves_a_report_that_says_so(user):
    """A launch without the template hears SIGTERM, as from scancel, and asks SLURM why."""
    command = " ".join(["srun gpuwatch launch", user.script("ddp_overflow.py"), *LONG])
    job = user.sbatch(*TWO_NODES, "--ntasks-per-node=1", "--time=1", f"--wrap={command}")
    job.end()

    assert job.state == "TIMEOUT"
    verdict = user.report()["verdict"]
    assert (verdict["kind"], verdict["rank"]) == ("interrupted", None)
    assert "time limit" in verdict["statement"]


@sample(1, of="a job that SLURM ends")
def test_a_job_that_is_requeued_in_the_middle_keeps_its_attempts_apart(user):
    """The first attempt is stopped by SLURM; the second one runs to its overflow."""
    script = user.cwd / "train.py"
    script.write_text(
        f"import os, runpy, sys\n"
        f"second = bool(os.environ.get('SLURM_RESTART_COUNT'))\n"
        f"sys.argv[1:] = {list(overflow(1))!r} if second else {list(LONG)!r}\n"
        f"runpy.run_path({user.script('ddp_overflow.py')!r}, run_name='__main__')\n"
    )
    job = user.sbatch(*TWO_NODES, TEMPLATE, str(script))
    job.says(UNDER_WAY)
    user.run("scontrol", "requeue", job.number)

    assert job.end() == f"{OVERFLOW}:0"
    assert job.facts["Restarts"] == "1"
    first, second = user.reports()
    assert (first["verdict"]["kind"], first["verdict"]["rank"]) == ("interrupted", None)
    blames(second, 1, "node-1")
    assert [(life["run"], life["kind"]) for life in second["run"]["earlier"]] == [(first["run"]["id"], "interrupted")]
    assert first["run"]["earlier"] == []


@sample(1, of="a node that SLURM loses")
def test_a_node_that_loses_its_power_is_lost_and_the_line_that_drains_it_is_said(user):
    job = user.sbatch(*TWO_NODES, "--no-requeue", TEMPLATE, user.script("ddp_overflow.py"), *LONG)
    job.says(UNDER_WAY)
    user.cluster.power_off(user.cluster.nodes[1])
    job.says("scontrol update nodename=node-1 state=drain")
    user.run("scontrol", "update", "nodename=node-1", "state=down", "reason=test")  # which SLURM itself finds out later
    assert job.end() == f"{LOST}:0"

    verdict = user.report()["verdict"]
    assert (verdict["kind"], verdict["host"]) == ("lost", "node-1")
    assert "--exclude=node-1" in job.output


@sample(1, of="a node that SLURM loses")
def test_a_node_whose_slurmd_is_killed_is_lost(user):
    """SLURM takes the node for lost, and ends the job."""
    job = user.sbatch(*TWO_NODES, "--no-requeue", TEMPLATE, user.script("ddp_overflow.py"), *LONG)
    job.says(UNDER_WAY)
    user.cluster.kill_slurmd(user.cluster.nodes[1])
    job.end()

    verdict = user.report()["verdict"]
    assert (verdict["kind"], verdict["host"]) == ("lost", "node-1")
    assert "scontrol update nodename=node-1 state=drain" in job.output


@sample(1, of="a node that a preflight names")
def test_a_preflight_that_fails_on_the_second_node_stops_the_job_and_names_it(user):
    job = user.sbatch(
        *TWO_NODES, TEMPLATE, user.script("ddp_overflow.py"), *overflow(1), **second_node_adds_wrong(user)
    )

    assert job.end() == f"{STOPPED}:0"
    verdict = user.report()["verdict"]
    assert (verdict["kind"], verdict["host"]) == ("preflight", "node-1")
    assert "node-1" in verdict["statement"]
    assert "batch 0" not in job.output


# -- gpuwatch submit --------------------------------------------------------------------------------------------------


@sample(1, of="submit")
def test_submit_waits_for_the_job_and_prints_the_report(user):
    done = user.gpuwatch("submit", *TWO_NODES, "--wait", user.script("ddp_overflow.py"), *overflow(1))

    assert done.returncode == OVERFLOW
    report = user.report()
    blames(report, 1, "node-1")
    assert report["verdict"]["statement"] in done.stdout.replace("\n", " ")
    (job,) = user.jobs()
    assert job.facts["ExitCode"] == f"{OVERFLOW}:0"
    assert job.facts["JobName"] == "ddp_overflow"


@sample(1, of="submit")
def test_submit_of_a_clean_run_of_two_ranks_on_each_node(user):
    options = ("--nodes", "2", "--gpus-per-node", "2", "--comment", "two words", "--preflight", "off", "-W")
    done = user.gpuwatch("submit", *options, user.script("ddp_overflow.py"), *overflow(9))

    assert done.returncode == 0
    report = user.report()
    assert (report["verdict"]["kind"], report["run"]["world_size"], report["run"]["nnodes"]) == ("clean", 4, 2)
    assert not list((user.cwd / "gpuwatch-runs").glob(".secret*"))


@sample(1, of="submit")
def test_submit_without_waiting_says_which_job_it_is(user):
    done = user.gpuwatch("submit", *TWO_NODES, "--preflight", "off", user.script("ddp_overflow.py"), *overflow(9))

    assert done.returncode == 0
    (job,) = user.jobs()
    assert f"job {job.number};" in done.stderr
    assert job.end() == "0:0"
    secrets = "keys derived from the rendezvous id"  # which a launch without a secret says
    assert secrets not in job.output


@sample(1)
@pytest.mark.parametrize(
    "name", ["my train.py", "it's.py", 'a "b".py', "a; touch owned; .py", "$(touch owned).py", "-n.py"]
)
def test_a_script_of_any_name_is_run_and_gets_its_arguments(user, name):
    folder = user.cwd / "a folder\nof two lines"
    folder.mkdir()
    (folder / name).write_text("import json, sys\njson.dump(sys.argv, open('argv.json', 'w'))\n")
    arguments = ["two words", "it's", "$HOME `id`", "*", "", "--wait", "a\nb"]
    options = ("--nodes=1", "--gpus-per-node=1", "--wait", "--preflight", "off")
    done = user.gpuwatch("submit", *options, str(folder / name), *arguments)

    assert done.returncode == 6, "it calls no module"
    assert json.loads((user.cwd / "argv.json").read_text()) == [str(folder / name), *arguments]
    assert not list(user.cwd.rglob("owned"))


def test_submit_of_what_slurm_does_not_take_is_one_sentence(user):
    done = user.gpuwatch("submit", "--nodes", "3", user.script("ddp_overflow.py"), *overflow(1))

    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("gpuwatch: sbatch rejected the job: ")
    assert user.jobs() == []


@sample(1, of="a node that a preflight names")
def test_the_line_that_drains_a_bad_node_drains_it_and_the_next_submit_leaves_it_out(user):
    bad = second_node_adds_wrong(user)
    done = user.gpuwatch("submit", *TWO_NODES, "-W", user.script("ddp_overflow.py"), *overflow(9), **bad)
    assert done.returncode == STOPPED
    (line,) = [line.strip() for line in done.stdout.splitlines() if line.strip().startswith("scontrol update ")]
    assert user.run("bash", "-c", line).returncode == 0
    first, second = user.cluster.nodes
    assert user.cluster.state(second) == "drain"
    assert user.cluster.takes_jobs(first)
    user.cluster.up()

    again = ("--exclude-bad", "latest", "--gpus-per-node=1", "--preflight", "off")
    refused = user.gpuwatch("submit", "--nodes", "2", *again, user.script("ddp_overflow.py"), *overflow(9))
    assert refused.returncode == 2
    done = user.gpuwatch("submit", "--nodes", "1", "-W", *again, user.script("ddp_overflow.py"), *overflow(9))
    assert done.returncode == 0
    assert user.jobs()[-1].facts["NodeList"] == first.host


@sample(1, of="a node that a preflight names")
def test_check_is_a_job_of_its_own(user):
    done = user.gpuwatch("check", "--slurm", "-N", "2", "--gpus-per-node=1", "--wait")
    assert done.returncode == 0
    assert "2 ranks on 2 nodes" in done.stdout

    bad = second_node_adds_wrong(user)
    done = user.gpuwatch("check", "--slurm", "-N", "2", "--gpus-per-node=1", "--wait", **bad)
    assert done.returncode == STOPPED
    assert "node-1" in done.stdout
    assert [job.facts["ExitCode"] for job in user.jobs()] == ["0:0", f"{STOPPED}:0"]


def second_node_adds_wrong(user):
    """Of two nodes with a rank each."""
    path = os.pathsep.join([user.script("wrong_rank"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"WRONG_RANK": "adds wrong", "PYTHONPATH": path}
