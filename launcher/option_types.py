"""The types of gpuwatch's arguments: each takes what was typed, or says what was expected and what was found.

And torchrun's own options.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import builtins
import importlib
import importlib.util
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args
from urllib.parse import urlsplit

from ..core.codes import Code
from ..core.errors import UsageError
from ..core.gpu.health_grades import load_thresholds
from ..core.guest.own_imports import path_as_given
from ..core.host import loopback
from ..core.secrets import masked_text
from ..core.settings import Watched
from ..core.text import is_web_address, parse_amount, parse_seconds, parse_size

_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_ADDRESS = re.compile(r"""https?://[^\s'"]+""")
_NOTIFY_VARIABLE = "GPUWATCH_NOTIFY"
_LEAST_TESTED = 1 << 10
_LEAST_ALLOCATED = 1 << 20
"""A bare `80` was meant as `80%`."""

T = TypeVar("T")


def _form(what: str, is_right: Callable[[str], Any], value: Callable[[str], T]) -> Callable[[str], T]:
    """A type for argparse: `value` of a text that is right; of another one, what was expected."""

    def parse(text: str) -> T:
        if not is_right(text):
            raise argparse.ArgumentTypeError(f"expected {what}, found {masked_text(text)!r}")
        return value(text)

    return parse


def is_number(text: str) -> bool:
    """Whether it is written in the digits 0 to 9 alone: Python's isdigit() takes superscripts, too."""
    return text.isascii() and text.isdigit()


def _float(text: str) -> float:
    """The number, or nan if the text is none: nan is in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def at_least(least: int, what: str) -> Callable[[str], int]:
    """A whole number from `least` on; `what` it counts."""
    return _form(
        f"{what} of {least} or more", lambda text: is_number(text.removeprefix("-")) and int(text) >= least, int
    )


def number(least: float, most: float, what: str) -> Callable[[str], float]:
    """A number in a range; `what` it is."""
    return _form(f"{what} from {least:g} to {most:g}", lambda text: least <= _float(text) <= most, float)


def _batches(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return [-1]


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _is_row_pattern(text: str) -> bool:
    module, colon, role = text.partition(":")
    return _is_name_pattern(module) and (not colon or bool(role.strip()))


def _is_name_pattern(text: str) -> bool:
    """A bracket without its end would only match a bracket, which no module's name has."""
    _, bracket, rest = text.partition("[")
    return bool(text.strip()) and (not bracket or "]" in rest)


def is_port(text: str) -> bool:
    """Whether it is a TCP port."""
    return is_number(text) and 0 < int(text) < 65536


def _is_address(text: str) -> bool:
    host, _, digits = text.removeprefix("tcp://").rpartition(":")
    return text.startswith("tcp://") and bool(host) and is_port(digits)


def _is_metrics_address(text: str) -> bool:
    host, colon, digits = text.rpartition(":")
    return bool(not colon or (host and ("[" in host) == (":" in host))) and is_port(digits)


def _metrics_address(text: str) -> str:
    host, _, digits = text.rpartition(":")
    return f"{host or bracketed(loopback())}:{digits}"


def _is_notify_target(text: str) -> bool:
    if is_web_address(text):
        return bool(urlsplit(text).hostname)
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that is not closed
        return False
    return bool(words) and shutil.which(words[0]) is not None


def _is_amount(text: str) -> bool:
    found = parse_amount(text)
    return found is not None and not 0 < found.size < _LEAST_ALLOCATED


explained = _form(
    "auto, off or a batch number such as 17",
    lambda text: text in ("auto", "off") or is_number(text),
    lambda text: int(text) if is_number(text) else text,
)
every = _form(
    "a number of batches of 1 or more, or auto",
    lambda text: text == "auto" or (is_number(text) and int(text) >= 1),
    lambda text: int(text) if is_number(text) else text,
)
batches = _form("batch numbers such as 0,1,3", lambda text: min(_batches(text)) >= 0, _batches)
seconds = _form(
    "a duration of 1 second or more, such as 90 or 5m", lambda text: 1 <= parse_seconds(text) < 1e6, parse_seconds
)
hang_timeout = _form(
    "auto, or a duration from 0 to 1e+06 seconds, such as 120 or 2m",
    lambda text: text == "auto" or 0 <= parse_seconds(text) <= 1e6,
    lambda text: None if text == "auto" else parse_seconds(text),
)
"""0 for never; None for `auto`."""
telemetry = _form(
    "0, or a duration from 1 second to 1 hour, such as 5 or 1m",
    lambda text: parse_seconds(text) == 0 or 1 <= parse_seconds(text) <= 3600,
    parse_seconds,
)
watched = _form(f"some of {','.join(get_args(Watched))}", lambda text: {*_parts(text)} <= {*get_args(Watched)}, _parts)
module_pattern = _form("a module's name or a pattern such as 'encoder.*'", _is_name_pattern, str)
row_pattern = _form("MODULE or MODULE:ROLE, such as 'mask.*:output'", _is_row_pattern, str)
run_name = _form("a name of letters, digits, '.', '-' and '_'", _NAME.fullmatch, str)
port = _form("a port from 1 to 65535", is_port, int)
address = _form("tcp://HOST:PORT", _is_address, str)
metrics_address = _form("[HOST:]PORT with a port from 1 to 65535", _is_metrics_address, _metrics_address)
"""As `HOST:PORT`."""
notify_target = _form("http://..., https://... or a command that can be started", _is_notify_target, str)
size = _form(
    "a size of 1KiB or more, such as 256MiB",
    lambda text: (parse_size(text) or 0) >= _LEAST_TESTED,
    lambda text: parse_size(text) or 0,
)
"""Bytes."""
amount = _form(
    "a share of the free memory, such as 80%, or a size of 1MiB or more, such as 256MiB", _is_amount, str.strip
)
"""Kept as it was written."""


runs_folder = _form("a folder for runs", lambda text: bool(text) and not Path(text).is_file(), str)
"""It need not be there yet."""


def thresholds(text: str) -> str:
    """The absolute path of a file of health thresholds, which every node reads for itself."""
    try:
        load_thresholds(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.text) from error
    return str(Path(text).absolute())


def parse_nnodes(text: str) -> tuple[int, int]:
    """`2` or `1:4` as (min, max). Raises UsageError on anything else."""
    parts = str(text).split(":")
    if len(parts) <= 2 and all(is_number(part) for part in parts):
        least, most = int(parts[0]), int(parts[-1])
        if 0 < least <= most:
            return least, most
    raise UsageError(Code.WRONG_VALUE, f"--nnodes: expected a number of nodes or MIN:MAX, found {text!r}")


def bracketed(host: str) -> str:
    """A host as it stands before `:PORT`."""
    return f"[{host}]" if ":" in host else host


def notify_targets(given: Sequence[str] | None) -> tuple[str, ...]:
    """What --notify was given, else what is in GPUWATCH_NOTIFY. Raises UsageError if the variable is wrong."""
    variable = os.environ.get(_NOTIFY_VARIABLE, "")
    if given or not variable:
        return tuple(given or ())
    try:
        return (notify_target(variable),)
    except argparse.ArgumentTypeError as error:
        raise UsageError(Code.WRONG_VALUE, f"{_NOTIFY_VARIABLE}: {error}") from error


def without_addresses(command: Sequence[str], targets: Sequence[str]) -> list[str]:
    """A command line whose addresses of --notify are hidden, also those in a command: many of them are a secret."""
    found = [*command]
    for target in targets:
        for address in [target] if is_web_address(target) else _ADDRESS.findall(target):
            found = [word.replace(address, "...") for word in found]
    return found


# torchrun's own parser of the torch that is installed, without the seconds that importing torch takes.
#
# `get_args_parser` is read from the file of torch.distributed.run and called, with what it refers to. So the options
# are those of the installed release, whichever that is. Where that fails, torch is imported and asked.

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
