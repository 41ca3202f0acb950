"""Finds this process's rank in its environment and its call of `init_process_group`, which a preflight precedes."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..core.codes import Code, coded
from ..core.events.preflight_events import PreflightResult
from ..core.guest.tell import say
from ..core.recorder.layout import RankPhase
from ..core.signal_errors import from_outside
from .meeting_place import GroupEntry, LeftOut, MeetingPlace
from .patches import PatchLedger
from .preflight.preflight_run import preflight_or_exit
from .session import WorkerSession

GROUPS = "torch.distributed.distributed_c10d"
_NAME = "init_process_group"


def call_before_init(call: Callable[[Mapping[str, Any]], None]) -> None:
    """Have `call` called with the arguments of each `init_process_group`. torch.distributed is imported already."""
    before = getattr(sys.modules[GROUPS], _NAME)
    signature = inspect.signature(before)

    @wraps(before)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:  # torch itself raises the error
            if from_outside(error):
                raise
            return before(*args, **kwargs)
        call(arguments)
        return before(*args, **kwargs)

    patches = PatchLedger()
    for module in list(sys.modules.values()):  # torch has handed the name on to some of its modules
        if (getattr(module, "__name__", "") or "").startswith("torch.") and vars(module).get(_NAME) is before:
            patches.replace(module, _NAME, lambda _: init_process_group)


def entry_of(arguments: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> GroupEntry | None:
    """None for a call that makes no group of several processes, or that torch will refuse.

    Raises LeftOut if the call does not contain the rank.
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
    """The first valid number; for torch, -1 means "not given"."""
    for one in said:
        text = str(one).strip()
        if text.isascii() and text.isdigit():
            return int(text)
    return None


def preflight_before_init(session: WorkerSession, entry: GroupEntry, local_rank: int | None) -> None:
    """Test this rank with all others. Ends the process if the training should not start.

    Leaves no group, store or variable behind. Raises gpuwatch's own errors.
    """
    settings = session.settings
    session.enter(RankPhase.PREFLIGHT)
    try:
        place = MeetingPlace(
            entry, local_rank, Path(settings.recorder_dir), settings.meets_at, settings.preflight_timeout_s
        )
        with place as identity:
            # the file that Python runs, which should be the same on all ranks
            path = Path(sys.argv[0] if sys.argv else "").absolute()
            preflight_or_exit(session, identity, str(path) if path.is_file() else "")
    except LeftOut as reason:
        leave_out(session, str(reason))
    finally:
        session.enter(RankPhase.SCRIPT)


def leave_out(session: WorkerSession, reason: str) -> None:
    """Say so, in the report and on stderr; "": another rank says it there."""
    session.recorder.append(PreflightResult(session.where(), "skipped", detail=reason))
    if reason:
        say(coded(f"the preflight is skipped: {reason}", Code.PREFLIGHT_SKIPPED))


@dataclass(frozen=True)
class RankClaim:
    """This process's rank according to its environment."""

    rank: int
    local_rank: int
    world_size: int
    is_sure: bool
    """The variables were set by a launcher that started this very process as a rank."""

    @classmethod
    def from_environment(cls) -> RankClaim | None:
        """None if the environment names no rank."""
        rank, size = number_in("RANK"), number_in("WORLD_SIZE")
        if rank is None or size is None or rank >= size:
            return None
        local_rank = number_in("LOCAL_RANK")
        return cls(rank, local_rank or 0, size, local_rank is not None and not _is_child_of_a_rank())


def number_in(name: str) -> int | None:
    """The number in a variable of the environment; None if there is none."""
    return _number(os.environ.get(name))


def _is_child_of_a_rank() -> bool:
    """Whether the parent is a Python that was given the same rank: its child may be a helper of that rank."""
    try:
        parent = Path("/proc", str(os.getppid()))
        is_python = (parent / "exe").readlink().name.startswith("python")
        return is_python and f"RANK={os.environ['RANK']}".encode() in (parent / "environ").read_bytes().split(b"\0")
    except OSError as error:  # not on Linux, or another user's
        if from_outside(error):
            raise
        return False


_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")


def told_local_rank() -> int | None:
    """The local rank in the launcher's variables; None if there is none."""
    return next((number for number in map(number_in, _LOCAL_RANKS) if number is not None), None)
