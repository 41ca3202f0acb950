"""The lines of a job's logs, and which rank wrote them. No file is opened here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_MOST_LINE = 4000
_MOST_PREFIX = 300
_NUMBERED = re.compile(r"\[rank(\d+)\]:? ?")
"""torch's own prefix: the rank within the job. (torch/csrc/distributed/c10d/logging, sys.excepthook)"""
_OTHERS_PREFIX = re.compile(r"^(?:\([^()]*\bpid=\d+[^()]*\) ?|\[\d+\] |\[(?!rank)[a-z]+\d+\]:|\s{0,4}\d{1,5}: )+")
"""Ray's, GNU parallel's, torchrun's `--tee` (the rank within its node), and that of `srun --label` (the task)."""
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_OF_FILE = re.compile(r"(?:^|/)(?P<before>[^/]*?)rank[_.-]?(?P<rank>\d{1,5})\.[a-z.]+$", re.IGNORECASE)
_NO_RANK = ("node", "local", "lora")
"""`node_rank1.log`, `local_rank0.log` and `lora-rank16.out` are of no rank of the job."""
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
    """The lines of one file. A file that is named as `rank3.log` is that rank's."""
    named = _OF_FILE.search(file)
    is_ranks = named is not None and not named["before"].rstrip("_.-").lower().endswith(_NO_RANK)
    of_file = int(named["rank"]) if named is not None and is_ranks else None
    for number, whole in enumerate(text.splitlines(), 1):
        line = _COLORS.sub("", whole[:_MOST_LINE])
        host = next((match[1] for pattern in _HOSTS if (match := pattern.search(line)) is not None), "")
        prefix = _OTHERS_PREFIX.match(line)
        if prefix is not None:
            line = line[prefix.end() :]
        found = _NUMBERED.search(line, 0, _MOST_PREFIX)
        rank = int(found[1]) if found is not None else of_file
        yield LogLine(file, number, rank, host, line[found.end() :] if found is not None else line)
