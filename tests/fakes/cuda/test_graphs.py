"""What gpuwatch sees of CUDA graphs: the overflow comes out of the arithmetic of a replay."""

from __future__ import annotations

import gpuwatch
import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.core.frames import RowMark
from test_gpuwatch import launch_script
from torch import nn

REPLAYS = 6
HAS_HOOKS = hasattr(torch.cuda.graphs, "register_graph_capture_start_hook")
with_hooks = pytest.mark.skipif(not HAS_HOOKS, reason="torch 2.14 and later say when a graph is replayed")
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # also without gpuwatch


class Net(nn.Module):
    """`grow` doubles its input."""

    def __init__(self, depth=1):
        super().__init__()
        self.keep = nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)])
        self.grow = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            self.grow.weight.copy_(2 * torch.eye(8))
            for each in self.keep:
                each.weight.copy_(torch.eye(8))

    def forward(self, x):
        return self.head(self.grow(self.keep(x)))


def made(depth=1):
    torch.manual_seed(0)
    return Net(depth).cuda(), torch.rand(4, 8, device="cuda")


def warm(net, x, times=3):
    """As torch's documentation has it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            net(x).pow(2).mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    net.zero_grad(set_to_none=True)


def captured(net, x):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = net(x).pow(2).mean()
        loss.backward()
    return graph, loss


def replay(graph, net, x, bad_at=-1, times=REPLAYS, loss=None):
    """The losses, and the weights at the end."""
    losses = []
    numbers = torch.Generator().manual_seed(1)
    for number in range(times):
        x.copy_(torch.rand(4, 8, generator=numbers))
        if number == bad_at:
            x.mul_(0).add_(2.5e38)  # finite; twice that is not
        graph.replay()
        losses += [loss.item()] if loss is not None else []
        with torch.no_grad():
            for weight in net.parameters():
                weight -= 1e-3 * weight.grad
    torch.cuda.synchronize()
    return losses, [weight.detach().cpu() for weight in net.parameters()]


def faults(watch):
    return [event.message for event in watch.events if isinstance(event, OwnFault) and event.part == "graph"]


def places(watch):
    return [(each.module, each.value, each.phase, each.where.batch) for each in watch.anomalies]


def measured(watch):
    """Batch -> (frames, kinds of their rows)"""
    return {
        page.batch: (len(page.frames), {row.kind for frame in page.frames for row in frame.rows})
        for page in watch.pages()
    }


@with_hooks
@pytest.mark.parametrize("depth", [1, 80])
def test_an_overflow_in_the_fourth_replay_is_named(depth):
    net, x = made(depth)
    with gpuwatch.watch(net, on_overflow="continue") as watch:
        warm(net, x)
        graph, _ = captured(net, x)
        replay(graph, net, x, bad_at=3)
    assert places(watch)[0] == ("grow", "+inf", "forward", 3 + 1 + 3)
    assert faults(watch) == []
    pages = measured(watch)
    frames, kinds = pages[2]
    assert pages[4] == (frames - 1, kinds)  # a replay has the frames of an eager batch, but for that of its loss


@with_hooks
def test_the_job_ends_at_a_later_replay():
    net, x = made()
    with gpuwatch.watch(net) as watch:
        warm(net, x)
        graph, loss = captured(net, x)
        with pytest.raises(OverflowDetected, match="inf in output of `grow`"):
            replay(graph, net, x, bad_at=3, times=50, loss=loss)
    assert places(watch) == [("grow", "+inf", "forward", 7)]


@with_hooks
def test_a_clean_graph_has_the_same_bits_and_waits_for_nothing(counted):
    net, x = made()
    warm(net, x)
    graph, loss = captured(net, x)
    expected = replay(graph, net, x, loss=loss)
    own = counted(lambda: [graph.replay() for _ in range(REPLAYS)])

    net, x = made()
    with gpuwatch.watch(net, on_overflow="continue") as watch:
        warm(net, x)
        graph, loss = captured(net, x)
        losses, weights = replay(graph, net, x, loss=loss)
        found = counted(lambda: [graph.replay() for _ in range(REPLAYS)])
    assert losses == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(weights, expected[1], strict=True))
    assert (faults(watch), watch.anomalies) == ([], [])
    for name in ("host_waits", "pageable_copies", "device_allocations", "host_allocations", "operations"):
        assert found.get(name, 0) == own.get(name, 0), name


@with_hooks
def test_graphed_callables_are_seen_and_their_rehearsal_raises_no_alarm():
    net, x = made()
    with gpuwatch.watch(net) as watch:
        call = torch.cuda.make_graphed_callables(net, (x,))
        with pytest.raises(OverflowDetected, match="grow"):
            for number in range(50):
                call(torch.full((4, 8), 2.5e38 if number == 3 else 1.0, device="cuda")).sum().backward()
                torch.cuda.synchronize()
    assert places(watch) == [("grow", "+inf", "forward", 7)]
    assert faults(watch) == []


class Doubles(torch.autograd.Function):
    """Passes its input on. Its backward doubles the gradient, which may be too large for that."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2.0


class Rehearsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return Doubles.apply(self.last(self.first(x)))


@pytest.mark.parametrize("bad_at", [None, 3])
def test_the_unwritten_gradients_of_a_rehearsal_are_no_evidence(bad_at, monkeypatch):
    """The rehearsal's memory holds nan. In a later replay the same place has an overflow."""
    torch.manual_seed(0)
    net, x = Rehearsed().cuda(), torch.rand(4, 8, device="cuda")
    torch.cuda.empty_cache()
    with gpuwatch.watch(net, on_overflow="continue") as watch:
        with monkeypatch.context() as patch:  # as it finds the memory: gpuwatch's may have been there before
            empty_like = torch.empty_like
            patch.setattr(torch, "empty_like", lambda *given, **more: empty_like(*given, **more).fill_(torch.nan))
            call = torch.cuda.make_graphed_callables(net, (x,))
        for number in range(6):
            total = call(x).sum()
            loss = (total - total.detach()) * (3e38 if number == bad_at else 1.0)  # 0, with gradients
            loss.backward()
            torch.cuda.synchronize()
        verdict = watch.verdict()
        rehearsed = [row for frame in watch.frames(0) for row in frame.rows if row.mark & RowMark.REHEARSED]
    assert any(row.flags for row in rehearsed), "the test needs a gradient that nobody has written"
    if bad_at is None:
        assert (verdict.kind, watch.anomalies) == ("clean", []), (verdict.statement, verdict.evidence)
    elif HAS_HOOKS:
        assert (verdict.kind, verdict.phase, verdict.value) == ("overflow", "backward", "+inf")
        assert [anomaly.where.batch for anomaly in watch.anomalies] == [verdict.batch]
    assert faults(watch) == [] or not HAS_HOOKS


def test_a_launch_takes_a_rehearsal_for_no_evidence(tmp_path):
    verdict, _, _ = launch_script("rehearsal.py", tmp_path / "run", 1, "cuda", "nccl", options=("--preflight", "off"))
    assert (verdict["kind"], verdict["certainty"]) == ("clean", "established")


@with_hooks
@pytest.mark.parametrize("sync", [True, False])
def test_the_operation_of_a_graph_is_not_guessed(sync):
    """The second run of the forward replays the graph, in which no operation is seen, and which does not end the job.

    With `sync` the numbers have arrived when the forward returns, as they may have on a fast device.
    """
    net = nn.Linear(8, 8, bias=False).cuda()
    x = torch.ones(4, 8, device="cuda")
    with gpuwatch.watch(net, sync=sync) as watch:
        call = torch.cuda.make_graphed_callables(net, (x,))
        with pytest.raises(OverflowDetected, match="root module \\(Linear\\), forward of batch 7; report"):
            for number in range(50):
                x.fill_(3e38 if number > 2 else 1.0)
                with torch.no_grad():
                    net.weight.fill_(2.0)
                call(x)
                torch.cuda.synchronize()
    assert len(watch.anomalies) == 1
    assert [event for event in watch.events if isinstance(event, OwnFault)] == []


@with_hooks
@pytest.mark.parametrize("is_known", [True, False])
def test_a_part_that_is_graphed_has_its_names_in_the_model(is_known):
    net, x = made(2)
    with gpuwatch.watch(net, on_overflow="continue") as watch:
        if is_known:
            net(x).sum().backward()
            torch.cuda.synchronize()
        net.keep = torch.cuda.make_graphed_callables(net.keep, (x,))
        for number in range(4):
            x.fill_(1.0)
            if number == 2:
                with torch.no_grad():
                    net.keep[1].weight.fill_(3e38)
            net(x).sum().backward()
        torch.cuda.synchronize()
    module, value, phase, batch = places(watch)[0]
    assert (module, value, phase) == ("keep.1", "+inf", "forward")
    last = list(watch.pages())[-1]
    assert last.batch == batch + 1
    assert [frame.module for frame in last.frames if frame.phase == "forward"] == [
        *("keep.0", "keep.1", "keep", "grow", "head", "")
    ]
    assert {frame.depth for frame in last.frames if frame.module.startswith("keep.")} >= {2}
    assert {frame.module for frame in last.frames if frame.phase == "backward"} >= {"keep.0", "grow", "head"}
    assert faults(watch) == []


@with_hooks
def test_a_graph_that_is_gone_and_one_that_is_captured_again():
    net, x = made()
    with gpuwatch.watch(net, on_overflow="continue") as watch:
        warm(net, x)
        graph, _ = captured(net, x)
        replay(graph, net, x, times=2)
        del graph
        again, _ = captured(net, x)
        replay(again, net, x, times=2)
        again.reset()
        net.zero_grad(set_to_none=True)
        with torch.cuda.graph(again):
            net(x).pow(2).mean().backward()
        replay(again, net, x, bad_at=1, times=2)
    assert places(watch)[0] == ("grow", "+inf", "forward", 3 + 3 + 3 + 2)
    assert faults(watch) == []


@with_hooks
def test_a_capture_that_fails_leaves_the_next_one_seen():
    net, x = made()
    with gpuwatch.watch(net, on_overflow="continue") as watch:
        warm(net, x)
        with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            net(x)
            torch.cuda.synchronize()  # not permitted
        torch.cuda.synchronize()
        net(x).sum().backward()
        net.zero_grad(set_to_none=True)
        graph, _ = captured(net, x)
        replay(graph, net, x, bad_at=0, times=1)
    assert places(watch)[0][:3] == ("grow", "+inf", "forward")
    assert faults(watch) == []


@with_hooks
def test_an_overflow_in_a_backward_of_a_replay_is_named():
    net, x = made()
    scale = torch.ones(1, device="cuda")
    with gpuwatch.watch(net, on_overflow="continue") as watch:
        warm(net, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (net(x).mean() * scale * scale).backward()
        for number in range(4):
            scale.fill_(1e30 if number == 2 else 1.0)
            graph.replay()
        torch.cuda.synchronize()
    module, value, phase, batch = places(watch)[0]
    assert (module, value, phase, batch) == ("head", "+inf", "backward", 3 + 1 + 2)
    assert faults(watch) == []


@with_hooks
def test_replays_on_another_stream_are_not_seen():
    """Their numbers could be those of two replays at once."""
    net, x = made()
    with gpuwatch.watch(net, on_overflow="continue") as watch:
        warm(net, x)
        graph, _ = captured(net, x)
        replay(graph, net, x, times=1)
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.replay()
        torch.cuda.synchronize()
        net(x)
    assert [message[:8] for message in faults(watch)] == ["not seen"]
    assert watch.anomalies == []


@with_hooks
def test_a_capture_in_a_batch_that_is_left_out_is_not_seen():
    net, x = made()
    with gpuwatch.watch(net, on_overflow="continue", every=2) as watch:
        warm(net, x)
        graph, _ = captured(net, x)  # batch 3
        replay(graph, net, x, times=1)
        net(x)
    assert [message[:8] for message in faults(watch)] == ["not seen"]


@with_hooks
def test_a_tensor_whose_kernel_has_not_run_is_not_seen():
    net, x = made()
    with gpuwatch.watch(net, on_overflow="continue") as watch:
        torch.nn.Linear(8, 8).cuda()(x)
        net(x)
        net.half()
        x = x.half()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            net(x)
        graph.replay()
        torch.cuda.synchronize()
    assert [message[:8] for message in faults(watch)] == ["not seen"]


@with_hooks
def test_what_a_replay_reads_is_not_freed_before_the_graph():
    """The graph itself does not use this argument."""

    class Ignores(nn.Module):
        def forward(self, x, other):
            return x + 1

    net, x = Ignores().cuda(), torch.ones(4, device="cuda")
    other = torch.full((1 << 20,), 2.0, device="cuda")
    with gpuwatch.watch(net, on_overflow="continue") as watch:
        for _ in range(3):
            net(x, other)
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            net(x, other)
        before = torch.cuda.memory_allocated()
        del other
        assert torch.cuda.memory_allocated() == before
        graph.replay()
        torch.cuda.synchronize()
        assert faults(watch) == []
        (read,) = [row for row in list(watch.pages())[-1].frames[0].rows if row.role == "input[1]"]
        assert read.abs_max == 2
        del graph
        assert torch.cuda.memory_allocated() < before


@pytest.mark.skipif(HAS_HOOKS, reason="torch 2.13 and earlier do not say when a graph is replayed")
def test_an_older_torch_says_that_a_graph_is_not_seen():
    net, x = made()
    with gpuwatch.watch(net, on_overflow="continue") as watch:
        warm(net, x)
        graph, _ = captured(net, x)
        replay(graph, net, x, bad_at=3)
    assert places(watch) == []
    assert [message[:8] for message in faults(watch)] == ["not seen"]


@with_hooks
@pytest.mark.parametrize("fault", ["none", "forward"])
def test_two_ranks_with_graphs(tmp_path, fault):
    verdict, _, _ = launch_script("graphs.py", tmp_path / "cuda", 2, "cuda", "nccl", "--fault", fault)
    if fault == "none":
        assert (verdict["kind"], verdict["certainty"]) == ("clean", "established")
    else:
        assert tuple(verdict[key] for key in ("rank", "module", "value", "phase", "batch", "certainty")) == (
            *(1, "block.widen", "+inf", "forward", 3 + 1 + 3, "established"),
        )
