"""Lets a rank's preflight wait before its allocation test until the pipe GATE has been opened and closed."""

import functools
import importlib.machinery
import os
import sys
from pathlib import Path

MODULE = "gpuwatch.worker.preflight.device_tests"


class Gated(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != MODULE:
            return None
        spec = super().find_spec(name, path, target)
        execute = spec.loader.exec_module

        def execute_and_gate(module):
            execute(module)
            allocate = module.allocate

            @functools.wraps(allocate)  # it is handed to the child by its name
            def wait_and_allocate(*args, **kwargs):
                Path(os.environ["GATE"]).read_text()
                return allocate(*args, **kwargs)

            module.allocate = wait_and_allocate

        spec.loader.exec_module = execute_and_gate
        return spec


if "GATE" in os.environ:
    sys.meta_path.insert(0, Gated)
