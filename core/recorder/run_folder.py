"""The scratch folder of a run, and what `gpuwatch run` hands to processes below it: variables, and files in there."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ..codes import Code, coded
from ..guest.own_files import write_whole
from ..host import boot_id, host_name, stat_fields
from ..settings import WorkerSettings
from ..signal_errors import from_outside, suppress_own
from ..text import command_for, error_text
from .layout import file_bytes

RUN_VARIABLE = "GPUWATCH_RUN"
"""The scratch folder of the run. worker/path/sitecustomize.py, which may import nothing, has it by this name."""
JOIN_VARIABLE = "GPUWATCH_JOIN"
"""The file by which other hosts join the run (core/wire/keys.py). sitecustomize.py has it by this name, too."""
_SETTINGS = "settings.json"
_MEETING_KEY = "meeting.key"
_UNANSWERED = "collector.unanswered"
_PROCESS = "process-{pid}.recorder"
PROCESSES = _PROCESS.format(pid="*")
LATER_PROGRAMS = _PROCESS.format(pid="*-*")
"""Recorders of processes that went on as another program (os.exec), which is watched again."""
RANKS = "rank-*.recorder"
_MOST_TEXT = 1000
_FAILED = "failed-{pid}"
_UNWATCHED = "unwatched-{pid}"
UNWATCHED = _UNWATCHED.format(pid="*")
"""Why a Python process could not be watched."""


def env() -> dict[str, str]:
    """What a launcher that starts ranks in an environment of its own is to give to them; {} outside of `gpuwatch run`.

        ray.init(runtime_env={"env_vars": gpuwatch.env()})

    The values are paths, and no secret. Ranks of other hosts join a run that was started with `--other-hosts`.
    """
    if not os.environ.get(RUN_VARIABLE):
        return {}
    names = (JOIN_VARIABLE, RUN_VARIABLE, "PYTHONPATH")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def write_settings(folder: Path, settings: WorkerSettings) -> None:
    """The settings of the ranks."""
    write_whole(folder / _SETTINGS, settings.to_json().encode())


def read_settings(folder: Path) -> WorkerSettings | None:
    """None if that run is over."""
    with suppress_own(OSError):
        return WorkerSettings.from_json((folder / _SETTINGS).read_bytes())
    return None


def write_meeting_key(folder: Path, key: str) -> None:
    """What the ranks seal their preflight's values with. The folder is private; no variable has it."""
    write_whole(folder / _MEETING_KEY, key.encode())


def read_meeting_key(folder: Path) -> str:
    """ "" for none: the folder could not be written, and the values are not sealed."""
    with suppress_own(OSError):
        return (folder / _MEETING_KEY).read_text()
    return ""


def tell_unanswered(folder: Path, collector: str) -> None:
    """This node's agent waits for the collector at this address. The folder may be full."""
    with suppress_own(OSError):
        write_whole(folder / _UNANSWERED, collector.encode())


def tell_answered(folder: Path) -> None:
    """The collector has taken this node into its run."""
    with suppress_own(OSError):
        (folder / _UNANSWERED).unlink(missing_ok=True)


def unanswered(folder: Path) -> str:
    """The address of the collector that this node's agent has not reached yet; "" if it has, or there is none."""
    with suppress_own(OSError):
        return (folder / _UNANSWERED).read_text()
    return ""


def tell_unwatched(folder: Path, pid: int, reason: str) -> None:
    """Why this process is not watched, for the report. The folder may be full, or gone."""
    with suppress_own(OSError):
        (folder / _UNWATCHED.format(pid=pid)).write_text(reason)


def tell_failed(folder: Path, pid: int, error: BaseException) -> None:
    """What a process has raised that is no rank: it may be why there is none. The folder may be full, or gone."""
    with suppress_own(OSError):
        (folder / _FAILED.format(pid=pid)).write_text(error_text(error), errors="replace")


def read_failed(folder: Path, pid: int) -> str:
    """The error of this process, else the latest of another; "" if no process reported one."""
    with suppress_own(OSError):
        own = folder / _FAILED.format(pid=pid)
        others = folder.glob(_FAILED.format(pid="*"))
        found = [own] if own.exists() else sorted(others, key=lambda path: path.stat().st_mtime_ns)[-1:]
        return found[0].read_text(errors="replace")[:_MOST_TEXT] if found else ""
    return ""


def process_file(pid: int, programs: int = 0) -> str:
    """Name of the recorder of a process that may become a rank, or not. `programs` had it before (os.exec)."""
    return _PROCESS.format(pid=f"{programs}-{pid}" if programs else pid)


def pid_of_file(path: Path) -> int:
    """Whose recorder it is, or whose reason."""
    return int(path.stem.rpartition("-")[2])


# How the runs of a scheduler's job are named: by the batch script, or by a launch in a script of the user's own. Who
# looks for them reads the names.
#
# 20261121-091533-slurm-17              job 17
# 20261121-092101-slurm-17-restart-1    the same job, after it was requeued once
# 20261121-091533-slurm-18_3            task 3 of array job 18

_SCHEDULERS = ("slurm",)
_NAME = re.compile(
    rf"(?P<time>\d{{8}}-\d{{6}})-(?:{'|'.join(_SCHEDULERS)})-(?P<job>\d+(?:_\d+)?)"
    r"(?:-restart-(?P<restart>\d+))?(?:-(?P<again>\d+))?"
)


class JobRun(NamedTuple):
    """A run of a job. They sort by life, and within one by time."""

    restart: int
    time: str
    again: int
    """Counts runs of one name: a batch script with several."""
    job: str
    name: str


def new_name_in_job(scheduler: str, job: str, restart: int) -> str:
    """For a run that begins now: `20261121-092101-slurm-17-restart-1`; "" for a scheduler that names none."""
    if scheduler.lower() not in _SCHEDULERS:
        return ""
    life = f"-restart-{restart}" if restart else ""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{scheduler.lower()}-{job}{life}"


def job_run(name: str) -> JobRun | None:
    """What a run's name says; None for a run of no job."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return JobRun(int(match["restart"] or 0), match["time"], int(match["again"] or 1), match["job"], name)


def runs_of_job(names: Iterable[str], job: str, since: str = "") -> list[JobRun]:
    """The runs of one job, of each life the last one, the first life first.

    A cluster that is set up anew counts its jobs from the beginning again. So `since` (a time as in the names) leaves
    out older runs.
    """
    found = [run for run in map(job_run, names) if run is not None and run.job == job and run.time >= since]
    return list({run.restart: run for run in sorted(found)}.values())


# The scratch folder, with a node's recorders: in /dev/shm where there is room, private, and removed when the run ends.

_PREFIX = "gpuwatch-"
_SHARED_MEMORY = Path("/dev/shm")
_DISK = Path("/var/tmp")
_OWNER = "owner"
_FILES = 32
_FILES_OF_RANK = 4
"""The most files of a rank in a folder, without those that the script has."""
KEPT_ATTEMPTS = 2
"""How many attempts that have ended keep their recorders."""
_TRIES = 3
RESCUED = "rescued"
"""Folder in the scratch for what the runs' folder took no more of."""


def make_scratch(recorders: int, say: Callable[[str], object] = lambda sentence: None) -> Path:
    """Make the folder for `recorders` recorders: in shared memory if they need less than half of its free room, else on
    a disk.

    `say` gets the reason if it is not in shared memory, and if no disk has the room either. If no folder can be made,
    `say` gets that, and the folder of the path does not exist: the ranks go on unwatched.
    """
    remove_stale()
    size, files = recorders * file_bytes(), _FILES + _FILES_OF_RANK * recorders
    trouble = ""
    takes_files = _files_free(_SHARED_MEMORY) > 2 * files
    if _free(_SHARED_MEMORY) > 2 * size and takes_files:
        try:
            return _new_folder(_SHARED_MEMORY)
        except OSError as error:
            if from_outside(error):
                raise
            trouble = f": {error}"
    # the first that has the room, or the most of it
    base = max(_disks(), key=lambda disk: (_files_free(disk) >= files, min(_free(disk), size)))
    try:
        folder = _new_folder(base)
    except OSError as error:
        if from_outside(error):
            raise
        text = f"no folder can be made for the recorders, and the ranks go on unwatched: {error}"
        say(coded(text, Code.SLOW_FOLDER))
        return base / f"{_PREFIX}{os.getuid()}-none-{os.urandom(8).hex()}"
    if trouble:
        say(coded(f"the recorders are in {base}, where a batch takes longer to record{trouble}", Code.SLOW_FOLDER))
        return folder
    need = f"{recorders} recorders need {size >> 20} MiB"
    lacks = f"{_mib_free(_SHARED_MEMORY)}, and {need}"
    if not takes_files and _free(_SHARED_MEMORY) >= 0:
        lacks = f"{_files_free(_SHARED_MEMORY)} inodes free, and {recorders} recorders may need {files}"
    say(
        f"{_SHARED_MEMORY} has {lacks}, and the script should have as much left: the recorders are in {base}, where "
        f"a batch takes longer to record [{Code.SLOW_FOLDER}]"
    )
    if _free(base) < size:
        say(
            f"{base} has {_mib_free(base)}, and {need}: ranks that find no room go on unwatched; make room in "
            f"{_SHARED_MEMORY}, or set TMPDIR to a disk that has it [{Code.SLOW_FOLDER}]"
        )
    return folder


def _mib_free(base: Path) -> str:
    return f"{max(0, _free(base)) >> 20} MiB free"


def _new_folder(base: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-", dir=base))
    adopt_scratch(folder)
    return folder


def _disks() -> list[Path]:
    """Where else it may be. The first is often in memory, too."""
    return [Path(tempfile.gettempdir()), _DISK]


def _free(base: Path) -> int:
    """Bytes that may be written there; -1 if nothing may."""
    with suppress_own(OSError):
        return shutil.disk_usage(base).free if os.access(base, os.W_OK | os.X_OK) else -1
    return -1


def _files_free(base: Path) -> int:
    """How many files can be made there, as far as is known; what counts none, such as btrfs, takes any number."""
    with suppress_own(OSError):
        found = os.statvfs(base)
        return found.f_favail if found.f_files else sys.maxsize
    return sys.maxsize


def adopt_scratch(folder: Path) -> None:
    """This process answers for the folder from now on; its agent does if this launch is killed."""
    owner = f"{os.getpid()} {_began(os.getpid()) or 0} {_pid_namespace()} {boot_id() or '-'} {host_name()}"
    with suppress_own(OSError):  # a launch removes it in any case
        write_whole(folder / _OWNER, owner.encode())


def _began(pid: int) -> int | None:
    """When a process began, in ticks since the host's boot: no clock that is set changes it. 0: there is no such
    process; None: that cannot be read here. (man 5 proc, field 22 of /proc/PID/stat)"""
    if not Path("/proc/self/stat").exists():
        return None
    with suppress_own(OSError, ValueError, IndexError):
        return int(stat_fields(Path(f"/proc/{pid}"))[19])
    return 0


def _pid_namespace() -> int:
    """Where the pid counts: containers on one host may share /dev/shm, and know nothing of each other's processes."""
    with suppress_own(OSError):  # not on Linux
        return Path("/proc/self/ns/pid").stat().st_ino
    return 0


def remove_scratch(folder: Path) -> None:
    """Remove the folder; twice does no harm. A process that has no descriptor left for a moment tries again."""
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break


def keep_rescued(scratch: Path, say: Callable[[str], object] = lambda sentence: None) -> Path | None:
    """Move what the runs' folder took no more of to where it stays, and say where; None if there is nothing."""
    source = scratch / RESCUED
    if not source.is_dir():
        return None
    try:
        folder = Path(tempfile.mkdtemp(prefix="gpuwatch-rescued-"))
        for path in source.iterdir():
            with suppress_own(FileNotFoundError):  # a journal, of a collector that closes its store now
                shutil.move(path, folder / path.name)
    except OSError as error:
        if from_outside(error):
            raise
        return None
    say(
        f"the runs' folder could not be written any more: the store and the files beside it have moved from {source} "
        f"to {folder}; read it with: {command_for(folder)} [{Code.STORE_UNWRITTEN}]"
    )
    return folder


def remove_stale() -> None:
    """Remove this user's folders whose launch is surely gone (it and its agent were killed)."""
    for base in {_SHARED_MEMORY, *_disks()}:
        for folder in base.glob(f"{_PREFIX}{os.getuid()}-*"):
            with suppress_own(OSError, ValueError, TypeError):
                if _is_ours(folder) and _is_gone(*_read_owner(folder / _OWNER).split()):
                    remove_scratch(folder)


def _is_gone(pid: str, began: str, namespace: str, boot: str = "", host: str = "") -> bool:
    """Whether the process that signed so has surely ended."""
    if int(namespace) != _pid_namespace():
        return False
    now = _began(int(pid))
    if not boot:  # of an earlier version: the time of its clock, which may have been set since
        return float(began) > 0 and now == 0
    if boot != (here := boot_id() or "-"):
        return "-" not in (boot, here) and host == host_name()  # else it is another host's, with the same disk
    return int(began) > 0 and now is not None and now != int(began)


def _is_ours(folder: Path) -> bool:
    """A folder itself, no link to one, of this user: anybody may put anything into the machine's temporary folders."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _read_owner(path: Path) -> str:
    """Never follows a link and never waits, as a FIFO would have us do."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is not a file")
        return os.read(fd, 200).decode("ascii", "replace")
    finally:
        os.close(fd)
