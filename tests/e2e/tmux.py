"""A real terminal of a given size, with a shell in it: tmux, on a server of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from ..waiting import until

DEADLINE_S = 300


class Terminal:
    """`columns` by `lines`, in which `sh` runs. Keys are typed, and what stands on the screen is read."""

    def __init__(self, folder: Path, environment: Mapping[str, str], columns: int, lines: int) -> None:
        self._socket = folder / "tmux"
        self._folder = folder
        self._environment = {
            **{name: value for name, value in environment.items() if name not in ("TMUX", "TMUX_PANE", "ENV")},
            "LC_ALL": "C.UTF-8",
            "COLUMNS": str(columns),  # as a program with readline leaves them: they do not change with the size
            "LINES": str(lines),
        }
        size = ("-x", str(columns), "-y", str(lines))
        self._tmux("-u", "-f", "/dev/null", "new-session", "-d", *size, "sh")
        try:
            self.run("PS1='ready> '; clear")
            self.until(lambda screen: screen[0].strip() == "ready>")
        except BaseException:
            self.close()
            raise

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), *words],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def type(self, *keys: str) -> None:
        """`q`, `Enter`, `C-c`, or a whole line."""
        self._tmux("send-keys", *keys)

    def run(self, line: str) -> None:
        """A line for the shell."""
        self.type(line, "Enter")

    def resize(self, columns: int, lines: int) -> None:
        """As a user drags the window's corner."""
        self._tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def screen(self) -> list[str]:
        """Its lines."""
        return self._tmux("capture-pane", "-p").split("\n")[:-1]

    def state(self, *names: str) -> list[str]:
        """What tmux knows of it: `alternate_on`, `cursor_flag`, `mouse_any_flag`."""
        return self._tmux("display-message", "-p", " ".join(f"#{{{name}}}" for name in names)).split()

    def until(self, seen: Callable[[list[str]], object]) -> list[str]:
        """Wait for a screen."""
        found = until(
            lambda: screen if seen(screen := self.screen()) else None,
            "a screen as wanted",
            lambda: "\n".join(["the last one:", *self.screen()]),
        )
        assert found is not None
        return found

    def close(self) -> None:
        """End the shell and what runs in it."""
        self._tmux("kill-server")
