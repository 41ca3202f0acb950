"""Hears of a call of `init_process_group` before it does anything, and what it says of the ranks."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .patches import PatchLedger

GROUPS = "torch.distributed.distributed_c10d"
_NAME = "init_process_group"


class LeftOut(Exception):
    """There can be no preflight; the message says why, as the end of a sentence."""


@dataclass(frozen=True)
class GroupEntry:
    """A rank that is about to join its default process group."""

    rank: int
    world_size: int
    meets: str
    """Where the script's own ranks meet: the same for all of one group, as far as can be told from the call."""
    host: str = ""
    """Of rank 0; "" if the call does not say it."""
    device: int | None = None
    """The index of the GPU that the call names."""


def call_before_init(call: Callable[[Mapping[str, Any]], None]) -> None:
    """Have `call` called with the arguments of each `init_process_group`. torch.distributed is imported already."""
    before = getattr(sys.modules[GROUPS], _NAME)
    signature = inspect.signature(before)

    @wraps(before)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:  # torch says what is wrong with it
            return before(*args, **kwargs)
        call(arguments)
        return before(*args, **kwargs)

    patches = PatchLedger()
    for module in list(sys.modules.values()):  # torch has handed the name on to some of its modules
        if (getattr(module, "__name__", "") or "").startswith("torch.") and vars(module).get(_NAME) is before:
            patches.replace(module, _NAME, lambda _: init_process_group)


def entry_of(arguments: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> GroupEntry | None:
    """None for a call that makes no group of several processes, or that torch will refuse.

    Raises LeftOut where the call does not tell the rank.
    """
    backend = str(arguments.get("backend") or "").lower()
    if backend == "fake":
        return None
    if backend == "mpi":
        raise LeftOut("with the backend mpi a rank is known only once it has joined its group")
    method = arguments.get("init_method")
    url = urlsplit(str(method or "env://"))
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    rank = _number(arguments.get("rank"), query.get("rank"), environ.get("RANK"))
    size = _number(arguments.get("world_size"), query.get("world_size"), environ.get("WORLD_SIZE"))
    if rank is None or size is None or rank >= size:
        return None
    if arguments.get("store") is not None:
        meets, host = "store", ""
    elif url.scheme == "env":
        meets, host = f"port {environ.get('MASTER_PORT', '')}", environ.get("MASTER_ADDR", "")
    elif url.scheme == "tcp":
        meets, host = f"port {url.port}", url.hostname or ""
    else:
        meets, host = f"{url.scheme} {url.netloc}{url.path}", ""
    device = arguments.get("device_id")
    index = device if isinstance(device, int) else getattr(device, "index", None)
    return GroupEntry(rank, size, f"{meets}, attempt {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", host, index)


def _number(*said: int | str | None) -> int | None:
    """The first that is one; torch takes -1 for "not told"."""
    for one in said:
        text = str(one).strip()
        if text.isascii() and text.isdigit():
            return int(text)
    return None
