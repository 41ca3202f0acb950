"""The preflight while it runs: a line per stage, live on a terminal, else one plain line per finished stage.

preflight arrive       ok       16 of 16 ranks   0.3 s
preflight compute      ...      12 of 16 ranks
"""

from __future__ import annotations

import sys
import threading
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from ..core.wire.pipe import PreflightOver, StageLine

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "unknown": "yellow"}


class LiveLines:
    """Where the lines go."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def show(self, line: StageLine | PreflightOver) -> None:
        """A stage has moved; or the preflight has ended, and its result and warnings are printed."""
        if isinstance(line, StageLine):
            self._show(line)
            return
        self.close()
        for text in filter(None, [line.text, *line.warnings]):
            self._say(text)

    def _show(self, line: StageLine) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Leave the terminal as it was. May be called several times."""
        raise NotImplementedError

    def _say(self, text: str) -> None:
        self._out.write(f"gpuwatch: {text}\n")  # in one piece: the ranks write to the same file
        self._out.flush()


def live_lines(*, check_only: bool, out: IO[str] | None = None, patience_s: float = 10.0) -> LiveLines:
    """The kind that suits stderr. A launch leaves one line in the end, a check one per stage.

    In a file, a stage that takes longer than `patience_s` has a line before it is over.
    """
    out = out or sys.stderr
    if out.isatty():
        return _TerminalLines(out, keep=check_only)
    return _PlainLines(out, every_stage=check_only, patience_s=patience_s)


class _PlainLines(LiveLines):
    """For a file or a pipe."""

    def __init__(self, out: IO[str], *, every_stage: bool, patience_s: float) -> None:
        super().__init__(out)
        self._every_stage = every_stage
        self._patience_s = patience_s
        self._told: set[str] = set()
        self._last: StageLine | None = None
        self._timer: threading.Timer | None = None

    def _show(self, line: StageLine) -> None:
        before, self._last = self._last, line  # before the timer begins: on a loaded machine it may be over at once
        if before is None or before.stage != line.stage:
            self.close()
            self._timer = threading.Timer(self._patience_s, self._say_that_it_takes_long)
            self._timer.daemon = True
            self._timer.start()
        if self._every_stage and line.grade and (line.stage not in self._told or line.grade == "fail"):
            self._told.add(line.stage)
            count = f"{line.done} of {line.ranks} ranks"
            self._say(f"preflight {line.stage:<12} {line.grade:<8} {count:<18} {line.seconds:.1f} s")

    def _say_that_it_takes_long(self) -> None:
        line = self._last
        if line is not None and not line.grade:
            self._say(f"preflight {line.stage}: {line.done} of {line.ranks} ranks so far, still waiting")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _StageSeconds(ProgressColumn):
    """How long a stage has been running; once it is over, how long its slowest rank took."""

    def render(self, task: Task) -> Text:
        seconds = task.fields.get("seconds") or task.elapsed or 0.0
        return Text(f"{seconds:.1f} s")


class _TerminalLines(LiveLines):
    """For a terminal: bars that fill. What others print meanwhile goes above them."""

    def __init__(self, out: IO[str], *, keep: bool) -> None:
        super().__init__(out)
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._progress = Progress(
            TextColumn("preflight {task.description:<12}"),
            TextColumn("{task.fields[grade]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed} of {task.total} ranks"),
            _StageSeconds(),
            console=Console(file=out, highlight=False),
            transient=not keep,
        )

    def _show(self, line: StageLine) -> None:
        with self._lock:
            if self._closed:
                return
            if not self._tasks:
                self._progress.start()
            if line.stage not in self._tasks:
                self._tasks[line.stage] = self._progress.add_task(line.stage, grade="...", total=line.ranks)
            task = self._tasks[line.stage]
            style = _STYLES.get(line.grade)
            grade = f"[{style}]{line.grade:<8}[/]" if style else f"{'...':<8}"
            self._progress.update(task, completed=line.done, total=line.ranks, grade=grade)
            if line.grade:
                self._progress.update(task, seconds=line.seconds)
                self._progress.stop_task(task)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._tasks:
                self._tasks.clear()
                self._progress.stop()
