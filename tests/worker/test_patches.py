"""What is replaced in torch and Python while a rank is watched, and that nothing of it stays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from gpuwatch.worker.patches import PatchLedger, replaced
from torch import nn

Found = dict[tuple[str, str], Any]


def functions() -> Found:
    """(module or class, name) -> each function of torch, of its classes, and of what Python's own modules hold."""
    found: Found = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] in ("torch", "os", "posix", "signal", "warnings"):
            for key, value in list(vars(module).items()):
                is_class = issubclass(type(value), type)
                if callable(value):
                    found[name, key] = value
                if is_class and value.__module__.partition(".")[0] == "torch":
                    members = {each: member for each, member in vars(value).items() if callable(member)}
                    place = f"{value.__module__}.{value.__qualname__}"
                    found |= {(place, each): member for each, member in members.items()}
    return found


def changed(before: Found, after: Found) -> set[str]:
    return {name for (place, name), value in before.items() if after.get((place, name), value) is not value}


def train() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_after_the_detach_every_function_is_torchs_own(watch: Callable[..., Any]) -> None:
    train()
    before = functions()
    watched = [watch(), watch()]
    train()
    within = functions()
    names = {name for owned in replaced().values() for name in owned}
    assert changed(before, within) == names, "what is replaced is in the ledger"
    assert {"allreduce", "wait", "export", "step", "scale", "__init__"} <= names
    for each in watched:  # not in the reverse order
        each.hooks.detach()
        each.hooks.detach()
    assert changed(before, functions()) == set()
    assert replaced() == {}
    train()
    assert [each.faults for each in watched] == [[], []]


def test_what_this_torch_does_not_have_is_a_fault(watch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.export, "export")
    monkeypatch.delattr(torch.distributed.ProcessGroup, "allreduce")
    watched = watch()
    faults = {(fault.part, fault.message.split("no ")[-1]) for fault in watched.faults}
    lost = "calls through it are not seen"
    assert faults == {
        ("attach", f"torch.export.export: {lost}"),
        ("attach", f"{torch.distributed.ProcessGroup.__module__}.ProcessGroup.allreduce: {lost}"),
    }


def owner() -> Any:
    return SimpleNamespace(call=lambda: [])


def adds(name: str) -> Callable[[Any], Any]:
    return lambda before: lambda: [*before(), name]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_watchers_leave_in_any_order(order: tuple[int, ...]) -> None:
    holder = owner()
    before = holder.call
    ledgers = [PatchLedger(lambda part, error: None) for _ in order]
    for number, ledger in enumerate(ledgers):
        ledger.replace(holder, "call", adds(str(number)))
    left = ["0", "1", "2"]
    for number in order:
        assert holder.call() == left
        ledgers[number].undo()
        left.remove(str(number))
    assert holder.call is before
    assert replaced() == {}


def test_what_somebody_else_has_put_around_ours_stays() -> None:
    holder = owner()
    ledger = PatchLedger(lambda part, error: None)
    ledger.replace(holder, "call", adds("ours"))
    holder.call = theirs = adds("theirs")(holder.call)
    ledger.undo()
    assert holder.call is theirs
    assert replaced() == {}


def test_what_is_replaced_for_the_whole_process_is_in_the_ledger() -> None:
    names = ["_exit", "execv", "execve"]
    code = (
        "from gpuwatch.worker.rank_process import hear_of_ends\n"
        "from gpuwatch.worker.patches import replaced; import json\n"
        "hear_of_ends(lambda: (lambda: None), lambda: None, lambda variables: {})\n"
        "print(json.dumps(replaced()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout) == {"os": names, "posix": names}, done.stderr
