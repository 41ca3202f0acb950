"""Install the wheel as a user does, and run it: for each Python, in a bare environment, without a compiler on PATH.

    python .ci/smoke.py                                   each Python from 3.10 to 3.14 that is on PATH
    python .ci/smoke.py --python /opt/python3.12/bin/python --torch 2.15.0
    python .ci/smoke.py --wheel dist/*.whl                a wheel that is there, with this Python

A wheel is built with the Python that it is for, from a copy of the sources. Then `gpuwatch --version`, a launch
of two ranks, its page and `explain` run in a folder of their own. It ends with 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = tuple(f"python3.{minor}" for minor in range(10, 15))
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.so", "build", "dist", "gpuwatch-runs")
SCRIPT = """\
import gc
import torch
import torch.distributed as dist


def train():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for batch in range(3):
        model(torch.ones(2, 4)).sum().backward()


dist.init_process_group("gloo")
train()
gc.collect()  # pytorch/pytorch#179291
dist.barrier()
dist.destroy_process_group()
"""
COMPILERS = ("cc", "gcc", "clang", "c++", "g++", "nvcc")
LACKS = ("without its C extension", "recursion.c", "signals.c")
"""Words of a launch whose wheel lacks what was compiled."""
QUIET = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")


def built(python: str, folder: Path) -> Path:
    """The wheel of this Python."""
    shutil.copytree(ROOT, folder / "sources", ignore=LEFT_OUT)
    command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / "wheel"), "."]
    subprocess.run(command, cwd=folder / "sources", check=True)
    (wheel,) = (folder / "wheel").iterdir()
    return wheel


def environment(python: str, folder: Path, wheel: Path, torch: str, packages: str) -> Path:
    """The programs of a new environment that holds the wheel and what it needs: from the index, or from `packages`, a
    folder like site-packages that is read after the environment's own."""
    subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
    programs = folder / "venv" / "bin"
    if packages:
        (own,) = (folder / "venv").glob("lib/python*/site-packages")
        (own / "beside.pth").write_text(f"{packages}\n")
        subprocess.run([str(programs / "python"), *QUIET, "--no-deps", "--no-index", str(wheel)], check=True)
    else:
        subprocess.run([str(programs / "python"), *QUIET, f"torch=={torch}", str(wheel)], check=True)
    return programs


def faults_of(programs: Path, folder: Path) -> list[str]:
    """What does not do what it must, with what it printed."""
    (folder / "job").mkdir()
    (folder / "job" / "train.py").write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GPUWATCH_", "PYTHON", "PET_"))}
    env |= {"PATH": str(programs), "OMP_NUM_THREADS": "1"}
    there = [name for name in COMPILERS if shutil.which(name, path=env["PATH"])]
    found = [f"PATH: expected no compiler, found {', '.join(there)}"] if there else []
    for arguments, wanted in (
        (["--version"], "gpuwatch, version "),
        (["launch", "--nproc-per-node", "2", "train.py"], "VERDICT  clean, established [GW101]"),
        (["report", "--format", "html", "--output", "page.html"], ""),
        (["explain", "GW104"], "GW104  "),
    ):
        command = [str(programs / "gpuwatch"), *arguments]
        done = subprocess.run(
            command, cwd=folder / "job", env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode or wanted not in done.stdout or any(word in done.stdout for word in LACKS):
            found.append(f"gpuwatch {' '.join(arguments)}: ended with {done.returncode}\n{done.stdout}")
    return found


def on_path() -> list[str]:
    """Those that start: a shim of pyenv stands for each release that it has, and runs the chosen ones alone."""
    found = [path for name in PYTHONS if (path := shutil.which(name))]
    runs = [path for path in found if not subprocess.run([path, "--version"], capture_output=True).returncode]
    for path in found:
        if path not in runs:
            print(f"{path} does not start: left out")
    if not runs:
        sys.exit("expected a Python from 3.10 to 3.14 on PATH, found none that starts; name it with --python PROGRAM")
    return runs


def main() -> None:
    """Build, install, run, for each Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", metavar="PROGRAM", help="Pythons (all on PATH)")
    parser.add_argument("--wheel", type=Path, help="a wheel to try, with one Python (built)")
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    parser.add_argument("--torch", default=pinned.removeprefix("torch=="), help="its release (%(default)s)")
    parser.add_argument("--packages", default="", metavar="DIR", help="site-packages to take all others from")
    args = parser.parse_args()
    pythons = args.python or ([sys.executable] if args.wheel else on_path())
    failed = False
    for given in pythons:
        python = str(Path.cwd() / (shutil.which(given) or given))  # a virtual environment's is a link: not resolved
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            wheel = args.wheel.resolve() if args.wheel else built(python, folder)
            faults = faults_of(environment(python, folder, wheel, args.torch, args.packages), folder)
        print(f"{python}, torch {args.torch}, {wheel.name}: {'ok' if not faults else 'failed'}", *faults, sep="\n  ")
        failed = failed or bool(faults)
    sys.exit(failed)


if __name__ == "__main__":
    main()
