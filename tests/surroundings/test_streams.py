"""stdout and stderr may be a full disk, a pipe that nobody reads, or closed: a job ends as under torchrun there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .place import LAUNCH, RUN, TORCHRUN, Place, finish


@contextmanager
def streams(where: str) -> Iterator[dict[str, Any]]:
    """stdin, stdout and stderr for a process, as Popen takes them."""
    if where == "full":
        with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123  # no file of a folder
            yield {"stdin": full, "stdout": full, "stderr": full}
    elif where == "closed":

        def close() -> None:
            for number in range(3):
                os.close(number)

        yield {"preexec_fn": close}
    else:
        read_end, write_end = os.pipe()
        os.close(read_end)
        with open(write_end, "wb", buffering=0) as unread:  # noqa: PTH123  # a descriptor
            yield {"stdout": unread, "stderr": unread}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    assert made.left() == []


def ended(place: Place, module: list[str], arguments: list[str | bytes], where: str) -> tuple[int, dict[str, str]]:
    with streams(where) as given:
        process = place.start(module, arguments, **given)
    return finish(process), place.losses()


@pytest.mark.slow
@pytest.mark.sample(1, of="surroundings", turns=True)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("watched", [LAUNCH, RUN], ids=["launch", "run"])
@pytest.mark.parametrize("where", ["full", "closed", "unread"])
def test_a_job_ends_as_under_torchrun(place, watched, where):
    bare = ended(place, TORCHRUN, place.script("3"), where)
    assert bare == (0, {f"losses-{rank}": "1.0 0.5 0.3333333333333333" for rank in range(2)})
    code, losses = ended(place, watched, place.script("3"), where)
    assert losses == bare[1]
    if watched is LAUNCH:
        assert (code, place.verdict()["kind"]) == (0, "clean")
    else:
        assert code == 6, "a light rank has no torch, and so is none that `gpuwatch run` sees"
    assert ended(place, TORCHRUN, ["no-such-script.py"], where)[0] == 1
    assert ended(place, watched, ["no-such-script.py"], where)[0] == (2 if watched is LAUNCH else 1)


@pytest.mark.slow
@pytest.mark.sample(1, of="surroundings", turns=True)
@pytest.mark.timeout(600)
def test_the_reader_of_the_output_may_leave_in_mid_run(place):
    def run(module: list[str]) -> tuple[int, dict[str, str]]:
        read_end, write_end = os.pipe()
        process = place.start(module, place.script("3", "--waits-at", "1"), stdout=write_end, stderr=write_end)
        os.close(write_end)

        def leave() -> None:
            while not (place.cwd / "here-1-0").exists() and process.poll() is None:
                time.sleep(0.01)
            os.close(read_end)
            (place.cwd / "go").touch()

        code = finish(process, leave)
        (place.cwd / "go").unlink()
        return code, place.losses()

    assert run(LAUNCH) == run(TORCHRUN)
    assert place.verdict()["kind"] == "clean"


REFUSED = {
    "launch": (["gpuwatch", "launch", "--nproc-per-node", "none", "train.py"], 2),
    "run": (["gpuwatch", "run", "--every", "none", "--", "true"], 2),
    "check": (["gpuwatch", "check", "--nproc-per-node", "none"], 2),
    "report": (["gpuwatch", "report", "no-such-run"], 2),
    "command": (["gpuwatch", "reprot"], 2),
    "no command": (["gpuwatch"], 2),
}


@pytest.mark.parametrize("where", ["full", "closed", "unread"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_wherever_it_is_printed(place, name, where):
    command, code = REFUSED[name]
    assert ended(place, command, [], where)[0] == code


@pytest.mark.parametrize(
    ("where", "code", "said"), [("full", 2, "expected a stdout that can be written"), ("unread", 0, "")]
)
@pytest.mark.parametrize("command", [["runs"], ["--help"], ["report", "--help"]])
def test_an_answer_that_cannot_be_printed_is_one_sentence(place, tmp_path, command, where, code, said):
    errors = tmp_path / "errors"
    with streams(where) as given, errors.open("wb") as stderr:
        process = place.start(["gpuwatch", *command], [], **{**given, "stderr": stderr})
    assert finish(process) == code
    told = errors.read_text()
    assert said in told
    assert len(told.splitlines()) == bool(said)
