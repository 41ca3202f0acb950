"""`gpuwatch explain-log`: what the logs of a job say of its end, without a run of gpuwatch."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import click

from ..core.codes import Code
from ..core.errors import UsageError
from .report import TEXT_OR_JSON, echo_json, text_width

_MOST_BYTES = 256 << 20
"""Of each file, its end: what failed stands there."""
_GZIP = b"\x1f\x8b"


@click.command(name="explain-log")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@TEXT_OR_JSON
def explain_log(files: tuple[Path, ...], form: str) -> int:
    """Say from a job's logs who failed first, what it means, and what to do.

    FILE is what ranks, torchrun, SLURM or the kernel have printed: one file for all ranks or one for each, or a folder
    of them, packed by gzip or not. Lines of torch's watchdog are lined up over the ranks. A rank is known by the prefix
    [rankN] that torch prints, or by a file name such as rank3.log.

    Nothing in a log is certain: the verdict is supported or unknown. A run under gpuwatch launch shows more.

    gpuwatch explain-log slurm-17.out rank*.log

    Exit codes: as those of gpuwatch launch for the verdict, 6 for unknown, 2 wrong usage.
    """
    from ..collector.decide.log_verdict import log_verdict
    from ..collector.facts.log_lines import log_lines
    from ..collector.facts.log_reader import facts_of_logs
    from ..collector.report.text_report import verdict_text
    from ..collector.run_files import verdict_code

    paths = list(_all_files(files))
    lines = (line for path in paths for line in log_lines(_name(path, paths), _read(path)))
    verdict = log_verdict(facts_of_logs(lines))
    if form == "json":
        echo_json(verdict)
    else:
        click.echo(verdict_text(verdict, width=text_width()))
    return verdict_code(verdict)


def _all_files(files: tuple[Path, ...]) -> Iterator[Path]:
    for path in files:
        if path.is_dir():
            found = sorted(inner for inner in path.rglob("*") if inner.is_file())
            if not found:
                raise UsageError(Code.UNREADABLE, f"expected a folder with logs, found none in {path}")
            yield from found
        else:
            yield path


def _name(path: Path, paths: list[Path]) -> str:
    """The shortest end of a path that tells it from the others."""
    parts = path.parts
    for length in range(1, len(parts)):
        if sum(other.parts[-length:] == parts[-length:] for other in paths) == 1:
            return "/".join(parts[-length:])
    return str(path)


def _read(path: Path) -> str:
    """The end of a file. Raises UsageError if it cannot be read."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
            if not packed:
                file.seek(max(0, path.stat().st_size - _MOST_BYTES))
                return file.read(_MOST_BYTES).decode(errors="replace")
        with gzip.open(path) as file:
            data = b""
            while chunk := file.read(16 << 20):
                data = (data + chunk)[-_MOST_BYTES:]
            return data.decode(errors="replace")
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(Code.UNREADABLE, f"expected a log that can be read, found {path}: {why}") from error
