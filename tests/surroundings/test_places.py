"""Folders, names and file systems as a job may find them. torchrun in the same place is the control of each."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from .place import LAUNCH, LIGHT_RANK, TORCHRUN, Place, finish

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sample(1, of="surroundings", turns=True),
    pytest.mark.timeout(600),
]
GOOD = {f"losses-{rank}": "1.0 0.5 0.3333333333333333" for rank in range(2)}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    made = Place(tmp_path, {"TMPDIR": str(temporary)})
    yield made
    assert made.left() == []


def both(place: Place, arguments: list[str | bytes], **how: Any) -> list[tuple[int, dict[str, str]]]:
    """Exit code and losses, of torchrun and of the launch."""
    return [(finish(place.start(module, arguments, **how)), place.losses()) for module in (TORCHRUN, LAUNCH)]


@pytest.mark.parametrize("name", [b"w\xff", "Grüße \N{SNOWMAN}".encode(), b"a b\n'"], ids=["bytes", "words", "newline"])
def test_a_folder_and_arguments_of_any_name(place, name):
    place.cwd = place.cwd / os.fsdecode(name)
    place.cwd.mkdir()
    script = place.cwd / os.fsdecode(name + b".py")
    text = (
        f"import os, runpy, sys\nassert os.fsencode(sys.argv.pop()) == {name!r}\nrunpy.run_path({str(LIGHT_RANK)!r})\n"
    )
    script.write_text(text)
    assert both(place, [os.fsencode(script.name), "3", name]) == [(0, GOOD)] * 2
    assert place.verdict()["kind"] == "clean"


@pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
    ],
    ids=["posix", "ascii"],
)
def test_a_locale_without_a_language(place, env):
    place.env |= env
    place.cwd = place.cwd / "Grüße"
    place.cwd.mkdir()
    assert both(place, place.script("3")) == [(0, GOOD)] * 2
    assert place.verdict()["kind"] == "clean"


def test_a_working_folder_that_is_removed_in_mid_run(place, tmp_path):
    """The ranks work elsewhere."""
    script = tmp_path / "moves.py"
    script.write_text(
        f"import os, runpy, sys\nos.chdir({str(tmp_path)!r})\nsys.argv[0] = {str(LIGHT_RANK)!r}\n"
        f"runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    place.cwd = tmp_path / "removed"

    def run(module: list[str]) -> tuple[int, dict[str, str], str]:
        place.cwd.mkdir()
        with (tmp_path / "said").open("wb") as said:
            process = place.start(module, [str(script), "3", "--waits-at", "1"], stderr=said)

        def remove() -> None:
            while not all((tmp_path / f"here-1-{rank}").exists() for rank in range(2)) and process.poll() is None:
                time.sleep(0.01)
            shutil.rmtree(place.cwd)
            (tmp_path / "go").touch()

        code = finish(process, remove)
        (tmp_path / "go").unlink()
        losses = Place(tmp_path).losses()
        return code, losses, (tmp_path / "said").read_text()

    code, losses, _ = run(TORCHRUN)
    assert (code, losses) == (0, GOOD)
    code, losses, said = run(LAUNCH)
    assert (code, losses) == (0, GOOD), said
    assert "VERDICT  clean, established" in said


@pytest.mark.parametrize("hides", ["mount -t tmpfs none /proc", "umount --lazy /proc"], ids=["empty", "unmounted"])
def test_without_proc(place, hides):
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace here: not root, or in a container without the right to")
    found = []
    for module in (TORCHRUN, LAUNCH):
        under = ["unshare", "--mount", "sh", "-c", f'{hides} && exec "$@"', "sh"]
        found.append((finish(place.start(module, place.script("3"), under=under)), place.losses()))
    assert found == [(0, GOOD)] * 2
    assert place.verdict()["kind"] == "clean"


@pytest.mark.parametrize(
    ("ends", "hides"),
    [
        ("well", "umount --lazy /proc"),
        ("overflows", "umount --lazy /proc"),
        ("is killed", "mount -t tmpfs none /proc"),
    ],
)
def test_a_proc_that_goes_away_while_the_job_runs(place, ends, hides):
    """A rank that is killed is the worst: who looks for its end finds no process any more."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace here: not root, or in a container without the right to")
    found = []
    for module in (TORCHRUN, LAUNCH):
        overflow = ["--overflow", "1", "2"] if ends == "overflows" and module is LAUNCH else []
        process = place.start(module, place.script("3", "--waits-at", "1", *overflow), under=["unshare", "--mount"])
        names = [f"here-1-{rank}" for rank in range(2)]

        def hide(process=process, names=names) -> None:
            while not all((place.cwd / name).exists() for name in names):
                assert process.poll() is None
                time.sleep(0.05)
            subprocess.run(["nsenter", "-t", str(process.pid), "--mount", "sh", "-c", hides], check=True)
            if ends == "is killed":
                time.sleep(1.0)  # the launch and its agent have looked for its ranks meanwhile
                next(each for each in psutil.Process(process.pid).children(recursive=True) if is_rank(each)).kill()
            (place.cwd / "go").touch()

        found.append((finish(process, hide), place.losses()))
        (place.cwd / "go").unlink()
    kind, code = {"well": ("clean", 0), "overflows": ("overflow", 4), "is killed": ("lost", 5)}[ends]
    assert found[0] == ((0, GOOD) if ends != "is killed" else (1, {}))
    assert found[1] == ((0, GOOD) if ends == "well" else (code, {}))
    assert place.verdict()["kind"] == kind


def is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "RANK" in process.environ() and str(LIGHT_RANK) in process.cmdline()
    return False
