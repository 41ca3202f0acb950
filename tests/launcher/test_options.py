from __future__ import annotations

import os

import pytest
from gpuwatch.core.errors import UsageError
from gpuwatch.core.exits import ExitCode
from gpuwatch.launcher.options import get_parser
from torch.distributed.run import get_args_parser


@pytest.fixture(autouse=True)
def no_torchrun_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def strings(parser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def test_every_option_of_torchrun_is_still_there():
    assert strings(get_args_parser()) <= strings(get_parser())
    theirs = {action.dest for action in get_args_parser()._actions}
    assert theirs <= {action.dest for action in get_parser()._actions}


def test_torchruns_defaults_are_unchanged():
    theirs = vars(get_args_parser().parse_args(["train.py"]))
    ours = vars(get_parser().parse_args(["train.py"]))
    assert {name: ours[name] for name in theirs} == theirs


def test_every_option_of_ours_has_a_dashed_and_an_underscored_form():
    new = strings(get_parser()) - strings(get_args_parser())
    assert "--on-overflow" in new
    for option in new:
        assert f"--{option[2:].replace('-', '_')}" in new


def test_defaults():
    args = get_parser().parse_args(["train.py"])
    assert (args.on_overflow, args.max_frames, args.trace_batches, args.abort_after_batch) == ("abort", 21, [], None)
    assert (args.preflight, args.preflight_timeout, args.on_preflight_failure) == ("quick", 120.0, "stop")
    assert (args.runs_dir, args.collector, args.collector_port, args.secret_file) == ("gpuwatch-runs", None, None, None)


def test_good_values_are_read():
    line = (
        "--on-overflow continue --max_frames 1 --trace-batches 0,3,12 --abort-after-batch 0 --preflight off "
        "--preflight-timeout 1.5 --on-preflight-failure continue --collector tcp://[::1]:5000 --collector-port 65535"
    )
    args = get_parser().parse_args([*line.split(), "train.py"])
    assert (args.max_frames, args.trace_batches, args.abort_after_batch) == (1, [0, 3, 12], 0)
    assert (args.preflight_timeout, args.collector, args.collector_port) == (1.5, "tcp://[::1]:5000", 65535)


def test_what_follows_the_script_is_the_scripts():
    args = get_parser().parse_args(["--nproc-per-node", "2", "my train.py", "--max-frames", "x", "--on-overflow"])
    assert (args.training_script, args.max_frames) == ("my train.py", 21)
    assert args.training_script_args == ["--max-frames", "x", "--on-overflow"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--on-overflow", "explode"),
        ("--max-frames", "0"),
        ("--max-frames", "many"),
        ("--max-frames", "²"),
        ("--trace-batches", "1,-2"),
        ("--trace-batches", "1,,2"),
        ("--trace-batches", ""),
        ("--abort-after-batch", "--5"),
        ("--abort-after-batch", "-1"),
        ("--preflight", "slow"),
        ("--preflight-timeout", "0"),
        ("--preflight-timeout", "nan"),
        ("--preflight-timeout", "inf"),
        ("--preflight-timeout", "soon"),
        ("--on-preflight-failure", "shrug"),
        ("--collector", "localhost:5000"),
        ("--collector", "tcp://:5000"),
        ("--collector", "tcp://host"),
        ("--collector", "tcp://host:0"),
        ("--collector", "tcp://host:²"),
        ("--collector-port", "0"),
        ("--collector-port", "65536"),
        ("--collector-port", "http"),
        ("--collector-port", "²"),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_the_option_and_what_was_found(option, value):
    with pytest.raises(UsageError) as caught:
        get_parser().parse_args([f"{option}={value}", "train.py"])
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert option in sentence
    assert repr(value) in sentence
    assert "expected" in sentence or "choose from" in sentence
    assert caught.value.exit_code == ExitCode.USAGE


def test_an_unknown_option_and_a_missing_script_are_usage_errors():
    for line in (["--no-such-option", "train.py"], []):
        with pytest.raises(UsageError, match="gpuwatch launch --help"):
            get_parser().parse_args(line)


def test_help_shows_both(capsys):
    with pytest.raises(SystemExit) as stop:
        get_parser().parse_args(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--rdzv-endpoint" in shown
    assert "--on-overflow" in shown
