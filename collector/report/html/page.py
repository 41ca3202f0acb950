"""report.html: the report as one file. The template has the words, this has what stands in them; nothing decides."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

from ....core.codes import CODE, CodeText, ReportSection, VerdictKind, code_texts, coded
from ....core.frames import Row, RowKind, format_number
from ....core.signal_errors import from_outside
from ....core.text import numbers_text
from ..model import RankReport, RunInfo, RunReport
from ..notices_text import notice_lines, trouble_lines
from ..operation_line import operation_in
from ..rank_states import state_text
from ..report_sections import LINES, is_open, sections_of
from ..sentence_parts import bytes_text, elapsed_text
from ..shared_lines import capture_lines, cascade_lines, concurrent_lines, first_text
from ..side_by_side import frame_key, frames_text, rank_to_show, stacks_text, title_of
from .cause_parts import sample_strip, trial_rows
from .chart import OutputChart, along_the_calls, losses, over_the_batches
from .grids import LEGEND, RankGrid, StageGrid, heat_map, level_of, rank_grid, stage_grid
from .over_time import SPARK_HEIGHT, SPARK_WIDTH, lanes, sparklines

MOST_EVENTS = 400
"""Most events in the timeline."""
MOST_WARNINGS = 200
FRAMES_BYTES = 1 << 20
"""Most bytes of text for all frames; the rest is in report.json alone."""


TensorColumn = tuple[str, str, str]
"""A tensor on one rank: (abs min, abs max, level)"""


PairRow = tuple[Row, str, list[TensorColumn | None]]
"""A tensor on two ranks: (row, shape, its columns)"""


class VerdictPicture(NamedTuple):
    """The one picture of the first screen: one of them is there, or none."""

    chart: OutputChart | None = None
    grid: RankGrid | None = None
    stages: StageGrid | None = None


def picture_of(report: RunReport) -> VerdictPicture:
    """The picture that shows the verdict, by its kind."""
    if report.verdict.kind == VerdictKind.OVERFLOW:
        chart = over_the_batches(report) or along_the_calls(report)
        if chart is not None:
            return VerdictPicture(chart=chart)
    if (report.run.check_only or report.verdict.kind == VerdictKind.PREFLIGHT) and report.preflight.stages:
        return VerdictPicture(stages=stage_grid(report))
    return VerdictPicture(grid=rank_grid(report))


def render_html(report: RunReport, spelled: Callable[[str], str] = str) -> str:
    """The whole page. `spelled` writes the options in a text as those spell them who read it."""
    style, script = _asset("report.css"), _asset("report.js")
    shown = rank_to_show(report)
    healthy = _healthy(report, shown)
    texts, left_out = _frame_texts(report)
    section_lines = {section: lines(report) for section, lines in LINES.items()}
    trouble, notices = list(trouble_lines(report)), notice_lines(report)
    lost = [rank for rank in report.ranks if rank.lost.total]
    found_lanes, telemetry = lanes(report), report.telemetry
    codes = _codes_of(report, [*trouble, *notices])
    counts = {
        **{section: len(lines) for section, lines in section_lines.items()},
        ReportSection.RANKS: len(report.everyone),
        ReportSection.PREFLIGHT: len(report.preflight.findings),
        ReportSection.NOTES: len(trouble) + len(notices),
        ReportSection.NODES: len(telemetry.notable) if telemetry is not None else 0,
        ReportSection.STEPS: len(report.steps.stragglers) if report.steps is not None else 0,
        ReportSection.INSIGHTS: len(report.insights),
        ReportSection.TIMELINE: len(report.timeline),
        ReportSection.BY_RANK: len(texts),
        ReportSection.LOST: len(lost),
        ReportSection.VERSIONS: len(report.nodes),
        ReportSection.CODES: len(codes),
    }
    template = _environment().get_template("report.html.jinja")
    return template.render(
        report=report,
        verdict=report.verdict,
        sections=[
            (
                section,
                is_open(report, section) or (section == ReportSection.TIMELINE and found_lanes is not None),
            )
            for section in sections_of(report)
        ],
        section_lines=section_lines,
        counts=counts,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'",
        picture=picture_of(report),
        loss_chart=losses(report),
        samples=sample_strip(report.verdict.cause),
        trials=trial_rows(report.verdict.cause),
        capture=capture_lines(report.verdict.capture),
        concurrent=concurrent_lines(report.verdict.concurrent),
        cascade=cascade_lines(report.verdict.cascade),
        trouble=trouble,
        notices=notices,
        heat=heat_map(report),
        legend=LEGEND,
        lanes=found_lanes,
        sparks=[(node, sparklines(node, telemetry.event)) for node in telemetry.nodes] if telemetry is not None else [],
        spark_size=(SPARK_WIDTH, SPARK_HEIGHT),
        shown=shown,
        healthy=healthy,
        pairs=_pairs(shown, healthy) if shown is not None else [],
        texts=texts,
        texts_left_out=left_out,
        stacks=list(stacks_text(report.ranks)),
        stages=stage_grid(report) if report.preflight.stages else None,
        warnings=[(rank.rank, warning) for rank in report.ranks for warning in rank.warnings][:MOST_WARNINGS],
        most_events=MOST_EVENTS,
        lost=lost,
        codes=codes,
        spelled=spelled,
    )


def embedded(page: str) -> str:
    """A page as one element of another one, such as a notebook: its style and script stay inside."""
    return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 32em; border: 0" title="gpuwatch"></iframe>'


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"first": first_text, "number": _number, "bytes": bytes_text, "numbers": numbers_text}
    environment.filters.update(
        filters, coded=coded, code=_spelled_code, level=level_of, duration=_duration, state=state_text
    )
    return environment


def _codes_of(report: RunReport, lines: list[str]) -> list[tuple[str, CodeText]]:
    """The codes that the page shows, with their texts. `lines` are those that the report's structs do not hold."""
    parts = report.verdict, report.insights, report.preflight.findings, report.steps, report.telemetry, lines
    there = set(CODE.findall(msgspec.json.encode(parts).decode()))
    return [(code, text) for code, text in code_texts().items() if code in there]


def _asset(name: str) -> str:
    return files(__package__).joinpath("templates").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    """As a content security policy names the one script that may run."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _healthy(report: RunReport, shown: RankReport | None) -> RankReport | None:
    if shown is None or not shown.frames_comparable:
        return None
    others = [rank for rank in report.ranks if rank is not shown and rank.frames and rank.frames_comparable]
    return next((rank for rank in others if rank.first_anomaly is None), others[0] if others else None)


def _pairs(shown: RankReport, healthy: RankReport | None) -> list[tuple[str, str, list[PairRow]]]:
    """Each call on two ranks: (title, module, rows)"""
    ranks = [shown] if healthy is None else [shown, healthy]
    frames = [{frame_key(frame): frame for frame in rank.frames} for rank in ranks]
    found = []
    for frame in shown.frames:
        alike = (mine.get(frame_key(frame)) for mine in frames)
        columns = [{row.role: row for row in other.rows} if other is not None else {} for other in alike]
        title = title_of(frame) if frame.module else f"(root) {title_of(frame).strip()}"
        rows: list[PairRow] = []
        for row in frame.rows:
            shape = "x".join(map(str, row.shape)) if row.shape is not None else ""
            rows.append((row, shape, [_column(each.get(row.role)) for each in columns]))
        found.append((title, frame.module, rows))
    return found


def _column(row: Row | None) -> TensorColumn | None:
    if row is None:
        return None
    if row.kind != RowKind.MEASURED:
        return row.kind.replace("_", " "), "", ""
    if row.nan:
        return "nan", "nan", "bad"
    if row.posinf or row.neginf:
        return _number(row.abs_min), "inf", "bad"
    near = row.headroom is not None and row.headroom < 1
    return _number(row.abs_min), _number(row.abs_max), "near" if near else ""


def _number(number: float | None) -> str:
    return format_number(number).strip() if number is not None else "inf"


def _frame_texts(report: RunReport) -> tuple[list[tuple[int, int, str, str]], int]:
    """((rank, batch, title, the frames as the text report has them) of each, how many are left out)"""
    found = []
    room, left_out = FRAMES_BYTES, 0
    for rank in sorted(report.ranks, key=lambda rank: rank.rank != report.verdict.rank):
        pages = [(f"last {len(rank.frames)} frames", rank.frames)] if rank.frames else []
        pages += [(f"{page.root}, traced: all frames", page.frames) for page in rank.traces if page.frames]
        for title, frames in pages:
            text = frames_text(frames)
            if len(text) > room:
                left_out += 1
                continue
            room -= len(text)
            found.append((rank.rank, frames[-1].batch, title, text))
    return found, left_out


_COMMAND = re.compile(
    r"gpuwatch (?:launch|run|check|submit|report|runs|diff|export|replay|top|stacks|collect)\b"
    r"(?: (?:--?[a-z][\w-]*(?:[ =](?!-)[^\s;:]*[^\s;:,.])?|[A-Z][A-Z_]+\b|[\w./-]*(?:\d[\w-]*|\.py\b)))*"
)
_CODED = re.compile(rf"\[({CODE.pattern})\]")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_STACKS = re.compile("(?<=the report has )the stacks")
_MARKS = {
    _COMMAND: '<code class="command">{}</code>',
    _OPTION: '<span class="option">{}</span>',
    _STACKS: f'<a href="#{ReportSection.STACKS}">{{}}</a>',
    _CODED: '<a class="code" href="#{1}">{0}</a>',
}


def code_of(text: str) -> Markup:
    """What stands between backticks as code, commands, which the page can copy, and links to the codes; else text.

    A line after the first is a command of its own, except in a traceback.

    >>> code_of("`fc1` < 2; to test it: gpuwatch check --nproc-per-node 8.")
    Markup('<code>fc1</code> &lt; 2; to test it: <code class="command">gpuwatch check --nproc-per-node 8</code>.')
    >>> code_of("Look at the line; the report has the stacks.")
    Markup('Look at the line; the report has <a href="#stacks">the stacks</a>.')
    """
    first, *commands = text.split("\n")
    if first.startswith("Traceback "):
        return Markup("{}<pre>{}</pre>").format(first, "\n".join(commands))
    pieces = first.split("`")
    if len(pieces) % 2 == 0:  # a name has a backtick of its own
        pieces = [first]
    parts = [Markup("<code>{}</code>").format(piece) if n % 2 else _marked(piece) for n, piece in enumerate(pieces)]
    return Markup("").join([*parts, *(Markup("<br>") + _command(line.strip()) for line in commands)])


@pass_context
def _spelled_code(context: Context, text: str) -> Markup:
    """As `code_of`. In the line of the verdict's operation, the operation is underlined."""
    line, rest = operation_in(context["verdict"].operation, text)
    marked = Markup("<code>{}<u>{}</u>{}</code>").format(*line.parts) if line is not None else Markup()
    return marked + code_of(context["spelled"](rest))


def _command(text: str) -> Markup:
    return Markup(_MARKS[_COMMAND]).format(text)


def _marked(text: str) -> Markup:
    """Commands as code; an option outside of one is not broken at its dashes; what stands below is a link."""
    found, at = [], 0
    matches = [match for pattern in _MARKS for match in pattern.finditer(text)]
    for match in sorted(matches, key=lambda match: match.start()):
        if match.start() >= at:
            found += [
                escape(text[at : match.start()]),
                Markup(_MARKS[match.re]).format(match[0], match[0][1:-1].lower()),
            ]
            at = match.end()
    return Markup("").join([*found, escape(text[at:])])


def _duration(run: RunInfo) -> str:
    """`took 0:04:07`; "" is unknown."""
    try:
        began, ended = (
            datetime.fromisoformat((time or "").replace("Z", "+00:00")) for time in (run.started, run.ended)
        )
    except ValueError as error:
        if from_outside(error):
            raise
        return ""
    return f"took {elapsed_text((ended - began).total_seconds())}"
