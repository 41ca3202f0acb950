"""Trains a tiny model of an architecture of transformers: without gpuwatch, under it, and with a fault put into it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import gpuwatch
import torch
from models import Architecture, inputs_of, model_of
from torch import nn

STEPS = 4
BAD_STEP = 2


@dataclass(frozen=True)
class Trained:
    """What a training has left."""

    losses: list[float]
    bits: list[torch.Tensor]


@dataclass(frozen=True)
class Named:
    """What was put in, and what the verdict says of it."""

    site: str
    phase: str
    verdict: Any
    late: bool = False
    """The numbers came from a device: less is known of the graph."""

    @property
    def right(self) -> bool:
        """The module is named."""
        found = self.verdict
        return (found.kind, found.module, found.phase) == ("overflow", self.site, self.phase)

    @property
    def listed(self) -> bool:
        """It is not named alone, and is among those that are said to come into question."""
        said = self.verdict.statement
        names = [self.site]
        if self.late:  # or a module around it is
            said = said.rpartition("'s backward, by ")[2]
            names += [self.site[:at] for at, letter in enumerate(self.site) if letter == "."]
        return self.verdict.certainty == "supported" and any(f"`{name}`" in said for name in names)


def train(
    architecture: Architecture, dtype: torch.dtype, prepare: Callable[[nn.Module, int], None] | None = None
) -> Trained:
    """Four steps from a fixed seed. `prepare(model, step)` is called before each of them."""
    model = model_of(architecture, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        if prepare is not None:
            prepare(model, step)
        loss = model(**inputs_of(architecture, model, dtype, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return Trained(losses, [parameter.detach().clone() for parameter in model.parameters()])


def same_bits(left: Trained, right: Trained) -> bool:
    """Whether two trainings have left the same bits, nan for nan."""
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(left.bits, right.bits, strict=True)
    )


# -- faults -------------------------------------------------------------------------------------------------------


class _Poison(torch.autograd.Function):
    """Leaves values alone, and puts a nan into their gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.masked_fill(torch.arange(gradient.numel()).reshape(gradient.shape) == 0, float("nan"))


def spoil_output(module: nn.Module) -> None:
    """From now on the module returns a nan."""
    forward = module.forward

    def spoilt(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = forward(*args, **kwargs)
        spot = torch.arange(output.numel()).reshape(output.shape) == 0
        return output.masked_fill(spot, float("nan"))

    module.forward = spoilt  # type: ignore[method-assign]  # as a bug in its code


def spoil_gradient(module: nn.Module) -> None:
    """From now on the module's backward makes a nan in the gradient of what it is handed."""
    forward = module.forward

    def spoilt(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(_Poison.apply(x), *args, **kwargs)

    module.forward = spoilt  # type: ignore[method-assign]  # as a bug in its code


def sites(architecture: Architecture, dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """Names of modules without children that are called once: all, and those that hand a gradient on to others."""
    model = model_of(architecture, dtype)
    called: dict[str, int] = {}
    forward, backward = set(), set()
    handles = []
    for name, module in model.named_modules(remove_duplicate=False):
        if not list(module.children()) and name:

            def after(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                called[name] = called.get(name, 0) + 1
                if not _is_made(output, args):
                    return
                forward.add(name)
                first = args[0] if args else None
                if isinstance(first, torch.Tensor) and first.requires_grad and not first.is_leaf:
                    backward.add(name)

            handles.append(module.register_forward_hook(after))
    torch.manual_seed(0)
    model(**inputs_of(architecture, model, dtype, 0)).loss.backward()
    once = {name for name, count in called.items() if count == 1}
    return sorted(forward & once), sorted(backward & once)


def _is_made(output: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call returned one tensor of its own that can have a gradient."""
    floats = isinstance(output, torch.Tensor) and output.is_floating_point() and output.requires_grad
    return floats and not any(output is each for each in args)


def watched(
    architecture: Architecture,
    dtype: torch.dtype,
    site: str = "",
    spoil: Callable[[nn.Module], None] | None = None,
) -> tuple[Trained, Any, list[Any]]:
    """(what the training has left, verdict, our own faults) of a training under gpuwatch."""
    handle: Any = None

    def prepare(model: nn.Module, step: int) -> None:
        nonlocal handle
        if handle is None:
            handle = gpuwatch.watch(model, on_overflow="continue")
        if step == BAD_STEP and spoil is not None:
            spoil(model.get_submodule(site))

    try:
        trained = train(architecture, dtype, prepare)
        verdict = handle.verdict()
        faults = [event for event in handle.events if type(event).__name__ == "OwnFault"]
    finally:
        if handle is not None:
            handle.remove()
    return trained, verdict, faults


@dataclass
class Result:
    """What an architecture has shown in one dtype."""

    right: list[str]
    listed: list[str]
    """Named among others, as supported."""
    wrong: list[str]

    def __str__(self) -> str:
        said = f"{len(self.right)} right, {len(self.listed)} among others, {len(self.wrong)} wrong"
        return "; ".join([said, *self.listed, *self.wrong])


def attempt(
    architecture: Architecture, dtype: torch.dtype, faults: int = 2, seed: int = 0, late: bool = False
) -> Result:
    """A clean training, then `faults` faults in the forward and `faults` in the backward."""
    plain = train(architecture, dtype)
    trained, verdict, ours = watched(architecture, dtype)
    result = Result([], [], [])
    result.wrong += [f"our own fault: {fault.message}" for fault in ours]
    if verdict.kind != "clean":
        result.wrong.append(f"an alarm without a fault: {verdict.statement}")
    if not same_bits(plain, trained):
        result.wrong.append("other bits")
    for phase, names, spoil in zip(
        ("forward", "backward"), sites(architecture, dtype), (spoil_output, spoil_gradient), strict=True
    ):
        for site in draw(names, faults, seed):
            _, verdict, ours = watched(architecture, dtype, site, spoil)
            named = Named(site, phase, verdict, late)
            text = f"{phase} of {site}: {verdict.certainty}: {verdict.statement}"
            (result.right if named.right else result.listed if named.listed else result.wrong).append(text)
            result.wrong += [f"our own fault: {fault.message}" for fault in ours]
    return result


# -- compiled -----------------------------------------------------------------------------------------------------


class _Switched(torch.autograd.Function):
    """Leaves values alone, and puts a nan into their gradient while `bad` is not 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _spoilt(gradient, ctx.saved_tensors[0]), None


def _spoilt(tensor: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
    spot = torch.arange(tensor.numel()).reshape(tensor.shape) == 0
    return torch.where(spot & bad.bool(), torch.full_like(tensor, float("nan")), tensor)


@contextmanager
def _spoiling(model: nn.Module, site: str, phase: str) -> Iterator[torch.Tensor]:
    """A module that has a fault while the value of this tensor is not 0.

    Another value makes no new graph. And all modules of the class have such a tensor: what they share, they share.
    """
    cls = type(model.get_submodule(site))
    plain = cls.forward
    for module in model.modules():
        if type(module) is cls:
            module.bad = torch.zeros(())

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "bad"):
            return plain(self, *args, **kwargs)
        if phase == "forward":
            return _spoilt(plain(self, *args, **kwargs), self.bad)
        return plain(self, _Switched.apply(args[0], self.bad), *args[1:], **kwargs)

    cls.forward = forward  # as a bug in its code
    try:
        yield model.get_submodule(site).bad
    finally:
        cls.forward = plain


def _compiled(model: nn.Module, blocks: bool) -> nn.Module:
    """The compiled model; or the model with each block of its lists compiled on its own."""
    if not blocks:
        return torch.compile(model, backend="aot_eager")
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(block) for block in module}) == 1:
            for block in module if len(list(module[0].children())) else ():
                block.compile(backend="aot_eager")
    return model


def _train_compiled(
    architecture: Architecture,
    blocks: bool,
    site: str = "",
    phase: str = "",
    *,
    watch: bool = True,
) -> tuple[Trained, Any, list[Any]]:
    """(what the training has left, verdict, our own faults) of a training of the compiled model."""
    torch.compiler.reset()
    model = model_of(architecture, torch.float32)
    with _spoiling(model, site, phase) if site else nullcontext(torch.zeros(())) as bad:
        compiled = _compiled(model, blocks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        handle = gpuwatch.watch(model, on_overflow="continue") if watch else None
        losses = []
        try:
            for step in range(STEPS):
                torch.manual_seed(step)
                bad.fill_(step == BAD_STEP)
                loss = compiled(**inputs_of(architecture, model, torch.float32, step)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss))
            verdict = handle.verdict() if handle is not None else None
            events = handle.events if handle is not None else []
            faults = [event for event in events if type(event).__name__ == "OwnFault"]
        finally:
            if handle is not None:
                handle.remove()
    return Trained(losses, [parameter.detach().clone() for parameter in model.parameters()]), verdict, faults


def attempt_compiled(architecture: Architecture, blocks: bool = False, faults: int = 1, seed: int = 0) -> Result:
    """As `attempt`, for the compiled model in float32, or for one whose `blocks` are compiled one by one.

    The verdict names the faulty module, lists it among others, or says that a graph was not inspected.
    """
    plain, _, _ = _train_compiled(architecture, blocks, watch=False)
    trained, verdict, ours = _train_compiled(architecture, blocks)
    result = Result([], [], [f"our own fault: {fault.message}" for fault in ours])
    if verdict.kind != "clean":
        result.wrong.append(f"an alarm without a fault: {verdict.statement}")
    if not same_bits(plain, trained):
        result.wrong.append("other bits")
    for phase, names in zip(("forward", "backward"), sites(architecture, torch.float32), strict=True):
        for site in draw(names, faults, seed):
            left, verdict, ours = _train_compiled(architecture, blocks, site, phase)
            named = Named(site, phase, verdict, late=True)  # no graph of autograd's shows its backward
            hidden = verdict.certainty == "supported" and any("not inspected" in line for line in verdict.evidence)
            no_gradient = verdict.kind == "clean" and all(bits.isfinite().all() for bits in left.bits)
            text = f"{phase} of {site}: {verdict.certainty}: {verdict.statement}"
            told = result.listed if named.listed or hidden or no_gradient else result.wrong
            (result.right if named.right else told).append(text)
            result.wrong += [f"our own fault: {fault.message}" for fault in ours]
    return result


def draw(names: list[str], number: int, seed: int) -> list[str]:
    """A sample of at most `number` names, the same for the same seed."""
    return random.Random(seed).sample(names, min(number, len(names)))
