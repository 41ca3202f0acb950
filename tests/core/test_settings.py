from __future__ import annotations

import inspect
import os

import gpuwatch
import msgspec
import pytest
from gpuwatch.core.settings import VARIABLE, WorkerSettings, as_keywords, worker_options

ALL_CHANGED = WorkerSettings(
    recorder_dir="/dev/shm/gpu watch; 'x'",
    round="abc-3",
    attempt=3,
    on_overflow="continue",
    explain=17,
    rank=3,
    capture="/runs/1 é",
    capture_max=1 << 20,
    trace_batches=[0, 7],
    abort_after_batch=0,
    preflight="off",
    preflight_timeout_s=1.5,
    on_preflight_failure="continue",
    watch=("weights",),
    modules=["encoder.*", "head [é]"],
    every=100,
    after_overflow=True,
    sync=True,
    guard_optimizer=True,
    ignore=["mask.*:output[0]"],
    near_overflow=2.5,
    underflow_share=0.25,
    scaler_skips=3,
    state_every=7,
    alloc="20%",
    bandwidth_size=4096,
    min_busbw=2.5,
    slow_factor=3.0,
    nccl_debug="/runs/a b/logs",
    health_thresholds="/etc/limits.toml",
    check_only=True,
    node_hosts=["gpu-1", "gpu-2"],
    meets_at="head:29400",
)


@pytest.mark.parametrize("settings", [WorkerSettings("/x"), ALL_CHANGED], ids=["defaults", "all changed"])
def test_settings_pass_through_the_environment_unchanged(settings, monkeypatch):
    monkeypatch.setenv(VARIABLE, settings.to_json())
    assert WorkerSettings.from_environment() == settings


def test_the_sample_changes_every_field():
    default = msgspec.structs.asdict(WorkerSettings("/x"))
    assert all(value != default[name] for name, value in msgspec.structs.asdict(ALL_CHANGED).items())


def test_the_worker_takes_its_variable_out_of_the_environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, WorkerSettings("/x").to_json())
    WorkerSettings.from_environment()
    assert VARIABLE not in os.environ


def test_without_a_launch_there_are_no_settings(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert WorkerSettings.from_environment() is None


def test_settings_of_a_later_version_are_read(monkeypatch):
    monkeypatch.setenv(VARIABLE, '{"recorder_dir": "/x", "later": 1}')
    assert WorkerSettings.from_environment() == WorkerSettings("/x")


def test_watch_has_a_keyword_for_each_option_of_watching():
    keywords = {
        name for name, (_, option) in worker_options().items() if option.part == "watching" and option.in_python is None
    }
    assert keywords == set(inspect.signature(gpuwatch.watch).parameters) - {"model"}


@pytest.mark.parametrize(
    ("advice", "in_python"),
    [
        ("use --sync a second time, --every 1 (--modules).", "use sync=True a second time, every=1 (modules=)."),
        ("Watch the weights, too: --watch forward,weights.", 'Watch the weights, too: watch=["forward", "weights"].'),
        (
            "See gpuwatch launch --trace-batches N,N; --on-overflow continue",
            'See frames(N) of the watch; on_overflow="continue"',
        ),
        (
            "--explain off tests nothing; `--explain N`, --explain 3",
            'explain="off" tests nothing; `explain=N`, explain=3',
        ),
        ("waived by --ignore 'a.*': 3, --ignore: 3", "waived by ignore=['a.*']: 3, ignore=: 3"),
        ("more than --capture-max; --capture-max is 2 GiB", "more than capture_max=; capture_max= is 2 GiB"),
        ("`parser('--sync')`, x--sync, --sync-all, --min-busbw 3, --rank 1", None),
    ],
)
def test_options_in_advice_become_keywords(advice, in_python):
    assert as_keywords(advice) == (in_python or advice)
