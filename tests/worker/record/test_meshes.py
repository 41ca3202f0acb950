"""A rank knows its place in each DeviceMesh whose dimensions have names."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import gpuwatch
from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.core.events.script_events import MeshCoordinates

torch.distributed.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
with gpuwatch.watch() as watch:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh["tp"], mesh["dp"]
    init_device_mesh("cpu", (8,))
    mesh["dp", "tp"]._flatten("all")
    slices = torch.compile(lambda x: x + mesh["tp"].size(), backend="eager", fullgraph=True)
    assert slices(torch.ones(1)).item() == 5
    try:
        init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "dp"))
    except RuntimeError as error:
        assert "mesh_dim_names" in str(error), error
    else:
        raise AssertionError("torch takes it")
    assert not [event for event in watch.events if isinstance(event, OwnFault)]
print([event.coordinates for event in watch.events if isinstance(event, MeshCoordinates)])
init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "ep"))
assert sum(isinstance(event, MeshCoordinates) for event in watch.events) == 2, "its hooks are removed"
"""


@pytest.mark.slow
def test_it_records_each_mesh_once_and_no_slice():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[{'dp': 1, 'tp': 1}, {'all': 5}]"
