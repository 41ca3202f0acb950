"""`gpuwatch` itself: what is said to somebody who does not know its commands."""

import sys

import pytest
from gpuwatch.cli import main as module
from gpuwatch.launcher.options import get_check_parser, get_parser, get_run_parser
from gpuwatch.launcher.short_help import SHORT, short_help


def said_to(capsys, monkeypatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["gpuwatch", *words])
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # click names `python -m pytest` by it
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


def test_a_variable_that_is_typed_wrong_is_told_by_a_collector_too(capsys, monkeypatch):
    """It would run, and notify nobody."""
    monkeypatch.setenv("GPUWATCH_NOTFY", "https://example.invalid")
    code, text = said_to(capsys, monkeypatch, "collect", "--bind", "tcp://127.0.0.1:29401", "--secret-file", "nowhere")
    assert code == 2
    assert "GPUWATCH_NOTFY: expected a variable that gpuwatch reads" in text
    assert "did you mean GPUWATCH_NOTIFY?" in text


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


@pytest.mark.parametrize("command", module.COMMANDS)
def test_the_help_of_each_command_is_one_screen_and_has_an_example(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["gpuwatch", command, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert not ended.value.code
    usage, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40
    assert f"gpuwatch {command} " in usage
    assert any(f"gpuwatch {command} " in line for line in lines)


@pytest.mark.parametrize("parser", [get_parser, get_run_parser, get_check_parser])
def test_the_short_help_has_options_of_the_parser_and_leads_to_all(parser):
    made = parser()
    known = made._option_string_actions
    for option, text in ((option, text) for part in SHORT[made.prog].parts.values() for option, text in part.items()):
        name, _, value = option.partition(" ")
        assert bool(value) == (known[name].nargs != 0), option
        assert known[name].choices is None or value in known[name].choices
        assert text
    shown = short_help(made.prog)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.splitlines()[-1] == f"All options: {made.prog} --help-all"


@pytest.mark.parametrize("parser", [get_parser, get_run_parser, get_check_parser])
def test_all_options_are_in_the_whole_help(capsys, parser):
    made = parser()
    with pytest.raises(SystemExit) as ended:
        made.parse_args(["--help-all"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert all(option in shown for option in made._option_string_actions)


@pytest.mark.parametrize("word", ["-h", "--help", "--hel"])
def test_a_shortened_help_is_the_short_one(capsys, word):
    with pytest.raises(SystemExit):
        get_run_parser().parse_args([word])
    assert capsys.readouterr().out == short_help("gpuwatch run")
