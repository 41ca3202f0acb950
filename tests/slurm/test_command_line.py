from __future__ import annotations

import re

import pytest
from gpuwatch.cli.submit import options_of
from gpuwatch.core.errors import UsageError
from gpuwatch.launcher.options import get_check_parser, get_parser
from gpuwatch.slurm.sbatch import REFUSED, SHORT, WITH_OR_WITHOUT, WITH_VALUE, WITHOUT_VALUE
from gpuwatch.slurm.submission import SbatchCommand, SbatchOption, batch_script, command_line_options, take_apart
from hypothesis import given
from hypothesis import strategies as st

LAUNCH = options_of(get_parser())


def taken(*arguments: str) -> SbatchCommand:
    return take_apart(list(arguments), LAUNCH)


def test_options_go_where_they_belong_in_any_order():
    found = taken("--every", "5", "-N", "2", "--wait", "--time=1:00", "--nproc-per-node=4", "train.py", "--time", "9")
    assert found.sbatch == [SbatchOption("nodes", "2"), SbatchOption("time", "1:00")]
    assert found.launch == ["--every", "5", "--nproc-per-node=4"]
    assert found.script == ["train.py", "--time", "9"]
    assert (found.wait, found.print_only) == (True, False)


@pytest.mark.parametrize(
    ("typed", "options"),
    [
        (["-N2"], [SbatchOption("nodes", "2")]),
        (["-N", "2"], [SbatchOption("nodes", "2")]),
        (["-HO"], [SbatchOption("hold"), SbatchOption("overcommit")]),
        (["-Hpgpu"], [SbatchOption("hold"), SbatchOption("partition", "gpu")]),
        (["-t", "4:00:00"], [SbatchOption("time", "4:00:00")]),
        (["--exclusive"], [SbatchOption("exclusive")]),
        (["--exclusive=user"], [SbatchOption("exclusive", "user")]),
        (["--nice"], [SbatchOption("nice")]),
        (["--comment="], [SbatchOption("comment", "")]),
        (["--comment", "--hold"], [SbatchOption("comment", "--hold")]),
        (["--comment=a=b"], [SbatchOption("comment", "a=b")]),
        (["--container-image=nvcr.io#x"], [SbatchOption("container-image", "nvcr.io#x")]),
        (["--nnodes", "2"], [SbatchOption("nodes", "2")]),
        (["--nnodes=2:4"], [SbatchOption("nodes", "2-4")]),
    ],
)
def test_options_of_sbatch_however_they_are_written(typed, options):
    assert taken(*typed, "train.py").sbatch == options


@pytest.mark.parametrize(
    ("typed", "launch", "script"),
    [
        (["-m", "my.train", "-x"], ["-m"], ["my.train", "-x"]),
        (["--module", "my.train"], ["--module"], ["my.train"]),
        (["--nproc_per_node", "2", "t.py"], ["--nproc_per_node", "2"], ["t.py"]),
        (["-r", "3", "t.py"], ["-r", "3"], ["t.py"]),
        (["--ignore", "--mask", "t.py"], ["--ignore", "--mask"], ["t.py"]),
        (["--sync", "--", "-odd.py", "--wait"], ["--sync"], ["-odd.py", "--wait"]),
        (["-", "a"], [], ["-", "a"]),
    ],
)
def test_options_of_the_launch_are_handed_on_as_they_were_typed(typed, launch, script):
    found = taken(*typed)
    assert (found.launch, found.script, found.sbatch) == (launch, script, [])


def test_options_of_its_own():
    found = taken("--print", "--exclude-bad", "a", "--exclude-bad=b", "--program", "x y", "--runs_dir", "r", "t.py")
    assert (found.print_only, found.exclude_bad, found.program, found.runs_dir) == (True, ["a", "b"], "x y", "r")
    assert taken("-W", "t.py").wait
    assert taken("-h").help and taken("--help").help


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (["--nodez", "2", "t.py"], "--nodez is an option of neither sbatch nor gpuwatch launch; did you mean --nodes"),
        (["--on-overflw", "continue"], "did you mean --on-overflow"),
        (["--container-mounts", "/a:/b"], "write it as --container-mounts=VALUE"),
        (["-Z", "t.py"], "-Z is an option of neither"),
        (["--time"], "--time: expected a value after it, found the end of the line"),
        (["-N"], "--nodes: expected a value after it"),
        (["--hold=yes"], "--hold: expected no value, found 'yes'"),
        (["--wait=yes"], "--wait: expected no value"),
        (["--nnodes", "two"], "--nnodes: expected a number of nodes or MIN:MAX, found 'two'"),
        (["--run-name", "x"], "--run-name: the runs of a job are named after it"),
        (["--ntasks-per-node", "8"], "--ntasks-per-node: gpuwatch starts the ranks of a node itself"),
        (["-n", "16"], "--ntasks: gpuwatch starts the ranks"),
        (["--wrap=date"], "--wrap: write the script after the options"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(typed, sentence):
    with pytest.raises(UsageError, match=re.escape(sentence)) as error:
        taken(*typed)
    assert "\n" not in str(error.value)


def test_no_option_of_sbatch_is_one_of_the_launch():
    names = {f"--{name}" for name in WITH_VALUE | WITHOUT_VALUE | WITH_OR_WITHOUT}
    for parser in (get_parser(), get_check_parser()):
        options = options_of(parser)
        assert not names & (options.with_value | options.without_value)


def test_the_tables_agree_with_each_other():
    assert not WITH_VALUE & WITHOUT_VALUE and not (WITH_VALUE | WITHOUT_VALUE) & WITH_OR_WITHOUT
    assert set(SHORT.values()) | REFUSED.keys() <= WITH_VALUE | WITHOUT_VALUE | WITH_OR_WITHOUT


@given(st.lists(st.text(max_size=5), max_size=5))
def test_what_follows_the_script_is_never_looked_at(arguments):
    found = taken("-N2", "train.py", *arguments)
    assert found.script == ["train.py", *arguments]


@given(st.lists(st.text(alphabet="-Nntx= \n9", max_size=4), max_size=4))
def test_whatever_is_typed_is_taken_apart_or_refused_in_a_sentence(arguments):
    try:
        found = taken(*arguments)
    except UsageError as error:
        assert str(error)
    else:
        assert not found.script or found.script == arguments[len(arguments) - len(found.script) :]


# -- from there to a script ---------------------------------------------------------------------------------------


def test_what_changes_sbatchs_own_doing_stays_on_its_command_line():
    submission = taken("--clusters=b", "--parsable", "-N2", "--test-only", "t.py")
    assert command_line_options(submission) == ["--clusters=b", "--parsable", "--test-only"]
    assert batch_script(submission, "launch", ("gpuwatch",), []).options == (SbatchOption("nodes", "2"),)


def test_bad_nodes_join_those_that_were_excluded_by_hand():
    submission = taken("-x", "gpu-1,gpu-2", "t.py")
    script = batch_script(submission, "launch", ("gpuwatch",), ["gpu-2", "gpu-3"])
    assert script.options == (SbatchOption("exclude", "gpu-1,gpu-2,gpu-2,gpu-3"),)  # twice does no harm


@pytest.mark.parametrize(
    ("verb", "typed", "name"),
    [
        ("launch", ["/x/pre train.py"], "pre train"),
        ("launch", ["-m", "my.train"], "my"),
        ("check", [], "gpuwatch-check"),
    ],
)
def test_a_job_is_named_after_its_script(verb, typed, name):
    assert batch_script(taken(*typed), verb, ("gpuwatch",), []).job_name == name
