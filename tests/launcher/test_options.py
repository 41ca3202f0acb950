from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import msgspec
import pytest
from gpuwatch.core.codes import ExitCode
from gpuwatch.core.errors import UsageError
from gpuwatch.core.secrets import masked_command
from gpuwatch.core.settings import VARIABLE, WorkerSettings
from gpuwatch.launcher.option_tables import worker_settings
from gpuwatch.launcher.option_types import without_addresses
from gpuwatch.launcher.options import (
    check_together,
    get_check_parser,
    get_parser,
    get_run_parser,
    parse_check,
    parse_launch,
    parse_run,
)
from gpuwatch.launcher.plan import limit_rendezvous
from gpuwatch.worker.watch import watch
from torch.distributed.run import get_args_parser


@pytest.fixture(autouse=True)
def no_torchrun_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def settings_of(line: list[str]) -> WorkerSettings:
    """What a launch with these arguments tells its workers."""
    return worker_settings(get_parser().parse_args(line), Path("/dev/shm/scratch"), Path("/runs/1/logs"))


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
    assert (args.preflight, args.preflight_timeout, args.on_preflight_failure) == ("quick", 300.0, "stop")
    assert (args.alloc, args.bandwidth_size, args.min_busbw, args.slow_factor) == (None, 0, 0.0, 1.5)
    assert (args.nccl_debug, args.health_thresholds) == (None, None)
    assert (args.runs_dir, args.collector, args.collector_port, args.secret_file) == ("gpuwatch-runs", None, None, None)


def test_what_to_watch_is_all_by_default():
    args = get_parser().parse_args(["train.py"])
    assert args.watch == ("forward", "grads", "weights", "comms")
    assert (args.modules, args.every, args.ignore) == ([], 1, [])
    assert (args.sync, args.guard_optimizer) == (False, False)
    assert (args.near_overflow, args.underflow_share, args.scaler_skips) == (1.0, 0.1, 12)
    assert args.state_every == 50


def test_the_defaults_are_those_of_the_worker():
    """One that is started by something else than a launch behaves the same."""
    assert settings_of(["train.py"]) == WorkerSettings("/dev/shm/scratch")


def test_the_keywords_of_watch_are_options_of_a_worker_with_their_defaults():
    keywords = {name: each for name, each in inspect.signature(watch).parameters.items() if name != "model"}
    settings = msgspec.structs.asdict(WorkerSettings(""))
    assert keywords.keys() <= settings.keys()
    for name, each in keywords.items():
        assert each.default in (settings[name], tuple(settings[name]) if settings[name] == [] else None)


EVERYTHING = (
    "--on-overflow continue --max-frames 5 --trace-batches 0,3 --abort-after-batch 9 --preflight full "
    "--preflight-timeout 7 --on-preflight-failure continue --watch weights,grads --modules encoder.* --modules head "
    "--every 100 --sync --guard-optimizer --ignore mask.*:output[0] --ignore *.dropout --near-overflow 2.5 "
    "--underflow-share 0.25 --scaler-skips 3 --state-every 7 --alloc 256MiB --bandwidth-size 1MiB "
    "--min-busbw 0.5 --slow-factor 2 --nccl-debug --health-thresholds {thresholds} --explain 17 --rank 3 "
    "--capture --capture-max 5MiB"
)


@pytest.mark.parametrize("form", ["dashed", "underscored"])
def test_every_option_for_the_worker_reaches_it(form, monkeypatch, tmp_path):
    (tmp_path / "limits.toml").touch()
    words = EVERYTHING.format(thresholds=tmp_path / "limits.toml").split()
    if form == "underscored":
        words = [f"--{word[2:].replace('-', '_')}" if word.startswith("--") else word for word in words]
    settings = settings_of([*words, "train.py"])
    monkeypatch.setenv(VARIABLE, settings.to_json())
    assert WorkerSettings.from_environment() == settings
    assert settings == WorkerSettings(
        recorder_dir="/dev/shm/scratch",
        on_overflow="continue",
        explain=17,
        rank=3,
        capture="/runs/1",
        capture_max=5 << 20,
        trace_batches=[0, 3],
        abort_after_batch=9,
        preflight="full",
        preflight_timeout_s=7.0,
        on_preflight_failure="continue",
        watch=("weights", "grads"),
        modules=["encoder.*", "head"],
        every=100,
        sync=True,
        guard_optimizer=True,
        ignore=["mask.*:output[0]", "*.dropout"],
        near_overflow=2.5,
        underflow_share=0.25,
        scaler_skips=3,
        state_every=7,
        alloc="256MiB",
        bandwidth_size=1 << 20,
        min_busbw=0.5,
        slow_factor=2.0,
        nccl_debug="/runs/1/logs",
        health_thresholds=str(tmp_path / "limits.toml"),
    )
    default = msgspec.structs.asdict(WorkerSettings("/x"))
    unset = {name for name, value in msgspec.structs.asdict(settings).items() if value == default[name]}
    agreed = {"round", "attempt", "node_hosts", "check_only", "meets_at", "after_overflow"}
    assert unset == agreed, "what the nodes agree on, and what makes a check"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--watch forward", "watch", ("forward",)),
        ("--watch=grads,forward,weights", "watch", ("grads", "forward", "weights")),
        ("--every 1", "every", 1),
        ("--every auto", "every", "auto"),
        ("--explain auto", "explain", "auto"),
        ("--explain off", "explain", "off"),
        ("--explain 0", "explain", 0),
        ("--every 1000000", "every", 1_000_000),
        ("--near-overflow 0", "near_overflow", 0.0),
        ("--near-overflow 64", "near_overflow", 64.0),
        ("--underflow-share 1", "underflow_share", 1.0),
        ("--underflow-share 1e-3", "underflow_share", 0.001),
        ("--scaler-skips 1", "scaler_skips", 1),
        ("--state-every 0", "state_every", 0),
        ("--ignore a:b:c", "ignore", ["a:b:c"]),
        ("--alloc 100%", "alloc", "100%"),
        ("--alloc 0.5%", "alloc", "0.5%"),
        ("--alloc 1.5G", "alloc", "1.5G"),
        ("--bandwidth-size 1k", "bandwidth_size", 1024),
        ("--bandwidth_size 16MB", "bandwidth_size", 16_000_000),
        ("--min-busbw 0", "min_busbw", 0.0),
        ("--slow-factor 1", "slow_factor", 1.0),
    ],
)
def test_values_at_the_edge_are_good(line, name, value):
    assert getattr(get_parser().parse_args([*line.split(), "train.py"]), name) == value


def test_spaces_after_the_commas_of_what_to_watch_do_no_harm():
    assert get_parser().parse_args(["--watch", "forward, grads", "train.py"]).watch == ("forward", "grads")


def test_a_pattern_is_kept_as_it_was_typed():
    """What a shell did not expand is not changed on the way either."""
    line = ["--modules", "layer[0-3].* x'\"", "--modules=*", "--ignore", "*.mask:kwargs.attn_mask", "train.py"]
    args = get_parser().parse_args(line)
    assert (args.modules, args.ignore) == (["layer[0-3].* x'\"", "*"], ["*.mask:kwargs.attn_mask"])
    assert get_parser().parse_args(["train.py"]).modules == [], "one parse leaves nothing behind for the next"


def test_torchruns_own_module_option_is_not_shadowed():
    args = get_parser().parse_args(["--module", "package.train", "--modules", "x"])
    assert (args.module, args.training_script, args.modules) == (True, "package.train", [])
    assert args.training_script_args == ["--modules", "x"]


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
        ("--watch", "gradients"),
        ("--watch", "forward,"),
        ("--watch", ""),
        ("--watch", "forward;grads"),
        ("--watch", "Forward"),
        ("--modules", ""),
        ("--modules", " "),
        ("--every", "0"),
        ("--every", "-3"),
        ("--every", "1.5"),
        ("--every", "²"),
        ("--every", ""),
        ("--ignore", ""),
        ("--ignore", ":output"),
        ("--ignore", "fc:"),
        ("--ignore", "layers[3:output"),
        ("--modules", "["),
        ("--near-overflow", "-1"),
        ("--near-overflow", "65"),
        ("--near-overflow", "nan"),
        ("--near-overflow", "inf"),
        ("--near-overflow", "two"),
        ("--underflow-share", "-0.1"),
        ("--underflow-share", "1.01"),
        ("--underflow-share", "10%"),
        ("--underflow-share", "nan"),
        ("--scaler-skips", "0"),
        ("--scaler-skips", "many"),
        ("--state-every", "-1"),
        ("--alloc", ""),
        ("--alloc", "0%"),
        ("--alloc", "101%"),
        ("--alloc", "80"),
        ("--alloc", "-1GiB"),
        ("--alloc", "80 percent"),
        ("--bandwidth-size", "0"),
        ("--bandwidth-size", "80%"),
        ("--bandwidth-size", "1e6"),
        ("--bandwidth-size", "9999TiB"),
        ("--min-busbw", "-1"),
        ("--min-busbw", "nan"),
        ("--min-busbw", "fast"),
        ("--slow-factor", "0.5"),
        ("--slow-factor", "inf"),
        ("--health-thresholds", "/no/such/file"),
        ("--health-thresholds", "/"),
        ("--collector-port", "0"),
        ("--collector-port", "65536"),
        ("--collector-port", "http"),
        ("--metrics-port", "0"),
        ("--metrics-port", "http://0.0.0.0:9400"),
        ("--metrics-port", ":9400"),
        ("--metrics-port", "::1:9400"),
        ("--metrics-port", "[::1]"),
        ("--notify", "ftp://example.org"),
        ("--notify", "https://"),
        ("--notify", "no-such-program-here --flag"),
        ("--notify", "'an open quote"),
        ("--notify", ""),
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


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9400", "127.0.0.1:9400"),
        ("0.0.0.0:9400", "0.0.0.0:9400"),
        ("head-node:9400", "head-node:9400"),
        ("[::1]:9400", "[::1]:9400"),
    ],
)
def test_metrics_are_served_on_this_host_alone_unless_another_address_is_given(text, address):
    assert get_parser().parse_args(["--metrics-port", text, "train.py"]).metrics_port == address


@pytest.mark.parametrize("option", ["--sync", "--guard_optimizer", "--nccl-debug"])
def test_a_switch_takes_no_value(option):
    with pytest.raises(UsageError) as caught:
        get_parser().parse_args([f"{option}=yes", "train.py"])
    assert caught.value.text.startswith(f"{option.replace('_', '-')}: expected no value, found 'yes'")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--explain", "on", "expected auto, off or a batch number such as 17, found 'on'"),
        ("--explain", "-1", "expected auto, off or a batch number such as 17"),
        ("--rank", "-1", "expected a rank of 0 or more"),
        ("--watch", "all", "expected some of forward,grads,weights,comms"),
        ("--every", "0", "expected a number of batches of 1 or more, or auto"),
        ("--every", "automatic", "expected a number of batches of 1 or more, or auto, found 'automatic'"),
        ("--near-overflow", "70", "expected powers of two from 0 to 64"),
        ("--underflow-share", "2", "expected a share from 0 to 1"),
        ("--scaler-skips", "0", "expected a number of steps of 1 or more"),
        ("--modules", "", "expected a module's name or a pattern such as 'encoder.*'"),
        ("--ignore", "fc:", "expected MODULE or MODULE:ROLE"),
        ("--alloc", "80", "expected a share of the free memory, such as 80%, or a size of 1MiB or more"),
        ("--bandwidth-size", "x", "expected a size of 1KiB or more, such as 256MiB"),
        ("--min-busbw", "x", "expected a bandwidth in GB/s from 0"),
        ("--health-thresholds", "nowhere", "expected a file that can be read"),
    ],
)
def test_the_sentence_says_what_was_expected(option, value, expected):
    with pytest.raises(UsageError) as caught:
        get_parser().parse_args([f"{option}={value}", "train.py"])
    assert expected in str(caught.value)
    assert f"found {value!r}" in str(caught.value)


def test_an_unknown_option_and_a_missing_script_are_usage_errors():
    for line in (["--no-such-option", "train.py"], []):
        with pytest.raises(UsageError, match="gpuwatch launch --help-all"):
            get_parser().parse_args(line)


def test_help_shows_both(capsys):
    with pytest.raises(SystemExit) as stop:
        get_parser().parse_args(["--help-all"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--rdzv-endpoint" in shown
    assert "--on-overflow" in shown
    assert "--guard-optimizer" in shown


# -- check --------------------------------------------------------------------------------------------------------


def check_settings(line: list[str]) -> WorkerSettings:
    return worker_settings(get_check_parser().parse_args(line), Path("/dev/shm/scratch"), Path("/runs/1/logs"))


def test_a_check_takes_what_torchrun_takes_but_for_the_script():
    positional = {"training_script", "training_script_args"}
    theirs = {action.dest for action in get_args_parser()._actions} - positional
    ours = {action.dest for action in get_check_parser()._actions}
    assert theirs <= ours
    assert not positional & ours
    assert "training_script" not in get_check_parser().format_help()


def test_a_check_is_full_unless_it_is_to_be_quick():
    assert check_settings([]) == WorkerSettings(
        "/dev/shm/scratch", preflight="full", preflight_timeout_s=120.0, check_only=True
    )
    assert check_settings(["--quick"]).preflight == "quick"


def test_a_check_hands_the_options_of_the_preflight_on():
    line = "--alloc 20% --bandwidth-size 4M --min-busbw 3 --slow-factor 4 --nccl-debug --preflight-timeout 9"
    settings = check_settings(line.split())
    assert (settings.alloc, settings.bandwidth_size, settings.min_busbw) == ("20%", 4 << 20, 3.0)
    assert (settings.slow_factor, settings.nccl_debug, settings.preflight_timeout_s) == (4.0, "/runs/1/logs", 9.0)


@pytest.mark.parametrize(
    "line", ["train.py", "--nproc-per-node 2 train.py", "--quick train.py --foo 1", "train.py --nproc-per-node 2"]
)
def test_a_script_given_to_a_check_is_one_sentence_that_names_launch(line):
    with pytest.raises(UsageError, match=r"check runs no script, found 'train.py'.*gpuwatch launch") as caught:
        get_check_parser().parse_args(line.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["--preflight quick", "--preflight=full", "--nproc-per-node 2 --preflight"])
def test_a_check_with_the_option_of_a_launch_names_its_own(line):
    with pytest.raises(UsageError, match=r"found --preflight.*: gpuwatch check --quick \[GW"):
        get_check_parser().parse_args(line.split())


def test_a_shortened_option_is_one_option_in_both_spellings():
    assert get_check_parser().parse_args(["--preflight-t", "9", "--nproc-per", "3"]).preflight_timeout == 9
    with pytest.raises(UsageError, match="--s could match --standalone, --"):
        get_check_parser().parse_args(["--s"])


@pytest.mark.parametrize("option", ["-m", "--no-python", "--run-path"])
def test_an_option_about_a_script_is_one_sentence_too(option):
    with pytest.raises(UsageError, match=f"found .*{option}.*drop it"):
        get_check_parser().parse_args([option])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--on-overfow continue t.py", "unrecognized arguments: --on-overfow; did you mean --on-overflow?"),
        ("--nproc-pernode=2 t.py", "did you mean --nproc-per-node?"),
        ("--onoverflow continue t.py", "did you mean --on-overflow?"),
        ("--xyzzy t.py", "unrecognized arguments: --xyzzy (all options"),
        ("--nproc-per-node 2", "expected a training script, found none"),
    ],
)
def test_a_wrong_line_is_told_what_was_meant(line, said):
    with pytest.raises(UsageError) as refused:
        get_parser().parse_args(line.split())
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "line", ["--on-overflow abort", "--on-preflight-failure stop", "--every 3", "--no-such-option"]
)
def test_an_option_that_only_training_has_is_refused_by_a_check(line):
    with pytest.raises(UsageError, match=r"unrecognized arguments.*gpuwatch check --help-all"):
        get_check_parser().parse_args(line.split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--rdzv-backend c10d", "join_timeout=120"),
        ("--rdzv-backend c10d --preflight-timeout 1.5 --rdzv-conf read_timeout=5", "read_timeout=5,join_timeout=2"),
        ("--rdzv-backend c10d --rdzv-conf join_timeout=900", "join_timeout=900"),
        ("--rdzv-backend static", "timeout=120"),
        ("--rdzv-backend etcd", ""),
    ],
)
def test_a_check_waits_for_nodes_as_long_as_for_ranks(line, expected):
    args = get_check_parser().parse_args(line.split())
    limit_rendezvous(args)
    assert args.rdzv_conf == expected


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("train.py --on-hang abort --nproc_per_node=2", ["--on-hang", "--nproc_per_node"]),
        ("train.py --sync --every 3 --lr 1e-3", []),
        ("--on-hang abort train.py", []),
    ],
)
def test_an_option_behind_the_script_is_noted(line, names):
    notes = parse_launch(line.split()).notes
    assert [note.partition(" ")[0] for note in notes] == names
    assert all("stands behind train.py, which gets it" in note for note in notes)


def test_a_rank_without_a_batch_to_explain_is_refused():
    with pytest.raises(UsageError, match=r"expected --explain with a batch number .* found --explain auto: "):
        check_together(get_parser().parse_args(["--rank", "3", "train.py"]))
    check_together(get_parser().parse_args(["--rank", "3", "--explain", "17", "train.py"]))


@pytest.mark.parametrize(
    ("parser", "line"),
    [
        (get_check_parser, "--token=hunter2"),
        (get_check_parser, "train.py --api-key hunter2"),
        (get_run_parser, "--token=hunter2 --every 3"),
        (get_run_parser, "--notify no-such-program,--token=hunter2"),
    ],
)
def test_a_mistaken_option_is_named_without_its_secret(parser, line):
    with pytest.raises(UsageError) as caught:
        parser().parse_args(line.split())

    assert "***" in caught.value.text
    assert "hunter2" not in caught.value.text


def test_the_command_that_is_sent_has_no_secret():
    command = "curl --token hunter2 https://hooks.example.org/hunter2"
    line = ["--notify", "https://hooks.example.org/x?y=hunter2", "--notify", command, "train.py", "--password=hunter2"]

    sent = masked_command(without_addresses(line, [line[1], command]))

    assert sent == ["--notify", "...", "--notify", "curl --token *** ...", "train.py", "--password=***"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--help-al-l", "unrecognized arguments: --help-al-l; did you mean --help-all?"),
        ("--nproc-per-node 2 --nnode=2", "expected a training script, found none"),  # a shortened --nnodes
        ("--verison", "unrecognized arguments: --verison; did you mean gpuwatch --version?"),
        ("--evry=3", "unrecognized arguments: --evry; did you mean --every?"),
        ("--nproc-per-node 2", "expected a training script, found none"),
    ],
)
def test_without_a_script_an_unknown_option_is_what_is_wrong(line, told):
    with pytest.raises(UsageError, match=f"^{re.escape(told)}"):
        get_parser().parse_args(line.split())


@pytest.mark.parametrize(
    ("parse", "line"),
    [
        (parse_launch, "\u2013nproc-per-node 2 train.py"),
        (parse_launch, "--standalone \u2013nproc-per-node 2 train.py"),
        (parse_check, "\u2013nproc-per-node 2"),
        (parse_run, "\u2013node-rank 0 -- python train.py"),
    ],
)
def test_an_option_from_a_web_page_is_told_how_to_be_typed(parse, line):
    with pytest.raises(UsageError, match=r"which begins with an en dash; did you mean --n(proc-per-node|ode-rank)[?]"):
        parse(line.split())


def test_a_file_whose_name_begins_with_another_dash_is_a_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("\u2013standalone").touch()
    assert parse_launch(["\u2013standalone"]).training_script == "\u2013standalone"
