from __future__ import annotations

import torch
from gpuwatch.worker.record.names import class_of, unwrap, walk
from torch import nn
from torch.distributed.fsdp import FSDPModule


def model() -> nn.Module:
    shared = nn.Linear(2, 2)
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), shared), shared)
    net.add_module("nothing", None)
    return net


class DistributedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.own = nn.Identity()


class CheckpointWrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module


class FullyShardedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


def named(module: nn.Module) -> list[tuple[str, str]]:
    return [(name, type(part).__name__) for name, part in walk(module)]


def test_without_wrappers_the_names_are_named_modules():
    net = model()
    assert list(walk(net)) == list(net.named_modules())


def test_a_model_that_holds_itself_ends():
    net = model()
    net.me = net
    assert len(list(walk(net))) == len(list(net.modules()))


def test_wrappers_around_the_model_leave_no_trace():
    net = model()
    wrapped = DistributedDataParallel(FullyShardedDataParallel(torch.compile(net, backend="eager")))
    names = [(name, part) for name, part in walk(wrapped) if part not in (wrapped, wrapped.own)]
    inner = [
        (name, part)
        for name, part in names
        if type(part).__name__ not in ("FullyShardedDataParallel", "OptimizedModule")
    ]
    assert inner == list(net.named_modules())
    assert {
        name for name, part in walk(wrapped) if type(part).__name__ in ("FullyShardedDataParallel", "OptimizedModule")
    } == {""}
    assert unwrap(wrapped) is net


def test_a_wrapper_deep_in_the_model_has_the_name_of_what_it_wraps():
    block = nn.Sequential(nn.Linear(2, 2))
    net = nn.Sequential(nn.ReLU(), CheckpointWrapper(torch.compile(block, backend="eager")))
    assert named(net) == [
        ("", "Sequential"),
        ("0", "ReLU"),
        ("1", "CheckpointWrapper"),
        ("1", "OptimizedModule"),
        ("1", "Sequential"),
        ("1.0", "Linear"),
    ]


def test_a_wrapper_that_fully_shard_made_a_class_of_is_still_one():
    """FSDP2 over activation checkpointing, as torchtitan does it: the wrapper's class becomes FSDPCheckpointWrapper."""
    block = CheckpointWrapper(nn.Sequential(nn.Linear(2, 2)))
    net = nn.Sequential(block)
    block.__class__ = type("FSDPCheckpointWrapper", (FSDPModule, CheckpointWrapper), {})

    assert [name for name, _ in walk(net)] == ["", "0", "0", "0.0"]
    assert class_of(block) == "Sequential"


def test_a_module_called_module_that_is_no_wrapper_keeps_its_name():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert named(Holder()) == [("", "Holder"), ("module", "Linear")]
    assert unwrap(holder := Holder()) is holder


def test_a_compiled_model_by_itself():
    net = model()
    compiled = torch.compile(net, backend="eager")
    assert [name for name, part in walk(compiled) if part is not compiled] == [name for name, _ in net.named_modules()]
    assert unwrap(compiled) is net
