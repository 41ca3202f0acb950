from __future__ import annotations

import os

import msgspec
import pytest
from gpuwatch.core.settings import VARIABLE, WorkerSettings

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
