"""The machine that the lines run on, and its missing parts; the native part, built where there is a compiler."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from .lines import Row, first_line, passed

CHECKOUT = Path(__file__).resolve().parents[2]
NEEDED = {
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py",
    "click": "click",
    "zmq": "pyzmq",
    "msgspec": "msgspec",
    "rich": "rich",
    "numpy": "numpy",
    "jinja2": "jinja2",
}
"""What gpuwatch imports -> what to install for it."""
_BUILD_S = 120


def environment(device: torch.device) -> Iterator[Row]:
    """torch, the driver, the GPUs, and the missing packages."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    note = f"missing: {', '.join(missing)}; put their unpacked wheels on PYTHONPATH" if missing else ""
    yield Row("packages that gpuwatch needs", passed(not missing), versions, "all there", note)
    if device.type == "cuda":
        names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
        yield Row("GPUs", "told", f"{torch.cuda.device_count()} x {', '.join(names)}", note=_driver())
    triton = importlib.util.find_spec("triton") is not None
    yield Row("Triton", "told", "there" if triton else "not there: torch's operations read the tensors")
    peer = importlib.util.find_spec("transformers") is not None
    yield Row("transformers", "told", "there" if peer else "not there: nothing is compared with its class")
    yield native()


def _driver() -> str:
    try:
        return "driver " + Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "driver unknown"


def native() -> Row:
    """The compiled part is optional: gpuwatch does without it, at a price. It is built here if it can be."""
    what = "native part"
    if _has_native():
        return Row(what, "told", "there")
    compiler = shutil.which(os.environ.get("CC", "").split(" ")[0] or "cc") or shutil.which("gcc")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if compiler is None or not header.is_file():
        lacks = "no C compiler" if compiler is None else f"no {header}"
        return Row(what, "told", f"not there, and cannot be built: {lacks}")
    build = [sys.executable, "-c", "from setuptools import setup; setup()", "build_ext", "--inplace"]
    try:
        done = subprocess.run(build, cwd=CHECKOUT, capture_output=True, text=True, timeout=_BUILD_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Row(what, "told", "not there, and was not built", note=first_line(error))
    if _has_native():
        return Row(what, "told", "built here")
    words = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()
    return Row(what, "told", "not there, and was not built", note=first_line(words[-1]))


def _has_native() -> bool:
    """In a process of its own: a module that could not be imported is not looked for again."""
    ask = [sys.executable, "-c", "import gpuwatch.worker.native.core"]
    return subprocess.run(ask, capture_output=True, timeout=_BUILD_S).returncode == 0
