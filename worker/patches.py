"""What gpuwatch replaces in torch and in Python, within a rank. All of it goes through a ledger, which can undo it.

Several watchers of a process may stand in the place of one function, around each other, and leave in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class _ReplacedFunction:
    owner: Any
    name: str
    around: Callable[[Any], Any]
    before: Any
    ours: Any


_replaced: list[_ReplacedFunction] = []
"""Of this process, in the order in which they were put in place."""


def replaced() -> list[tuple[Any, str]]:
    """(class or module, name) of all that is replaced now."""
    return [(each.owner, each.name) for each in _replaced]


def _raised(part: str, error: Exception) -> None:
    raise error


class PatchLedger:
    """What one watcher has replaced, and what else is to be undone when it leaves.

    What is to stay as long as the process is replaced through a ledger that nobody keeps.
    """

    def __init__(self, on_fault: Callable[[str, Exception], None] = _raised) -> None:
        self._on_fault = on_fault
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        """Put `around(before)` in the place of what a class or a module has under this name itself.

        A name that this torch does not have is a fault, and nothing is replaced.
        """
        before = vars(owner).get(name)
        if before is None:
            lost = f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")
            self._on_fault("attach", LookupError(f"this torch has no {lost}: what is called by it is not seen"))
            return
        patch = _ReplacedFunction(owner, name, around, before, around(before))
        setattr(owner, name, patch.ours)
        _replaced.append(patch)
        self.at_undo(lambda: _take_out(patch))

    def at_undo(self, call: Callable[[], object]) -> None:
        """Have this called as well."""
        self._undo.append(call)

    def undo(self) -> None:
        """Put everything back, the last first. What somebody else has put around ours since stays, and calls ours."""
        while self._undo:
            self._undo.pop()()


def _take_out(patch: _ReplacedFunction) -> None:
    _replaced.remove(patch)
    old, new = patch.ours, patch.before
    for other in _replaced:  # those of other watchers go around what was there before
        if other.owner is patch.owner and other.name == patch.name and other.before is old:
            old, other.before = other.ours, new
            new = other.ours = other.around(new)
    if vars(patch.owner).get(patch.name) is old:
        setattr(patch.owner, patch.name, new)
