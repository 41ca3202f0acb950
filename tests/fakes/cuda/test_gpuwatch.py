"""gpuwatch on the stand-in: the verdicts and the bits of the CPU, through the device's path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

BACKENDS = ["gloo", "nccl"]
SCRIPTS = Path(__file__).parent / "scripts"
OF_A_VERDICT = ("kind", "rank", "module", "class", "phase", "role", "value", "batch", "certainty", "dtype")


def launch(*arguments, **more):
    """As `launch_script`, of train.py"""
    return launch_script("train.py", *arguments, **more)


def launch_script(script, folder, nproc, device, backend, *arguments, options=()):
    """(verdict, what the ranks print, the report)"""
    folder.mkdir()
    command = [sys.executable, "-m", "gpuwatch.cli.main", "launch", "--standalone", "--nproc-per-node", str(nproc)]
    command += [*options, str(SCRIPTS / script), "--device", device, "--backend", backend, *arguments]
    environment = {**os.environ, "STAND_IN_CUDA_DEVICES": str(max(2, nproc))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    file = folder / "gpuwatch-runs" / "latest" / "report.json"
    assert file.is_file(), done.stderr
    report = json.loads(file.read_text())
    verdict = {key: report["verdict"].get(key) for key in OF_A_VERDICT}
    return verdict, sorted(line for line in done.stdout.splitlines() if line.startswith("rank ")), report


@cache
def on_the_cpu(folder, nproc, fault):
    return launch(folder / f"cpu-{nproc}-{fault}", nproc, "cpu", "gloo", "--fault", fault, "--rank", str(nproc - 1))


@pytest.fixture(scope="module")
def of_the_cpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    return lambda nproc, fault: on_the_cpu(folder, nproc, fault)


@pytest.mark.parametrize(("fault", "place"), [("none", None), ("forward", (1, "block.widen", "+inf", 2))])
def test_fsdp2_over_nccl_is_watched(tmp_path, fault, place):
    verdict, _, _ = launch(tmp_path / "cuda", 2, "cuda", "nccl", "--wrap", "fsdp2", "--fault", fault, "--rank", "1")

    assert verdict["certainty"] == "established"
    if place is None:
        assert verdict["kind"] == "clean"
    else:
        assert tuple(verdict[key] for key in ("rank", "module", "value", "batch")) == place


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_a_transformer_is_clean_with_the_same_bits(tmp_path, model, nproc):
    verdict, found, _ = launch_script("models.py", tmp_path / "cuda", nproc, "cuda", "nccl", "--model", model)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    command += [str(SCRIPTS / "models.py"), "--backend", "nccl", "--model", model]
    plain = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=280)

    assert (verdict["kind"], verdict["certainty"]) == ("clean", "established")
    assert found == sorted(line for line in plain.stdout.splitlines() if line.startswith("rank "))
    assert len(found) == 6 * nproc


@pytest.mark.parametrize("fault", ["none", "forward", "backward", "optimizer"])
@pytest.mark.parametrize(
    ("nproc", "backend"),
    [(1, "gloo"), (2, "gloo"), (2, "nccl"), *(pytest.param(4, each, marks=pytest.mark.soak) for each in BACKENDS)],
)
def test_the_verdict_is_that_of_the_cpu(tmp_path, of_the_cpu, nproc, backend, fault):
    expected, lines, _ = of_the_cpu(nproc, fault)
    verdict, found, report = launch(
        tmp_path / "cuda", nproc, "cuda", backend, "--fault", fault, "--rank", str(nproc - 1)
    )

    assert verdict == expected
    assert verdict["kind"] == ("clean" if fault == "none" else "overflow")
    assert fault != "none" or found == lines  # losses and weights, bit by bit
    assert [rank["device"] for rank in report["ranks"]] == [f"cuda:{rank}" for rank in range(nproc)]


def test_an_overflow_before_a_collective_that_never_ends_is_no_hang(tmp_path):
    verdict, _, _ = launch(
        tmp_path / "cuda",
        2,
        "cuda",
        "nccl",
        "--fault",
        "hang",
        "--rank",
        "1",
        options=("--hang-timeout", "10", "--on-hang", "abort"),
    )

    assert tuple(verdict[key] for key in ("kind", "rank", "module", "value", "batch", "certainty")) == (
        *("overflow", 1, "block.widen", "+inf", 0, "established"),
    )


def test_a_device_that_asserts_on_what_has_overflowed_is_no_fault_of_gpuwatchs(tmp_path):
    verdict, tokens, report = launch_script("draw_token.py", tmp_path / "cuda", 1, "cuda", "nccl")

    assert [verdict[key] for key in ("kind", "module", "batch", "certainty")] == ["overflow", "1", 2, "established"]
    assert len(tokens) == 2
    assert "own fault" not in json.dumps(report)
    assert not any("not recorded since" in line for line in report["verdict"]["evidence"])
