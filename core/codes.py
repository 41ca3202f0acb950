"""What is published of an answer: the codes of messages, the exit codes, and the kinds of verdict, ONE row each.

GW203 is one kind of message, in every release. docs/codes.md says what each means. A code is never used again: one that
is no longer needed keeps its line here, and its place in docs/codes.md. A kind's row says what a run exits with, its
colour, what of a report it opens, and whom it blames.
"""

from __future__ import annotations

import re
from enum import Enum, IntEnum
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .word_enum import WordEnum


class Code(str, Enum):
    """GW1xx verdicts, 2xx findings and notes, 3xx preflight, 4xx usage, 5xx what was not seen, 6xx gpuwatch itself."""

    CLEAN = "GW101"
    CRASH = "GW102"
    PREFLIGHT = "GW103"
    OVERFLOW = "GW104"
    HANG = "GW105"
    LOST = "GW106"
    INTERRUPTED = "GW107"
    UNKNOWN = "GW108"

    REPLICA_ODD = "GW201"
    REPLICA_DRIFT = "GW202"
    SCALER_COLLAPSING = "GW203"
    GROWTH = "GW204"
    NEAR_OVERFLOW = "GW205"
    RANK_UNLIKE = "GW206"
    NO_SCALER = "GW207"
    DEAD_MODULE = "GW208"
    SCALER_TOO_SMALL = "GW209"
    UNDERFLOW = "GW210"
    GRADIENTS_ZEROED = "GW211"
    WEIGHTS_UNMOVED = "GW212"
    DEAD_ACTIVATION = "GW213"
    GRADIENT_STOPPED = "GW214"
    PARTS_UNMOVED = "GW215"
    STRAGGLER = "GW221"
    NODE_FIGURE = "GW222"
    SCALER_SKIPS = "GW231"
    VALUES_WAIVED = "GW232"
    VALUES_ABSORBED = "GW233"
    BATCHES_SKIPPED = "GW234"
    TRACES_THINNED = "GW235"
    GROUPS_NOT_SHOWN = "GW236"
    CLOCK_OFF = "GW237"

    NOT_ARRIVED = "GW301"
    RANK_SILENT = "GW302"
    STORE_LOST = "GW303"
    FOREIGN_ENTRY = "GW304"
    PREFLIGHT_FAULT = "GW305"
    PREFLIGHT_SKIPPED = "GW306"
    RANK_TEST_FAILED = "GW311"
    GPU_NOT_INSPECTED = "GW312"
    GPU_MISSING = "GW313"
    GPU_SHARED = "GW314"
    VERSIONS_DIFFER = "GW321"
    SETTING_DIFFERS = "GW322"
    INTERFACE_MISSING = "GW323"
    NO_COMMON_NETWORK = "GW324"
    LIMIT_LOW = "GW325"
    GPU_UNHEALTHY = "GW331"
    HEALTH_UNKNOWN = "GW332"
    MEMORY_SCARCE = "GW333"
    WRONG_NUMBERS = "GW334"
    SLOW_DEVICE = "GW335"
    RANK_FAILED_GROUP = "GW341"
    GROUP_UNDECIDED = "GW342"
    NODE_UNREACHABLE = "GW343"
    LINK_BROKEN = "GW344"
    NO_PAIR_WORKS = "GW345"
    ONLY_ALL_FAIL = "GW346"
    BANDWIDTH_LOW = "GW347"
    LINK_SLOW = "GW348"

    NO_SUCH_COMMAND = "GW401"
    NO_SUCH_OPTION = "GW402"
    WRONG_VALUE = "GW403"
    WRONG_TOGETHER = "GW404"
    ARGUMENT_MISSING = "GW405"
    ARGUMENT_TOO_MANY = "GW406"
    NO_SCRIPT = "GW407"
    NESTED_RUN = "GW408"
    NO_SUCH_RUN = "GW411"
    NOT_IN_RUN = "GW412"
    NO_STORE = "GW413"
    UNREADABLE = "GW414"
    NOT_RUNNING = "GW415"
    NO_CAPTURE = "GW416"
    NOT_WRITABLE = "GW421"
    ADDRESS_IN_USE = "GW422"
    NO_MEETING_POINT = "GW423"
    NODE_UNCLEAR = "GW424"
    SECRET_WRONG = "GW425"
    SETTINGS_FILE = "GW426"
    NOT_INSTALLED = "GW427"
    SUBMISSION_REFUSED = "GW428"
    VERSIONS_APART = "GW429"
    NO_SUCH_CODE = "GW430"

    NODE_UNHEARD = "GW501"
    RANK_UNHEARD = "GW502"
    END_UNREPORTED = "GW503"
    OTHER_PROGRAM = "GW504"
    NO_RECORDER = "GW505"
    HOOKS_FAILED = "GW506"
    NO_MODULE_CALLED = "GW507"
    NOTHING_SELECTED = "GW508"
    CHILD_UNWATCHED = "GW509"
    RECORDS_LOST = "GW510"
    COMPILED_UNSEEN = "GW511"
    PARAMETERS_UNREAD = "GW512"
    THREAD_UNSEEN = "GW513"
    HOOKS_CLEARED = "GW514"
    TORCH_UNSEEN = "GW515"
    TENSOR_UNMEASURED = "GW516"

    OWN_FAULT = "GW601"
    COLLECTOR_ENDED = "GW602"
    AGENT_ENDED = "GW603"
    STORE_UNWRITTEN = "GW604"
    CLIENTS_REJECTED = "GW605"
    NO_C_PART = "GW606"
    SLOW_FOLDER = "GW607"
    NOT_NOTIFIED = "GW608"
    LEFT_BEHIND = "GW609"
    NO_RENDEZVOUS = "GW610"
    SCHEDULER_SILENT = "GW611"
    VERDICT_LATE = "GW612"
    KEYS_GUESSABLE = "GW613"
    READER_OFF = "GW614"

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # as StrEnum has it, from Python 3.11 on

    @property
    def kind(self) -> str:
        """`replica_odd`"""
        return self.name.lower()


CODE = re.compile(r"\bGW[1-9]\d\d\b")


def coded(text: str, code: str) -> str:
    """`text [GW203]`; without a code, which a report of an earlier release lacks, the text alone."""
    return f"{text} [{code}]" if code else text


class CodeText(NamedTuple):
    """What docs/codes.md has of one code."""

    title: str
    """One sentence."""
    text: str
    """A paragraph: the cause, how to check, the mend."""


@lru_cache(maxsize=1)
def code_texts() -> dict[str, CodeText]:
    """By code, in the page's order."""
    page = (Path(__file__).parents[1] / "docs" / "codes.md").read_text(encoding="utf-8")
    found = re.findall(r"^### (GW\d+)\n\n\*\*(.+?)\*\*\n\n(.+?)\n(?=\n#|\Z)", page, re.MULTILINE | re.DOTALL)
    plain = re.compile(r"\[([^]]+)\]\(([^)]+)\)")
    return {code: CodeText(title, plain.sub(r"\1 (docs/\2)", " ".join(text.split()))) for code, title, text in found}


# Exit codes of `gpuwatch launch` and `gpuwatch check`: a contract with the scripts that call them.


class ExitCode(IntEnum):
    """What a caller may branch on. As in a shell, a run that signal N ended exits with 128 + N."""

    CLEAN = 0
    SCRIPT_FAILED = 1
    USAGE = 2
    PREFLIGHT_FAILED = 3
    OVERFLOW = 4
    LOST = 5
    UNKNOWN = 6
    SIGNAL = 128


RANK_OVERFLOW = 94
"""What a rank ends with that gpuwatch ends because of an overflow: no script is likely to use it."""


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
