"""The two ends of a program that Python tells nobody of: os.exec puts another one into its process, os._exit ends it.

Both are heard by standing in for the functions of `os`. An audit hook would hear os.exec as well, but it is called for
every event of the process, id() among them (32 ns without one, 196 ns with one that does nothing), and stays for good.
"""

from __future__ import annotations

import functools
import os
import posix
from collections.abc import Callable, Mapping
from typing import Any

from .patches import PatchLedger

Undo = Callable[[], None]
_replaced = False


def hear_of_ends(
    before_exec: Callable[[], Undo],
    before_exit: Callable[[], None],
    variables: Callable[[Mapping[Any, Any]], dict[str, str]],
) -> None:
    """Call `before_exec` and `before_exit` before such an end, in this process and its forks. They may not raise.

    `before_exec` returns what undoes it: os.exec fails where there is no such file. `variables` says what else belongs
    into the environment that the other program is to have. Only the first call in a process counts.
    """
    global _replaced
    if _replaced:
        return
    _replaced = True
    real_execv, real_execve, real_exit = os.execv, os.execve, os._exit

    @functools.wraps(real_execv)
    def execv(path: Any, argv: Any, /) -> Any:
        undo, more = before_exec(), variables(os.environ)
        before = {name: os.environ.get(name) for name in more}
        os.environ.update(more)
        try:
            return real_execv(path, argv)
        finally:  # there is no such file
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            undo()

    @functools.wraps(real_execve)
    def execve(path: Any, argv: Any, env: Mapping[Any, Any]) -> Any:
        undo, more = before_exec(), variables(env)
        try:
            return real_execve(path, argv, {**env, **more} if more else env)
        finally:
            undo()

    @functools.wraps(real_exit)
    def _exit(status: int) -> Any:
        before_exit()
        real_exit(status)

    patches = PatchLedger()
    for place in (os, posix):
        patches.replace(place, "execv", lambda _: execv)
        patches.replace(place, "execve", lambda _: execve)
        patches.replace(place, "_exit", lambda _: _exit)
    if real_execve in os.supports_fd:
        os.supports_fd.add(execve)
