"""What is missing in the Python that runs gpuwatch is said in one sentence: torch, or the part in C."""

import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("torch", "functorch", "triton", "__editable__", "gpuwatch", "__pycache__")
WITHOUT_C = {
    "core": "gpuwatch was installed without its C extension",
    "recursion": "recursion.c of gpuwatch was not built for this Python",
}
DOCS = {"core": "docs/cost.md", "recursion": "docs/limits.md"}


def linked_package(folder: Path, without: str = "") -> None:
    """The package as links, but files that begin with `without` in worker/native."""
    native = folder / "gpuwatch" / "worker" / "native"
    native.mkdir(parents=True)
    for source, target in (
        (ROOT, native.parents[1]),
        (ROOT / "worker", native.parent),
        (ROOT / "worker/native", native),
    ):
        for path in source.iterdir():
            is_left_out = without and target == native and path.name.startswith(without) and path.suffix == ".so"
            if path.name[0] != "." and not is_left_out and not (target / path.name).exists():
                (target / path.name).symlink_to(path)


@pytest.fixture(scope="module")
def python_without_torch(tmp_path_factory):
    """A real environment with all that gpuwatch needs, but torch."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    target = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(LEFT_OUT) and path.suffix != ".pth":
            (target / path.name).symlink_to(path)
    linked_package(target)
    return str(folder / "bin" / "python")


@pytest.mark.quick(1)
@pytest.mark.parametrize("line", ["launch train.py", "check", "submit --print train.py", "launch --help"])
def test_without_torch_a_command_says_so(bench, python_without_torch, line):
    (bench.cwd / "train.py").touch()
    done = bench.finish(bench.start_program(python_without_torch, "-m", "gpuwatch", *line.split()))
    assert done.stderr == (
        f"gpuwatch: expected torch in the Python that runs gpuwatch, {python_without_torch}, found none: install it "
        "there [GW427]\n"
    )
    assert (done.code, done.stdout) == (2, "")


@pytest.mark.slow
def test_without_torch_run_runs_what_needs_none(bench, python_without_torch):
    (bench.cwd / "train.py").write_text("print('hello')\nimport torch\n")
    command = ("run", "--", python_without_torch, "train.py")
    done = bench.finish(bench.start_program(python_without_torch, "-m", "gpuwatch", *command))
    assert (done.code, done.stdout) == (1, "hello\n")
    assert done.stderr.count("Traceback") == 1
    assert "ModuleNotFoundError: No module named 'torch'" in done.stderr


@pytest.mark.slow
@pytest.mark.sample(2, of="an incomplete Python")
def test_a_rank_whose_python_has_no_torch_fails_as_it_does_under_torchrun(bench, python_without_torch):
    (bench.cwd / "train.py").write_text("print('hello')\nimport torch\n")
    environment = {"PYTHON_EXEC": python_without_torch}
    watched = bench.gpuwatch("launch", "--preflight", "off", "train.py", **environment)
    plain = bench.torchrun("train.py", **environment)
    assert (watched.code, watched.stdout) == (plain.code, plain.stdout) == (1, "hello\n")
    assert watched.stderr.count("ModuleNotFoundError: No module named 'torch'") >= 1
    assert watched.verdict["kind"] == "crash"


@pytest.mark.slow
@pytest.mark.sample(2, of="an incomplete Python")
def test_a_rank_whose_python_has_nothing_of_ours_goes_on_unwatched(bench):
    venv.create(bench.cwd / "bare", with_pip=False)
    python = str(bench.cwd / "bare" / "bin" / "python")
    (bench.cwd / "train.py").write_text(
        "import os, sys\nprint(sys.argv, sys.path[0], [n for n in os.environ if 'GPUW' in n])\n"
    )
    line = ("--preflight", "off", "train.py", "--lr", "1")
    watched = bench.gpuwatch("launch", *line, PYTHON_EXEC=python)
    plain = bench.torchrun(*line[2:], PYTHON_EXEC=python)
    assert (watched.code, watched.verdict["kind"], plain.code) == (6, "unknown", 0)
    assert watched.stdout == plain.stdout
    assert f"gpuwatch: expected msgspec in {python}, found none: install gpuwatch there\n" in watched.stderr


@pytest.mark.slow
@pytest.mark.sample(2, of="an incomplete Python")
@pytest.mark.parametrize("missing", ["core", "recursion"])
def test_without_the_part_in_c_that_is_said_once(bench, missing):
    linked_package(bench.cwd / "library", without=missing)
    (bench.cwd / "train.py").write_text("import torch\nprint(torch.nn.Linear(2, 2)(torch.ones(2)).shape)\n")
    for command in (("launch", "--preflight", "off", "--nproc-per-node", "2"), ("run", "--", sys.executable)):
        done = bench.gpuwatch(*command, "train.py", PYTHONPATH=str(bench.cwd / "library"))
        assert done.code == 0
        assert done.stderr.count("[GW606]") == done.stderr.count(WITHOUT_C[missing]) == 1
        assert DOCS[missing] in done.stderr
    shutil.rmtree(bench.cwd / "library")
    assert "[GW606]" not in bench.gpuwatch("run", "--", sys.executable, "train.py").stderr
