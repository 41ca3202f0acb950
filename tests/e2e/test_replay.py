"""A forward that --capture wrote is run again by another process, from the file and the source of its class alone."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys

import pytest
import torch

from .conftest import SCRIPTS

FAULTS = {
    "attention": ("nan", "aten.mul.Tensor", "nan"),
    "custom_norm": ("nan", "aten.rsqrt.default", "nan"),
    "bf16_autocast": ("+inf", "aten.reciprocal.default", "finite"),
    "fp16": ("+inf", "aten.addmm.default", "finite"),
    "gather": ("+inf", "aten.log.default", "+inf"),
    "custom_function": ("+inf", "aten.exp.default", "+inf"),
    "dropout": ("+inf", "aten.div.Tensor", "+inf"),
    "keywords": ("+inf", "aten.mul.Tensor", "+inf"),
    "structured": ("nan", "aten._softmax.default", "nan"),
    "named_tuple": ("nan", "aten._softmax.default", "nan"),
    "batch_norm": ("nan", "aten.native_batch_norm.default", "nan"),
    "tied": ("+inf", "aten.pow.Tensor_Scalar", "+inf"),
}
"""Name -> (value of the output, operation, value in float32)."""


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """Folders of captures, from one process that has ended. `ran` has a line for each time that the script ran."""
    folder = tmp_path_factory.mktemp("captured")
    command = [sys.executable, str(SCRIPTS / "captured_faults.py"), str(folder)]
    environment = {**os.environ, "RAN": str(folder / "ran"), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=400)
    return folder


def replay(bench, *words):
    run = bench.gpuwatch("replay", "--format", "json", *map(str, words))
    return json.loads(run.stdout)["rows"], run


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows_again_from_its_folder(bench, captured, fault):
    """Random numbers, autocast, shared weights, buffers and hooks are as they were; the script does not train again."""
    value, operation, in_float32 = FAULTS[fault]

    rows, run = replay(bench, captured / fault, "--trust", "--dtype", "float32")

    assert run.code == 0
    assert (rows[0]["value"], rows[0]["operation"]) == (value, operation)
    assert fault in rows[0]["place"].partition("#")[2].split()
    assert rows[1]["value"] == in_float32
    assert (captured / "ran").read_text() == "__main__\n", "no replay has run the script"


@pytest.mark.slow
def test_both_files_are_private_and_the_second_runs_alone(bench, captured):
    folder = captured / "fp16"
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "overflow.pt": 0o600,
        "reproduce.py": 0o600,
    }
    alone = bench.finish(bench.start_program(sys.executable, str(folder / "reproduce.py")))
    assert alone.code == 0
    assert "aten.addmm.default" in alone.stdout
    bare = (
        "import sys; sys.modules['gpuwatch'] = None; import runpy; runpy.run_path(sys.argv.pop(), run_name='__main__')"
    )
    bare_run = bench.finish(bench.start_program(sys.executable, "-c", bare, str(folder / "reproduce.py")))
    assert "torch.float16 [4, 8]: 32 of them are not finite" in bare_run.stdout, "torch alone is enough"
    finite = bench.finish(bench.start_program(sys.executable, str(folder / "reproduce.py"), "--dtype", "bfloat16"))
    assert "the output is finite" in finite.stdout


@pytest.mark.slow
def test_the_rank_of_the_verdict_is_captured_under_ddp(bench):
    run = bench.launch("ddp_overflow.py", "--preflight", "off", "--capture", args=("--rank", "1", "--batch", "2"))

    assert run.code == 4
    folder = (bench.cwd / "gpuwatch-runs" / "latest").resolve()
    capture = run.verdict["capture"]
    assert capture["path"] == str(folder / "overflow.pt")
    assert capture["bytes"] == (folder / "overflow.pt").stat().st_size
    assert (capture["needs_trust"], capture["refused"]) == (True, "")
    assert not list(folder.glob("overflow-*"))
    assert not list(folder.glob(".overflow*"))
    command = next(step for step in run.verdict["next"] if "gpuwatch replay" in step).partition("gpuwatch replay ")[2]
    assert command == f"{folder} --trust"
    assert "gpuwatch replay" in run.stderr  # the one screen has the step, the whole report what was captured
    for name in ("report.txt", "report.html"):
        assert "Capture" in (folder / name).read_text()
    rows, replayed = replay(bench, *command.split())
    assert replayed.code == 0
    assert (rows[0]["value"], rows[0]["operation"]) == ("nan", "aten.mm.default")
    assert "self.widen(" in rows[0]["place"]
    assert [row["dtype"] for row in rows] == ["as captured", "float32", "bfloat16", "float16"]
    latest = bench.gpuwatch("replay", "--trust")
    assert "aten.mm.default" in latest.stdout


@pytest.mark.slow
def test_what_is_not_captured_is_told_and_changes_nothing(bench):
    plain = bench.launch("wide_overflow.py", "--preflight", "off", nproc=1)
    before = plain.verdict
    limit = "--capture", "--capture-max", "100kB"
    run = bench.launch("wide_overflow.py", "--preflight", "off", *limit, nproc=1)

    assert (plain.code, run.code) == (4, 4)
    assert before["capture"] is None
    why = "it takes 400 KiB, and --capture-max is 97.7 KiB; --sync writes a smaller part"
    assert run.verdict["capture"]["refused"] == why
    assert run.verdict["statement"] == before["statement"]
    assert run.verdict["operation"] == before["operation"]
    whole = (bench.cwd / "gpuwatch-runs" / "latest" / "report.txt").read_text()
    assert f"not written: {why}" in " ".join(whole.split())
    assert "threads.py" not in whole, "a line of gpuwatch's own is no line of the script"
    refused = bench.gpuwatch("replay")
    assert refused.code == 2
    assert "--capture-max" in refused.stderr


@pytest.mark.slow
def test_a_rank_that_is_killed_as_it_writes_leaves_no_file(bench):
    run = bench.launch("wide_overflow.py", "--preflight", "off", "--capture", nproc=1, args=("--limit",))

    assert run.report["ranks"][0]["exit"] == -signal.SIGXFSZ
    assert run.verdict["kind"] == "overflow"
    folder = bench.cwd / "gpuwatch-runs" / "latest"
    assert [path.name for path in folder.iterdir() if "overflow" in path.name or "reproduce" in path.name] == []


# Hostile files.


@pytest.fixture
def hostile(bench, captured):
    """Writes a capture that was changed, and says what replaying it without --trust did."""
    folder = bench.cwd / "hostile"
    shutil.copytree(captured / "of_torch", folder)
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nfrom torch.nn import Linear as Evil\n")

    def replayed(change, *options):
        capture = torch.load(folder / "overflow.pt", weights_only=True)
        torch.save(change(capture) or capture, folder / "overflow.pt")
        run = bench.gpuwatch("replay", str(folder), *options)
        return run, (folder / "ran").exists()

    return replayed


@pytest.mark.slow
def test_a_capture_of_torchs_own_modules_needs_no_trust(bench, captured):
    rows, run = replay(bench, captured / "of_torch", "--dtype", "float32")
    assert run.code == 0
    assert (rows[0]["value"], rows[0]["operation"], rows[0]["place"]) == ("+inf", "aten.addmm.default", "in `1`")


class _Opens:
    """What a pickle can do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--trust",)])
def test_a_pickle_instead_of_a_capture_runs_never(bench, hostile, options):
    run, ran = hostile(lambda capture: _Opens(str(bench.cwd / "hostile" / "ran")), *options)
    assert (run.code, ran) == (2, False)
    assert "cannot be read as data alone" in run.stderr


@pytest.mark.slow
def test_a_bare_pickle_runs_never(bench):
    path = bench.cwd / "overflow.pt"
    path.write_bytes(pickle.dumps(_Opens(str(bench.cwd / "ran"))))
    run = bench.gpuwatch("replay", str(path))
    assert (run.code, (bench.cwd / "ran").exists()) == (2, False)


def _with_class(*name):
    return lambda capture: capture["modules"][0].update({"class": name})


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [("os", "system"), ("evil", "Evil"), ("__main__", "Evil"), ("torch.nn.modules.evil", "Evil")]
)
def test_a_class_that_is_not_torchs_is_not_imported_without_trust(bench, hostile, name):
    folder = bench.cwd / "hostile"

    def change(capture):
        capture["source"].update(file=str(folder / "evil.py"), path=[str(folder)])
        _with_class(*name)(capture)

    run, ran = hostile(change)
    assert (run.code, ran) == (2, False)
    assert "if you trust the file: --trust" in run.stderr


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [("torch.nn.modules.module", "torch.os.system"), ("torch.nn.modules.module", "warnings")]
)
def test_what_is_no_module_of_torch_is_not_called(hostile, name):
    run, _ = hostile(_with_class(*name))
    assert run.code == 2
    assert "--trust" in run.stderr


@pytest.mark.slow
def test_a_pickle_inside_is_not_read_without_trust(bench, hostile):
    def change(capture):
        data = io.BytesIO()
        torch.save(_Opens(str(bench.cwd / "hostile" / "ran")), data)
        capture["pickled"] = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)

    run, ran = hostile(change)
    assert (run.code, ran) == (2, False)
    assert "it unpickles objects" in run.stderr
    assert hostile(lambda capture: None, "--trust")[1], "with --trust it does"


@pytest.mark.slow
def test_the_folders_of_a_capture_are_not_searched_without_trust(bench, hostile):
    folder = bench.cwd / "hostile"
    for name in "numpy", "sympy", "rich", "queue", "linecache":
        shutil.copy(folder / "evil.py", folder / f"{name}.py")
    run, ran = hostile(lambda capture: capture["source"].update(path=[str(folder)]))
    assert (run.code, ran) == (0, False)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("text", [b"", b"PK\x03\x04", b"x" * 4096])
def test_a_damaged_file_is_refused_in_a_sentence(bench, text):
    path = bench.cwd / "overflow.pt"
    path.write_bytes(text)
    run = bench.gpuwatch("replay", str(path))
    assert run.code == 2
    assert "Traceback" not in run.stderr
    assert run.stderr.count("\n") == 1


def test_a_pipe_in_place_of_the_file_is_not_waited_for(bench):
    os.mkfifo(bench.cwd / "overflow.pt")
    run = bench.gpuwatch("replay", str(bench.cwd / "overflow.pt"))
    assert run.code == 2
    assert "not a regular file" in run.stderr
