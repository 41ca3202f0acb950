"""A module and its call as plain data, which torch.load reads with `weights_only`; what is no such data is pickled."""

from __future__ import annotations

import io
import os
import sys
import sysconfig
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.host import gpuwatch_version
from ...core.signal_errors import from_outside
from ..record.names import inputs_of, unwrap
from ..record.roots import is_in_parts
from . import reproduce

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
"""Types that `weights_only` reads, beside tensors, lists, tuples and dicts."""
_LEFT_OUT = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl"}
_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"}
_PIECE = 16 << 20


class CaptureRefused(Exception):
    """The message says why, as a clause."""


class _NotPlain(Exception):
    """A value that only pickle can write."""


class BoundedFile:
    """What torch.save writes into. It raises nothing, as torch's writer in C++ may end the process at an error."""

    def __init__(self, file: Any, most: int, stop: threading.Event) -> None:
        self._file, self._left, self._stop = file, most, stop
        self.error: Exception | None = None

    def write(self, data: Any) -> int:
        """Take it, in pieces; drop it after an error."""
        view = memoryview(data).cast("B")
        for at in range(0, len(view), _PIECE):
            piece = view[at : at + _PIECE]
            self._left -= len(piece)
            try:
                if self._left < 0:
                    raise CaptureRefused("it takes more than --capture-max")
                if self.error is None and not self._stop.is_set():
                    self._file.write(piece)
            except Exception as error:
                if from_outside(error):
                    raise
                self.error = self.error or error
        return len(view)

    def flush(self) -> None:
        """Called by torch.save."""


class CapturedParts:
    """A module and its call as tensors, numbers and names, and the rest pickled."""

    def __init__(self, most: int) -> None:
        self._most, self.bytes = most, 0
        self.notes: list[str] = []
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """id -> (the tensor, which keeps its id, as it is written)"""

    def of(self, module: nn.Module, call: dict[str, Any]) -> dict[str, Any]:
        """What reproduce.py reads."""
        modules, places = [module], {id(module): (0, "")}
        state: dict[str, torch.Tensor] = {}
        keys: dict[int, str] = {}
        parts: list[dict[str, Any]] = []
        objects: dict[str, Any] = {}
        for part in modules:  # it grows
            (number, prefix), cls = places[id(part)], _class_of(part)
            children: dict[str, int | None] = {}
            for name, child in part._modules.items():
                inner = unwrap(child) if child is not None else None
                if inner is not None and id(inner) not in places:
                    places[id(inner)] = len(modules), f"{prefix}{name}."
                    modules.append(inner)
                children[name] = places[id(inner)][0] if inner is not None else None
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and keys.setdefault(id(tensor), prefix + name) == prefix + name:
                    state[prefix + name] = self._tensor(tensor)
            plain, pickled = self._attributes(part, prefix, is_root=part is module)
            if pickled:
                objects.setdefault("attributes", {})[number] = pickled
            parts.append(
                {
                    "class": cls,
                    "attributes": plain,
                    "children": children,
                    "parameters": {
                        name: (keys.get(id(tensor)), tensor is not None and tensor.requires_grad)
                        for name, tensor in part._parameters.items()
                    },
                    "buffers": {name: keys.get(id(tensor)) for name, tensor in part._buffers.items()},
                    "not_persistent": sorted(vars(part)["_non_persistent_buffers_set"]),
                }
            )
        try:
            found = call | {"args": self._plain(call["args"]), "kwargs": self._plain(call["kwargs"])}
        except _NotPlain:
            found = call | {"args": None, "kwargs": None}
            objects["call"] = call["args"], call["kwargs"]
        leaves = [(role, leaf) for role, leaf in inputs_of(call["args"], call["kwargs"]) if hasattr(leaf, "dtype")]
        return found | {
            "format": reproduce.FORMAT,
            "gpuwatch": gpuwatch_version(),
            "torch": str(torch.__version__),
            "class": ".".join(parts[0]["class"]),
            "modules": parts,
            "state_dict": state,
            "tensors": [f"{role} {leaf.dtype} {list(leaf.shape)} {leaf.device}" for role, leaf in leaves],
            "source": _source(),
            "pickled": self._pickled("what it was handed", objects) if objects else None,
            "notes": self.notes,
        }

    def _attributes(self, part: nn.Module, prefix: str, *, is_root: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Those that are written as they are, and those that are pickled."""
        own = getattr(type(part), "__getstate__", None)
        given: dict[str, Any] = own(part) if own not in (None, getattr(object, "__getstate__", None)) else vars(part)
        plain, pickled, fresh = {}, {}, vars(nn.Module())
        for name, value in given.items():
            is_hook = name in fresh and name.endswith(("_hooks", "_with_kwargs", "_always_called"))
            if name in _LEFT_OUT or (is_hook and (name not in _HOOKS or not value or is_root)):
                continue
            try:
                plain[name] = self._plain(value)
            except _NotPlain:
                try:
                    self.bytes -= len(self._pickled(f"its attribute {prefix}{name}", value))  # it is tried alone
                    pickled[name] = value
                except CaptureRefused:
                    if not is_hook:
                        raise
                    self.notes.append(f"the hooks of {prefix.removesuffix('.')} are left out: they cannot be pickled")
        return plain, pickled

    def _plain(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind in (list, tuple):
            return kind(map(self._plain, value))
        if kind in (dict, OrderedDict) and all(type(key) in _PLAIN for key in value):
            return kind((key, self._plain(each)) for key, each in value.items())
        raise _NotPlain

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """As it is written: without its graph, and without the rest of the memory that it is a view of."""
        if id(tensor) in self._tensors:
            return self._tensors[id(tensor)][1]
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise CaptureRefused(f"it holds tensors of a class of its own ({type(tensor).__name__})")
        if tensor.is_meta or is_in_parts(tensor):
            raise CaptureRefused("its weights are not whole on this rank")
        size, found = tensor.numel() * tensor.element_size(), tensor.detach()
        self.bytes += size
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > size and self.bytes <= self._most:
            found = found.clone()
        self._tensors[id(tensor)] = tensor, found
        return found

    def _pickled(self, what: str, value: Any) -> torch.Tensor:
        """Bytes, as a tensor: `weights_only` reads that in every release."""
        data = io.BytesIO()
        bounded = BoundedFile(data, self._most, threading.Event())
        try:
            torch.save(value, bounded)  # type: ignore[arg-type]  # likewise
        except Exception as error:
            if from_outside(error):
                raise
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise CaptureRefused(f"{what} cannot be pickled ({reason})") from error
        if bounded.error is not None:
            raise bounded.error
        self.bytes += data.tell()
        return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)


def _class_of(module: nn.Module) -> tuple[str, str]:
    """(module, qualified name) by which the class is found again."""
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureRefused("it has code of TorchScript")
    if any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in cls.__mro__):
        raise CaptureRefused(f"its weights are sharded ({cls.__name__})")
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not cls:
        raise CaptureRefused(f"its class {cls.__qualname__} is defined inside of a function, or made while it runs")
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if cls.__module__ in reproduce.SCRIPTS and not script.is_file():
        raise CaptureRefused(f"its class {cls.__qualname__} is in no file")
    return cls.__module__, cls.__qualname__


def _source() -> dict[str, Any]:
    """How the classes are found again: the script, and the folders of sys.path that are not Python's."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    python = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = [os.path.abspath(folder) for folder in sys.path]  # noqa: PTH100  # it may be any text
    return {
        "file": os.path.abspath(file) if file else "",  # noqa: PTH100  # likewise
        "package": getattr(main, "__package__", None),
        "path": [folder for folder in folders if os.path.isdir(folder) and folder not in python],  # noqa: PTH112  # likewise
    }
