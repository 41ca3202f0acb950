"""From pictures of a job to the text of the screen. Pure: no socket, no clock, no terminal.

run 20261122-1437-ab12: train.py --lr 1e-4
4 ranks on 1 node, 2.1 batches/s (2.0 to 2.1), step 812
rank 2 is waited for: it has stood for 41 s in the forward, in `net.fc1`; 3 ranks wait
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Literal, NamedTuple, get_args

from msgspec.structs import replace

from ...core.codes import RANK_OVERFLOW, VerdictKind
from ...core.frames import format_number
from ...core.identity import is_rank, pid_of_number, rank_name
from ...core.text import numbers_text, shown
from ...core.values import DTYPE_MAX
from ...core.wire.view import JobView, NodeView, RankView
from ..report.rank_states import signal_name
from ..report.sentence_parts import counted, elapsed_text
from .snapshot import STATES, STILL_S, behind_of, state_of

WINDOW_S = 20.0
"""Batches a second are averaged over this time."""


class ScreenLine(NamedTuple):
    """One line and its look: "", `dim`, `good`, `warn` or `bad`."""

    text: str
    look: str = ""


class TopScreen(NamedTuple):
    """All of it. The parts stand one below the other; `ranks` may be longer than the terminal is high."""

    head: list[ScreenLine]
    ranks_title: ScreenLine
    ranks: list[ScreenLine]
    nodes: list[ScreenLine]
    hot: list[ScreenLine]
    events: list[ScreenLine]


class JobEnd(NamedTuple):
    """What verdict.json says of a run that is over; "" where there is none."""

    kind: str = ""
    statement: str = ""


Order = Literal["trouble", "number", "slowest", "longest at rest", "least used GPU"]
ORDERS: tuple[Order, ...] = get_args(Order)
_MOST_TIMES = 40
"""Step times that are drawn."""
_LEAST_TIMES = 4


@dataclass
class TopModel:
    """Give it each picture, then ask for the screen."""

    order: Order = "trouble"
    """Ranks with a remark first, in the order of their numbers, or those first that do least."""
    wanted: str = ""
    """Only ranks and nodes whose number, host, phase or module has this text."""
    shows_nodes: bool = False
    """The table shows the nodes in place of the ranks."""
    end: JobEnd | None = None
    """How the job ended; None while it goes on. The last picture is older."""
    _views: deque[JobView] = field(default_factory=deque)
    """Those of the last WINDOW_S."""
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))
    """Seconds of a batch, from one picture to the next in which the middle rank has got on."""
    _at: tuple[int, int] = (0, -1)
    """Time and batch of the middle rank when it last got on."""

    def see(self, view: JobView) -> None:
        """The next picture."""
        views = self._views
        if views and (views[-1].attempt != view.attempt or views[-1].time_ns >= view.time_ns):
            views.clear()
            self._times.clear()
            self._at = (0, -1)
        views.append(view)
        batches = sorted(rank.batch for rank in view.ranks if not rank.ended and rank.batch >= 0)
        time_ns, before = self._at
        if batches and (batch := batches[len(batches) // 2]) != before:
            self._at = view.time_ns, batch
            if batch > before >= 0:
                self._times.append((view.time_ns - time_ns) / 1e9 / (batch - before))
        while len(views) > 2 and view.time_ns - views[0].time_ns > WINDOW_S * 1e9:
            views.popleft()

    @property
    def newest(self) -> JobView | None:
        """The last picture."""
        return self._views[-1] if self._views else None

    def screen(self, width: int) -> TopScreen:
        """For a terminal of this width; no line is longer."""
        if not self._views:
            waiting = ScreenLine("waiting for the first update from the collector")
            return TopScreen([waiting], ScreenLine(""), [], [], [], [])
        view = self._views[-1] if self.end is None else _ended(self._views[-1], self.end)
        rates = self._rates() if self.end is None else {}
        behind = behind_of(view)
        columns = _columns(
            width,
            has_gpus=any(rank.gpu_use >= 0 for rank in view.ranks),
            has_loss=any(rank.loss != -1 for rank in view.ranks),
        )
        ranks = [rank for rank in view.ranks if self._is_wanted(rank.rank, rank.host, rank.phase, rank.module)]
        if self.order == "trouble":
            ranks = sorted(ranks, key=lambda rank: (STATES.index(state_of(rank, behind)), rank.rank))
        elif self.order == "slowest":
            ranks = sorted(ranks, key=lambda rank: (rank.ended, rates.get(rank.rank, 0.0), -rank.still_s, rank.rank))
        elif self.order == "longest at rest":
            ranks = sorted(ranks, key=lambda rank: (rank.ended, -rank.still_s, rank.rank))
        elif self.order == "least used GPU":
            ranks = sorted(ranks, key=lambda rank: (rank.ended, rank.gpu_use < 0, rank.gpu_use, rank.rank))
        lines = [_rank_line(rank, rates.get(rank.rank), rank.rank in behind, columns) for rank in ranks]
        lines += [_rank_line(process, None, False, columns) for process in view.processes]
        if view.more_processes:
            lines.append(ScreenLine(f"{view.more_processes} more processes without a rank", "dim"))
        title = ScreenLine("".join(_cell(size, name) for name, size in columns.items()) + " in", "dim")
        events = [ScreenLine(event.text, "bad" if event.loud else "") for event in reversed(view.events)]
        head = _head(view, rates, behind, list(self._times))
        if self.wanted:
            head.append(
                ScreenLine(f"only what has {self.wanted!r}: {len(ranks)} of {counted(len(view.ranks), 'rank')}")
            )
        nodes = _node_lines([node for node in view.nodes if self._is_wanted(node.host)])
        hot = _hot(view) if not behind else []  # where no rank gets on, no value comes closer to its limit
        head = [part for line in head for part in _folded(line, width)]
        (title,), lines, nodes, hot, events = (
            [_cut(line, width) for line in part] for part in ([title], lines, nodes, hot, events)
        )
        return TopScreen(head, title, lines, nodes, hot, events)

    def _is_wanted(self, *words: object) -> bool:
        return self.wanted.lower() in " ".join(map(str, words)).lower()

    def _rates(self) -> dict[int, float]:
        first, last = self._views[0], self._views[-1]
        seconds = (last.time_ns - first.time_ns) / 1e9
        if seconds <= 0:
            return {}
        before = {rank.rank: rank.batch for rank in first.ranks if rank.batch >= 0}
        found = [(rank.rank, rank.batch - before[rank.rank]) for rank in last.ranks if rank.rank in before]
        return {rank: max(0, batches) / seconds for rank, batches in found}


def _ended(view: JobView, end: JobEnd) -> JobView:
    """The last picture of a job that is over: it was made before the last ranks ended."""
    ranks = [rank if rank.ended else replace(rank, ended=True) for rank in view.ranks]
    found = replace(view, ranks=ranks, slow=None)
    return replace(found, kind=end.kind, verdict=end.statement) if end.statement else found


def _head(view: JobView, rates: dict[int, float], behind: set[int], times: list[float]) -> list[ScreenLine]:
    hosts = len(view.nodes)
    lines = [ScreenLine(f"run {view.run}: {' '.join(view.command)}")]
    speeds = sorted(rates[rank.rank] for rank in view.ranks if not rank.ended and rank.rank in rates)
    steps = [rank.step for rank in view.ranks if rank.step >= 0]
    text = f"{counted(view.world_size, 'rank')} on {counted(hosts, 'node')}"
    if speeds:
        text += f", {speeds[len(speeds) // 2]:.3g} batches/s ({speeds[0]:.3g} to {speeds[-1]:.3g})"
    text += f", step {max(steps)}" if steps else ""
    text += f", attempt {view.attempt + 1}" if view.attempt else ""
    text += f", for {elapsed_text((view.time_ns - view.started_ns) / 1e9)}" if view.started_ns else ""
    lines.append(ScreenLine(text))
    if len(times) >= _LEAST_TIMES:
        least, most = (format_seconds(seconds) for seconds in (min(times), max(times)))
        lines.append(ScreenLine(f"a batch takes {format_seconds(times[-1])} ({least} to {most}) {sparkline(times)}"))
    phases = Counter("ended" if rank.ended else rank.phase for rank in view.ranks)
    lines.append(ScreenLine(", ".join(f"{number} {phase}" for phase, number in phases.most_common())))
    if behind:
        lines.append(_waiting(view, behind))
    if view.verdict:
        lines.append(ScreenLine(view.verdict, "good" if view.kind == VerdictKind.CLEAN else "bad"))
    elif behind and view.hang:
        lines.append(ScreenLine(view.hang, "bad"))
    if view.slow is not None:
        lines.append(ScreenLine(f"rank {view.slow.rank} costs the job {view.slow.cost:.0%} of its time now", "warn"))
    lines += _gpus(view)
    gpus = [f"{node.host}: {node.gpus}" for node in view.nodes if node.gpus not in ("", "ok")]
    lost = [node.host for node in view.nodes if node.lost]
    xids = [f"{node.host}: XID {', '.join(map(str, node.xids))}" for node in view.nodes if node.xids]
    lines += [ScreenLine(f"silent: {', '.join(lost)}", "bad")] if lost else []
    lines += [ScreenLine("; ".join(xids), "bad")] if xids else []
    lines += [ScreenLine(f"GPUs not watched on {len(gpus)} of {hosts} nodes: {gpus[0]}", "dim")] if gpus else []
    return lines


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float]) -> str:
    """A block for each value, from 0 to the largest.

    >>> sparkline([0.1, 0.2, 0.8])
    '▁▂█'
    """
    top = max(values, default=0.0) or 1.0
    return "".join(_BLOCKS[max(0, math.ceil(value / top * len(_BLOCKS)) - 1)] for value in values)


def bar(share: float, width: int = 8) -> str:
    """`██████░░  75 %`; blanks where the share is not known.

    >>> bar(0.75)
    '██████░░  75 %'
    """
    full = round(max(0.0, min(1.0, share)) * width)
    return f"{'█' * full}{'░' * (width - full)} {share * 100:3.0f} %" if share >= 0 else " " * (width + 6)


def format_seconds(seconds: float) -> str:
    """`41 ms`, `2.3 s`"""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _node_lines(nodes: list[NodeView]) -> list[ScreenLine]:
    """A line for each, under a title: those with trouble first, then those with the busiest processors."""
    has_gpus = any(node.gpu_use >= 0 for node in nodes)
    title = f"{'node':<14}  {'processors':<14}  {'memory':<14}" + (f"  {'GPUs':<14}  GPU memory" if has_gpus else "")
    lines = []
    for node in sorted(nodes, key=lambda node: (not node.lost, not node.xids, -node.cpu, node.host)):
        text = f"{node.host[:14]:<14}  {bar(node.cpu)}  {bar(node.memory)}"
        text += f"  {bar(node.gpu_use)}  {bar(node.gpu_memory)}" if has_gpus else ""
        text += f"  {node.temperature:.0f} C" if node.temperature >= 0 else ""
        text += f"  {node.power:.0f} W" if node.power >= 0 else ""
        text += f"  XID {', '.join(map(str, node.xids))}" if node.xids else ""
        text += "  silent" if node.lost else ""
        lines.append(ScreenLine(text.rstrip(), "bad" if node.lost or node.xids else ""))
    is_known = has_gpus or any(node.cpu >= 0 or node.memory >= 0 for node in nodes)
    return [ScreenLine(title.rstrip(), "dim"), *lines] if is_known else []


def _waiting(view: JobView, behind: set[int]) -> ScreenLine:
    """`rank 2 is waited for: it has not moved for 41 s in forward, `net.fc1`; 3 ranks wait`"""
    one = next(rank for rank in view.ranks if rank.rank in behind)
    names = f"rank{'s' if len(behind) > 1 else ''} {numbers_text(sorted(behind))}"
    where = one.phase + (f", `{one.module}`" if one.module else "")
    waiting = sum(not rank.ended for rank in view.ranks) - len(behind)
    stood = "it has not moved" if len(behind) == 1 else f"rank {one.rank} has not moved"
    text = f"{names} {'is' if len(behind) == 1 else 'are'} waited for: {stood} for {one.still_s:.0f} s in {where}"
    return ScreenLine(f"{text}; {counted(waiting, 'rank')} wait{'s' if waiting == 1 else ''}", "bad")


def _gpus(view: JobView) -> list[ScreenLine]:
    """`GPUs in use 97 % of the time (3 to 99 %), memory up to 81 %`"""
    shares = sorted(rank.gpu_use for rank in view.ranks if rank.gpu_use >= 0)
    if not shares:
        return []
    memory = max(rank.gpu_memory for rank in view.ranks)
    middle, least, most = (_percent(share) for share in (shares[len(shares) // 2], shares[0], shares[-1]))
    full = f", memory up to {_percent(memory)} %" if memory >= 0 else ""
    return [ScreenLine(f"GPUs in use {middle} % of the time ({least} to {most} %){full}")]


def _percent(share: float) -> str:
    return f"{share * 100:.0f}" if share >= 0 else ""


_LOSS = "loss"
"""A column where a rank has one: a rank of a pipeline may have none."""
_FULL_BAR = 16.0
"""Powers of two below its limit at which a module's bar is empty."""
_WIDTHS = {
    **{"rank": 5, "host": -14, "phase": -10, "step": 8, "batch": 8, "/s": 6, _LOSS: 8},
    **{"gpu%": 4, "mem%": 4, "still": 6, "warned": 6},
}
"""Columns of a rank's line; below 0 a text begins at the left."""
_OF_GPUS = {"gpu%", "mem%"}
_FIRST_TO_GO = ("warned", "step", "host", "mem%", "/s", _LOSS)
"""Columns that a narrow terminal drops, in this order, to leave room for the module and the remark about the rank."""
_ROOM = 24


_WIDE = 120
"""Columns of a terminal that has room for bars of the GPUs."""
_BAR = len("██████░░  75 %")


def _columns(width: int, *, has_gpus: bool, has_loss: bool) -> dict[str, int]:
    """Name -> width, of the columns that have room."""
    without = (set() if has_gpus else _OF_GPUS) | (set() if has_loss else {_LOSS})
    left = {name: size for name, size in _WIDTHS.items() if name not in without}
    if width >= _WIDE:
        left |= dict.fromkeys(_OF_GPUS & left.keys(), -_BAR)
    for name in _FIRST_TO_GO:
        if sum(abs(size) + 1 for size in left.values()) + 1 + _ROOM <= width:
            break
        left.pop(name, None)
    return left


def _cell(width: int, text: str) -> str:
    size = abs(width)
    return f"{text[:size]:<{size}} " if width < 0 else f"{text:>{size}} "


def _rank_line(rank: RankView, rate: float | None, is_behind: bool, columns: dict[str, int]) -> ScreenLine:
    phase = _ending(rank) if rank.ended else rank.phase
    still = f"{rank.still_s:.0f} s" if not rank.ended and rank.still_s >= STILL_S else ""
    where = rank.module if not rank.ended else ""
    note = "OVERFLOW " if rank.overflow else "WAITED FOR " if is_behind else ""
    note += "" if is_rank(rank.rank) else f"pid {pid_of_number(rank.rank)} "
    share = bar if columns.get("gpu%") == -_BAR else _percent
    cells = {
        "rank": str(rank.rank) if is_rank(rank.rank) else "-",
        "host": rank.host,
        "phase": phase,
        "step": _count(rank.step),
        "batch": _count(rank.batch),
        "/s": f"{rate:.3g}" if rate is not None and not rank.ended else "",
        _LOSS: f"{rank.loss:.3g}" if rank.loss != -1 else "",
        "gpu%": share(rank.gpu_use),
        "mem%": share(rank.gpu_memory),
        "still": still,
        "warned": str(rank.warned or ""),
    }
    text = "".join(_cell(size, cells[name]) for name, size in columns.items()) + f" {note}{where}"
    bad = rank.overflow or is_behind or (rank.ended and rank.exit not in (0, None))
    return ScreenLine(text.rstrip(), "bad" if bad else "warn" if still else "dim" if rank.ended else "")


def _ending(rank: RankView) -> str:
    """At most ten letters: `stopped`, `SIGKILL`, `exit 3`; that it ended at its overflow stands beside it."""
    if rank.stopped:
        return "stopped"
    if rank.runs_on:
        return "running"
    if not rank.exit or (rank.overflow and rank.exit == RANK_OVERFLOW):
        return "ended"
    return signal_name(-rank.exit) if rank.exit < 0 else f"exit {rank.exit}"


def _hot(view: JobView) -> list[ScreenLine]:
    """`███████░   2.1 powers of two left: fc2, rank 3, to float16's 6.55e+04, +0.05 a batch, batch 812`

    A narrow terminal cuts its end: module and rank come first.
    """
    lines = []
    for hot in view.hot:
        going = f", {hot.change:+.2f} a batch" if abs(hot.change) >= 0.005 else ""
        limit = f"{hot.dtype}'s {format_number(DTYPE_MAX.get(hot.dtype)).strip()}"
        place = f"{hot.module or '(root)'}, {rank_name(hot.rank)}"
        room = bar(1 - hot.left / _FULL_BAR).partition(" ")[0]
        text = f"{room} {hot.left:5.1f} powers of two left: {place}, to {limit}{going}, batch {hot.batch}"
        lines.append(ScreenLine(text, "bad" if hot.left < 1 else "warn" if hot.left < 3 else ""))
    return lines


def _count(number: int) -> str:
    return str(number) if number >= 0 else "-"


_MOST_LINES = 4
"""Of a sentence in the head."""


def _folded(line: ScreenLine, width: int) -> list[ScreenLine]:
    """A verdict, or a sentence about trouble, has several lines where it needs them; any other line is cut."""
    if line.look not in ("bad", "good"):
        return [_cut(line, width)]
    parts = wrap(shown(line.text), width, max_lines=_MOST_LINES, placeholder="...")
    return [ScreenLine(part, line.look) for part in parts]


def stack_parts(text: str, width: int) -> list[str]:
    """A line of the stacks, whose further lines stand below its text."""
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return wrap(shown(text), max(20, width), subsequent_indent=indent) or [""]


def _cut(line: ScreenLine, width: int) -> ScreenLine:
    """No line is longer than the terminal is wide, and none has a character that moves the cursor."""
    text = shown(line.text)
    return ScreenLine(text if len(text) <= width else text[: max(0, width - 3)] + "...", line.look)


def plain(screen: TopScreen, most_ranks: int) -> str:
    """The screen as text, for where there is no terminal."""
    ranks = [line.text for line in screen.ranks[:most_ranks]]
    if len(screen.ranks) > most_ranks:
        ranks.append(f"... {len(screen.ranks) - most_ranks} more ranks")
    parts = [[line.text for line in screen.head], [screen.ranks_title.text, *ranks]]
    parts += [[line.text for line in screen.nodes[: most_ranks + 1]]] if screen.nodes else []
    parts += [["Closest to their limit", *(line.text for line in screen.hot)]] if screen.hot else []
    parts += [["What happened", *(line.text for line in screen.events)]] if screen.events else []
    return "\n\n".join("\n".join(part) for part in parts)
