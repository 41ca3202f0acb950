"""The types of gpuwatch's arguments: each takes what was typed, or says what was expected and what was found."""

from __future__ import annotations

import argparse
import math
import string
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from ..core.errors import UsageError
from ..core.gpu.health_grades import load_thresholds
from ..core.host import loopback
from ..core.settings import Watched
from ..core.text import parse_amount, parse_size

_OF_A_NAME = frozenset(f"{string.ascii_letters}{string.digits}._-")
_LEAST_TESTED = 1 << 10
_LEAST_ALLOCATED = 1 << 20
"""A bare `80` was meant as `80%`."""


def _expect(is_right: bool, what: str, found: str) -> None:
    if not is_right:
        raise argparse.ArgumentTypeError(f"expected {what}, found {found!r}")


def batches(text: str) -> list[int]:
    """`0,1,3`"""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [-1]
    _expect(min(found) >= 0, "batch numbers such as 0,1,3", text)
    return found


def at_least(least: int, what: str) -> Callable[[str], int]:
    """A whole number from `least` on; `what` it counts."""

    def parse(text: str) -> int:
        is_right = is_number(text.removeprefix("-")) and int(text) >= least
        _expect(is_right, f"{what} of {least} or more", text)
        return int(text)

    return parse


def _float(text: str) -> float:
    """The number, or nan if the text is none: nan is in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def seconds(text: str) -> float:
    """A time of a second or more."""
    _expect(1 <= _float(text) < 1e6, "a number of seconds of 1 or more", text)
    return float(text)


def number(least: float, most: float, what: str) -> Callable[[str], float]:
    """A number in a range; `what` it is."""

    def parse(text: str) -> float:
        _expect(least <= _float(text) <= most, f"{what} from {least:g} to {most:g}", text)
        return float(text)

    return parse


def hang_timeout(text: str) -> float | None:
    """A number of seconds, 0 for never; None for `auto`."""
    if text == "auto":
        return None
    _expect(0 <= _float(text) <= 1e6, "auto, or a number of seconds from 0 to 1e+06", text)
    return float(text)


def telemetry(text: str) -> float:
    """A number of seconds, 0 for never."""
    found = _float(text)
    _expect(found == 0 or 1 <= found <= 3600, "0, or a number of seconds from 1 to 3600", text)
    return found


def watched(text: str) -> tuple[str, ...]:
    """`forward,grads`"""
    parts = tuple(part.strip() for part in text.split(","))
    _expect(set(parts) <= set(get_args(Watched)), f"some of {','.join(get_args(Watched))}", text)
    return parts


def module_pattern(text: str) -> str:
    """A shell pattern of module names."""
    _expect(bool(text.strip()), "a module's name or a pattern such as 'encoder.*'", text)
    return text


def row_pattern(text: str) -> str:
    """`MODULE` or `MODULE:ROLE`, with shell patterns."""
    module, colon, role = text.partition(":")
    is_right = module.strip() and (not colon or role.strip())
    _expect(bool(is_right), "MODULE or MODULE:ROLE, such as 'mask.*:output'", text)
    return text


def run_name(text: str) -> str:
    """A folder's name."""
    is_right = text and not text.startswith((".", "-")) and set(text) <= _OF_A_NAME
    _expect(bool(is_right), "a name of letters, digits, '.', '-' and '_'", text)
    return text


def _is_port(text: str) -> bool:
    return is_number(text) and 0 < int(text) < 65536


def port(text: str) -> int:
    """A TCP port."""
    _expect(_is_port(text), "a port from 1 to 65535", text)
    return int(text)


def address(text: str) -> str:
    """`tcp://HOST:PORT`"""
    host, _, digits = text.removeprefix("tcp://").rpartition(":")
    _expect(text.startswith("tcp://") and bool(host) and _is_port(digits), "tcp://HOST:PORT", text)
    return text


def metrics_address(text: str) -> str:
    """`PORT` or `HOST:PORT`, as `HOST:PORT`."""
    host, colon, digits = text.rpartition(":")
    is_host = not colon or (host and ("[" in host) == (":" in host))
    _expect(bool(is_host) and _is_port(digits), "[HOST:]PORT with a port from 1 to 65535", text)
    return f"{host or bracketed(loopback())}:{digits}"


def size(text: str) -> int:
    """Bytes, such as `256MiB`."""
    found = parse_size(text)
    _expect((found or 0) >= _LEAST_TESTED, "a size of 1KiB or more, such as 256MiB", text)
    return found or 0


def amount(text: str) -> str:
    """A share of the free memory or a size, kept as it was written."""
    found = parse_amount(text)
    is_right = found is not None and not 0 < found.size < _LEAST_ALLOCATED
    _expect(is_right, "a share of the free memory, such as 80%, or a size of 1MiB or more, such as 256MiB", text)
    return text.strip()


def thresholds(text: str) -> str:
    """The absolute path of a file of health thresholds, which every node reads for itself."""
    try:
        load_thresholds(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return str(Path(text).absolute())


def is_number(text: str) -> bool:
    """Whether it is written in the digits 0 to 9 alone: Python's isdigit() takes superscripts, too."""
    return text.isascii() and text.isdigit()


def parse_nnodes(text: str) -> tuple[int, int]:
    """`2` or `1:4` as (min, max). Raises UsageError on anything else."""
    parts = str(text).split(":")
    if len(parts) <= 2 and all(is_number(part) for part in parts):
        least, most = int(parts[0]), int(parts[-1])
        if 0 < least <= most:
            return least, most
    raise UsageError(f"--nnodes: expected a number of nodes or MIN:MAX, found {text!r}")


def bracketed(host: str) -> str:
    """A host as it stands before `:PORT`."""
    return f"[{host}]" if ":" in host else host
