"""The lines of a job's logs, and which rank wrote them. No file is opened here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_MOST_LINE = 4000
_NUMBERED = re.compile(r"\[rank(\d+)\]:? ?")
"""torch's own prefix: the rank within the job. (torch/csrc/distributed/c10d/logging, sys.excepthook)"""
_OTHERS_PREFIX = re.compile(r"^(?:\(\w+ (?:pid|rank)=\d+[^)]*\) ?|\[\d+\] |\[(?!rank)[a-z]+\d+\]:|\s{0,4}\d{1,5}: )+")
"""Ray's, GNU parallel's, torchrun's `--tee` (the rank within its node), and that of `srun --label` (the task)."""
_OF_FILE = re.compile(r"(?:^|[^a-z])rank[_.-]?(\d{1,5})(?!\d)", re.IGNORECASE)
_HOSTS = (
    re.compile(r"srun: error: (\S+): tasks? "),
    re.compile(r"^(\S+?):\d+:\d+ \[\d+\] .*NCCL "),
    re.compile(r"^\w{3} [ \d]\d \d\d:\d\d:\d\d (\S+) kernel: "),
)


class LogLine(NamedTuple):
    """One line, without the prefix that says who wrote it."""

    file: str
    number: int
    """From 1."""
    rank: int | None
    host: str
    """"" where the line does not say it."""
    text: str

    @property
    def place(self) -> str:
        """`slurm-17.out:4711`"""
        return f"{self.file}:{self.number}"


def log_lines(file: str, text: str) -> Iterator[LogLine]:
    """The lines of one file. A file that has a rank in its name is that rank's."""
    named = _OF_FILE.search(file)
    of_file = int(named[1]) if named is not None else None
    for number, line in enumerate(text.splitlines(), 1):
        line = line[:_MOST_LINE]
        host = next((match[1] for pattern in _HOSTS if (match := pattern.search(line)) is not None), "")
        prefix = _OTHERS_PREFIX.match(line)
        if prefix is not None:
            line = line[prefix.end() :]
        found = _NUMBERED.search(line, 0, 60)
        rank = int(found[1]) if found is not None else of_file
        yield LogLine(file, number, rank, host, line[found.end() :] if found is not None else line)
