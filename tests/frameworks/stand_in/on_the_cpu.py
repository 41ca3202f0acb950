"""What scripts of others find on this machine that it has not, and a fault, where FAULT asks for one.

Two accelerators, which are the CPU; nccl, which is gloo; a seed for scripts that set none.

FAULT is RANK:MODULE:CALL. On that rank, before that call of the module whose name ends so, all of its weights become
3e38. That is finite; sums of it are not.
"""

import os

import torch
import torch.distributed as dist
import torch.utils.data
from torch.nn.modules.module import register_module_forward_pre_hook

CPU = torch.device("cpu")
RANKS = 4


def give_accelerators():
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: RANKS
    torch.accelerator.current_accelerator = lambda *args, **kwargs: CPU
    torch.accelerator.set_device_index = torch.accelerator.device_index = torch.cuda.set_device = lambda index: None
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to = on_the_cpu(kind.to)
    init = dist.init_process_group
    dist.init_process_group = lambda *args, **kwargs: init(
        "gloo", **{name: value for name, value in kwargs.items() if name not in ("backend", "device_id")}
    )
    load = torch.utils.data.DataLoader
    load_all = load.__init__
    load.__init__ = lambda self, *args, **kwargs: load_all(self, *args, **{**kwargs, "pin_memory": False})
    ddp = torch.nn.parallel.DistributedDataParallel
    make = ddp.__init__
    ddp.__init__ = lambda self, module, device_ids=None, **kwargs: make(self, module, **kwargs)


def on_the_cpu(to):
    def moved(self, *args, **kwargs):
        return to(self, *(CPU if type(arg) is int else arg for arg in args), **kwargs)

    return moved


def fill_what_is_empty():
    """FSDP2's example never initialises its blocks: what they hold would be another thing in each run."""
    make_empty = torch.nn.Module.to_empty

    def to_empty(self, **kwargs):
        with torch.no_grad():
            for weight in make_empty(self, **kwargs).parameters():
                weight.fill_(0.01)
        return self

    torch.nn.Module.to_empty = to_empty


class Fault:
    def __init__(self, text):
        rank, self.name, call = text.split(":")
        self.rank, self.calls_left = int(rank), int(call)
        self.module = None

    def __call__(self, module, args):
        if self.module is None:
            for name, part in module.named_modules():
                if name.endswith(self.name):
                    self.module = part
        if module is not self.module or (dist.is_initialized() and dist.get_rank() != self.rank):
            return
        self.calls_left -= 1
        if self.calls_left == 0:
            with torch.no_grad():
                module.weight.fill_(3e38)


if "STAND_IN" in os.environ:
    give_accelerators()
    fill_what_is_empty()
torch.manual_seed(0)
if "FAULT" in os.environ:
    register_module_forward_pre_hook(Fault(os.environ["FAULT"]))
