"""Drawn scripts that compute a loss, and whether the line that is told for what made it bad is one that ran it.

Each has functions that call each other, branches, loops, variables that are assigned anew or deleted, and operations of
torch that run others. The truth is a second run under a dispatch mode: which operations made a nan or inf of finite
operands, and which lines of the script ran then.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from gpuwatch.core.events.alarm_evidence import BadOperation
from gpuwatch.core.events.read_tensors import ScriptTensor
from gpuwatch.worker.explain.kept_loss import kept_loss
from gpuwatch.worker.explain.loss_look import LossLook
from gpuwatch.worker.explain.packed_nodes import follow_packed_nodes
from gpuwatch.worker.explain.script_tensors import running_frames
from gpuwatch.worker.patches import PatchLedger
from gpuwatch.worker.record.autograd_graph import AutogradGraph, GraphCalls, ReturnedOutputs, next_node
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_EXPRESSIONS = (
    *(
        "{v} ** 2",
        "{v} * {w}",
        "{v} + {w}",
        "{v} - {w}",
        "{v} / ({w}.abs() + 1)",
        "{v} * 1e25",
        "{v} * 1e20",
        "1 / {v}",
    ),
    *("torch.exp({v}.clamp(-5, 100))", "{v}.square()", "{v}.clamp(-1, 1)", "torch.log({v}.abs())", "sum([{v}, {w}])"),
    *("functional.mse_loss({v}, {w}, reduction='none')", "{v}.norm() * {w}", "torch.dist({v}, {w}) + {v}"),
    "functional.gaussian_nll_loss({v}, {w}, torch.ones(2, 4), reduction='none')",
    "functional.cosine_similarity({v}, {w}).unsqueeze(-1) * {w}",
)


class DrawnScript:
    """The lines of one script. `main(model, x, b)` computes a loss and begins its backward."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._functions: list[str] = []
        self.lines = ["import torch", "from torch.nn import functional", "KEPT = []"]
        for number in range(self._draw.randint(1, 3)):
            self._function(f"f{number}")
        self.lines += ["def back(loss):", "    loss.backward()", "def back_of(value):", "    back(value)"]
        self._main()

    def _expression(self, variables: list[str], depth: int = 0) -> str:
        draw = self._draw
        names = [*_EXPRESSIONS, *(3 * [f"{name}({{v}}, {{w}})" for name in self._functions])]
        made = draw.choice(names).format(v=draw.choice(variables), w=draw.choice(variables))
        if depth < 2 and draw.random() < 0.3:
            made = f"({made}) {draw.choice('+-*')} ({self._expression(variables, depth + 1)})"
        return made

    def _function(self, name: str) -> None:
        variables = ["a", "b"]
        self.lines.append(f"def {name}(a, b):")
        for number in range(self._draw.randint(0, 4)):
            new, kind = f"v{number}", self._draw.random()
            value = self._expression(variables)
            if kind < 0.12:
                self.lines.append(f"    if a.sum() > {self._draw.choice(['-1e30', '1e30'])}:")
                self.lines += [
                    f"        {new} = {value}",
                    "    else:",
                    f"        {new} = {self._expression(variables)}",
                ]
            elif kind < 0.2:
                self.lines.append(f"    KEPT.append({value})")
                continue
            elif kind < 0.3:
                self.lines.append(f"    a = {value}")
                continue
            elif kind < 0.36:
                self.lines += ["    def inner(x):", "        return x ** 2", f"    {new} = inner(a)"]
            elif kind < 0.42:
                looped = self._expression([*variables, new])
                self.lines += [f"    {new} = a", "    for _ in range(2):", f"        {new} = {looped}"]
            else:
                self.lines.append(f"    {new} = {value}")
            variables.append(new)
        self.lines.append(f"    return {self._expression(variables)}")
        self._functions.append(name)

    def _main(self) -> None:
        variables = ["out", "b"]
        self.lines += ["def main(model, x, b):", "    out = model(x)"]
        for number in range(self._draw.randint(0, 3)):
            kind, value = self._draw.random(), self._expression(variables)
            if kind < 0.2:
                self.lines.append(f"    out = {value}")
            elif kind < 0.3:
                self.lines += ["    for _ in range(2):", f"        out = {value}"]
            else:
                self.lines.append(f"    m{number} = {value}")
                variables.append(f"m{number}")
        if len(variables) > 2 and self._draw.random() < 0.3:
            self.lines.append(f"    del {variables.pop()}")
        loss, back = f"({self._expression(variables)}).mean()", self._draw.choice(["back", "back_of"])
        more = f"    total = total + ({self._expression(variables)}).mean()"
        self.lines += self._draw.choice(
            [
                [f"    {loss}.backward()"],
                [f"    loss = {loss}", "    loss.backward()"],
                [f"    loss = {loss}", f"    {back}(loss)"],
                [f"    {back}({loss})"],
                [f"    total = {loss}", more, f"    {back}(total)"],
            ]
        )


class _BadOperations(TorchDispatchMode):
    """The operations that make a bad value of finite ones, and the lines of `file` that run them."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = file
        self.names, self.lines = set[str](), set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(map(_is_bad, tree_leaves(made))) and not any(map(_is_bad, tree_leaves((args, kwargs)))):
            self.names.add(str(func))
            frame = sys._getframe(1)
            while frame is not None:
                if frame.f_code.co_filename == self._file:
                    self.lines.add(frame.f_lineno)
                frame = frame.f_back
        return made


def _is_bad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not bool(value.isfinite().all())


_BAD: Any = SimpleNamespace(page=SimpleNamespace(number=0, step=0, losses=1))
"""The row of a loss: what is asked of its page."""


class _BackwardBegins(Exception):
    pass


class _Model(nn.Linear):
    """Notes what each call has returned."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.returned: list[ReturnedOutputs] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = next_node()
        made = super().__call__(*args, **kwargs)
        self.returned.append(ReturnedOutputs(first, next_node(), [(weakref.ref(made), made._version)]))
        return made


def _looked_at_later(loss: torch.Tensor, model: _Model, backward: Callable[[], Any]) -> BadOperation | None:
    """The operation as it is told of a loss on a device: when its backward has run. Raises ValueError if the variable
    that is told is another tensor."""
    kept = kept_loss(loss, model.returned, False, sys._getframe(2))
    backward()
    graph = AutogradGraph((loss.grad_fn,), GraphCalls(0), kept_loss=kept)
    look = LossLook(lambda module: True, lambda page: [graph])
    told = look.variable_of(_BAD)
    if told is not None:
        held = [each.f_locals.get(told.name) for each, _ in running_frames(sys._getframe()) if is_of(each, told)]
        if not any(each is loss for each in held):
            raise ValueError(f"{told.name} of {told.function} is not the loss")
    return look.operation_of(_BAD)


def is_of(frame: FrameType, told: ScriptTensor) -> bool:
    """Whether a frame runs the function of a variable."""
    return frame.f_code.co_filename == told.file and frame.f_code.co_name == told.function


def run(seed: int, folder: Path, monkeypatch: Any, is_later: bool = False) -> str:
    """`finite`, `no operation`, `no line`, `right` or `wrong: ...`. `is_later`: as on a device."""
    path = folder / f"script{seed}.py"
    path.write_text("\n".join(DrawnScript(seed).lines) + "\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model, real = _Model(), torch.autograd.graph._engine_run_backward
    x, b = torch.randn(2, 4) * draw.choice([1, 1e10, 1e18]), torch.randn(2, 4) * draw.choice([0, 1, 1e15])
    found: list[BadOperation | None] = []

    def begins(outputs: Any, *args: Any, **kwargs: Any) -> None:
        if _is_bad(outputs[0]) and not found:
            look = LossLook(lambda module: True)
            look.begins(outputs[0], 0, False)
            found.append(look.operation_of(_BAD))
            if is_later:
                found.append(_looked_at_later(outputs[0], model, lambda: real(outputs, *args, **kwargs)))
        raise _BackwardBegins

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", begins)
    truth = _BadOperations(str(path))
    try:
        script.main(model, x, b)
    except _BackwardBegins:
        pass
    except RuntimeError:  # the loss needs no gradient
        return "no graph"
    if not found:
        return "finite"
    told = found[-1]
    if told is None:
        return "no operation"
    try:
        with truth:
            script.main(model, x, b)
    except _BackwardBegins:
        pass
    if told.op not in truth.names:
        return f"wrong: {path.name}: {told.op} has made nothing bad, {truth.names} have"
    if not told.line:
        return "no line"
    return "right" if told.line in truth.lines else f"wrong: {path.name}:{told.line} ran no such operation"


def count(seeds: range, folder: Path, monkeypatch: Any, is_later: bool) -> Counter[str]:
    """How many scripts ended in each of these ways."""
    patches = PatchLedger()
    follow_packed_nodes(patches)  # as a watch does
    try:
        return Counter(run(seed, folder, monkeypatch, is_later) for seed in seeds)
    finally:
        patches.undo()
