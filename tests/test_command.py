"""`gpuwatch` itself: what is said to somebody who does not know its commands."""

import sys

import pytest
from gpuwatch.cli import main as module


def said_to(capsys, monkeypatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["gpuwatch", *words])
    with pytest.raises(SystemExit) as ended:
        module.main()
    out, err = capsys.readouterr()
    assert not out
    return ended.value.code, err


def test_without_a_command_it_shows_them_all(capsys, monkeypatch):
    code, text = said_to(capsys, monkeypatch)
    assert code == 2
    assert text.startswith("Usage: gpuwatch [OPTIONS] COMMAND")
    assert all(f"  {command} " in text for command in module.COMMANDS)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("lanch", "did you mean gpuwatch launch?"),
        ("reports", "did you mean gpuwatch report?"),
        ("train.py", "to watch a script: gpuwatch launch train.py"),
        ("xyz", "all commands: gpuwatch --help"),
    ],
)
def test_another_word_is_told_what_was_expected_in_one_line(capsys, monkeypatch, word, hint):
    code, text = said_to(capsys, monkeypatch, word, "--lr", "1")
    assert code == 2
    assert text == f"gpuwatch: expected one of {', '.join(module.COMMANDS)}, found '{word}'; {hint} [GW401]\n"


def test_an_option_before_the_command_is_told_where_it_belongs(capsys, monkeypatch):
    code, text = said_to(capsys, monkeypatch, "--nproc-per-node", "2", "train.py")
    assert code == 2
    assert text == (
        "gpuwatch: expected a command before --nproc-per-node; did you mean gpuwatch launch --nproc-per-node? [GW402]\n"
    )


def test_an_unknown_option_of_a_command_is_that_commands(capsys, monkeypatch):
    code, text = said_to(capsys, monkeypatch, "report", "--jsn")
    assert code == 2
    assert "--jsn" in text
    assert "launch" not in text


@pytest.mark.parametrize(("option", "meant"), [("--verison", "--version"), ("--hlep", "--help")])
def test_an_option_of_gpuwatch_itself_that_is_typed_wrong_is_told(capsys, monkeypatch, option, meant):
    code, text = said_to(capsys, monkeypatch, option)
    assert code == 2
    assert text == (
        f"gpuwatch: expected a command or an option of gpuwatch, found {option}; "
        f"did you mean gpuwatch {meant}? [GW402]\n"
    )


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["report", "\u2013rank", "3"], "which begins with an en dash; did you mean --rank? [GW402]"),
        (["\u2013version"], "did you mean --version, with hyphens? [GW401]"),
    ],
)
def test_another_dash_in_place_of_hyphens_is_told(capsys, monkeypatch, words, hint):
    code, text = said_to(capsys, monkeypatch, *words)
    assert code == 2
    assert text.endswith(f"{hint}\n")
