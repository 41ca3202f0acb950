"""The numbers that the native part shares with Python: each by name, and none is used when one differs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from gpuwatch.core.recorder import layout
from gpuwatch.core.values import DTYPE_CODES, ValueEncoding
from gpuwatch.worker.hooks import native_writer
from torch import nn

from ..conftest import Watched

SOURCES = Path(native_writer.__file__).parents[1] / "native"

pytestmark = pytest.mark.skipif(
    native_writer.NativeFrameWriter is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="worker/native was not built where gpuwatch was installed, or this torch lends it no tensors",
)


def test_each_number_is_the_same_in_both():
    assert native_writer.python_layout() == native_writer.LAYOUT


def test_no_constant_of_the_layout_is_left_out():
    declared = re.findall(r"\bDO\((\w+), ", (SOURCES / "include" / "layout.h").read_text())
    dtypes = {name for name in declared if name.lower() in DTYPE_CODES}
    floats = dtypes & set(ValueEncoding.__members__)
    expected = {f"DTYPE_{name}" for name in dtypes}
    expected |= {f"{kind}_{name}" for name in floats for kind in ("ENCODING", "INF")}
    assert set(native_writer.LAYOUT) == expected | (set(declared) - dtypes) | {"NOTHING"}
    assert len(declared) > 30


@pytest.mark.quick(30)
@pytest.mark.parametrize("name", sorted(native_writer.python_layout()))
def test_a_number_that_differs_means_no_native_writer_and_one_fault(tmp_path, monkeypatch, name):
    monkeypatch.setitem(native_writer.LAYOUT, name, native_writer.LAYOUT[name] + 1)
    watched = Watched(tmp_path / "x.recorder")
    try:
        assert watched.hooks._gradients.writer is None
        (fault,) = watched.faults
        assert fault.part == "native frame writer"
        assert f"{name} is {native_writer.LAYOUT[name]} and not {native_writer.LAYOUT[name] - 1}" in fault.message
        nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
        assert len(watched.last.frames) > 2
    finally:
        watched.close()


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_a_build_that_lacks_a_number_or_knows_another_is_not_used(monkeypatch, change):
    native = dict(native_writer.LAYOUT)
    if change == "missing":
        del native["S_ROWS"]
    else:
        native["S_COLUMNS"] = 3
    assert "S_ROWS is None" in native_writer.difference(native) or "S_COLUMNS is 3" in native_writer.difference(native)
    assert native_writer.difference(dict(native_writer.LAYOUT)) == ""


def test_a_field_that_moves_within_a_frame_is_seen(monkeypatch):
    import struct

    monkeypatch.setattr(layout, "FRAME", struct.Struct("<IIBhBqIII"))
    found = native_writer.difference(native_writer.LAYOUT)
    assert "FRAME_PHASE" in found or "FRAME_DEPTH" in found
