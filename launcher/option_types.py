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


def batches(text: str) -> list[int]:
    """`0,1,3`"""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [-1]
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"expected batch numbers such as 0,1,3, found {text!r}")
    return found


def at_least(least: int, what: str) -> Callable[[str], int]:
    """A whole number from `least` on; `what` it counts."""

    def parse(text: str) -> int:
        if not is_number(text.removeprefix("-")) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected {what} of {least} or more, found {text!r}")
        return int(text)

    return parse


def _float(text: str) -> float:
    """Not a number, which is in no range, for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def seconds(text: str) -> float:
    """A time of a second or more."""
    found = _float(text)
    if not 1 <= found < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number of seconds of 1 or more, found {text!r}")
    return found


def number(least: float, most: float, what: str) -> Callable[[str], float]:
    """A number in a range; `what` it is."""

    def parse(text: str) -> float:
        found = _float(text)
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"expected {what} from {least:g} to {most:g}, found {text!r}")
        return found

    return parse


def hang_timeout(text: str) -> float | None:
    """A number of seconds, 0 for never; None for `auto`."""
    if text == "auto":
        return None
    found = _float(text)
    if not 0 <= found <= 1e6:
        raise argparse.ArgumentTypeError(f"expected auto, or a number of seconds from 0 to 1e+06, found {text!r}")
    return found


def telemetry(text: str) -> float:
    """A number of seconds, 0 for never."""
    found = _float(text)
    if found != 0 and not 1 <= found <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0, or a number of seconds from 1 to 3600, found {text!r}")
    return found


def watched(text: str) -> tuple[str, ...]:
    """`forward,grads`"""
    parts = tuple(part.strip() for part in text.split(","))
    if not set(parts) <= set(get_args(Watched)):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(get_args(Watched))}, found {text!r}")
    return parts


def module_pattern(text: str) -> str:
    """A shell pattern of module names."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a module's name or a pattern such as 'encoder.*', found {text!r}")
    return text


def row_pattern(text: str) -> str:
    """`MODULE` or `MODULE:ROLE`, with shell patterns."""
    module, colon, role = text.partition(":")
    if not module.strip() or (colon and not role.strip()):
        raise argparse.ArgumentTypeError(f"expected MODULE or MODULE:ROLE, such as 'mask.*:output', found {text!r}")
    return text


def run_name(text: str) -> str:
    """A folder's name."""
    if not text or text.startswith((".", "-")) or not set(text) <= _OF_A_NAME:
        raise argparse.ArgumentTypeError(f"expected a name of letters, digits, '.', '-' and '_', found {text!r}")
    return text


def port(text: str) -> int:
    """A TCP port."""
    if not is_number(text) or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, found {text!r}")
    return int(text)


def address(text: str) -> str:
    """`tcp://HOST:PORT`"""
    host, _, digits = text.removeprefix("tcp://").rpartition(":")
    if not text.startswith("tcp://") or not host or not is_number(digits) or not 0 < int(digits) < 65536:
        raise argparse.ArgumentTypeError(f"expected tcp://HOST:PORT, found {text!r}")
    return text


def metrics_address(text: str) -> str:
    """`PORT` or `HOST:PORT`, as `HOST:PORT`."""
    host, colon, digits = text.rpartition(":")
    is_host = not colon or (host and ("[" in host) == (":" in host))
    if not is_host or not is_number(digits) or not 0 < int(digits) < 65536:
        raise argparse.ArgumentTypeError(f"expected [HOST:]PORT with a port from 1 to 65535, found {text!r}")
    return f"{host or bracketed(loopback())}:{digits}"


def size(text: str) -> int:
    """Bytes, such as `256MiB`."""
    found = parse_size(text)
    if found is None or found < _LEAST_TESTED:
        raise argparse.ArgumentTypeError(f"expected a size of 1KiB or more, such as 256MiB, found {text!r}")
    return found


def amount(text: str) -> str:
    """A share of what is free or a size, kept as it was written."""
    found = parse_amount(text)
    if found is None or 0 < found.size < _LEAST_ALLOCATED:
        raise argparse.ArgumentTypeError(
            f"expected a share of the free memory, such as 80%, or a size of 1MiB or more, such as 256MiB, "
            f"found {text!r}"
        )
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
