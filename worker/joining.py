"""One Python process below `gpuwatch run`, from the import of torch on: it may become a rank, or not.

It is a rank for sure once it has joined a process group (`init_process_group`, with any backend, store or
`init_method`), or when whoever started it has given it RANK, WORLD_SIZE and LOCAL_RANK, as torchrun does. Before that
it may become one: it gets a recorder when it makes a model or calls one, under its process id. A process that does
neither has none: a launcher, a DataLoader worker, a compile worker.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ..core.codes import Code, coded
from ..core.events.script_events import LeftGroup
from ..core.guest.own_imports import own_command
from ..core.guest.tell import say
from ..core.recorder.layout import HeadField, RankPhase, file_name
from ..core.recorder.run_folder import (
    JOIN_VARIABLE,
    RUN_VARIABLE,
    process_file,
    read_settings,
    tell_failed,
    tell_unwatched,
)
from ..core.settings import WorkerSettings
from ..core.signal_errors import from_outside
from .before_init import (
    GROUPS,
    RankClaim,
    call_before_init,
    entry_of,
    leave_out,
    number_in,
    preflight_before_init,
    told_local_rank,
)
from .meeting_place import LeftOut
from .patches import after_import
from .rank_process import tell_the_end
from .session import WorkerSession, open_session, watch_the_ends

# A Python of another host than that of its `gpuwatch run`: it joins through the file that GPUWATCH_JOIN names.

_PATIENCE_S = 60.0
_JOIN = f"{__package__.partition('.')[0]}.launcher.run.join"


def join(path: str) -> str | None:
    """The folder in which this host's ranks are recorded; None, and a sentence on stderr, if there can be none."""
    environ = {name: value for name, value in os.environ.items() if name not in (JOIN_VARIABLE, RUN_VARIABLE)}
    try:
        done = subprocess.run(
            own_command(_JOIN, path),
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
        folder, why = done.stdout.strip(), done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        if from_outside(error):
            raise
        folder, why = "", str(error)
    if folder and os.path.isdir(folder):  # noqa: PTH112  # a path is needed as text
        return folder
    last = why.splitlines()[-1:] or ["no answer"]
    text = f"process {os.getpid()} on {socket.gethostname()} goes on unwatched: {last[0]}"
    say(coded(text, Code.CHILD_UNWATCHED))
    return None


_MOST_ATTEMPTS = 1000


def begin(folder: str, path_folder: str) -> None:
    """Called at the first import of torch. `path_folder` is the folder that `gpuwatch run` put on PYTHONPATH."""
    settings = read_settings(Path(folder))
    if settings is not None:
        process = _JoiningProcess(settings, path_folder)
        after_import("torch", process.torch_is_imported)
        atexit.register(process.tell_own_error, os.getpid())


class _JoiningProcess:
    def __init__(self, settings: WorkerSettings, path_folder: str) -> None:
        self._settings = settings
        self._folder = Path(settings.recorder_dir)
        self._path_folder = path_folder
        self._session: WorkerSession | None = None
        self._is_sure = False
        self._tested = 0
        """The process that had its preflight: a fork has its own."""
        self._left_out = ""
        """Why there can be no preflight; reported once this process is a rank."""
        self._removed: dict[str, str] = {}
        """Variables of ours that a rank's child processes do not find, by name."""
        self._handles: list[Any] = []
        """Handles of the hooks that run at the first call of a model."""

    def torch_is_imported(self) -> None:
        """Never raises."""
        self._safely(self._begin)

    def tell_own_error(self, pid: int) -> None:
        """This process ends, and has no recorder: a launcher whose port is taken, say. Never raises."""
        error = getattr(sys, "last_value", None)
        if self._session is not None or os.getpid() != pid or not isinstance(error, Exception):
            return
        if type(error).__name__ != "ChildFailedError":  # torchrun's: its ranks say more
            tell_failed(self._folder, pid, error)

    def _begin(self) -> None:
        os.register_at_fork(after_in_child=lambda: self._safely(self._is_forked))
        after_import(GROUPS, lambda: self._safely(self._watch_groups))
        claim = RankClaim.from_environment()
        if claim is None:
            self._wait_for_a_model()
        elif claim.is_sure:
            self._become(claim.rank, claim.local_rank, claim.world_size)
        else:
            self._may_become(claim)

    # -- what makes it a rank -----------------------------------------------------------------------------------

    def _watch_groups(self) -> None:
        """Notice each default process group, however it was made."""
        module = sys.modules[GROUPS]
        before: Callable[..., Any] = module._update_default_pg

        @wraps(before)
        def _update_default_pg(group: Any) -> Any:
            result = before(group)
            if group is not None and group is not module.GroupMember.NON_GROUP_MEMBER:
                self._safely(lambda: self._become(group.rank(), None, group.size()))
            elif group is None:
                self._safely(self._leaves)
            return result

        module.__dict__["_update_default_pg"] = _update_default_pg
        if self._settings.preflight != "off":
            call_before_init(lambda arguments: self._safely(lambda: self._before_init(arguments)))

    def _before_init(self, arguments: Mapping[str, Any]) -> None:
        """Run the preflight before the script joins its group: the ranks are known, and all of them get here."""
        if self._tested == os.getpid():
            return
        try:
            entry = entry_of(arguments)
        except LeftOut as reason:
            self._left_out = str(reason)
            return
        if entry is None:
            return
        self._tested = os.getpid()
        self._become(entry.rank, None, entry.world_size)
        if self._session is not None and self._session.is_ours:
            preflight_before_init(self._session, entry, told_local_rank())

    def _wait_for_a_model(self) -> None:
        """Until the first parameter of a module is made, or a module is called that was loaded whole."""
        from torch.nn.modules import module as modules

        self._handles = [
            modules.register_module_parameter_registration_hook(lambda *_: self._has_a_model()),
            modules.register_module_forward_pre_hook(self._calls_a_module),
        ]

    def _is_forked(self) -> None:
        """A fork of a process that is watched, and of no rank, may train by itself, or become a rank."""
        if self._session is not None and not self._is_sure:
            self._wait_for_a_model()

    def _has_a_model(self) -> None:
        if self._handles and not _loads_data():
            self._forget_the_wait()
            self._safely(lambda: self._may_become(RankClaim.from_environment() or RankClaim(0, 0, 1, False)))

    def _calls_a_module(self, module: Any, args: Any) -> None:
        from torch.compiler import is_compiling
        from torch.nn.modules import module as modules

        if is_compiling() or not self._handles or _loads_data():
            return
        known = set(modules._global_forward_pre_hooks)
        self._has_a_model()
        for number, hook in list(modules._global_forward_pre_hooks.items()):
            if number not in known:  # torch has made its list of this call's hooks already
                hook(module, args)

    def _forget_the_wait(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    # -- what it becomes ----------------------------------------------------------------------------------------

    def _may_become(self, claim: RankClaim) -> None:
        """It is watched from here on, under its process id."""

        def open_it(settings: WorkerSettings, programs: int) -> None:  # some that this process was before
            path = self._folder / process_file(os.getpid(), programs)
            self._open(settings, path, claim.rank, claim.local_rank, claim.world_size)

        self._as_first_free(open_it)

    def _become(self, rank: int, local_rank: int | None, world_size: int) -> None:
        """It is a rank."""
        self._forget_the_wait()
        if local_rank is None:
            told = told_local_rank()
            local_rank = rank if told is None else told  # without a word, all ranks are taken for this host's
        if self._session is None or not self._session.is_ours:  # a fork of a process that is watched is another one
            self._is_sure = False
            self._open_rank(rank, local_rank, world_size)
        elif not self._is_sure:
            self._rename(self._session, rank, local_rank, world_size)
        else:
            self._join_again(self._session, rank, world_size)
            return
        self._is_sure = True
        self._clean_the_environment()
        if self._left_out and self._session is not None:
            leave_out(self._session, self._left_out)

    def _leaves(self) -> None:
        """Its group is gone, as at the end of a training. Whoever started it may kill it after that."""
        session = self._session
        if session is not None and session.is_ours and self._is_sure and session.settle():
            session.enter(RankPhase.SCRIPT)
            session.recorder.append(LeftGroup(session.where()))

    def _join_again(self, session: WorkerSession, rank: int, world_size: int) -> None:
        """It has joined another group after its first. Its name in the report is that of the first."""
        if rank != session.rank:
            text = f"rank {session.rank} has joined a second group, of {world_size} ranks, as rank {rank}"
            session.record_fault("run", text)
        else:
            fields = session.recorder.fields
            session.recorder.identify(rank, fields[HeadField.LOCAL_RANK], world_size, fields[HeadField.ATTEMPT])

    def _open_rank(self, rank: int, local_rank: int, world_size: int) -> None:
        def open_it(settings: WorkerSettings, _: int) -> None:
            self._open(settings, self._folder / file_name(rank, settings.attempt), rank, local_rank, world_size)

        self._as_first_free(open_it)
        assert self._session is not None
        self._session.answer_with_stacks()
        self._session.note_signals()

    def _rename(self, session: WorkerSession, rank: int, local_rank: int, world_size: int) -> None:
        """Rename the recorder from the process id to this rank."""
        recorder, before = session.recorder, session.recorder.path

        def rename(settings: WorkerSettings, _: int) -> None:
            session.become(settings, rank, local_rank, world_size)
            path = self._folder / file_name(rank, settings.attempt)
            path.hardlink_to(before)
            recorder.path = path
            before.unlink(missing_ok=True)

        self._as_first_free(rename)
        session.answer_with_stacks()
        session.note_signals()

    def _as_first_free(self, take: Callable[[WorkerSettings, int], None]) -> None:
        """Call `take` with the settings and the place of each attempt that this may be, until its file is a new one."""
        first = number_in("TORCHELASTIC_RESTART_COUNT") or 0
        for place in range(_MOST_ATTEMPTS):
            with suppress(FileExistsError):
                take(replace(self._settings, attempt=first + place), place)
                return

    def _open(self, settings: WorkerSettings, path: Path, rank: int, local_rank: int, world_size: int) -> None:
        try:
            session = open_session(settings, path, rank, local_rank, world_size)
        except FileExistsError:
            raise
        except OSError as error:
            if from_outside(error):
                raise
            text = f"process {os.getpid()} goes on unwatched, no recorder: {error}"
            say(coded(text, Code.NO_RECORDER))
            tell_unwatched(self._folder, os.getpid(), f"no recorder: {error}")
            return
        self._session = session
        session.enter(RankPhase.SCRIPT)
        session.attach_hooks()
        tell_the_end(session)
        watch_the_ends(self._for_another_program)

    def _clean_the_environment(self) -> None:
        """The rank's own child processes are no ranks, and find the environment as it was."""
        for name in (RUN_VARIABLE, JOIN_VARIABLE):
            value = os.environ.pop(name, None)
            if value is not None:
                self._removed[name] = value
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        rest = [path for path in paths if path != self._path_folder]
        if len(rest) != len(paths):
            del os.environ["PYTHONPATH"]
            if rest:
                os.environ["PYTHONPATH"] = os.pathsep.join(rest)

    def _for_another_program(self, environment: Mapping[Any, Any]) -> dict[str, str]:
        """The variables that a program needs to be watched as well, when the rank continues as it (os.exec)."""
        if self._session is None or not self._session.is_ours or not self._removed:
            return {}
        rest = environment.get("PYTHONPATH")
        paths = [self._path_folder, *([rest] if isinstance(rest, str) and rest else [])]
        return {**self._removed, "PYTHONPATH": os.pathsep.join(paths)}

    def _safely(self, step: Callable[[], None]) -> None:
        """Run a step. An error of ours is recorded and goes no further."""
        try:
            step()
        except Exception as error:
            if from_outside(error):
                raise
            text = f"{type(error).__name__}: {error}"
            if self._session is not None and self._session.is_ours:
                self._session.record_fault("run", text)
            else:
                say(coded(f"process {os.getpid()} goes on unwatched: {text}", Code.OWN_FAULT))
                tell_unwatched(self._folder, os.getpid(), text)


def _loads_data() -> bool:
    """Whether this is a DataLoader's worker: transforms are modules, too."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return getattr(worker, "_worker_info", None) is not None
