"""Turns a parsed command line into a batch script, and follows a job to its end.

The script's template is gpuwatch.sbatch.jinja. gpuwatch.sbatch beside it is what the template gives when nothing is
asked for: the arguments are then those of sbatch.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple

import jinja2

from ..core.codes import Code, coded
from ..core.errors import UsageError
from .sbatch import OF_THE_SUBMISSION, REFUSED, SHORT, WITH_OR_WITHOUT, WITH_VALUE, WITHOUT_VALUE, JobTask, LocalSlurm

RUNS_DIR = "gpuwatch-runs"
_PLAIN = re.compile(r"[\w.,:/=@%+*\[\]~^-]+", re.ASCII)
_LOOKS_ACTIVE = re.compile(r"[$`\\]")
_LINE_END = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029]")


class SbatchOption(NamedTuple):
    """An option of sbatch. `--exclusive` has no value, `--comment=` an empty one."""

    name: str
    value: str | None = None


@dataclass(frozen=True)
class BatchScript:
    """What a batch script is made from."""

    verb: Literal["launch", "check"] = "launch"
    options: tuple[SbatchOption, ...] = ()
    """Options of sbatch."""
    arguments: tuple[str, ...] | None = None
    """What follows the verb; None: what follows the script's name on the command line of sbatch."""
    job_name: str = "gpuwatch"
    """Unless the options have one."""
    program: tuple[str, ...] = ("gpuwatch",)
    """What runs gpuwatch on the nodes."""
    runs_dir: str = RUNS_DIR
    """Relative to the folder where sbatch is called."""


def render(script: BatchScript) -> str:
    """The text of the script. Raises UsageError on a value that a `#SBATCH` line cannot hold."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {
        "directive": _directive_value,
        "below_submit_dir": _below_submit_dir,
        "comment": partial(_LINE_END.sub, " "),
    }
    source = resources.files(__package__).joinpath("gpuwatch.sbatch.jinja").read_text(encoding="utf-8")
    arguments = None if script.arguments is None else shlex.join(script.arguments)
    return environment.from_string(source).render(
        verb=script.verb,
        given={option.name for option in script.options},
        options=[directive(option) for option in script.options],
        arguments=arguments,
        job_name=script.job_name,
        program=shlex.join(script.program),
        runs_dir=script.runs_dir,
        quiets_shellcheck=arguments is not None and bool(_LOOKS_ACTIVE.search(arguments)),
    )


def directive(option: SbatchOption) -> str:
    """What stands behind `#SBATCH`. Raises UsageError on a value that goes over the end of the line."""
    if option.value is None:
        return f"--{option.name}"
    if _LINE_END.search(option.value):
        raise UsageError(Code.WRONG_VALUE, f"--{option.name}: expected a value in one line, found {option.value!r}")
    return f"--{option.name}={_directive_value(option.value)}"


def _directive_value(value: str) -> str:
    """As sbatch reads it, which is not as a shell does: double quotes, and a backslash before `"` and itself."""
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _below_submit_dir(path: str) -> str:
    return shlex.quote(path) if path.startswith("/") else f"$SLURM_SUBMIT_DIR/{shlex.quote(path)}"


# Whose option is whose: gpuwatch submit takes those of sbatch, of gpuwatch launch, and a few of its own. Pure.

_OWN_FLAGS = frozenset({"print", "wait", "help"})
_OWN_LETTERS = {"h": "help", "W": "wait"}
_OWN_VALUES = frozenset({"exclude-bad", "program"})
_NNODES = re.compile(r"([0-9]+)(?::([0-9]+))?")


@dataclass(frozen=True)
class LaunchOptions:
    """What `gpuwatch launch` (or `check`) takes, as typed: `--every`, `--nproc_per_node`, `-m`."""

    with_value: frozenset[str]
    without_value: frozenset[str]


@dataclass
class SbatchCommand:
    """A command line, taken apart."""

    sbatch: list[SbatchOption] = field(default_factory=list)
    launch: list[str] = field(default_factory=list)
    """Options of the launch, with their values."""
    script: list[str] = field(default_factory=list)
    """The script and its arguments."""
    runs_dir: str | None = None
    exclude_bad: list[str] = field(default_factory=list)
    program: str | None = None
    print_only: bool = False
    wait: bool = False
    help: bool = False

    def value(self, name: str) -> str | None:
        """The value of an option of sbatch; if it is given more than once, the last one, as sbatch takes it."""
        return next((option.value for option in reversed(self.sbatch) if option.name == name), None)


def take_apart(arguments: list[str], options: LaunchOptions) -> SbatchCommand:
    """Everything up to the script is options. Raises UsageError on one that nobody knows.

    A name that sbatch and the launch both have (-t, -m): -m is the launch's, all others are sbatch's.
    """
    found = SbatchCommand()
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            _long(word, rest, options, found)
        else:
            _short(word, rest, options, found)
    found.script = rest
    return found


def _long(word: str, rest: list[str], options: LaunchOptions, found: SbatchCommand) -> None:
    typed, equals, text = word.partition("=")
    name, value = typed[2:], text if equals else None
    dashed = name.replace("_", "-")
    if dashed in _OWN_FLAGS:
        if value is not None:
            raise UsageError(Code.WRONG_VALUE, f"--{dashed}: expected no value, found {value!r}")
        setattr(found, {"print": "print_only"}.get(dashed, dashed), True)
    elif dashed == "exclude-bad":
        found.exclude_bad.append(_value(typed, value, rest))
    elif dashed in ("program", "runs-dir"):
        setattr(found, dashed.replace("-", "_"), _value(typed, value, rest))
    elif dashed == "nnodes":  # as torchrun has it
        nodes = _value(typed, value, rest)
        if _NNODES.fullmatch(nodes) is None:
            raise UsageError(Code.WRONG_VALUE, f"--nnodes: expected a number of nodes or MIN:MAX, found {nodes!r}")
        found.sbatch.append(SbatchOption("nodes", nodes.replace(":", "-")))
    elif dashed == "run-name":
        raise UsageError(Code.WRONG_TOGETHER, "--run-name: the runs of a job are named after it; drop it")
    elif typed in options.with_value:
        found.launch += [typed, _value(typed, value, rest)] if value is None else [word]
    elif typed in options.without_value:
        found.launch.append(word)
    else:
        _of_sbatch(name, value, rest, found, options)


def _of_sbatch(name: str, value: str | None, rest: list[str], found: SbatchCommand, options: LaunchOptions) -> None:
    if name in REFUSED:
        raise UsageError(Code.WRONG_TOGETHER, f"--{name}: {REFUSED[name]}")
    if name in WITH_VALUE:
        found.sbatch.append(SbatchOption(name, _value(f"--{name}", value, rest)))
    elif name in WITHOUT_VALUE and value is not None:
        raise UsageError(Code.WRONG_VALUE, f"--{name}: expected no value, found {value!r}")
    elif name in WITHOUT_VALUE | WITH_OR_WITHOUT or value is not None:
        found.sbatch.append(SbatchOption(name, value))
    else:
        raise _unknown(f"--{name}", options)


def _short(word: str, rest: list[str], options: LaunchOptions, found: SbatchCommand) -> None:
    """`-N 2`, `-N2`, `-HO`, `-m`"""
    letter, attached = word[1], word[2:]
    flag = f"-{letter}"
    if letter in _OWN_LETTERS:
        setattr(found, _OWN_LETTERS[letter], True)
    elif letter in SHORT:
        name = SHORT[letter]
        takes = name in WITH_VALUE
        _of_sbatch(name, attached if takes and attached else None, rest, found, options)
        if attached and not takes:
            _short(f"-{attached}", rest, options, found)
    elif flag in options.with_value:
        found.launch += [flag, attached or _value(flag, None, rest)]
    elif flag in options.without_value and not attached:
        found.launch.append(flag)
    else:
        raise _unknown(word, options)


def _value(typed: str, value: str | None, rest: list[str]) -> str:
    if value is not None:
        return value
    if not rest:
        raise UsageError(Code.ARGUMENT_MISSING, f"{typed}: expected a value after it, found the end of the line")
    return rest.pop(0)


def _unknown(word: str, options: LaunchOptions) -> UsageError:
    known = {f"--{name}" for name in WITH_VALUE | WITHOUT_VALUE | WITH_OR_WITHOUT | _OWN_FLAGS | _OWN_VALUES}
    close = difflib.get_close_matches(word, sorted(known | options.with_value | options.without_value), n=1)
    hint = f"did you mean {close[0]}? If it is" if close else "if it is"
    return UsageError(
        Code.NO_SUCH_OPTION,
        f"{word} is an option of neither sbatch nor gpuwatch launch; {hint} one of your site, write it as {word}=VALUE",
    )


_FIRST_LOOK_S = 1.0
_LATER_LOOKS_S = 10.0
_SLOWER = 1.2


def batch_script(
    submission: SbatchCommand, verb: Literal["launch", "check"], program: tuple[str, ...], bad_nodes: list[str]
) -> BatchScript:
    """What to render. A job is named after its script."""
    options = [option for option in submission.sbatch if option.name not in OF_THE_SUBMISSION]
    if bad_nodes:
        given = [option.value for option in options if option.name == "exclude" and option.value]
        options = [option for option in options if option.name != "exclude"]
        options.append(SbatchOption("exclude", ",".join(dict.fromkeys([*given, *bad_nodes]))))
    return BatchScript(
        verb,
        tuple(options),
        (*submission.launch, *submission.script),
        job_name=_job_name(submission, verb),
        program=program,
        runs_dir=submission.runs_dir or RUNS_DIR,
    )


def command_line_options(submission: SbatchCommand) -> list[str]:
    """What goes to sbatch itself."""
    options = [option for option in submission.sbatch if option.name in OF_THE_SUBMISSION]
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in options]


def _job_name(submission: SbatchCommand, verb: str) -> str:
    if verb == "check":
        return "gpuwatch-check"
    name = Path(submission.script[0]).stem if submission.script else ""
    try:
        directive(SbatchOption("job-name", name))
    except UsageError:  # a file's name may have two lines
        name = ""
    return name or "gpuwatch"


@dataclass
class JobFollower:
    """Polls a job until it is over, and reports changes of its state."""

    slurm: LocalSlurm
    say: Callable[[str], None]
    sleep: Callable[[float], None]

    def follow(self, job: str) -> list[JobTask]:
        """Its tasks as they ended. What SLURM has forgotten meanwhile is as it was seen last."""
        known: dict[str, JobTask] = {}
        pause_s, silent = _FIRST_LOOK_S, False
        while True:
            tasks = self.slurm.tasks(job)
            if tasks is None:
                if not silent:
                    self.say(coded(f"job {job}: SLURM does not answer; asking again", Code.SCHEDULER_SILENT))
                silent = True
            else:
                silent = False
                for task in tasks:
                    if task.id not in known or known[task.id].state != task.state:
                        why = f" ({task.reason})" if task.reason not in ("", "None") else ""
                        where = f" on {task.nodes}" if task.nodes and task.state == "RUNNING" else ""
                        self.say(f"job {task.id}: {task.state.lower()}{where}{why}")
                    known[task.id] = task
                if all(task.over for task in tasks):  # 17_3 before 17_10
                    return sorted(known.values(), key=lambda task: [int(n) for n in task.id.split("_") if n.isdigit()])
            self.sleep(pause_s)
            pause_s = min(_LATER_LOOKS_S, pause_s * _SLOWER)
