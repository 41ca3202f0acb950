"""A job's own modules may have any name: gpuwatch imports none of them, and the script gets its own."""

import json
import sys
from pathlib import Path

import pytest

TRAP = """
import os, sys
with open({log!r}, "a") as log:
    print({name!r}, *sys.orig_argv[:4], file=log)
raise SystemExit(9)
"""
OURS = ["zmq", "msgspec", "psutil", "click", "rich", "jinja2", "pynvml", "numpy", "gpuwatch"]
NOT_TORCHS = ["zmq", "msgspec", "click"]
"""torch and what it imports do without them, so torchrun lives with a broken one of that name on its path."""
SCRIPT = """
import json, os, sys
names = os.environ["NAMES_OF_THE_SCRIPT"].split()
path = list(sys.path)
before = [name for name in names if name in sys.modules]
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
torch.manual_seed(0)
for parameter in model.parameters():
    torch.nn.init.constant_(parameter, 0.5)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
own = {name: getattr(__import__(name), "MINE", None) for name in names}
print(json.dumps({"path": path, "loaded before": before, "own": own, "losses": losses}), flush=True)
"""


def trap(folder: Path, names) -> None:
    """Modules that end the process that imports them, and say which."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.py").write_text(TRAP.format(log=str(folder / "imported"), name=name))


def caught(folder: Path) -> str:
    log = folder / "imported"
    return log.read_text() if log.exists() else ""


def command(way: str, script: Path) -> list[str]:
    if way == "run":
        return ["gpuwatch.cli.main", "run", "--", str(Path(sys.executable).with_name("torchrun")), str(script)]
    return ["gpuwatch.cli.main", "launch", "--preflight", way, str(script)]


def both(bench, way, script, **environment):
    """The job under gpuwatch and under torchrun, both started by their names as a user does."""
    environment.setdefault("NAMES_OF_THE_SCRIPT", "")
    plain = bench.finish(
        bench.start_program(str(Path(sys.executable).with_name("torchrun")), str(script), **environment)
    )
    watched = bench.finish(
        bench.start_program(str(Path(sys.executable).with_name("gpuwatch")), *command(way, script)[1:], **environment)
    )
    assert plain.code == 0, plain.stderr
    assert (watched.code, watched.stdout) == (0, plain.stdout)
    return json.loads(watched.stdout)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["off", "quick", "run"])
def test_nothing_is_imported_from_the_working_folder(bench, way):
    work = bench.cwd
    every = [name for name in sys.stdlib_module_names if name not in sys.builtin_module_names]
    trap(work, [*every, *OURS])
    job = work / "job"
    job.mkdir()
    (job / "train.py").write_text(SCRIPT)
    try:
        seen = both(bench, way, job / "train.py")
    finally:
        assert caught(work) == ""
    assert seen["path"][0] == str(job)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["off", "quick", "run"])
def test_a_script_finds_its_own_modules(bench, way):
    job = bench.cwd / "job"
    trap(job, ["zmq", "click"])
    own = ["msgspec", "uuid", "sched"]
    (job / "uuid.py").write_text(
        "MINE = 'uuid'\nfrom random import random as uuid4, random as uuid1\nclass UUID: pass\n"
    )
    for name in set(own) - {"uuid"}:
        (job / f"{name}.py").write_text(f"MINE = {name!r}\n")
    (job / "train.py").write_text(SCRIPT)

    seen = both(bench, way, job / "train.py", NAMES_OF_THE_SCRIPT=" ".join(own))

    assert caught(job) == ""
    assert seen["own"] == {name: name for name in own}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["quick", "run"])
def test_nothing_of_ours_is_imported_from_the_jobs_pythonpath(bench, way):
    library = bench.cwd / "library"
    trap(library, NOT_TORCHS)
    (bench.cwd / "train.py").write_text(SCRIPT)

    both(bench, way, bench.cwd / "train.py", PYTHONPATH=str(library))

    assert caught(library) == ""


@pytest.mark.slow
@pytest.mark.sample(1)
def test_python_m_does_not_look_into_the_working_folder_either(bench):
    trap(bench.cwd, NOT_TORCHS)
    (bench.cwd / "job").mkdir()
    (bench.cwd / "job" / "train.py").write_text(SCRIPT)
    plain = bench.torchrun("job/train.py", NAMES_OF_THE_SCRIPT="")
    for module in ("gpuwatch", "gpuwatch.cli.main"):
        watched = bench.finish(bench.start(module, "launch", "job/train.py", NAMES_OF_THE_SCRIPT=""))
        assert caught(bench.cwd) == ""
        assert (watched.code, watched.stdout) == (0, plain.stdout)
