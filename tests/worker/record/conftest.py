"""What several tests of the record need."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone. Its collectives write into the tensor and count up."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store-{os.getpid()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
