"""The kinds of verdict, ONE row each: what a run exits with, its colour, what of a report it opens, whom it blames."""

from __future__ import annotations

from .errors import Code, ExitCode
from .text import WordEnum


class Certainty(WordEnum):
    """How sure a verdict is."""

    ESTABLISHED = "established"
    SUPPORTED = "supported"
    UNKNOWN = "unknown"


class VerdictTone(WordEnum):
    """The colour of a verdict: on a terminal, and as a class of the page."""

    GOOD = "green"
    OPEN = "yellow"
    BAD = "red"


class NodeBlame(WordEnum):
    """Which nodes a verdict blames, where a scheduler may drain one."""

    GPU = "errors of the named rank's GPU"
    SILENT = "GPU, and the nodes that were lost"
    PREFLIGHT = "what the preflight found"


class ReportSection(WordEnum):
    """The sections of a report in their order: the name that links to it on the page, and its title."""

    VERDICT = "verdict", "Verdict"
    ATTEMPTS = "attempts", "Other attempts and earlier lives"
    RANKS = "ranks", "Ranks"
    STACKS = "stacks", "Stacks of the ranks"
    ERRORS = "errors", "Exceptions"
    PREFLIGHT = "preflight", "Preflight"
    NOTES = "notes", "Notes"
    NODES = "nodes", "Node telemetry"
    STEPS = "steps", "Where the time goes"
    INSIGHTS = "insights", "Close to trouble"
    WARNINGS = "warnings", "Rows close to trouble"
    HEAT = "heat", "Modules by ranks"
    TIMELINE = "timeline", "Timeline"
    FRAMES = "frames", "Last frames"
    BY_RANK = "by-rank", "Frames, rank by rank"
    LOST = "lost", "Lost records"
    VERSIONS = "versions", "Nodes and versions"
    CODES = "codes", "What the codes mean"

    heading: str


_T, _S = VerdictTone, ReportSection


class VerdictKind(WordEnum):
    """What became of a run. A kind whose row lacks a column is an error at import."""

    CLEAN = "clean", Code.CLEAN, ExitCode.CLEAN, _T.GOOD, None, NodeBlame.GPU, False
    CRASH = "crash", Code.CRASH, ExitCode.SCRIPT_FAILED, _T.BAD, _S.ERRORS, NodeBlame.GPU, False
    PREFLIGHT = "preflight", Code.PREFLIGHT, ExitCode.PREFLIGHT_FAILED, _T.BAD, _S.PREFLIGHT, NodeBlame.PREFLIGHT, True
    OVERFLOW = "overflow", Code.OVERFLOW, ExitCode.OVERFLOW, _T.BAD, _S.FRAMES, NodeBlame.GPU, True
    HANG = "hang", Code.HANG, ExitCode.LOST, _T.BAD, _S.STACKS, NodeBlame.GPU, False
    LOST = "lost", Code.LOST, ExitCode.LOST, _T.BAD, _S.NODES, NodeBlame.SILENT, False
    INTERRUPTED = "interrupted", Code.INTERRUPTED, ExitCode.SIGNAL, _T.OPEN, None, NodeBlame.GPU, False
    UNKNOWN = "unknown", Code.UNKNOWN, ExitCode.UNKNOWN, _T.OPEN, None, NodeBlame.GPU, False

    code: Code
    exit_code: ExitCode
    """Of `gpuwatch launch`; `SIGNAL`: 128 and the signal's number."""
    tone: VerdictTone
    opens: ReportSection | None
    """The section that bears the answer out: the page shows it unfolded, and the text on one screen has room for it."""
    blames: NodeBlame
    outranks: bool
    """A run exits with its code, whatever the wrapped command exits with."""


SHOWN: dict[VerdictKind, tuple[ReportSection, ...]] = {
    VerdictKind.CLEAN: (_S.INSIGHTS, _S.STEPS, _S.PREFLIGHT, _S.NOTES, _S.ATTEMPTS),
    VerdictKind.CRASH: (_S.NOTES, _S.ATTEMPTS, _S.RANKS),
    VerdictKind.PREFLIGHT: (_S.PREFLIGHT, _S.NOTES),
    VerdictKind.OVERFLOW: (_S.FRAMES, _S.NOTES, _S.ATTEMPTS, _S.RANKS),
    VerdictKind.HANG: (_S.STACKS, _S.NODES, _S.NOTES, _S.ATTEMPTS, _S.RANKS),
    VerdictKind.LOST: (_S.NODES, _S.NOTES, _S.ATTEMPTS, _S.RANKS),
    VerdictKind.INTERRUPTED: (_S.NOTES, _S.ATTEMPTS, _S.RANKS),
    VerdictKind.UNKNOWN: (_S.NOTES, _S.ATTEMPTS, _S.INSIGHTS, _S.RANKS),
}
"""What the text on one screen has below the verdict, the most telling first. The traceback of a crash is evidence: it
stands in the verdict."""
assert list(SHOWN) == list(VerdictKind)
