"""Trains while signals come at random moments, whose handler raises. Prints as JSON what has become of each.

A handler's exception must reach `main`, with the handler at the end of its traceback. Afterwards the model trains as
one that nobody watches. `--plain` is the control.
"""

from __future__ import annotations

import argparse
import copy
import gc
import io
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--places", nargs="+", default=["forward", "backward", "step"])
parser.add_argument("--signals", type=int, default=20, help="at each place")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--plain", action="store_true", help="without gpuwatch")
parser.add_argument("--without-c", action="store_true", help="without gpuwatch's part in C")
parser.add_argument("--late", action="store_true", help="as if all tensors were on a device")
parser.add_argument("--saves", action="store_true", help="the handler first does what one at preemption does")
options = parser.parse_args()
if options.without_c:
    for name in ("core", "recursion"):
        sys.modules[f"gpuwatch.worker.native.{name}"] = None  # type: ignore[assignment]
if options.late:
    os.environ["GPUWATCH_LATE_DEVICE"] = "1"

import gpuwatch  # noqa: E402  # with the above
import torch  # noqa: E402
from torch import distributed as dist  # noqa: E402
from torch import nn  # noqa: E402


def is_ours(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is of gpuwatch. Its tests, and what is installed for it, may lie within its folder."""
    folder = os.path.dirname(gpuwatch.__file__)  # noqa: PTH120  # a path is needed as text
    within = frame.filename.removeprefix(folder)
    return within != frame.filename and "site-packages" not in within and frame.filename != __file__


class Preempted(Exception):
    """What a script's own handler raises."""


KINDS: list[Callable[[], BaseException]] = [Preempted, KeyboardInterrupt, lambda: SystemExit(3), TimeoutError]
KINDS += [lambda: RuntimeError("told to stop")]  # as torch's own errors
draws = random.Random(options.seed)
"""Others than those of the script that is interrupted."""
raised: list[BaseException] = []
armed = False
left_changed: list[tuple[str, list[str]]] = []
"""(what a second run did not put back, the names of the frames that were interrupted)"""


def handler(number: int, frame: Any) -> None:
    global armed
    if armed:  # one that comes while the last one is being counted is not sent
        armed = False
        if options.saves:
            save(places)
        raised.append(draws.choice(KINDS)())
        raise raised[-1]


def save(places: Places) -> None:
    """It evaluates, waits for the other ranks, and writes a checkpoint: gpuwatch sees each of these."""
    with torch.no_grad():
        places.loss().item()
    dist.barrier()
    torch.save({"model": places.model.state_dict(), "optimizer": places.optimizer.state_dict()}, io.BytesIO())


class Overflows(nn.Module):
    """One sample overflows, and stands out: the forward runs again, with another sample in its place, and as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.last = x
        return (x * 1e20 + torch.rand(1) + random.random()) * 1e15

    def state(self) -> dict[str, Any]:
        """What a forward changes, and a second run must not."""
        return {
            "buffer": int(self.calls),
            "attribute": id(self.last),
            "torch's random numbers": torch.get_rng_state().tolist(),
            "Python's random numbers": random.getstate(),
            "hooks": [*self._forward_hooks, *self._forward_pre_hooks],
        }


class Places:
    """What is interrupted: `prepare` comes before it, and its result is handed to the place."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(2, 4, 16)
        self.watch: Any = None
        self.compiled = torch.compile(copy.deepcopy(self.model)) if "compiled" in options.places else None

    def loss(self, model: Any = None) -> torch.Tensor:
        return (model or self.model)(self.x).square().mean()

    def ddp_loss(self) -> torch.Tensor:
        return self.loss(nn.parallel.DistributedDataParallel(self.model))

    def with_gradients(self) -> None:
        self.loss().backward()

    def collectives(self) -> None:
        for _ in range(20):
            dist.all_reduce(torch.ones(8))
            dist.all_reduce(torch.ones(8), async_op=True).wait()
            dist.barrier()

    def compiled_step(self) -> None:
        self.loss(self.compiled).backward()

    def new_watch(self) -> tuple[nn.Module, Any, torch.Tensor, list[dict[str, Any]]]:
        if self.watch is not None:
            self.watch.remove()  # its signal came before `second_run` had begun
        gc.collect()  # the last watch ends now: Python drops what is raised in callbacks of weak references
        model, other, x = nn.Sequential(nn.Identity(), Overflows()), Overflows(), torch.ones(8, 8)
        x[2] = 1e10
        before = model[1].state()
        states = [before]
        for _ in range(2):
            other(x)
            states.append(other.state())
        torch.set_rng_state(torch.tensor(before["torch's random numbers"], dtype=torch.uint8))
        random.setstate(before["Python's random numbers"])
        watch = self.watch = gpuwatch.watch(model) if not options.plain else None
        if options.late and watch is not None:
            with suppress(gpuwatch.OverflowDetected):
                model(x)
                watch.verdict()  # the numbers arrive: the next forward begins with the alarm of this one
        return model, watch, x, states

    def second_run(self, made: tuple[nn.Module, Any, torch.Tensor, list[dict[str, Any]]]) -> float:
        """Returns how long the part took that a signal may interrupt."""
        global armed
        model, watch, x, states = made
        began = time.perf_counter()
        try:
            with suppress(gpuwatch.OverflowDetected):
                model(x)
            return time.perf_counter() - began
        finally:
            armed = False  # a watch that is interrupted as it is removed stays
            for what, now in model[1].state().items():
                if now not in [state[what] for state in states]:
                    trace = traceback.extract_tb(sys.exc_info()[2])
                    left_changed.append((what, [f"{each.name}:{each.lineno}" for each in trace]))
            if watch is not None:
                watch.remove()

    def of(self, place: str) -> tuple[Callable[[], Any], Callable[..., Any]]:
        """(what comes before, what is interrupted)"""
        return {
            "forward": (lambda: (), lambda: self.model(self.x)),
            "backward": (self.loss, torch.Tensor.backward),
            "step": (self.with_gradients, lambda _=None: self.optimizer.step()),
            "collective": (lambda: (), self.collectives),
            "reduction": (self.ddp_loss, torch.Tensor.backward),
            "compiled": (lambda: (), self.compiled_step),
            "second run": (self.new_watch, self.second_run),
        }[place]


def call(prepare: Callable[[], Any], interrupted: Callable[..., Any], after_s: float | None) -> float:
    """Returns how long it took. Interrupts it after so many seconds."""
    global armed
    prepared = prepare()
    given = () if prepared is None or prepared == () else (prepared,)
    began = time.perf_counter()
    if after_s is not None:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, max(after_s, 1e-6))
    own_s = interrupted(*given)
    took_s = own_s if isinstance(own_s, float) else time.perf_counter() - began
    while armed and after_s is not None:  # it was faster this time
        time.sleep(0)
    return took_s


def main(places: Places) -> dict[str, Any]:
    global armed
    told: dict[str, Any] = {"caught": {}, "lost": {}, "in gpuwatch": 0, "ended in gpuwatch": 0}
    told |= {
        "in a second run": 0,
        "elsewhere": [],
        "without gradients": [],
        "ended in": [],
        "left changed": left_changed,
    }
    for place in options.places:
        for _ in range(3):
            took_s = call(*places.of(place), None)
            places.optimizer.zero_grad()
        caught = 0
        raised.clear()
        while len(raised) < options.signals:
            try:
                before = len(raised)
                own_s = call(*places.of(place), draws.random() * took_s)
                took_s = own_s if len(raised) == before else took_s  # it ended before its signal
                if len(raised) > before:
                    frames = traceback.extract_tb(raised[-1].__traceback__)
                    told["ended in"].append([frame.name for frame in frames])
                    told["ended in gpuwatch"] += any(map(is_ours, frames))
            except BaseException as error:
                if not raised or error is not raised[-1]:
                    raise
                caught += 1
                frames = traceback.extract_tb(error.__traceback__)
                names = [frame.name for frame in frames]
                if names[:2] != ["main", "call"] or names[-1] != "handler":
                    told["elsewhere"].append(names)
                told["in gpuwatch"] += is_ours(frames[-2])
                told["in a second run"] += any(frame.name == "_look_into" for frame in frames)
                if not torch.is_grad_enabled():
                    if is_ours(frames[-2]):  # torch's own `no_grad` can be interrupted, too
                        told["without gradients"].append(names)
                    torch.set_grad_enabled(True)
            if raised:  # else what the frames of the traceback hold would live on
                raised[-1].__traceback__ = raised[-1].__context__ = None
            places.optimizer.zero_grad()
        told["caught"][place], told["lost"][place] = caught, len(raised) - caught
    return told


def one_step(places: Places, model: nn.Module) -> list[bytes]:
    loss = places.loss(model)
    loss.backward()
    found = [loss.detach().numpy().tobytes(), *(p.grad.numpy().tobytes() for p in model.parameters())]  # type: ignore[union-attr]
    model.zero_grad()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    random.seed(options.seed)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    signal.signal(signal.SIGALRM, handler)
    places = Places()
    gc.freeze()  # what was imported is not looked at again
    if options.plain or options.places == ["second run"]:  # that has watches of its own
        found = main(places)
    else:
        with gpuwatch.watch(places.model) as watch:
            found = main(places)
            watched = one_step(places, places.model)
            verdict = watch.verdict()
            found["verdict"] = verdict.kind, verdict.statement, *verdict.evidence
        found["same bits"] = watched == one_step(places, places.model)
    found["kinds"] = Counter(type(error).__name__ for error in raised)
    print(json.dumps(found))
    dist.destroy_process_group()
