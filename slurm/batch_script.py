"""The batch script: from what was asked for to text. Pure; the template is gpuwatch.sbatch.jinja.

gpuwatch.sbatch beside it is what the template gives when nothing is asked for: the arguments are then those of sbatch.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Literal, NamedTuple

import jinja2

from ..core.codes import Code
from ..core.errors import UsageError

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
