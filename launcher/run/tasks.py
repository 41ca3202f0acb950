"""The tasks of one host, each a `gpuwatch run` of its own: one of them has the node agent, for all.

    /dev/shm/gpuwatch-1000-tasks-1f0c2b.../
        owner             locked by the task that has the agent and the scratch folder, as long as it lives
        scratch           the path of that folder, once the agent runs
        task-4711         locked by that task as long as it lives; holds its command's process id, then its exit code
        stop              why all commands of this host are to end
        verdict           what all of them print and exit with

`srun --ntasks-per-node 8` and `mpirun` start tasks. They communicate through files alone, so that none waits for one
that was killed: its locks go with it. Anybody may put something else where the folder is to be: then it is
`...-1`, `...-2` and so on, and the tasks go on without one where no name is left.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from ...core.codes import Code
from ...core.errors import GpuwatchError
from ...core.guest.own_files import write_whole
from ...core.text import from_json, to_json
from ...core.wire.pipe import JobResult

_SHARED_MEMORY = Path("/dev/shm")
_COME_S = 60.0
"""How long to wait for tasks that the environment announces and that have not come."""
_LEAVE_S = 20.0
_LOOK_S = 0.05
_MOST_NAMES = 64
"""In each place. Others may take names, and need not stop at one."""


class NoFolder(GpuwatchError):
    """There is no place for the folder: others have taken its names, or nothing can be written."""


class TaskCommand(msgspec.Struct, frozen=True):
    """The state of a task's command."""

    pid: int = 0
    code: int | None = None
    """Negative for a signal; None while it runs."""
    ended_by: int = 0
    """The signal that has ended this task's run; 0 for none."""


class HostTasks:
    """The tasks of one host and job, as one of them sees them. `number` is how many the job starts here."""

    def __init__(self, key: str, number: int) -> None:
        """`key` is the same in all tasks of this host. Raises NoFolder."""
        self._name = f"gpuwatch-{os.getuid()}-tasks-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        self._mine_name = f"task-{os.getpid()}"
        """It keeps that name if this process forks and its child goes on."""
        self._number = number
        self._ended_s: float | None = None
        while not self._enter():
            pass  # tasks of an earlier life of this job were about to take the folder away

    def _find_folder(self) -> Path:
        """The one that is there, even if a name before its own is free by now; else a new one. Raises NoFolder."""
        places = [  # in the order in which all tasks try
            base / (f"{self._name}-{number}" if number else self._name)
            for base in (_SHARED_MEMORY, Path(tempfile.gettempdir()))
            for number in range(_MOST_NAMES)
        ]
        for folder in places:
            if _is_private(folder):
                return folder
        trouble: OSError | None = None
        for folder in places:
            try:
                folder.mkdir(mode=0o700)
            except OSError as error:  # another task's that has just been made, another user's, or it cannot be made
                trouble = trouble if isinstance(error, FileExistsError) else error
            if _is_private(folder):
                return folder
        why = str(trouble) if trouble is not None else f"other users have taken all names, such as {places[0]}"
        raise NoFolder(Code.NOT_WRITABLE, why)

    def _enter(self) -> bool:
        """False if the folder was taken away meanwhile."""
        self._folder = self._find_folder()
        self._path_of_mine = self._folder / self._mine_name
        try:
            self._owner = self._open("owner")
            self._mine = self._open(f".{self._path_of_mine.name}")
        except FileNotFoundError:
            return False
        except OSError as error:
            raise NoFolder(Code.NOT_WRITABLE, str(error)) from error
        self.is_owner = _lock(self._owner)
        if not self.is_owner and self.verdict() is not None:  # an earlier job of this name, which is about to leave
            os.close(self._mine)
            os.close(self._owner)
            (self._folder / f".{self._mine_name}").unlink(missing_ok=True)
            time.sleep(_LOOK_S)
            return False
        fcntl.flock(self._mine, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):  # whoever sees a task's file sees it locked, or its task has ended
            (self._folder / f".{self._path_of_mine.name}").rename(self._path_of_mine)
        if not _is_at(self._owner, self._folder / "owner") or not _is_at(self._mine, self._path_of_mine):
            os.close(self._mine)
            os.close(self._owner)
            return False
        if self.is_owner:
            for name in ("scratch", "stop", "verdict"):
                (self._folder / name).unlink(missing_ok=True)
        return True

    # -- what all do --------------------------------------------------------------------------------------------

    def say(self, task: TaskCommand) -> None:
        """How this task's command is."""
        os.pwrite(self._mine, msgspec.json.encode(task).ljust(200), 0)  # in place: the lock is on this file

    def is_stopped(self) -> bool:
        """Whether the commands are to end."""
        return (self._folder / "stop").exists()

    def close(self) -> None:
        """This task leaves. The owner takes the folder away once the others have left."""
        if self.is_owner:
            ends = time.monotonic() + _LEAVE_S
            while self._others() and time.monotonic() < ends:
                time.sleep(_LOOK_S)
            self._remove()
        elif _lock(self._owner) and _is_at(self._owner, self._folder / "owner") and not self._others():
            self._remove()  # the owner was killed, and this is the last
        os.close(self._mine)
        os.close(self._owner)

    def _remove(self) -> None:
        for path in [path for path in self._folder.iterdir() if path.name != "owner"]:
            path.unlink(missing_ok=True)
        (self._folder / "owner").unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()

    # -- the owner ----------------------------------------------------------------------------------------------

    def share_scratch(self, scratch: Path) -> None:
        """The agent runs: the others may begin."""
        write_whole(self._folder / "scratch", str(scratch).encode())

    def stop(self, reason: str) -> None:
        """Have all commands ended."""
        write_whole(self._folder / "stop", reason.encode())

    def commands(self) -> dict[int, int | None]:
        """The other tasks' commands: exit codes by process id, None for one of which its task will tell."""
        return {task.pid: task.code for task, lives in self._heard() if task.pid and (lives or task.code is not None)}

    def all_ended(self, num_ranks: int = 0) -> bool:
        """Whether every other task has started and its command has ended, or it was killed.

        `num_ranks`: how many ranks this host has had. With one for each task, none is still to come.
        """
        heard = self._heard()
        if any(task.code is None and lives for task, lives in heard):
            self._ended_s = None
            return False
        if max(len(heard) + 1, num_ranks) >= self._number:
            return True
        self._ended_s = self._ended_s or time.monotonic()
        return time.monotonic() - self._ended_s > _COME_S

    def any_failed(self) -> bool:
        """Whether the command of another task has ended badly, or the task was killed."""
        return any(task.code or (task.code is None and not lives) for task, lives in self._heard())

    def results(self) -> list[TaskCommand]:
        """How the other tasks ended; one that was killed has no code."""
        return [task for task, _ in self._heard()]

    def share_verdict(self, verdict: JobResult | None) -> None:
        """The end, for all."""
        write_whole(self._folder / "verdict", to_json(verdict))

    # -- the others ---------------------------------------------------------------------------------------------

    def scratch(self) -> Path | None:
        """Where the owner has its recorders; None as long as it has not begun, or where it never will."""
        with suppress(OSError):
            return Path((self._folder / "scratch").read_text())
        return None

    def owner_lives(self) -> bool:
        """Whether the task that has the agent still does."""
        if not _lock(self._owner):
            return True
        fcntl.flock(self._owner, fcntl.LOCK_UN)
        return False

    def verdict(self) -> JobResult | None:
        """None as long as there is none."""
        with suppress(OSError):
            verdict: JobResult | None = from_json((self._folder / "verdict").read_bytes(), JobResult | None)
            return verdict
        return None

    # -- files --------------------------------------------------------------------------------------------------

    def _open(self, name: str) -> int:
        return os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _others(self) -> list[Path]:
        return [path for path in self._task_files() if _is_locked(path)]

    def _task_files(self) -> list[Path]:
        return [path for path in self._folder.glob("task-*") if path != self._path_of_mine]

    def _heard(self) -> list[tuple[TaskCommand, bool]]:
        """What the other tasks have said, and whether each still lives."""
        found = []
        for path in self._task_files():
            lives = _is_locked(path)  # first: what it has said before it ended counts
            with suppress(OSError, msgspec.DecodeError):
                text = path.read_bytes().strip()
                found.append((msgspec.json.decode(text, type=TaskCommand) if text else TaskCommand(), lives))
        return found


def _is_private(folder: Path) -> bool:
    """A folder itself, no link to one, of this user, in which nobody else may write."""
    with suppress(OSError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return False


def _lock(fd: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is the one that has this name."""
    with suppress(OSError):
        return os.fstat(fd).st_ino == path.stat().st_ino
    return False


def _is_locked(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return not _lock(file.fileno())
    return False
