"""What every test must leave as it found it: hooks, threads, and gpuwatch's variables."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

_HOOK_TABLES = {
    "torch.nn.modules.module": (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_forward_hooks_always_called",
        "_global_forward_hooks_with_kwargs",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    ),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("GPUWATCH_")}


def _hooks() -> dict[str, int]:
    return {
        f"{module}.{table}": len(found)
        for module, tables in _HOOK_TABLES.items()
        if module in sys.modules
        for table in tables
        if (found := getattr(sys.modules[module], table, None))
    }


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    threads, variables = _threads(), _variables()
    yield
    hooks = _hooks()
    for name in hooks:  # so that one test is blamed and not all that come after it
        module, _, table = name.rpartition(".")
        getattr(sys.modules[module], table).clear()
    assert hooks == {}
    assert _threads() - threads == set()
    assert _variables() == variables
