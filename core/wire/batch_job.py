"""The job of a batch scheduler that a node runs in, in the scheduler's own words.

The launcher's module for that scheduler fills it in; who reads it knows no scheduler by name.
"""

from __future__ import annotations

import re
import shlex

import msgspec

_BLANK = re.compile(r"\{(nodes|reason)\}")


class SchedulerJob(msgspec.Struct, frozen=True):
    """A scheduler's job, as one node sees it. The two command texts have the placeholders `{nodes}` and `{reason}`."""

    scheduler: str
    """What users call it: `SLURM`."""
    job: str
    """The job's id."""
    node: str = ""
    """What the scheduler calls this node; "" if it does not say."""
    nodes: list[str] = []
    """What it calls the nodes of the job, in its order."""
    drain: str = ""
    """The command that takes nodes out of service: `scontrol update nodename={nodes} state=drain reason={reason}`."""
    exclude: str = ""
    """The option of a next submission that leaves nodes out: `--exclude={nodes}`."""
    daemon: str = ""
    """Its process on a node: `slurmd`."""


def fill_command(text: str, nodes: list[str], reason: str) -> str:
    """A command text with its blanks filled, quoted for a shell.

    >>> fill_command("--exclude={nodes}", ["gpu-1", "gpu-2"], "")
    '--exclude=gpu-1,gpu-2'
    """
    values = {"nodes": shlex.quote(",".join(nodes)), "reason": shlex.quote(reason)}
    return _BLANK.sub(lambda blank: values[blank[1]], text)
