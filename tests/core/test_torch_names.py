"""The table of torch's private names is true for the torch that runs this, and holds every such name that is used."""

from __future__ import annotations

import ast
import importlib
import pathlib
import re
import subprocess
import sys
import warnings
from contextlib import suppress

import gpuwatch
import pytest
import torch
from gpuwatch.core.torch_names import (
    DEVICE,
    GRAPH,
    NAMES,
    NEWEST,
    OLDEST,
    is_there,
    missing,
    name_in_torch,
    notes_on,
    release_of,
)

from ..parsed import nodes_of

ROOT = pathlib.Path(gpuwatch.__file__).parent
RELEASE = release_of(torch.__version__)
OBJECTS = {
    "<module>": lambda: torch.nn.Linear(1, 1),
    "<operation>": lambda: torch.ops.aten.mul.Tensor,
    "<autograd node>": lambda: (torch.ones(2, requires_grad=True) + 1).grad_fn,
    "<DataLoader's iterator>": lambda: iter(torch.utils.data.DataLoader([1], num_workers=1)),
}
"""What has no class that could be asked."""


def import_what_holds(place: str) -> None:
    """The innermost module of a place. torch says of some that they will go."""
    parts = place.split(".")
    for number in range(len(parts), 0, -1):
        with suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(".".join(parts[:number]))
            return


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_a_release_has_what_the_table_says(name):
    if name.lost == DEVICE and torch.version.cuda is None and torch.version.hip is None:
        pytest.skip("this torch was built without GPUs")
    if name.place in OBJECTS:
        found = hasattr(OBJECTS[name.place](), name.name)
    else:
        import_what_holds(name.place)
        found = is_there(name)
    assert found == name.is_in(min(RELEASE, NEWEST)), f"torch {torch.__version__}: {name.lost}"


def test_a_name_stands_once_and_its_releases_were_tried():
    assert len({name.path for name in NAMES}) == len(NAMES)
    for name in NAMES:
        assert OLDEST <= name.since <= (name.until or NEWEST) <= NEWEST, name.path


OF_OTHERS = {"argparse", "sys", "atexit", "runpy", "parser", "group", "GroupPhase", "RankPhase"}
"""Whose private names these are: Python's, and an enum's."""
OF_PYTHON = {
    "_replace",
    "_fields",
    "_print_message",
    "_asdict",
    "_config",
    "_parser",
    "_names",
    "_option_string_actions",
    "_is_owned",
}
FALLBACKS = {
    "_C",
    "_functorch",
    "_erased",  # of a torch.fx node
    "_worker_group",  # of the agent, as its method's argument
    "_pcontext",
    "_local_params",  # of _FunctionalLocalOptimizer
    "_optimizer_step_pre_hooks",  # of an optimizer, as the global ones are of its module
    "types",  # torch._dynamo.types, which is asked with hasattr
}
"""Not in the table: what holds names, what tests alone use, and what comes with a name of the table."""


def private_names() -> dict[str, str]:
    """Private attribute that gpuwatch asks for and does not define -> where."""
    files = [path for room in ("worker", "core", "launcher") for path in (ROOT / room).rglob("*.py")]
    own, used = set(), {}
    for path in files:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
    for path in files:
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and re.match("_[A-Za-z]", node.attr) and node.attr not in own:
                if not isinstance(node.value, ast.Name) or node.value.id not in OF_OTHERS:
                    used[node.attr] = f"{path.relative_to(ROOT)}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
                for alias in node.names:
                    if alias.name.startswith("_") or any(part.startswith("_") for part in node.module.split(".")):
                        used[alias.name] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return used


def test_every_private_name_of_torch_is_in_the_table():
    known = {part for name in NAMES for part in (*name.place.split("."), *name.name.split("."))}
    unknown = {name: at for name, at in private_names().items() if name not in known | FALLBACKS | OF_PYTHON}
    assert unknown == {}


def test_nothing_is_missing_in_this_torch():
    assert missing(RELEASE) == []


@pytest.mark.slow
def test_a_name_that_is_gone_turns_off_one_view_and_the_run_says_so(tmp_path):
    """As in a release that has moved it: the hooks attach, a frame is judged, and the fault names what is lost."""
    code = f"""
import torch
del torch._C._current_autograd_node, torch.autograd._get_sequence_nr
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker.session import WorkerSession
recorder = RecorderWriter({str(tmp_path / "r")!r}, rank=0, local_rank=0, world_size=1, attempt=0)
session = WorkerSession(WorkerSettings("", on_overflow="continue"), recorder, 0)
session.attach_hooks()
torch.nn.Linear(2, 2)(torch.full((1, 2), float("inf"))).sum().backward()
for entry in RecorderReader(recorder.path).new_entries()[1]:
    print(type(entry).__name__, getattr(entry, "part", ""), getattr(entry, "message", ""))
session.hooks.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    gone = "torch._C._current_autograd_node, torch.autograd._get_sequence_nr"
    assert [line for line in lines if line.startswith("OwnFault")] == [
        f"OwnFault names of torch torch {torch.__version__} has no {gone}: {GRAPH}"
    ]
    assert any(line.startswith("Anomaly") for line in lines)


def test_a_fallback_stands_in_for_a_name_that_is_gone(monkeypatch):
    assert name_in_torch("torch._C._is_tracing", 7) is torch._C._is_tracing
    monkeypatch.delattr(torch._C, "_is_tracing")
    assert name_in_torch("torch._C._is_tracing", 7) == 7


def test_what_a_known_release_lacks_is_one_line():
    (line,) = notes_on("2.5.1+cu124")
    assert line.startswith("torch 2.5: ") and "keyword arguments are not in the frames" in line
    assert notes_on(f"{NEWEST[0]}.{NEWEST[1]}.0") == notes_on("") == notes_on("unheard of") == []


def test_a_release_that_is_newer_than_all_that_were_tried_is_one_line():
    newest = f"{NEWEST[0]}.{NEWEST[1]}"
    assert notes_on(f"{NEWEST[0]}.{NEWEST[1] + 1}.0a0+git") == [
        f"torch {NEWEST[0]}.{NEWEST[1] + 1} is newer than the newest release that gpuwatch was tested with, {newest}"
    ]
