"""The codes of messages, exit codes, and the errors of the package.

GW203 is one kind of message, in every release. docs/codes.md says what each means. A code is never used again: one that
is no longer needed keeps its line here, and its place in docs/codes.md.

The command line prints the sentence of a `GpuwatchError` and exits with its code.
"""

from __future__ import annotations

import re
from enum import Enum, IntEnum
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


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


class GpuwatchError(Exception):
    """An error that the user sees as one sentence, with its code at the end."""

    exit_code: ExitCode = ExitCode.SCRIPT_FAILED

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text

    def __str__(self) -> str:
        return coded(self.text, self.code)


class UsageError(GpuwatchError):
    """A usage error. It says what was expected, what was found, and which flag to change."""

    exit_code = ExitCode.USAGE


class OutputLost(GpuwatchError):
    """What a command was called for cannot be printed. `is_wanted`: somebody still reads."""

    def __init__(self, error: Exception, *, is_wanted: bool) -> None:
        text = f"expected a stdout that can be written, found: {error}; where the command has --output, write to a file"
        super().__init__(Code.NOT_WRITABLE, text)
        self.is_wanted = is_wanted
        self.exit_code = ExitCode.USAGE if is_wanted else ExitCode.CLEAN


class OverflowDetected(GpuwatchError, ValueError):
    """A watched tensor holds inf or nan and the policy is `abort`.

    It is a `ValueError`, because transformers' DebugUnderflowOverflow raises one.
    """

    exit_code = ExitCode.OVERFLOW

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)

    __str__ = Exception.__str__


class JobEnded(SystemExit):
    """The job ends at the batch that `--abort-after-batch` names. The exit code is 0."""
