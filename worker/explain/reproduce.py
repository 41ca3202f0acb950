"""Runs a captured forward again, alone: python reproduce.py [--device cpu|cuda] [--dtype float32|bfloat16|float16]

`gpuwatch launch --capture` has put a copy of this file beside overflow.pt. It needs torch, and the source of the
module's class. It imports that class, and unpickles what is no tensor, text or number: both run code, so run this file
only if you trust where overflow.pt comes from. `gpuwatch replay` asks before it does either.

overflow.pt is a dict, which `torch.load(..., weights_only=True)` reads: `state_dict`, `args`, `kwargs`, `rng`,
`autocast`, `modules` (class, attributes and children of each), `source` (how the classes are found), and versions.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import dis
import importlib
import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree

FORMAT = 1
OF_GPU = "cuda"
"""The key of the GPU's random numbers in a capture."""
SCRIPTS = ("__main__", "__mp_main__")
"""Names of the module that a script is."""
OF_TORCH = "torch.nn.modules."
_PARTS = ("_parameters", "_buffers", "_modules")
_ASSIGNS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, *_ASSIGNS, ast.If, ast.Try)
_READS, _BINDS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), ("STORE_NAME", "STORE_GLOBAL")


class CaptureError(Exception):
    """The capture cannot be run. The message is a sentence."""


class CapturedCall(NamedTuple):
    """A forward as it was called."""

    module: nn.Module
    args: Any
    kwargs: Any


def load(path: Path, device: str = "cpu") -> dict[str, Any]:
    """The capture, with its tensors on a device. Unpickles nothing but data. Raises CaptureError."""
    try:
        with path.open("rb") as file:
            capture = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:
        raise CaptureError(f"it cannot be read as data alone: {str(error).strip().partition(chr(10))[0]}") from error
    if not isinstance(capture, dict) or capture.get("format") != FORMAT:
        raise CaptureError("it is no capture of this version")
    return capture


def needs_trust(capture: dict[str, Any]) -> str:
    """Why building the module may run code that torch did not bring; "" if it cannot."""
    for part in capture["modules"]:
        module, name = part["class"]
        if not module.startswith(OF_TORCH) or module not in sys.modules or "." in name:
            return f"it imports the class {module}.{name}"
        if not _is_module(getattr(sys.modules[module], name, None)):
            return f"{module}.{name} is no module of torch"
    return "it unpickles objects" if capture["pickled"] is not None else ""


def _is_module(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, nn.Module)


# The module, built from its parts.


def rebuild(capture: dict[str, Any], device: str = "cpu") -> CapturedCall:
    """The module, its arguments and keyword arguments. Raises CaptureError, and what the imported code raises."""
    source = capture["source"]
    if needs_trust(capture):
        sys.path[:] = [*source["path"], *(folder for folder in sys.path if folder not in source["path"])]
    script = ScriptDefinitions(source["file"], source["package"])
    with script.as_main():
        pickled: Any = {}
        if capture["pickled"] is not None:
            data = io.BytesIO(capture["pickled"].cpu().numpy().tobytes())
            pickled = torch.load(data, map_location=device, weights_only=False)
        state, made = capture["state_dict"], []
        for part in capture["modules"]:
            cls = _find(script, *part["class"])
            made.append(cls.__new__(cls))
            nn.Module.__init__(made[-1])
        for number, (part, module) in enumerate(zip(capture["modules"], made, strict=True)):
            own = {**part["attributes"], **pickled.get("attributes", {}).get(number, {})}
            own["_modules"] = {name: None if at is None else made[at] for name, at in part["children"].items()}
            own["_buffers"] = {name: state.get(key) for name, key in part["buffers"].items()}
            own["_parameters"] = {
                name: nn.Parameter(state[key], requires_grad=bool(grad)) if key is not None else None
                for name, (key, grad) in part["parameters"].items()
            }
            own["_non_persistent_buffers_set"] = set(part["not_persistent"])
            module.__setstate__(own)
        _tie(capture, made)
        args, kwargs = pickled["call"] if "call" in pickled else (capture["args"], capture["kwargs"])
    return CapturedCall(made[0], args, kwargs)


def _tie(capture: dict[str, Any], made: list[nn.Module]) -> None:
    """A parameter that two modules share is one object."""
    known: dict[str, Any] = {}
    for part, module in zip(capture["modules"], made, strict=True):
        for name, (key, _) in part["parameters"].items():
            if key is not None:
                module._parameters[name] = known.setdefault(key, module._parameters[name])


def _find(script: ScriptDefinitions, module: str, name: str) -> Any:
    try:
        found: Any = script if module in SCRIPTS else importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise CaptureError(f"its class {module}.{name} is not found: {error}") from error
    if not _is_module(found):
        raise CaptureError(f"{module}.{name} is no class of a module")
    return found


class ScriptDefinitions(ModuleType):
    """What a script defines, without running it.

    The first use of a name executes the statements that define it, and those that they need: imports, functions,
    classes and assignments, and no call that stands alone, no loop and no `if __name__ == "__main__"`.
    """

    def __init__(self, file: str, package: str | None) -> None:
        super().__init__("__main__")
        self.__dict__.update(__file__=file, __package__=package)
        self._statements: list[tuple[CodeType | None, set[str], set[str]]] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not self.__file__:
            raise AttributeError(f"{self.__file__ or 'the script'} does not define {name}")
        if self._statements is None:
            self._statements = self._read()
        needed, asked = set(), [name]
        while asked:
            wanted = asked.pop()
            for place, (_, reads, binds) in enumerate(self._statements):
                if place not in needed and (wanted in binds or "*" in binds):
                    needed.add(place)
                    asked += reads
        for place in sorted(needed):
            code, reads, binds = self._statements[place]
            if code is not None:
                self._statements[place] = None, reads, binds
                exec(code, self.__dict__)  # the script's own definitions
        if name not in self.__dict__:
            raise AttributeError(f"{self.__file__} does not define {name}")
        return self.__dict__[name]

    def _read(self) -> list[tuple[CodeType | None, set[str], set[str]]]:
        """(code, names that it reads, names that it binds) of each statement that defines something."""
        try:
            tree = ast.parse(Path(self.__file__ or "").read_bytes(), self.__file__ or "")
        except (OSError, SyntaxError) as error:
            raise CaptureError(f"the script that defines its class cannot be read: {error}") from error
        future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        found: list[tuple[CodeType | None, set[str], set[str]]] = []
        for node in tree.body:
            is_guard = isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
            if isinstance(node, _DEFINES) and not is_guard and node not in future:
                code = compile(ast.Module([*future, node], []), self.__file__ or "", "exec", dont_inherit=True)
                binds = {name for kind, name in _names(code, inner=False) if kind in _BINDS}
                is_star = isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
                reads = {name for kind, name in _names(code) if kind in _READS} - binds - vars(builtins).keys()
                for target in getattr(node, "targets", [getattr(node, "target", None)]):  # `config.scale = 3`
                    while isinstance(target, ast.Attribute | ast.Subscript):
                        target = target.value
                    binds |= {target.id} if isinstance(target, ast.Name) else set()
                found.append((code, reads, binds | ({"*"} if is_star else set())))
        return found

    @contextmanager
    def as_main(self) -> Iterator[None]:
        """Within it, pickles find the script's classes."""
        before = {name: sys.modules.get(name) for name in SCRIPTS}
        sys.modules.update(dict.fromkeys(SCRIPTS, self))
        try:
            yield
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module


def _names(code: CodeType, *, inner: bool = True) -> Iterator[tuple[str, str]]:
    """(operation, name) of the global names in a code object, and in those inside of it."""
    for line in dis.get_instructions(code):
        if line.opname in _READS + _BINDS:
            yield line.opname, str(line.argval)
    for constant in code.co_consts if inner else ():
        if isinstance(constant, CodeType):
            yield from _names(constant)


# One run.


def as_dtype(call: CapturedCall, dtype: torch.dtype) -> CapturedCall:
    """The same with all its floating point numbers in another dtype."""

    def moved(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    for part in call.module.modules():
        vars(part).update({name: _pytree.tree_map(moved, v) for name, v in vars(part).items() if name not in _PARTS})
    return CapturedCall(call.module.to(dtype), *_pytree.tree_map(moved, (call.args, call.kwargs)))


@contextmanager
def surroundings(capture: dict[str, Any], device: str, *, autocast: bool = True) -> Iterator[None]:
    """The state of torch in which the forward was called: autocast, gradients, default dtype, random numbers."""
    default, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, default)
        stack.callback(torch.set_float32_matmul_precision, precision)
        torch.set_default_dtype(capture["default_dtype"])
        torch.set_float32_matmul_precision(capture["matmul_precision"])
        stack.enter_context(torch.set_grad_enabled(capture["grad"]))
        for kind, dtype in capture["autocast"].items() if autocast else ():
            stack.enter_context(torch.autocast(device if kind != "cpu" else kind, dtype))
        if capture["rng"] is not None:
            torch.set_rng_state(capture["rng"]["cpu"].cpu())
            if device != "cpu" and capture["rng"][OF_GPU] is not None:
                generator = torch.cuda.default_generators[torch.cuda.current_device()]
                generator.manual_seed(capture["rng"][OF_GPU][0])
                generator.set_offset(capture["rng"][OF_GPU][1])
        yield


def main() -> None:
    """Called where this file is run."""
    parser = argparse.ArgumentParser(description="Runs a captured forward again.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="in place of its own")
    options = parser.parse_args()
    path = Path(__file__).resolve()
    try:
        capture = load(path.with_name(path.name.replace("reproduce", "overflow")).with_suffix(".pt"), options.device)
        call = rebuild(capture, options.device)
    except CaptureError as error:
        sys.exit(f"{path.name}: {error}")
    if options.dtype:
        call = as_dtype(call, getattr(torch, options.dtype))
    print(f"{capture['class']} (`{capture['name']}`), rank {capture['rank']}, torch {capture['torch']}")
    with surroundings(capture, options.device, autocast=not options.dtype):
        try:
            explain = importlib.import_module("gpuwatch").explain  # this file lies beside the capture
        except ImportError:
            with torch.no_grad():
                output = call.module(*call.args, **call.kwargs)
            for leaf in _pytree.tree_leaves(output):
                if isinstance(leaf, torch.Tensor):
                    print(f"{leaf.dtype} {list(leaf.shape)}: {int((~leaf.isfinite()).sum())} of them are not finite")
        else:
            print(explain(call.module, *call.args, **call.kwargs))


if __name__ == "__main__":
    main()
