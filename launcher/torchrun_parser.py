"""torchrun's own parser of the torch that is installed, without the seconds that importing torch takes.

`get_args_parser` is read from the file of torch.distributed.run and called, with what it refers to. So the options are
those of the installed release, whichever that is. Where that fails, torch is imported and asked.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import builtins
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from ..core.codes import Code
from ..core.errors import UsageError
from ..core.own_imports import path_as_given

_FLAGS = __future__.annotations.compiler_flag
"""Annotations are not evaluated."""


def torchrun_parser() -> argparse.ArgumentParser:
    """Raises UsageError where there is no torch."""
    path_as_given()
    if "torch.distributed.run" not in sys.modules:
        try:
            return read_parser(_torch_folder())
        except UsageError:
            raise
        except Exception:  # another way of writing it, or files that are not there
            pass
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def read_parser(torch: Path) -> argparse.ArgumentParser:
    """Build torchrun's parser from the source of torch in this folder. An unexpected source may raise any exception."""
    parser: argparse.ArgumentParser = _TorchSource(torch, "torch.distributed.run").value("get_args_parser")()
    return parser


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UsageError(
            Code.NOT_INSTALLED,
            f"expected torch in the Python that runs gpuwatch, {sys.executable}, found none: install it there",
        )
    return Path(spec.origin).parent


class _TorchSource:
    """The source of one module of torch, of which single names are executed."""

    def __init__(self, torch: Path, module: str) -> None:
        self._torch = torch
        stem = torch.joinpath(*module.split(".")[1:])
        path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        self._name = str(path)
        self._imported: dict[str, tuple[str, str]] = {}
        self._defined: dict[str, ast.stmt] = {}
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._imported |= {one.asname or one.name: (node.module, one.name) for one in node.names}
            elif isinstance(node, ast.Import):
                self._imported |= {one.asname or one.name.partition(".")[0]: (one.name, "") for one in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                self._defined[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self._defined |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        self._space: dict[str, Any] = {"__name__": module}

    def value(self, name: str) -> Any:
        """Execute the definition of a name, after those that it refers to."""
        if name not in self._space and name in self._imported:
            module, attribute = self._imported[name]
            self._space[name] = self._import(module, attribute)
        elif name not in self._space and name in self._defined:
            node = self._defined[name]
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and inner.id != name and not hasattr(builtins, inner.id):
                    self.value(inner.id)
            exec(compile(ast.Module([node], []), self._name, "exec", _FLAGS), self._space)
        return self._space.get(name)

    def _import(self, module: str, attribute: str) -> Any:
        if module.partition(".")[0] == "torch":
            return _TorchSource(self._torch, module).value(attribute)
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else sys.modules[module.partition(".")[0]]
