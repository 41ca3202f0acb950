"""Tests of what an older torch lacks: skipped by the table that a run tells its user from."""

from __future__ import annotations

import pytest
import torch
from gpuwatch.core.torch_names import NAMES, NEWEST, release_of

RELEASE = release_of(torch.__version__) or NEWEST


def needs(path: str) -> pytest.MarkDecorator:
    """Skip with a torch that has no such name."""
    (name,) = (one for one in NAMES if one.path == path)
    reason = f"torch {torch.__version__} has no {path}: {name.lost}"
    return pytest.mark.skipif(not name.is_in(min(RELEASE, NEWEST)), reason=reason)
