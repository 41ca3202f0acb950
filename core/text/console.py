"""A text of a given width, printed with rich as on a terminal and kept."""

from __future__ import annotations

import io

from rich.console import Console


class TextConsole(Console):
    """`width` in characters; with `color`, the text has escape sequences."""

    def __init__(self, width: int, *, color: bool) -> None:
        self._kept = io.StringIO()
        super().__init__(
            file=self._kept,
            width=width,
            force_terminal=color,
            color_system="standard" if color else None,
            highlight=False,
        )

    def text(self) -> str:
        """All that was printed, without blanks at the ends of lines and without empty lines at the end."""
        return "\n".join(line.rstrip() for line in self._kept.getvalue().splitlines()).rstrip("\n")
