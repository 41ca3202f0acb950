"""Ranks that do not meet in a collective: the one at fault is named if it can be known, and none else."""

import random
import re

import pytest

TOLD = ("--hang-timeout", "10", "--preflight", "off")
ABORT = (*TOLD, "--on-hang", "abort")
NEVER = ("--hang-timeout", "0", "--preflight", "off")


def run_of(bench, how, nproc, seed, *options, more=()):
    """(the run, the rank at fault): which rank it is, and when, comes from the seed."""
    chance = random.Random(f"{how} {seed}")
    rank, batch = chance.randrange(nproc), chance.randrange(1, 6)
    args = ("--how", how, "--rank", str(rank), "--batch", str(batch), *more)
    return bench.launch("meet.py", *options, nproc=nproc, args=args), rank


def without_lines(statement: str) -> str:
    """A statement in which the lines of meet.py are left out, of which there must be one at least."""
    text, number = re.subn(r" \((?:now|last) at meet\.py:\d+\)| at meet\.py:\d+(?! in )", "", statement)
    assert number or "issued" not in statement
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "certainty", "sentence"),
    [
        ("size", "supported", "issued all_reduce of 5 elements of float32, where 2 other ranks issued all_reduce of 8"),
        ("exit", "established", "left early: its script ended with exit code 0, while ranks"),
    ],
)
def test_what_ends_the_others_names_who_was_at_fault(bench, how, certainty, sentence):
    """gloo aborts some rank, or the others lose their connection to it. At some sizes it only waits."""
    run, rank = run_of(bench, how, 3, 0, *ABORT)

    verdict = run.verdict
    assert (verdict["rank"], verdict["certainty"]) == (rank, certainty)
    assert sentence in without_lines(verdict["statement"])
    assert (verdict["kind"], run.code) in (("crash", 1), ("hang", 5))
    assert not any(found["faults"] for found in run.report["ranks"])


@pytest.mark.slow
@pytest.mark.sample(1, of="ranks at fault that end the job")
@pytest.mark.parametrize("how", ["size", "dtype", "exit", "_exit"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_ends_the_others_with_other_ranks_and_batches(bench, how, seed):
    run, rank = run_of(bench, how, 2 + seed, seed, *ABORT)

    assert run.verdict["rank"] == rank
    assert run.verdict["kind"] in ("crash", "hang")


@pytest.mark.slow
@pytest.mark.sample(1, of="ranks that do not meet")
@pytest.mark.parametrize(
    ("how", "nproc", "certainty", "sentence"),
    [
        ("barrier", 3, "established", "never reached barrier"),
        ("monitored", 3, "established", "never reached monitored_barrier"),
        ("subgroup", 8, "established", "never reached all_reduce of group"),
        (
            "operation",
            3,
            "supported",
            "issued broadcast from the group's rank 0 of 8 elements of float32, where 2 other",
        ),
        ("skip", 3, "supported", "issued broadcast from the group's rank 0 of 3 elements of float32, where 2 other"),
        ("order", 3, "supported", "The ranks wait for each other in different groups"),
        ("forward", 3, "established", "never reached all_reduce"),
        ("loader", 3, "established", "never reached all_reduce"),
        ("optimizer", 3, "established", "never reached all_reduce"),
        ("checkpoint", 4, "established", "never reached all_reduce"),
        ("stopped", 3, "established", "never reached all_reduce"),
        ("leaves slowly", 3, "established", "never reached all_reduce"),
    ],
)
def test_while_the_job_stands_still(bench, how, nproc, certainty, sentence):
    run, rank = run_of(bench, how, nproc, 0, *ABORT)

    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == ("hang", rank, certainty)
    assert sentence in without_lines(verdict["statement"])
    assert run.code == 5
    assert not any(found["faults"] for found in run.report["ranks"])


@pytest.mark.slow
@pytest.mark.sample(1, of="nobody can be named")
@pytest.mark.parametrize(
    ("how", "nproc", "sentence"),
    [
        ("operation", 2, "It is unknown which rank is the odd one."),
        ("skip", 2, "It is unknown which rank is the odd one."),
        ("order", 2, "The ranks wait for each other in different groups"),
        ("send", 3, "A send and its receive do not match."),
    ],
)
def test_where_it_cannot_be_known_none_is_named(bench, how, nproc, sentence):
    run, _ = run_of(bench, how, nproc, 0, *ABORT)

    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == ("hang", None, "unknown")
    assert sentence in verdict["statement"]


@pytest.mark.slow
@pytest.mark.sample(1, of="what cannot go on")
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("operation", "the ranks do not issue the same collectives"),
        ("stopped", " is stopped (by SIGSTOP, Ctrl-Z or a debugger)"),
        ("exit", "left early: its script ended with exit code 0"),
    ],
)
def test_what_cannot_go_on_is_ended_by_default(bench, how, sentence):
    run, rank = run_of(bench, how, 3, 0, *TOLD)

    verdict = run.verdict
    assert verdict["rank"] == rank
    assert sentence in verdict["statement"]
    assert (run.code, verdict["kind"]) in ((5, "hang"), (1, "crash"))


@pytest.mark.slow
@pytest.mark.sample(1, of="a group's timeout")
@pytest.mark.parametrize(("how", "nproc"), [("barrier", 3), ("subgroup", 4)])
def test_a_groups_timeout_names_who_missed(bench, how, nproc):
    """And not one of those that waited and raised."""
    run, rank = run_of(bench, how, nproc, 0, *NEVER, more=("--timeout", "15"))

    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == ("hang", rank, "established")
    assert "waited until the group's timeout" in verdict["statement"]


@pytest.mark.slow
@pytest.mark.sample(1, of="a group's timeout")
@pytest.mark.parametrize("nproc", [2, 3])
def test_a_groups_timeout_in_ddps_own_reduction_names_who_missed(bench, nproc):
    run = bench.launch("hang.py", *NEVER, nproc=nproc, args=("--how", "data", "--timeout", "15"))

    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"], verdict["certainty"], run.code) == ("hang", 1, "supported", 5)
    assert "never reached the backward's reduction of gradients" in verdict["statement"]
    assert (verdict["phase"], verdict["step"], verdict["batch"]) == ("script", 3, 2)


@pytest.mark.slow
def test_what_is_told_and_left_to_the_groups_timeout_is_a_hang_when_that_has_ended_it(bench):
    """The rank that never comes is told while it stands still, and named in the end; the others raise."""
    run, rank = run_of(bench, "barrier", 3, 0, *TOLD, more=("--timeout", "30"))

    verdict = run.verdict
    assert (run.code, verdict["kind"], verdict["rank"], verdict["certainty"]) == (5, "hang", rank, "established")
    assert f"because rank {rank} may still go on; the timeouts of its process groups still apply" in run.stderr


@pytest.mark.slow
def test_a_rank_that_raised_and_does_not_end_is_named_by_what_it_raised(bench):
    run, rank = run_of(bench, "raises", 3, 0, *ABORT)

    assert (run.verdict["kind"], run.verdict["rank"]) == ("crash", rank)
    assert "raised ValueError: boom" in run.verdict["statement"]


@pytest.mark.slow
def test_a_rank_that_does_not_end_is_told_and_left_alone(bench):
    run, rank = run_of(bench, "does not end", 2, 0, *ABORT)

    assert (run.code, run.verdict["kind"]) == (0, "clean")
    # the other one waits for it, or has ended by then
    told = re.search(r"Ranks? ([0-9, -]+) (has|have) not exited for", run.stderr)
    assert told is not None
    assert str(rank) in re.findall(r"\d+", told[1])


@pytest.mark.slow
@pytest.mark.sample(1, of="slow and healthy")
def test_a_rank_that_is_late_and_comes_ends_nothing(bench):
    """The others have waited for longer than the limit, and by default the job is not ended for it."""
    run, rank = run_of(bench, "slow", 3, 0, *TOLD)

    assert (run.code, run.verdict["kind"]) == (0, "clean")
    assert f"Rank {rank} is at " in run.stderr and "It never reached all_reduce" in run.stderr
    assert f"because rank {rank} may still go on" in run.stderr


@pytest.mark.slow
def test_operations_that_do_not_match_are_told_before_the_limit_and_ended_by_it(bench):
    args = ("--how", "operation", "--rank", "1", "--batch", "2")
    run = bench.launch("meet.py", "--hang-timeout", "40", "--preflight", "off", nproc=2, args=args)

    assert (run.code, run.verdict["kind"]) == (5, "hang")
    told, _, ended = run.stderr.partition("(if no rank moves, gpuwatch ends the job after ")
    assert "the ranks do not issue the same collectives" in told
    assert "(ending the ranks)" in ended
