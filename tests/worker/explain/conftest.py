"""Fixtures of the tests of explanations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpuwatch.worker.explain.packed_nodes import follow_packed_nodes
from gpuwatch.worker.patches import PatchLedger


@pytest.fixture(autouse=True)
def packed_nodes() -> Iterator[None]:
    """Hooks on saved tensors are followed, as by a watch."""
    patches = PatchLedger()
    follow_packed_nodes(patches)
    yield
    patches.undo()
