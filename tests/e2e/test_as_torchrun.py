"""A script behaves as under torchrun: same bits, same facts about its process, same output."""

import json
import re
import shutil

import pytest

pytestmark = pytest.mark.sample(2, of="as torchrun")  # of those without a mark of their own


@pytest.mark.slow
def test_a_clean_run_computes_the_same_bits(bench):
    watched = bench.launch("clean.py")
    plain = bench.torchrun("--nproc-per-node", "2", bench.script("clean.py"))

    assert watched.code == plain.code == 0
    assert sorted(watched.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert len(watched.stdout.splitlines()) == 22
    assert watched.verdict["kind"] == "clean"
    assert watched.verdict["rank"] is None
    assert [rank["state"] for rank in watched.report["ranks"]] == ["finished", "finished"]
    assert [rank["batch"] for rank in watched.report["ranks"]] == [9, 9]
    assert {rank["preflight"]["outcome"] for rank in watched.report["ranks"]} == {"ok"}


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("folder", ["plain", "a folder; with 'odd\" names"])
def test_a_script_finds_its_process_as_it_expects(bench, folder):
    place = bench.cwd / folder
    place.mkdir()
    for name in ("ordinary.py", "sibling.py"):
        shutil.copy(bench.script(name), place)
    arguments = ("--nproc-per-node", "2", str(place / "ordinary.py"), "--text", "two words", "--", "--rest", "-m")

    watched = bench.gpuwatch("launch", *arguments)
    plain = bench.torchrun(*arguments)

    assert (watched.code, plain.code) == (6, 0), "it calls no module"
    facts = json.loads(watched.stdout)
    assert facts == json.loads(plain.stdout)
    assert facts["rest"] == ["--rest", "-m"]
    assert facts["batches"] == facts["forked"] == [[0.0, 1.0, 4.0, 9.0], [16.0, 25.0, 36.0, 49.0]]


@pytest.mark.slow
def test_a_module_runs_as_one(bench):
    shutil.copytree(bench.script("pack"), bench.cwd / "pack")
    arguments = ("--nproc-per-node", "2", "-m", "pack.train", "--lr", "1e-4")

    watched = bench.gpuwatch("launch", *arguments)
    plain = bench.torchrun(*arguments)

    assert (watched.code, plain.code) == (6, 0)
    assert json.loads(watched.stdout) == json.loads(plain.stdout)
    assert json.loads(watched.stdout)["argv"] == ["train.py", "--lr", "1e-4"]
    assert (watched.verdict["kind"], watched.verdict["missing"]) == ("unknown", ["ranks 0, 1 called no module"])


@pytest.mark.slow
def test_a_script_that_raises_prints_what_it_prints_under_torchrun(bench):
    watched = bench.launch("raises.py", "--preflight", "off")
    plain = bench.torchrun("--nproc-per-node", "2", bench.script("raises.py"))

    assert watched.code == plain.code == 1
    assert lines_of_rank(watched.stderr, 0) == lines_of_rank(plain.stderr, 0) != []
    assert "raises.py FAILED" in watched.stderr
    verdict = watched.verdict
    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == ("crash", 0, "established")
    assert "KeyError" in verdict["statement"]
    assert 'raise KeyError("no such column: labels")' in verdict["evidence"][0]
    assert "gpuwatch" not in verdict["evidence"][0]
    assert [entry["rank"] for entry in verdict["cascade"]] == [1]


def lines_of_rank(stderr: str, rank: int) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith(f"[rank{rank}]:")]


@pytest.mark.slow
def test_torchruns_own_options_do_what_they_do(bench):
    run = bench.launch(
        *("clean.py", "--preflight", "off", "--log-dir", "logs here", "--redirects", "3", "--local-ranks-filter", "0")
    )

    assert run.code == 0
    assert run.stdout == ""
    (written,) = (bench.cwd / "logs here").glob("*/attempt_0/1/stdout.log")
    assert "rank 1 step 9" in written.read_text()


@pytest.mark.slow
def test_a_program_that_is_not_python_runs_unwatched(bench):
    run = bench.gpuwatch("launch", "--nproc-per-node", "1", "--no-python", "sh", "-c", "echo rank $RANK $0", "zero")

    assert run.code == 6
    assert run.stdout == "rank 0 zero\n"
    assert run.report["ranks"][0]["state"] == "unwatched"
    assert (run.verdict["kind"], run.verdict["missing"]) == ("unknown", ["rank 0 ran a program that is not watched"])
    assert "not proven that there was none: rank 0 ran a program that is not watched" in " ".join(run.stderr.split())


@pytest.mark.slow
def test_elastic_restarts_work_and_their_attempts_are_kept_apart(bench):
    run = bench.launch("flaky.py", "--max-restarts", "2")

    assert run.code == 0
    assert "attempt 1 rank 0 done" in run.stdout
    assert run.verdict["kind"] == "clean"
    assert run.report["run"]["attempts"] == 2
    assert [(rank["attempt"], rank["state"]) for rank in run.report["ranks"]] == [(1, "finished"), (1, "finished")]
    assert any(entry["attempt"] == 0 and entry["what"] == "raised RuntimeError" for entry in run.report["timeline"])


@pytest.mark.slow
def test_an_overflow_is_not_restarted(bench):
    run = bench.launch(
        "ddp_overflow.py", "--preflight", "off", "--max-restarts", "3", args=("--rank", "1", "--batch", "1")
    )

    assert run.code == 4
    assert run.report["run"]["attempts"] == 1


@pytest.mark.parametrize(
    "times",
    [pytest.param(12, marks=pytest.mark.slow), pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])],
)
def test_many_restarts_in_a_row_end_as_under_torchrun(bench, times):
    options = ("--nproc-per-node", "1", "--max-restarts", str(times), bench.script("restarts.py"))
    commands = [("torch.distributed.run",), ("gpuwatch.cli.main", "launch", "--preflight", "off")]
    plain, watched = (
        [bench.finish(bench.start(*command, *options, str(last)), 3600) for last in (times, times + 1)]
        for command in commands
    )

    assert [run.code for run in plain] == [run.code for run in watched] == [0, 1]
    assert [run.stdout for run in plain] == [run.stdout for run in watched] == ["the last attempt\n", ""]
    assert [run.stderr.count("(exitcode: 7)") for run in plain] == [
        run.stderr.count("(exitcode: 7)") for run in watched
    ]
    assert "VERDICT  clean, established" in watched[0].stderr
    assert watched[1].report["run"]["attempts"] == times + 1
    assert watched[1].verdict["kind"] == "crash"
    assert "started again" not in "".join(run.stderr for run in watched), "no helper has ended meanwhile"


@pytest.mark.slow
def test_children_of_a_rank_that_train_unseen_keep_it_from_being_clean(bench):
    run = bench.gpuwatch("launch", "--nproc-per-node", "1", "--preflight", "off", bench.script("trains_in_children.py"))

    assert run.code == 6
    (missing,) = run.verdict["missing"]
    assert re.fullmatch(r"rank 0 had a child process \(pid \d+\) that trained and was not watched", missing)
