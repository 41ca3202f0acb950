"""The screen of `gpuwatch top`, with textual. It draws what the model says, and asks the link twice a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static

from ...core.errors import GpuwatchError
from ...core.wire.view import JobView
from .top_model import ORDERS, JobEnd, ScreenLine, TopModel, stack_parts

EVERY_S = 0.5
_STYLES = {
    "bad": Style(color="red", bold=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "dim": Style(dim=True),
    "": Style(),
}


class RankTable(ScrollView):
    """A line for each rank. Only visible lines are drawn, so that ten thousand cost as little as twenty."""

    can_focus = True

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self.lines: list[ScreenLine] = []

    def show(self, lines: list[ScreenLine]) -> None:
        """Replace all lines; the scroll position stays."""
        self.lines = lines
        self.virtual_size = Size(self.size.width, len(lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One line of the visible part."""
        width, number = self.size.width, y + self.scroll_offset.y
        if number >= len(self.lines):
            return Strip.blank(width)
        line = self.lines[number]
        return Strip([Segment(line.text, _STYLES[line.look])]).adjust_cell_length(width)


class TopApp(App[int]):
    """`newest` returns the last picture, or None without a new one; `is_over` says whether no more will follow."""

    CSS = """
    #head { height: auto; max-height: 14; }
    #title { height: 1; }
    #ranks { height: 1fr; min-height: 4; overflow-x: hidden; scrollbar-size-vertical: 1; }
    #hot, #events { height: auto; max-height: 5; border-top: solid $panel; }
    .empty { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),  # textual only shows how to quit
        Binding("o", "order", "Order"),
        Binding("n", "nodes", "Nodes or ranks"),
        Binding("s", "stacks", "Stacks"),
        Binding("slash", "filter", "Filter"),
        Binding("escape", "all", "All", show=False),  # ranks, and the table in place of the stacks
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self,
        newest: Callable[[], JobView | None],
        is_over: Callable[[], bool],
        report: str,
        ask_stacks: Callable[[], Callable[[], list[str] | None]] = lambda: lambda: [],
        end: Callable[[], JobEnd] = JobEnd,
    ) -> None:
        """`ask_stacks` asks the ranks for their stacks; what it returns has the text, or None until that has come.

        `end` is asked once the job is over.
        """
        super().__init__()
        self.model = TopModel()
        self._newest, self._is_over, self._report = newest, is_over, report
        self._ask_stacks, self._end = ask_stacks, end
        self._answer: Callable[[], list[str] | None] | None = None
        self._stacks: list[str] | None = None

    def compose(self) -> ComposeResult:
        """Five parts, one below the other."""
        yield Static(id="head")
        yield Static(id="title")
        yield RankTable(id="ranks")
        yield Input(id="filter", placeholder="part of a host, phase, module or rank", classes="empty")
        yield Static(id="hot")
        yield Static(id="events")
        yield Footer()

    def on_mount(self) -> None:
        """Start polling."""
        self.set_interval(EVERY_S, self.poll)
        self.query_one(RankTable).focus()
        self.draw()

    def poll(self) -> None:
        """Take the newest picture and draw it."""
        try:
            view = self._newest()
            self.model.end = self._end() if view is None and self._is_over() else None
            if self._answer is not None and (stacks := self._answer()) is not None:
                self._stacks, self._answer = stacks, None
        except GpuwatchError as error:
            self.notify(str(error), severity="error")
            return
        if view is not None:
            self.model.see(view)
        self.draw()

    def on_resize(self) -> None:
        """Redraw for the new width."""
        self.draw()

    def action_order(self) -> None:
        """The next order of the ranks."""
        self.model.order = ORDERS[(ORDERS.index(self.model.order) + 1) % len(ORDERS)]
        self.notify(f"ranks by {self.model.order}", timeout=2)
        self.draw()

    def action_nodes(self) -> None:
        """The nodes in place of the ranks, or back."""
        self.model.shows_nodes = not self.model.shows_nodes
        self.draw()

    def action_stacks(self) -> None:
        """Ask the ranks for their stacks, and show these in place of the ranks; or back."""
        if self._stacks is None:
            self._stacks, self._answer = ["the ranks are asked for their stacks"], self._ask_stacks()
        else:
            self._stacks = self._answer = None
        self.query_one(RankTable).scroll_home(animate=False)
        self.draw()

    def action_filter(self) -> None:
        """Type what is to be shown."""
        field = self.query_one("#filter", Input)
        field.remove_class("empty")
        field.focus()

    def action_all(self) -> None:
        """Show all again."""
        field = self.query_one("#filter", Input)
        field.value = self.model.wanted = ""
        self._stacks = self._answer = None
        self.on_input_submitted()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show only what has the text so far."""
        self.model.wanted = event.value
        self.draw()

    def on_input_submitted(self) -> None:
        """The text stays in effect."""
        self.query_one("#filter", Input).add_class("empty")
        self.query_one(RankTable).focus()
        self.draw()

    def draw(self) -> None:
        """All parts. The timer may fire once more when the app has ended, and removes them."""
        if len(self.query("#ranks, #head, #title, #hot, #events")) < 5:
            return
        screen = self.model.screen(self.size.width)
        over = self.model.end is not None
        head = [*screen.head, *([ScreenLine(f"the job is over: {self._report}", "warn")] if over else [])]
        table, title = (screen.nodes[1:], screen.nodes[:1]) if self.model.shows_nodes else (screen.ranks, None)
        if self._stacks is not None:
            table = [ScreenLine(part) for line in self._stacks for part in stack_parts(line, self.size.width - 1)]
            title = [ScreenLine("stacks; s: the ranks again", "dim")]
        self.query_one(RankTable).show(table)
        for name, lines in (
            ("head", head),
            ("title", [screen.ranks_title] if title is None else title),
            ("hot", screen.hot[:4]),
            ("events", screen.events[:4]),
        ):
            part = self.query_one(f"#{name}", Static)
            part.set_class(not lines, "empty")
            part.update(Text("\n").join(Text(line.text, _STYLES[line.look], no_wrap=True) for line in lines))
