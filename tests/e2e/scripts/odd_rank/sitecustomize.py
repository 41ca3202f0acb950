"""A rank that runs on something else than the others, or on the same GPU, in the way that ODD_RANK says."""

import importlib.abc
import os
import sys
from types import SimpleNamespace

WAY = os.environ.get("ODD_RANK", "")


def report_another_torch():
    import torch

    torch.__version__ = "2.12.1"


def pretend_one_gpu():
    """torch reports two GPUs that have the same UUID."""
    import torch

    gpu = SimpleNamespace(name="Pretended GPU", uuid="11111111-2222-3333-4444-555555555555")
    torch.version.cuda = "12.8"
    torch.cuda.init = lambda: None
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2
    torch.cuda.get_device_properties = lambda device: gpu
    torch.cuda.mem_get_info = lambda device: (1 << 30, 2 << 30)


def before_import_of(name, spoil):
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, found, path, target=None):
            if found == name:
                sys.meta_path.remove(self)
                spoil()
            return

    sys.meta_path.insert(0, Finder())


if "RANK" in os.environ:
    if os.environ["RANK"] == "1" and "=" in WAY:
        os.environ.update(setting.split("=") for setting in WAY.split(","))
    if os.environ["RANK"] == "1" and WAY == "another torch":
        before_import_of("gpuwatch.worker.preflight.inventory", report_another_torch)
    if WAY == "one GPU":
        before_import_of("gpuwatch.worker.preflight.inventory", pretend_one_gpu)
