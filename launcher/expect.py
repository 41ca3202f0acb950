"""What must be there before a job starts: its script, its place among the nodes, and room for its ranks.

Nothing of the user's is imported or run here.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import math
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from pathlib import Path
from shlex import quote

import psutil

from ..core.codes import Code
from ..core.errors import UsageError
from ..core.misspelled import did_you_mean
from ..core.wire.columns import HOST
from .agent.host_figures import read_cgroup
from .fill_in import count_gpus
from .option_types import is_number
from .plan import CollectorPlan

_MUST = "expected a script to run"
_ALIKE = 0.75
"""Two names of files may have much in common."""


def expect_script(args: argparse.Namespace) -> None:
    """What torchrun would only find out later, said in one sentence."""
    if args.no_python and args.module:
        raise UsageError(
            Code.WRONG_TOGETHER, "expected one of --no-python and -m/--module, found both; drop one of them"
        )
    if args.module or args.no_python:
        return
    script = Path(args.training_script)
    if not script.exists():
        raise UsageError(
            Code.NO_SCRIPT, f"{_MUST}, found no file {args.training_script!r} in {Path.cwd()}{_meant(args, script)}"
        )
    if script.is_dir() and not (script / "__main__.py").exists():  # Python runs a folder by it
        scripts = sorted(path for path in script.glob("*.py") if path.name != "__init__.py")
        hint = f"; did you mean {quote(str(scripts[0]))}?" if len(scripts) == 1 else ""
        found = f"the folder {args.training_script!r}, which has no __main__.py"
        raise UsageError(Code.NO_SCRIPT, f"{_MUST}, found {found}{hint}")
    if script.suffix == ".json":  # Python runs some of it without a word
        found = f"the JSON file {args.training_script!r}; to show a report: gpuwatch report {quote(str(script))}"
        raise UsageError(Code.NO_SCRIPT, f"expected a Python script, found {found}")
    if shell := _shell_of(script):
        runs = quote(str(script)) if os.sep in args.training_script else f"./{quote(str(script))}"
        if not os.access(script, os.X_OK) or not _first_line(script).startswith("#!"):
            runs = f"{shell} {quote(args.training_script)}"
        raise UsageError(
            Code.NO_SCRIPT,
            f"expected a Python script, found the shell script {args.training_script!r}; to start it as each rank, "
            f"without watching it: gpuwatch launch --no-python {runs}; if it starts the ranks itself: "
            f"gpuwatch run -- {runs}",
        )


def _meant(args: argparse.Namespace, script: Path) -> str:
    if args.training_script in ("python", "python3") and args.training_script_args:
        return f"; leave it out: gpuwatch launch [options] {args.training_script_args[0]}"
    if args.training_script in _LAUNCHERS:
        if args.training_script == "torchrun":
            return "; gpuwatch launch takes its place: leave torchrun out"
        return f"; to watch the ranks that it starts: gpuwatch run -- {args.training_script} ..."
    with suppress(OSError):
        beside = map(str, script.parent.iterdir())
        return did_you_mean(str(script.parent / script.name), beside, alike=_ALIKE)
    return ""


_LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "ray", "bash", "sh"}
_SHELLS = {f".{shell}": shell for shell in ("sh", "bash", "zsh", "ksh", "fish", "csh")}


def _first_line(script: Path) -> str:
    with suppress(OSError), script.open("rb") as file:
        return file.readline(200).decode(errors="replace")
    return ""


def _shell_of(script: Path) -> str:
    """The shell that a script is for, by its first line or its name; "" of what Python may run, or does."""
    if not script.is_file():  # reading a pipe would empty it
        return ""
    line = _first_line(script)
    words = line[2:].split() if line.startswith("#!") else []
    named = next((Path(word).name for word in words if Path(word).name in _SHELLS.values()), "")
    shell = named or (_SHELLS.get(script.suffix, "") if not words else "")
    if not shell or zipfile.is_zipfile(script):
        return ""
    try:
        ast.parse(script.read_bytes())  # there are scripts for both
    except (SyntaxError, ValueError):
        return shell
    except (OSError, RecursionError, MemoryError):
        pass
    return ""


def expect_program(args: argparse.Namespace) -> None:
    """The program of --no-python, and the module of -m, are looked for where Python would on this node."""
    if args.no_python and (problem := why_not_started(args.training_script, "gpuwatch launch")):
        raise UsageError(Code.NO_SCRIPT, f"--no-python: {args.training_script}: {problem[0]}")
    if args.module and "PYTHON_EXEC" not in os.environ:  # with it, torchrun starts another Python
        _expect_module(args.training_script)


_MOST_PORT = 65535
_OWN = ("launch", "check", "submit", "report", "top")
"""Commands of gpuwatch that somebody types after `run`."""
_NOT_EXECUTABLE = 126
_NOT_FOUND = 127
"""As a shell exits."""


def why_not_started(program: str, python: str) -> tuple[str, int] | None:
    """Why there is no such program to run, and a shell's exit code for it; None if there is one.

    `python` is what runs a script.
    """
    if shutil.which(program) is not None:
        return None
    path = Path(program)
    hint = f"; to run it: {python} {quote(program)}" if path.suffix == ".py" and path.is_file() else ""
    words = program.split()
    if len(words) > 1 and shutil.which(words[0]) is not None:
        return f"command not found; its name and its arguments are one word here, without quotes: {program}", _NOT_FOUND
    if os.sep not in program:
        if program in _OWN:
            return f"command not found; did you mean gpuwatch {program}, without run?", _NOT_FOUND
        if path.is_file() and not hint:
            hint = f"; did you mean ./{program}?"
        return f"command not found{hint or did_you_mean(program, _programs(), alike=_ALIKE)}", _NOT_FOUND
    if not path.exists():
        return "no such file", _NOT_FOUND
    return ("is a directory" if path.is_dir() else f"permission denied{hint}"), _NOT_EXECUTABLE


def _programs() -> Iterator[str]:
    """The names that a shell would find."""
    for folder in os.get_exec_path():
        with suppress(OSError):
            yield from os.listdir(folder)  # noqa: PTH208  # names alone


# A module is looked for without an import: importing its package would run the user's code in the launch.

_CHANGES_ITS_PATH = re.compile(r"__path__|extend_path|meta_path|path_hooks|sys\s*\.\s*modules|__getattr__")
"""A package with such a word may have modules that are not in its folder."""


def _expect_module(name: str) -> None:
    """Raises UsageError if Python certainly finds no such module on this node."""
    top, *rest = name.split(".")
    try:
        found = _spec_of(top)
        places = [Path(place) for place in (found.submodule_search_locations or ())] if found is not None else []
    except Exception:  # a finder that the user has installed
        return
    if found is None:
        beside = [path.stem for path in Path.cwd().iterdir() if path.suffix in ("", ".py")]
        where = f"in {Path.cwd()}, on PYTHONPATH and among what is installed"
        raise _no_module(f"no module {top!r} {where}", name, beside, top)
    inside = top
    for part in [*rest, "__main__"] if places or rest else []:
        if part == "__main__" and part not in rest and not places:
            return  # a module, and no package
        if not places and (found.origin is None or _makes_modules(Path(found.origin))):
            return
        if any(not place.is_dir() or any(map(_makes_modules, place.glob("__init__.*"))) for place in places):
            return
        if not any((place / f"{part}{suffix}").exists() for place in places for suffix in ("", *all_suffixes())):
            beside = [path.stem for place in places for path in place.iterdir() if path.name[:2] != "__"]
            what = (
                f"no __main__ in the package {inside!r}" if part == "__main__" else f"no module {part!r} in {inside!r}"
            )
            raise _no_module(what, name, beside, part)
        places = [place / part for place in places if (place / part).is_dir()]
        inside = f"{inside}.{part}"


def _spec_of(top: str) -> ModuleSpec | None:
    """Where a module is that no other contains: `python -m` looks into the working folder first."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = PathFinder.find_spec(top, [str(Path.cwd()), *filter(None, given), *sys.path])
    if found is None or found.origin is None:  # a folder without an __init__.py comes last
        other = importlib.util.find_spec(top)
        return other if found is None or (other is not None and other.origin is not None) else found
    return found


def _makes_modules(source: Path) -> bool:
    """Whether importing it may bring modules that are in none of its folders."""
    try:
        return source.suffix != ".py" or bool(_CHANGES_ITS_PATH.search(source.read_text(errors="replace")))
    except OSError:
        return True


def _no_module(what: str, name: str, known: Iterable[str], part: str) -> UsageError:
    hint = did_you_mean(part, known, alike=_ALIKE)
    if name.endswith(".py") and Path(name).is_file():
        hint = f"; to run this file: gpuwatch launch {quote(name)}, without -m"
    return UsageError(Code.NO_SCRIPT, f"-m {name}: expected a module to run, found {what}{hint}")


def expect_place(args: argparse.Namespace, plan: CollectorPlan) -> None:
    """This node must be one of the job's, with what its rendezvous needs."""
    if args.node_rank and not 0 <= args.node_rank < plan.max_nodes:
        raise UsageError(
            Code.WRONG_VALUE,
            f"--node-rank: expected 0 to {plan.max_nodes - 1} with --nnodes {args.nnodes}, found {args.node_rank}",
        )
    if args.standalone and plan.min_nodes > 1:
        raise UsageError(
            Code.WRONG_TOGETHER,
            f"--standalone: expected --nnodes 1, as no other node can join such a job, found --nnodes {args.nnodes}; "
            "leave --standalone out, and pass --rdzv-endpoint HOST:PORT",
        )
    if args.master_port is not None and not 0 <= args.master_port <= _MOST_PORT:
        raise UsageError(
            Code.WRONG_VALUE, f"--master-port: expected a port from 0 to {_MOST_PORT}, found {args.master_port}"
        )
    if args.rdzv_backend.startswith("etcd") and importlib.util.find_spec("etcd") is None:
        what = "expected the package python-etcd, which torchrun needs for it, found it not installed"
        raise UsageError(
            Code.NOT_INSTALLED, f"--rdzv-backend {args.rdzv_backend}: {what}; install it, or pass --rdzv-backend c10d"
        )


def number_of_ranks(args: argparse.Namespace) -> int:
    """How many ranks this node runs. Raises UsageError."""
    if args.max_restarts < 0:
        raise UsageError(Code.WRONG_VALUE, f"--max-restarts: expected 0 or more, found {args.max_restarts}")
    if is_number(str(args.nproc_per_node)):
        nproc = int(args.nproc_per_node)
    else:
        from torch.distributed.run import determine_local_world_size  # it counts GPUs

        try:
            nproc = int(determine_local_world_size(str(args.nproc_per_node)))
        except ValueError as error:
            raise UsageError(
                Code.WRONG_VALUE,
                f"--nproc-per-node: expected a number, cpu, gpu or auto, found {args.nproc_per_node!r} ({error})",
            ) from error
    if nproc < 1:
        raise UsageError(Code.WRONG_VALUE, f"--nproc-per-node: expected 1 or more, found {nproc}")
    return nproc


# Room for the ranks of a check. torchrun starts as many as it is told to, and so does a launch.

RANKS_PER_CORE = 4
RANK_BYTES = 256 << 20
"""What a rank of a check takes at least: two Pythons with torch, and the memory that it tests."""


def expect_room(nproc: int, cores: int | None = None, memory: float | None = None) -> None:
    """Raises UsageError for more ranks than this host's cores and memory carry, unless it has as many GPUs."""
    cores = cores or os.cpu_count() or 1
    memory = memory if memory is not None else _free_memory()
    by_cores, by_memory = RANKS_PER_CORE * cores, memory / RANK_BYTES
    most = max(1, int(min(by_cores, by_memory)))
    if nproc <= most or nproc <= count_gpus():
        return
    why = f"{RANKS_PER_CORE} for each of its {cores} cores"
    if by_memory < by_cores:
        why = f"{RANK_BYTES >> 20} MiB for each, and {int(memory) >> 20} MiB are free"
    raise UsageError(
        Code.WRONG_VALUE,
        f"--nproc-per-node: expected at most {most} ranks on this host ({why}), found {nproc}; to start them all the "
        "same: --force",
    )


def _free_memory() -> float:
    """Bytes that this job may still take on this host; inf where nothing tells."""
    try:
        free = float(psutil.virtual_memory().available)
    except (psutil.Error, OSError):
        return math.inf
    limits = read_cgroup()
    if (limit := limits.get((HOST, "job_memory_limit"))) is not None:
        free = min(free, limit - limits[HOST, "job_memory_used"])
    return free
