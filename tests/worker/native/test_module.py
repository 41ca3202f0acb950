"""The module itself: it is made once in a process, and only for a Python with the GIL."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from gpuwatch.launcher import life

core = pytest.importorskip("gpuwatch.worker.native.core", reason="worker/native was not built")
SOURCE = Path(__file__).resolve().parents[3] / "worker" / "native" / "module.c"


def test_a_second_import_gets_the_same_types(monkeypatch):
    monkeypatch.delitem(sys.modules, core.__name__)
    again = importlib.import_module(core.__name__)
    assert again is not core
    assert (again.NativeFrameWriter, again.WriterLock) == (core.NativeFrameWriter, core.WriterLock)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_it_is_not_built_for_a_python_without_the_gil():
    includes = ["-I", str(SOURCE.parent / "include"), "-I", sysconfig.get_path("include")]
    command = ["cc", "-fsyntax-only", "-std=c99", *includes, str(SOURCE)]
    assert subprocess.run(command).returncode == 0
    done = subprocess.run([*command, "-DPy_GIL_DISABLED=1"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "needs the GIL" in done.stderr


def test_that_is_said_at_the_start(monkeypatch):
    assert life.without_c() == ""
    missing = {"signals"}
    monkeypatch.setattr(life.host, "has_part_in_c", lambda name="core": name not in missing)
    assert "signals.c" in life.without_c()
    missing.add("recursion")
    assert "recursion limit" in life.without_c()
    missing.add("core")
    assert "C compiler" in life.without_c()
    monkeypatch.setattr(life.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    assert "a Python without the GIL" in life.without_c()
