"""What was meant by a word that was typed wrong."""

import pytest
from gpuwatch.core.codes import Code
from gpuwatch.core.errors import UsageError
from gpuwatch.core.misspelled import did_you_mean, expect_hyphens, meant_option, mistyped, with_hyphens

OPTIONS = {"-m", "--module", "--nproc-per-node"}


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("\u2013nproc-per-node", "--nproc-per-node"),
        ("\u2014nproc-per-node=2", "--nproc-per-node=2"),
        ("\u2013-nproc-per-node", "--nproc-per-node"),
        ("\u2212m", "-m"),
        ("--nproc-per-node", ""),
        ("train\u20132.py", ""),
        ("", ""),
    ],
)
def test_a_dash_that_is_no_hyphen_was_meant_as_hyphens(word, option):
    assert with_hyphens(word) == option


def test_an_option_with_another_dash_is_one_sentence():
    with pytest.raises(UsageError) as refused:
        expect_hyphens(["train.py", "\u2013nproc-per-node=2"], OPTIONS)
    assert refused.value.code is Code.NO_SUCH_OPTION
    assert refused.value.text == (
        "expected an option that begins with two hyphens, found '\u2013nproc-per-node=2', which begins with an en "
        "dash; did you mean --nproc-per-node=2?"
    )


def test_a_word_with_another_dash_that_is_no_option_is_left_alone():
    expect_hyphens(["\u2013 a title \u2013", "\u2013no-such-option", "\u2013", ""], OPTIONS)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("ERVY", "EVERY"), ("EVRY", "EVERY"), ("RUN_DIR", "RUNS_DIR"), ("USER", ""), ("PATH", ""), ("BATCH", "")],
)
def test_letters_in_another_order_are_a_mistake_and_another_word_is_not(word, meant):
    assert mistyped(word, ["EVERY", "RUNS_DIR", "SECRET", "WATCH"]) == meant


def test_what_is_like_nothing_gets_no_hint():
    assert did_you_mean("torchrunn", ["torchrun", "true"]) == "; did you mean torchrun?"
    assert did_you_mean("xyz", ["torchrun", "true"]) == ""


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--json", "--format json"),
        ("--num_gpus=8", "--nproc-per-node"),
        ("--timeout", "--hang-timeout"),
        ("--moduls", "--module"),
        ("--save", ""),  # no --output here
        ("--tee", ""),
        ("-x", ""),
    ],
)
def test_an_option_of_another_program_is_known_by_its_name_and_a_part_of_a_name_suffices(word, meant):
    known = {*OPTIONS, "--hang-timeout", "--format", "--format text", "--format json", "--dtype"}
    assert meant_option(word, known) == meant
