"""The report on one screen: the verdict, and below it what bears out an answer of its kind, in at most 40 lines.

SHOWN in core/codes.py has the sections of each kind. All of them are in the text of `gpuwatch report --all`, on the
page and in report.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ...core.codes import SHOWN, ReportSection, VerdictKind
from ...core.identity import is_rank
from .model import RunReport
from .operation_line import evidence_lines
from .report_sections import is_about_preflight, sections_of_text
from .sentence_parts import TextConsole, counted
from .shared_lines import capture_lines, cascade_lines, concurrent_lines
from .side_by_side import frames_text, rank_to_show, stacks_of, stacks_text
from .text_report import (
    answer_text,
    frames_title,
    print_block,
    print_headline,
    print_item,
    print_list,
    print_ranks,
    print_section,
    print_title,
    scrolls,
)

MOST_LINES = 40
"""Of a terminal."""
_LEAST_REASONS = 8
"""Lines that the evidence has, whatever else there is to show."""
_MOST = {
    ReportSection.FRAMES: MOST_LINES,
    ReportSection.STACKS: 14,
    ReportSection.NODES: 12,
    ReportSection.PREFLIGHT: MOST_LINES,
    ReportSection.NOTES: 6,
    ReportSection.INSIGHTS: 10,
    ReportSection.STEPS: 8,
    ReportSection.RANKS: MOST_LINES,
}
"""Lines of each section,"""
_MOST_OF_A_LIST = 4
"""and of one that is a list of lines (report_sections.py)."""
_MOST_FRAME_LINES = 7
_MOST_CALLS = 5
_MOST_RANKS = 6
_LEAST_STEPS, _MOST_STEPS, _MOST_FURTHER = 3, 8, 4
"""Lines of "Next", and of each other list of the verdict."""
_NEVER_CUT = (ReportSection.FRAMES, ReportSection.RANKS)
"""Their end is what matters."""
_LEAST_CUT = 4
"""A section that has less room is shown whole or not at all."""
_LAST_LIST = "Seen before"
"""It stands below "Next"."""
_FIRST_TO_STAY = ("At the same time", "Capture", _LAST_LIST, "Because of it")
_CURSOR = re.compile(r"\x1b\[[0-9;]*m")

Lines = list[str]


def screen_text(
    report: RunReport, *, width: int = 80, color: bool = False, last_words: str = "", again: bool = True
) -> str:
    """The report, then `last_words`. Where this is more than a small terminal shows, the answer comes once more.

    `again` False: it does not, as in a file, which is read from its beginning.
    """
    screen = _ScreenWriter(report, width, color=color)
    last = ["", *last_words.splitlines()] if last_words else []
    text = "\n".join([*screen.lines(MOST_LINES - screen.height(last)), *last])
    if not again or not scrolls(text):
        return text
    last += ["", *answer_text(report, width=width, color=color).splitlines()]
    return "\n".join([*screen.lines(MOST_LINES - screen.height(last), step_follows=True), *last])


class _ScreenWriter:
    """Chooses what of a report has room."""

    def __init__(self, report: RunReport, width: int, *, color: bool) -> None:
        self._report = report
        self._width = width
        self._color = color
        self._there = sections_of_text(report)
        self._room = MOST_LINES
        """Lines that are left."""
        self._is_whole = True
        """Nothing is left out so far."""

    def height(self, lines: Lines) -> int:
        """How many lines of a terminal these are."""
        return sum(max(1, -(-cell_len(_CURSOR.sub("", line)) // self._width)) for line in lines)

    def lines(self, room: int, *, step_follows: bool = False) -> Lines:
        """The report in so many lines. The headline, one reason and one step are there in any case.

        `step_follows`: the first step comes again below, so that "Next" may be left out here.
        """
        report, verdict = self._report, self._report.verdict
        hint = self._drawn(self._hint)
        head = self._drawn(lambda console: print_title(console, report))
        head += self._drawn(lambda console: print_headline(console, verdict, report.how_sure))
        self._room = room - self.height([*head, *hint])
        kind = VerdictKind.PREFLIGHT if is_about_preflight(report) else verdict.kind
        drawn = {section: self._section(section) for section in SHOWN[kind]}
        first = [section for section in drawn if section in (kind.opens, ReportSection.NOTES)]
        kept = sum(self.height(drawn[section]) for section in first)
        evidence = evidence_lines(verdict, self._width)
        all_reasons = self._drawn(partial(print_list, title="Why", items=evidence))
        least = min(_LEAST_REASONS, self._room, self.height(all_reasons))
        steps = self._steps(self._room - kept - least if step_follows else self._room // 3, may_lack=step_follows)
        reasons = self._taken(self._items("Why", evidence, max(least, self._room - kept)))
        further = self._further(kept)
        shown = self._with_room([*first, *(section for section in drawn if section not in first)], drawn)
        last = further.pop(_LAST_LIST, [])
        found = [line for section in drawn for line in shown.get(section, [])]
        is_whole = self._is_whole and {ReportSection.VERDICT, *drawn} >= set(self._there)
        lists = [line for lines in further.values() for line in lines]
        return [*head, *reasons, *lists, *steps, *last, *found, *([] if is_whole else hint)]

    def _taken(self, lines: Lines) -> Lines:
        """The same lines, whose room is used up."""
        self._room -= self.height(lines)
        return lines

    def _steps(self, room: int, *, may_lack: bool) -> Lines:
        steps = self._report.verdict.next
        if may_lack and room < _LEAST_STEPS:
            self._is_whole &= len(steps) < 2
            return []
        return self._taken(self._items("Next", steps, min(_MOST_STEPS, room)))

    def _further(self, kept: int) -> dict[str, Lines]:
        """The other lists of the verdict that have room beside the `kept` lines, in the order of the whole text."""
        verdict = self._report.verdict
        items = {
            "Capture": capture_lines(verdict.capture),
            "At the same time": concurrent_lines(verdict.concurrent),
            "Because of it": cascade_lines(verdict.cascade),
            _LAST_LIST: self._report.seen_before,
        }
        shown: dict[str, Lines] = {}
        for title in _FIRST_TO_STAY:
            lines = self._items(title, items[title], min(_MOST_FURTHER, self._room - kept))
            if self._fits(lines, self._room - kept):
                shown[title] = self._taken(lines)
        return {title: shown[title] for title in items if title in shown}

    def _with_room(
        self, sections: list[ReportSection], drawn: dict[ReportSection, Lines]
    ) -> dict[ReportSection, Lines]:
        """Those that have room, the first ones first."""
        shown: dict[ReportSection, Lines] = {}
        for section in sections:
            lines = drawn[section]
            if self._room >= _LEAST_CUT:
                lines = self._cut(section, lines, self._room)
            if self._fits(lines, self._room):
                shown[section] = self._taken(lines)
        return shown

    def _fits(self, lines: Lines, room: int) -> bool:
        fits = self.height(lines) <= room
        self._is_whole &= fits
        return fits

    def _hint(self, console: Console) -> None:
        """The command for all of it."""
        console.print(Text(f"All of it: {self._report.run.report_command} --all", "dim"), soft_wrap=True)

    # -- the parts ----------------------------------------------------------------------------------------------

    def _drawn(self, draw: Callable[[Console], object]) -> Lines:
        console = TextConsole(self._width, color=self._color)
        draw(console)
        text = console.text()
        return text.split("\n") if text else []

    def _items(self, title: str, items: Lines, room: int) -> Lines:
        """A list of as many items as there is room for, and of the first one at least its ends."""
        if not items:
            return []
        lines = self._drawn(lambda console: console.print(Text(title, style="bold")))
        room -= len(lines)
        for number, item in enumerate(items):
            drawn = self._drawn(partial(print_item, item=item))
            left = room - (number < len(items) - 1)
            if self.height(drawn) > left and (number == 0 or ("\n" in item and left >= _LEAST_CUT)):
                drawn = self._folded(drawn, max(2, left))
            if self.height(drawn) > left and number > 0:
                lines.append(f"  - and {len(items) - number} more")
                self._is_whole = False
                break
            lines += drawn
            room -= self.height(drawn)
        return lines

    def _folded(self, lines: Lines, room: int) -> Lines:
        """The first of them and the last ones: of a traceback, its title and its innermost calls."""
        self._is_whole = False
        kept = list(lines[1:])
        while kept and self.height([lines[0], "", *kept]) > room:
            kept.pop(0)
        return [lines[0], f"    ... {counted(len(lines) - 1 - len(kept), 'line')}", *kept]

    def _cut(self, section: ReportSection, lines: Lines, room: int) -> Lines:
        if section in _NEVER_CUT or self.height(lines) <= room:
            return lines
        self._is_whole = False
        kept = list(lines)
        while kept and self.height(kept) > room - 1:
            kept.pop()
        return [*kept, f"  ... {len(lines) - len(kept)} more lines"]

    def _section(self, section: ReportSection) -> Lines:
        if section not in self._there:
            return []
        own = {ReportSection.FRAMES: self._frames, ReportSection.STACKS: self._stacks, ReportSection.RANKS: self._ranks}
        draw = own.get(section, lambda console: print_section(console, self._report, section))
        return self._cut(section, self._drawn(draw), _MOST.get(section, _MOST_OF_A_LIST))

    def _ranks(self, console: Console) -> None:
        console.print()
        print_ranks(console, self._report, _MOST_RANKS)

    def _frames(self, console: Console) -> None:
        """The last frames of the named rank, which end with the bad one."""
        rank = rank_to_show(self._report)
        if rank is None:
            return
        few = rank.frames[-1:]
        for number in range(2, len(rank.frames) + 1):
            if len(frames_text(rank.frames[-number:]).splitlines()) > _MOST_FRAME_LINES:
                break
            few = rank.frames[-number:]
        header, title, *rows = frames_text(few).splitlines()
        shown = [header, title, *rows[-(_MOST_FRAME_LINES - 2) :]]
        more = ""
        if len(few) < len(rank.frames):
            more = f" of {len(rank.frames)}" + (f"; more: --rank {rank.rank}" if is_rank(rank.rank) else "")
            self._is_whole = False
        print_block(console, f"{frames_title(rank.rank, few)}{more}", "\n".join(shown))

    def _stacks(self, console: Console) -> None:
        """That of the named rank, and the one that most of the others have."""
        named = self._report.named
        groups = stacks_of(self._report.ranks)
        groups.sort(key=lambda group: (all(rank.rank != named for rank in group[1]), -len(group[1])))
        few = [rank for _, ranks in groups[:2] for rank in ranks]
        lines = list(stacks_text(few, _MOST_CALLS))
        if len(groups) > 2:
            lines.append(f"and {counted(len(groups) - 2, 'more stack')}")
            self._is_whole = False
        print_block(console, ReportSection.STACKS.heading, "\n".join(lines))
