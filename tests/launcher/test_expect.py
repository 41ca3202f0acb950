"""What is refused before anything starts, and what is not, because plain torchrun would run it."""

from __future__ import annotations

import importlib
import os
import sys
import zipfile
from pathlib import Path

import pytest
from gpuwatch.core.codes import Code
from gpuwatch.core.errors import UsageError
from gpuwatch.launcher import expect
from gpuwatch.launcher.expect import RANK_BYTES, expect_program, expect_room, expect_script, why_not_started
from gpuwatch.launcher.options import get_parser

POLYGLOT = "#!/bin/sh\n'''exec' python3 \"$0\" \"$@\"\n' '''\nprint(1)\n"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith(("PET_", "PYTHON_EXEC"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    return tmp_path


def write(path: str, text: str = "print(1)\n", mode: int = 0o644) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    Path(path).chmod(mode)


def expect_all(*line: str) -> None:
    args = get_parser().parse_args(list(line))
    expect_script(args)
    expect_program(args)


def refused(*line: str) -> str:
    with pytest.raises(UsageError) as error:
        expect_all(*line)
    assert error.value.code is Code.NO_SCRIPT
    return error.value.text


@pytest.mark.parametrize(
    ("text", "mode", "runs"),
    [
        ("#!/bin/sh\necho hi\n", 0o755, "./s.sh"),
        ("#!/usr/bin/env -S bash -e\necho hi\n", 0o755, "./s.sh"),
        ("#!/bin/bash\necho hi\n", 0o644, "bash s.sh"),
        ("echo hi\n", 0o755, "sh s.sh"),
    ],
)
def test_a_shell_script_is_told_how_to_be_run(text, mode, runs):
    write("s.sh", text, mode)
    assert refused("s.sh").endswith(
        "found the shell script 's.sh'; to start it as each rank, without watching it: "
        f"gpuwatch launch --no-python {runs}; if it starts the ranks itself: gpuwatch run -- {runs}"
    )


def test_a_report_is_no_script():
    write("my report.json", "{}")
    assert refused("my report.json").endswith(
        "found the JSON file 'my report.json'; to show a report: gpuwatch report 'my report.json'"
    )


@pytest.mark.parametrize(("name", "text"), [("s.sh", "print(1)\n"), ("train", POLYGLOT), ("x.py", "this is no Python")])
def test_what_python_runs_or_fails_at_itself_is_left_to_it(name, text):
    write(name, text)
    expect_all(name)


def test_a_pipe_and_a_zip_file_are_scripts():
    os.mkfifo("pipe.sh")
    expect_all("pipe.sh")  # it is not read
    with zipfile.ZipFile("app.sh", "w") as app:
        app.writestr("__main__.py", "print(1)")
    expect_all("app.sh")


@pytest.mark.parametrize(
    ("script", "hint"),
    [
        (["trian.py"], "; did you mean train.py?"),
        (["src/mian.py"], "; did you mean src/main.py?"),
        (["nothing.py"], ""),
        (["python", "train.py"], "; leave it out: gpuwatch launch [options] train.py"),
    ],
)
def test_a_script_that_is_not_there_was_maybe_another(script, hint, tmp_path):
    write("train.py")
    write("src/main.py")
    assert refused(*script) == f"expected a script to run, found no file {script[0]!r} in {tmp_path}{hint}"


def test_a_folder_with_one_script_was_maybe_that():
    write("src/main.py")
    assert refused("src").endswith("which has no __main__.py; did you mean src/main.py?")
    write("src/other.py")
    assert refused("src").endswith("which has no __main__.py")
    write("src/__main__.py")
    expect_all("src")


def test_a_program_must_be_there(monkeypatch):
    write("s.sh", "#!/bin/sh\necho hi\n", 0o755)
    write("train.py")
    expect_all("--no-python", "./s.sh")
    expect_all("--no-python", "sh", "s.sh")
    assert refused("--no-python", "s.sh") == "--no-python: s.sh: command not found; did you mean ./s.sh?"
    assert refused("--no-python", "./nothere") == "--no-python: ./nothere: no such file"
    assert refused("--no-python", "train.py").endswith("command not found; to run it: gpuwatch launch train.py")
    monkeypatch.setenv("PATH", f"{Path.cwd()}{os.pathsep}{os.environ['PATH']}")
    expect_all("--no-python", "s.sh")


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("nosuch", "found no module 'nosuch' in {folder}, on PYTHONPATH and among what is installed"),
        ("nosuch.module", "found no module 'nosuch' in {folder}, on PYTHONPATH and among what is installed"),
        (
            "trian",
            "found no module 'trian' in {folder}, on PYTHONPATH and among what is installed; did you mean train?",
        ),
        ("pkg.trian", "found no module 'trian' in 'pkg'; did you mean train?"),
        ("pkg.train.more", "found no module 'more' in 'pkg.train'"),
        ("pkg", "found no __main__ in the package 'pkg'"),
        ("plain.trian", "found no module 'trian' in 'plain'; did you mean train?"),
        ("train.py", "found no module 'py' in 'train'; to run this file: gpuwatch launch train.py, without -m"),
    ],
)
def test_a_module_that_is_certainly_not_there_is_refused(module, told, tmp_path):
    for path in ("train.py", "pkg/__init__.py", "pkg/train.py", "plain/train.py"):
        write(path, "raise AssertionError('imported')\n")
    assert refused("-m", module) == f"-m {module}: expected a module to run, {told.format(folder=tmp_path)}"
    assert not {"train", "pkg", "plain"} & sys.modules.keys()


@pytest.mark.parametrize(
    ("files", "module"),
    [
        (["train.py"], "train"),
        (["pkg/__init__.py", "pkg/train.py"], "pkg.train"),
        (["pkg/__init__.py", "pkg/__main__.py"], "pkg"),
        (["plain/deep/train.py"], "plain.deep.train"),  # folders without an __init__.py
        (["my-tools.py"], "my-tools"),
        (["http/notes.py"], "http.server"),  # a folder does not hide a package
        ([], "json.tool"),
        ([], "torch.distributed.run"),
        ([], "timeit"),
    ],
)
def test_a_module_that_python_would_find_is_not(files, module):
    for path in files:
        write(path)
    expect_all("-m", module)


@pytest.mark.parametrize("source", ["__path__.append('elsewhere')\n", "import sys\nsys.modules['pkg.made'] = sys\n"])
def test_a_package_that_may_make_its_modules_is_left_to_python(source):
    write("pkg/__init__.py", source)
    expect_all("-m", "pkg.made.more")


def test_modules_of_pythonpath_and_of_another_python_are_not_refused(tmp_path, monkeypatch):
    write("elsewhere/far.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    expect_all("-m", "far")
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    expect_all("-m", "nosuch")


def test_more_ranks_than_the_cores_or_the_memory_carry_are_one_sentence(monkeypatch):
    monkeypatch.setattr(expect, "count_gpus", lambda: 0)
    expect_room(8, cores=2, memory=8 * RANK_BYTES)
    with pytest.raises(UsageError) as error:
        expect_room(9, cores=2, memory=1e15)
    assert error.value.text == (
        "--nproc-per-node: expected at most 8 ranks on this host (4 for each of its 2 cores), found 9; to start them "
        "all the same: --force"
    )
    with pytest.raises(UsageError, match=r"at most 3 ranks on this host \(256 MiB for each, and 1000 MiB are free\)"):
        expect_room(8, cores=2, memory=1000 << 20)
    expect_room(1, cores=1, memory=0.0)
    with pytest.raises(UsageError, match="found 99999"):
        expect_room(99999)


def test_a_rank_for_each_gpu_is_never_too_many(monkeypatch):
    monkeypatch.setattr(expect, "count_gpus", lambda: 16)
    expect_room(16, cores=1, memory=0.0)


@pytest.mark.parametrize(
    ("program", "hint"),
    [("ls -l", "without quotes: ls -l"), ("launch", "did you mean gpuwatch launch, without run?")],
)
def test_a_program_that_is_none_is_told_with_what_was_meant(program, hint):
    problem = why_not_started(program, "python")
    assert problem is not None
    assert problem[0].endswith(hint) and problem[1] == 127
