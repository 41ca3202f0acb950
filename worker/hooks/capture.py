"""`--capture`: writes the forward of an alarm to overflow.pt, and beside it reproduce.py, which runs it again.

The job ends anyway. A thread writes, and the job waits for it no longer than a deadline. The file gets its name when
all of it is written.
"""

from __future__ import annotations

import io
import os
import sys
import sysconfig
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.events import CaptureFile
from ...core.host import gpuwatch_version
from ...core.own_files import standard_streams_taken, write_whole
from ...core.text import size_text
from .. import reproduce
from ..record.names import inputs_of, unwrap
from ..stats.tensor_stats import version_of
from .forward_thread import ContextMaker, RandomNumbers

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
"""Types that `weights_only` reads, beside tensors, lists, tuples and dicts."""
_LEFT_OUT = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl"}
_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"}
_PIECE = 16 << 20
_MOST_NAMES = 100
_LOCK_S = 1.0
_SHARE = 0.8
"""Of the time limit, to write. The rest is to leave torch's writer, which computes checksums of what is dropped."""


class _NotCaptured(Exception):
    """The message says why, as a clause."""


class _NotPlain(Exception):
    """A value that only pickle can write."""


class _BoundedFile:
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
                    raise _NotCaptured("it takes more than --capture-max")
                if self.error is None and not self._stop.is_set():
                    self._file.write(piece)
            except Exception as error:
                self.error = self.error or error
        return len(view)

    def flush(self) -> None:
        """Called by torch.save."""


class ForwardCapture:
    """The one file of a rank. `result` is there after the first attempt."""

    def __init__(self, folder: str, most: int, rank: int, *, is_tested: bool) -> None:
        """`is_tested`: a second run has shown that the call leaves its inputs as they are."""
        self._folder, self._most, self._rank, self._is_tested = Path(folder), most, rank, is_tested
        self.result: CaptureFile | None = None
        self._lock = threading.Lock()
        """The thread gives the file its name, or the deadline passes: not both."""
        self._stop = threading.Event()
        """The deadline passes. The thread leaves torch's writer soon: it ends a process whose Python ends first."""
        self._new = self._folder / f".overflow-{rank}-{os.getpid()}"

    def write(
        self,
        module: nn.Module,
        name: str,
        inputs: tuple[Any, Any],
        contexts: list[ContextMaker],
        random: RandomNumbers | None,
        limit_s: float,
    ) -> float:
        """Write it once, and wait at most this long. Returns the seconds that it took. Never raises."""
        if self.result is not None:
            return 0.0
        began = time.monotonic()
        call = {
            "args": inputs[0],
            "kwargs": inputs[1],
            "name": name,
            "rank": self._rank,
            "grad": torch.is_grad_enabled(),
            "rng": {"cpu": random.cpu, "cuda": random.cuda} if random is not None else None,
            "autocast": dict(
                part.args for part in contexts if isinstance(part, partial) and part.func is torch.autocast
            ),
            "default_dtype": torch.get_default_dtype(),
            "matmul_precision": torch.get_float32_matmul_precision(),
        }
        thread = threading.Thread(target=self._write, args=(module, call), name="gpuwatch capture", daemon=True)
        try:
            thread.start()
            thread.join(limit_s * _SHARE)
            self._stop.set()
            thread.join(limit_s * (1 - _SHARE))
        except RuntimeError as error:
            self.result = CaptureFile(refused=f"a thread to write it could not be started: {error}")
        is_free = self._lock.acquire(timeout=_LOCK_S)  # else the disk hangs as the file gets its name
        self.result = self.result or CaptureFile(refused=f"writing it took longer than {limit_s * _SHARE:.3g} s")
        if is_free:
            self._lock.release()
        return time.monotonic() - began

    def _write(self, module: nn.Module, call: dict[str, Any]) -> None:
        try:
            with torch.no_grad(), standard_streams_taken():
                self._write_file(module, call)
            return
        except _NotCaptured as error:
            why = str(error)
        except OSError as error:
            why = f"{self._folder} could not be written: {error.strerror or error}"
        except BaseException as error:  # the script's own code may run where an object is pickled
            why = f"writing it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        with self._lock:
            self.result = self.result or CaptureFile(refused=why)

    def _write_file(self, module: nn.Module, call: dict[str, Any]) -> None:
        parts = _CapturedParts(self._most)
        capture = parts.of(module, call)
        leaves = [leaf for _, leaf in inputs_of(call["args"], call["kwargs"]) if isinstance(leaf, torch.Tensor)]
        if not self._is_tested and any(map(version_of, leaves)):
            parts.notes.append("its inputs may have been changed in place by the call: --explain off tests nothing")
        limit = f"--capture-max is {size_text(self._most)}"
        if parts.bytes > self._most:
            raise _NotCaptured(f"it takes {size_text(parts.bytes)}, and {limit}; --sync writes a smaller part")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_uid != os.geteuid():
            raise _NotCaptured(f"{self._folder} belongs to another user")
        self._new.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(self._new, flags, 0o600), "wb") as file:
                # torch's format aligns each tensor
                bounded = _BoundedFile(file, self._most + (self._most >> 3) + (1 << 20), self._stop)
                torch.save(capture, bounded)  # type: ignore[arg-type]  # it needs no more than write
                if bounded.error is not None:
                    raise bounded.error
                file.flush()
                size = os.fstat(file.fileno()).st_size
            module_text = f"{call['name'] or '(root)'} ({capture['class']})"
            trust = bool(reproduce.needs_trust(capture))
            self._name(CaptureFile("", size, module_text, trust, parts.notes))
        finally:
            self._new.unlink(missing_ok=True)

    def _name(self, file: CaptureFile) -> None:
        """Name it overflow.pt, or by this rank where another one, or an earlier attempt, has that."""
        tails = ["", f"-rank{self._rank}", *(f"-rank{self._rank}-{number}" for number in range(2, _MOST_NAMES))]
        for tail in tails:
            path = self._folder / f"overflow{tail}.pt"
            with self._lock, suppress(FileExistsError):
                if self._stop.is_set():
                    return
                path.hardlink_to(self._new)
                with suppress(OSError):  # `gpuwatch replay` does without
                    write_whole(self._folder / f"reproduce{tail}.py", Path(reproduce.__file__).read_bytes())
                self.result = CaptureFile(str(path), file.bytes, file.module, file.needs_trust, file.notes)
                return
        raise _NotCaptured(f"{self._folder} has {_MOST_NAMES} of them")


class _CapturedParts:
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
                    "not_persistent": sorted(part._non_persistent_buffers_set),
                }
            )
        try:
            found = call | {"args": self._plain(call["args"]), "kwargs": self._plain(call["kwargs"])}
        except _NotPlain:
            found = call | {"args": None, "kwargs": None}
            objects["call"] = call["args"], call["kwargs"]
        leaves = [(role, leaf) for role, leaf in inputs_of(call["args"], call["kwargs"]) if hasattr(leaf, "dtype")]
        main = sys.modules.get("__main__")
        file = getattr(main, "__file__", None)
        return found | {
            "format": reproduce.FORMAT,
            "gpuwatch": gpuwatch_version(),
            "torch": str(torch.__version__),
            "class": ".".join(parts[0]["class"]),
            "modules": parts,
            "state_dict": state,
            "tensors": [f"{role} {leaf.dtype} {list(leaf.shape)} {leaf.device}" for role, leaf in leaves],
            "source": {
                "file": os.path.abspath(file) if file else "",  # noqa: PTH100  # it may be any text
                "package": getattr(main, "__package__", None),
                "path": _own_path(),
            },
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
                except _NotCaptured:
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
            raise _NotCaptured(f"it holds tensors of a class of its own ({type(tensor).__name__})")
        if tensor.is_meta or hasattr(tensor, "ds_tensor"):
            raise _NotCaptured("its weights are not whole on this rank")
        size, found = tensor.numel() * tensor.element_size(), tensor.detach()
        self.bytes += size
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > size and self.bytes <= self._most:
            found = found.clone()
        self._tensors[id(tensor)] = tensor, found
        return found

    def _pickled(self, what: str, value: Any) -> torch.Tensor:
        """Bytes, as a tensor: `weights_only` reads that in every release."""
        data = io.BytesIO()
        bounded = _BoundedFile(data, self._most, threading.Event())
        try:
            torch.save(value, bounded)  # type: ignore[arg-type]  # likewise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise _NotCaptured(f"{what} cannot be pickled ({reason})") from error
        if bounded.error is not None:
            raise bounded.error
        self.bytes += data.tell()
        return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)


def _class_of(module: nn.Module) -> tuple[str, str]:
    """(module, qualified name) by which the class is found again."""
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise _NotCaptured("it has code of TorchScript")
    if any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in cls.__mro__):
        raise _NotCaptured(f"its weights are sharded ({cls.__name__})")
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not cls:
        raise _NotCaptured(f"its class {cls.__qualname__} is defined inside of a function, or made while it runs")
    if (
        cls.__module__ in reproduce.SCRIPTS
        and not Path(getattr(sys.modules["__main__"], "__file__", "") or "").is_file()
    ):
        raise _NotCaptured(f"its class {cls.__qualname__} is in no file")
    return cls.__module__, cls.__qualname__


def _own_path() -> list[str]:
    """Folders of sys.path that are the script's, and not Python's."""
    python = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    found = [os.path.abspath(folder) for folder in sys.path]  # noqa: PTH100  # likewise
    return [folder for folder in found if Path(folder).is_dir() and folder not in python]
