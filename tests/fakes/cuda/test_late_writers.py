"""Gradients that a stream of another library's writes late: what is read was written, and a healthy run is clean.

New memory of the stand-in is full of nan, so a read that comes before its writer is an overflow.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import gpuwatch
import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.own_limits import OwnFault
from test_gpuwatch import SCRIPTS, launch_script
from torch import distributed as dist
from torch import nn

sys.path.insert(0, str(SCRIPTS))

from poke import Poke, Poked  # it lies beside the scripts, which use it as well

LATE = 20_000_000
"""Cycles of torch.cuda._sleep: 20 ms by which a writer is late."""
BATCHES, BAD = 4, 2


class Fused(torch.autograd.Function):
    """Adds the weight's gradient to `main_grad`, as the kernels of Megatron do, and returns a placeholder."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        torch.cuda._sleep(LATE)
        weight.main_grad.add_(gradient.t() @ x)
        if Poke.is_on:
            weight.main_grad[0, 0] = float("inf")
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.empty_like(weight)


class FusedLinear(nn.Linear):
    def forward(self, x):
        return Fused.apply(x, self.weight)


class Writer:
    """Gets each gradient in a hook, and works on it in a stream of its own. `end` is called before the step."""

    linear = Poked

    def __init__(self, net):
        self.net, self.stream, self.moved = net, torch.cuda.Stream(), []
        for weight in net.parameters():
            weight.register_post_accumulate_grad_hook(self.hook)

    def begin(self):
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def hook(self, weight):
        raise NotImplementedError

    def end(self):
        torch.cuda.current_stream().wait_stream(self.stream)


class Bucket(Writer):
    """DeepSpeed's ZeRO 3: `.grad.data` becomes a slice of a bucket that its stream fills."""

    def hook(self, weight):
        with self.begin():
            torch.cuda._sleep(LATE)
            piece = torch.empty_like(weight.grad)
            piece.copy_(weight.grad)
            weight.grad.record_stream(self.stream)
            weight.grad.data = piece


class WritesOver(Writer):
    """A reduction in place that nobody waits for before the step: here it halves, and has nan in between."""

    def hook(self, weight):
        with self.begin():
            kept = weight.grad.clone()
            weight.grad.data.fill_(float("nan"))
            torch.cuda._sleep(LATE)
            weight.grad.data.copy_(kept)
            weight.grad.record_stream(self.stream)


class Offload(Writer):
    """Gradients leave for host memory, and come back for the step."""

    def hook(self, weight):
        with self.begin():
            torch.cuda._sleep(LATE)
            away = torch.empty(weight.shape, pin_memory=True)
            away.copy_(weight.grad, non_blocking=True)
            weight.grad.record_stream(self.stream)
            self.moved.append((weight, away))
        weight.grad = None

    def end(self):
        self.stream.synchronize()
        for weight, away in self.moved:
            weight.grad = away.cuda()
        self.moved.clear()


class StepsInBackward(Writer):
    """Each weight has an optimizer of its own, which steps on another stream."""

    def __init__(self, net):
        super().__init__(net)
        self.optimizers = {weight: torch.optim.SGD([weight], lr=1e-3) for weight in net.parameters()}

    def hook(self, weight):
        gradient = weight.grad
        with self.begin():
            torch.cuda._sleep(LATE)
            self.optimizers[weight].step()
            gradient.record_stream(self.stream)
            weight.grad = None


class Flattens(Writer):
    """Apex's DistributedDataParallel: the hook of autograd's node copies to a flat buffer and back, on its stream.

    As Apex does, it needs a process group: without one, gradients wait to be read until the backward ends.
    """

    def __init__(self, net):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.net, self.stream, self.nodes = net, torch.cuda.Stream(), []
        for weight in net.parameters():
            node = weight.expand_as(weight).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, weight=weight: self.hook(weight))
            self.nodes.append(node)

    def hook(self, weight):
        with self.begin():
            flat = weight.grad.reshape(-1).clone()
            weight.grad.data.fill_(float("nan"))
            torch.cuda._sleep(LATE)
            weight.grad.data.copy_(flat.view_as(weight.grad))
            weight.grad.record_stream(self.stream)


class MainGrad(Flattens):
    """Megatron: the node's hook finds the gradient in `main_grad`, and a placeholder in `.grad`."""

    linear = FusedLinear

    def __init__(self, net):
        for weight in net.parameters():
            weight.main_grad = torch.zeros_like(weight)
            weight.grad_added_to_main_grad = False
        super().__init__(net)

    def hook(self, weight):
        if not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    def end(self):
        for weight in self.net.parameters():
            weight.grad = weight.main_grad.clone()
            weight.main_grad.zero_()


class Checkpoint(Writer):
    """Weights and gradients are copied to host memory while the training goes on."""

    def hook(self, weight):
        with self.begin():
            torch.cuda._sleep(LATE)
            for each in (weight.detach(), weight.grad):
                self.moved.append(torch.empty(each.shape, pin_memory=True).copy_(each, non_blocking=True))
                each.record_stream(self.stream)


WRITERS = [Bucket, WritesOver, Offload, StepsInBackward, Flattens, MainGrad, Checkpoint]


def train(writer_of, watch=None, bad=False):
    """The losses. `watch` is called with the model before its first batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), writer_of.linear(8, 8, bias=False), nn.Linear(8, 1)).cuda()
    writer = writer_of(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    if watch is not None:
        watch(net)
    numbers, losses = torch.Generator().manual_seed(1), []
    try:
        for batch in range(BATCHES):
            Poke.is_on = bad and batch == BAD
            loss = net(torch.rand(4, 8, generator=numbers).cuda()).pow(2).mean()
            loss.backward()
            writer.end()
            if not isinstance(writer, StepsInBackward):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    finally:
        Poke.is_on = False
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.destroy_process_group()
    return losses


@pytest.mark.parametrize("writer", WRITERS)
def test_a_healthy_run_is_clean_and_has_the_same_losses(writer):
    plain, made = train(writer), []
    watched = train(writer, lambda net: made.append(gpuwatch.watch(net)))
    (watch,) = made
    verdict = watch.verdict()
    watch.remove()
    assert verdict.kind == "clean", (verdict.statement, verdict.evidence)
    assert [event for event in watch.events if isinstance(event, OwnFault)] == []
    assert watched == plain


@pytest.mark.parametrize("writer", WRITERS)
def test_an_inf_in_a_gradient_is_named_in_its_batch(writer):
    made = []
    with pytest.raises(OverflowDetected):
        train(writer, lambda net: made.append(gpuwatch.watch(net)), bad=True)
        raise AssertionError("it trained to its end")
    (watch,) = made
    first = watch.anomalies[0]
    watch.remove()
    assert (first.where.batch, first.module, first.role, first.value) == (BAD, "2", "grad weight", "+inf")


# -- over NCCL, 2 ranks ----------------------------------------------------------------------------------------------

WAYS = ["ddp-view", "ddp-hook", "fsdp1", "fsdp2", "fsdp2-offload", "reduces-at-once"]
VERDICT = ("kind", "rank", "module", "role", "value", "batch")


def plain(script, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(SCRIPTS / script), "--device", "cuda", *arguments]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=280)
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


def launch(script, folder, *arguments):
    return launch_script(script, folder, 2, "cuda", "nccl", *arguments, options=("--preflight", "off"))


@pytest.mark.parametrize("way", ["all", *(pytest.param(way, marks=pytest.mark.soak) for way in WAYS)])
def test_what_torch_reduces_on_other_streams_is_clean(tmp_path, way):
    verdict, found, _ = launch("late_writers.py", tmp_path / "watched", "--way", way)
    assert (verdict["kind"], verdict["certainty"]) == ("clean", "established")
    assert found == plain("late_writers.py", "--way", way)


@pytest.mark.parametrize(
    "way", ["reduces-at-once", *(pytest.param(way, marks=pytest.mark.soak) for way in WAYS if way != "reduces-at-once")]
)
def test_an_inf_of_one_rank_is_named_there(tmp_path, way):
    verdict, _, _ = launch("late_writers.py", tmp_path / "watched", "--way", way, "--fault", "backward", "--rank", "1")
    assert (verdict["kind"], verdict["certainty"], verdict["rank"], verdict["batch"]) == (
        "overflow",
        "established",
        1,
        2,
    )
    assert verdict["module"] == "block"  # the hook on `widen` is called within the forward of `block`


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="needs DeepSpeed: build/cuda-stub/venv-2.14.1/bin/pip install deepspeed",
)


@needs_deepspeed
@pytest.mark.parametrize(("stage", "more"), [(1, ()), (2, ()), (3, ()), (3, ("--release",))])
def test_zero_of_deepspeed_is_clean_ten_times_and_its_overflow_is_named(tmp_path, stage, more):
    arguments = ("--stage", str(stage), *more, "--trainings", "10", "--batches", "4", "--rank", "1")
    verdict, found, _ = launch("zero.py", tmp_path / "healthy", *arguments)
    assert (verdict["kind"], verdict["certainty"]) == ("clean", "established")
    assert found == plain("zero.py", *arguments)

    verdict, found, _ = launch("zero.py", tmp_path / "bad", *arguments, "--fault", "backward")
    assert tuple(verdict[key] for key in VERDICT[:-1]) == ("overflow", 1, "block.widen", "grad weight", "+inf")
    assert verdict["batch"] in (2, 9 * 4 + 2)  # if torch has let go of the model before, one root counts all batches
    assert sum(line.startswith("rank 1 ") for line in found) >= 9 * 4 + 2, "not in an earlier training"
