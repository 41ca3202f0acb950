"""Walk through a page of the docs as its reader does: run its commands in order, and compare what it shows.

    python -m tests.docs.walk PAGE...            # run, and say what differs
    python -m tests.docs.walk --write PAGE...    # and put what was printed into the page

A block is indented by four spaces or more. Its first paragraphs are commands or Python, what follows is what they
print. A paragraph of output stands in what one of the commands above it printed, word by word: numbers, times, paths,
names of runs and the ends of lines may differ, and `...` stands for any words. `--write` replaces each paragraph by the
newest one that begins with the same words; one that ends with `...` keeps its number of lines, one with `...` elsewhere
stays as it is.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from gpuwatch.core.codes import ExitCode, VerdictKind

from .walk_table import BEFORE, NOT_RUN, OPTIONAL

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
"""The environment's own programs come first."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "verdicts").glob("*.md"))]

COMMAND = re.compile(
    r"(_?[A-Z_]+=\S+ )*"
    r"(gpuwatch|python3?|make|pip|srun|mpirun|sbatch|torchx|mlflow|eval|export|mkdir|timeout|\(umask|#!/bin/bash)(?=\s|$)"
)
PYTHON = re.compile(r"(import|with|from) \w|ray\.")
COMPOUND = re.compile(r"(?:for|hosts)\b.*?^(?:done|wait)$", re.MULTILINE | re.DOTALL)
MASKS = [
    (re.compile(r"\[\S+/gloo/\S+\]\s.*?GLHF! \S+"), "what gloo says"),
    (re.compile(r"\b\d{8}-\d{6}-\w+"), "RUN"),
    (re.compile(r"(?<![\w*])(?:~|\.\.\.)?/(?:[^\s/:,'\"()]+/)*(?=[^\s/])"), ""),  # the folder of a file
    (re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b"), "#"),
    (re.compile(r"(?<![\w.#])[-+]?\d[\d:,]*(?:\.\d+)?(?:e[-+]?\d+)?"), "#"),
    (re.compile(r"# (?:[mu]?s|min|h|[kMG]?i?B)\b"), "#"),
    (re.compile(r"#(?:, #)+"), "#"),
    (re.compile(r"[▁-▏░]+"), "▇"),
    (re.compile(r"after its script had raised(?: \w+)?(?: \(its last batch: #\))?"), "THERE"),
    (re.compile(r"in the \w+ of batch #|outside of a forward, after batch #|in the preflight, stage \w+"), "THERE"),
    (re.compile(r"(?:raised \w+ after # collectives|was stopped by torchrun)(?: THERE)?"), "ENDED"),
    (re.compile(r"raised RuntimeError|stopped by torchrun"), "ENDED"),
    (re.compile(r"─+"), "─"),
]
"""What may differ from one run to the next, and what it becomes on both sides."""


LONGEST_S = 1200
ENDS_AS_THE_RUN = re.compile(r"gpuwatch (launch|run|check)")


@dataclass(frozen=True)
class Block:
    """An indented block: `line` is that of its first line, from 0."""

    page: Path
    line: int
    indent: int
    lines: list[str]

    def paragraphs(self) -> list[str]:
        return re.split(r"\n(?:\s*\n)+", "\n".join(self.lines))

    def parts(self) -> tuple[list[str], list[str]]:
        """(what is run, what is shown)."""
        paragraphs = self.paragraphs()
        if PYTHON.match(paragraphs[0]):
            return ["\n\n".join(paragraphs)], []
        told = next((n for n, text in enumerate(paragraphs) if not COMMAND.match(text)), len(paragraphs))
        run, shown = paragraphs[:told], paragraphs[told:]
        return [command for text in run for command in commands(text)], shown


def commands(text: str) -> list[str]:
    """The commands of a paragraph."""
    if text.startswith("#!") or COMPOUND.search(text):
        return [text]
    return re.sub(r"\\\n\s*", "", text).splitlines()


def blocks(page: Path) -> Iterator[Block]:
    """The indented blocks of a page."""
    lines = page.read_text().splitlines()
    start = 0
    while start < len(lines):
        before = lines[start - 1] if start else ""
        if not lines[start].startswith("    ") or before.strip():
            start += 1
            continue
        end = start
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith("    ")):
            end += 1
        taken = lines[start:end]
        while not taken[-1].strip():
            taken.pop()
        indent = min(len(line) - len(line.lstrip()) for line in taken if line.strip())
        yield Block(page, start, indent, [line[indent:] for line in taken])
        start = end


def masked(text: str) -> str:
    """The words of a text, without what differs from run to run."""
    text = " ".join(text.split())
    for pattern, mask in MASKS:
        text = pattern.sub(mask, text)
    return text


def stands_in(shown: str, printed: str) -> bool:
    """Whether each piece between two `...` stands in what was printed (masked), in their order."""
    at = 0
    for piece in shown.split("..."):
        words = masked(piece)
        at = printed.find(words, at)
        if at < 0:
            return False
        at += len(words)
    return True


def name_of(page: Path) -> str:
    """`docs/top.md`."""
    return page.relative_to(ROOT).as_posix()


def why_not(page: Path, text: str) -> tuple[str, str, str] | None:
    """The line of the table that says why a command is not run, or a paragraph not compared."""
    plain = re.sub(r"\s+# .*", "", text) if "\n" not in text else text
    lines = (line for line in NOT_RUN if line[0] == name_of(page) and fnmatch.fnmatchcase(plain, line[1]))
    return next(lines, None)


@dataclass
class Walk:
    """A page that is walked in a folder of its own."""

    page: Path
    folder: Path
    printed: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    made: list[tuple[Block, list[str]]] = field(default_factory=list)
    """The paragraphs of each block, with what was printed in place of what is shown."""
    groups: list[int] = field(default_factory=list)

    def walk(self) -> None:
        """Run all of it, and note what is not as shown."""
        for command in BEFORE.get(name_of(self.page), ()):
            self._run_whole(command)
        for block in blocks(self.page):
            run, shown = block.parts()
            for command in run:
                if not why_not(self.page, command) and (OPTIONAL not in command or shutil.which(OPTIONAL, path=PATH)):
                    self._run_whole(command)
            everything = [masked(text) for text in self.printed]
            compared = [paragraph for paragraph in shown if not why_not(self.page, paragraph)]
            for paragraph in compared:
                if not any(stands_in(paragraph, text) for text in everything):
                    self.trouble.append(f"{name_of(self.page)}:{block.line + 1}: nothing printed this:\n{paragraph}")
            texts = [renewed(text, self.printed) if text in compared else text for text in block.paragraphs()]
            self.made.append((block, texts))
        self.end()

    def end(self) -> None:
        """End the jobs that it left in the background."""
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)

    def _run_whole(self, command: str) -> None:
        """Run it, and after a job its whole report: a page may show more than one screen has."""
        self.run(command)
        if "\nVERDICT  " in self.printed[-1] and ENDS_AS_THE_RUN.search(command):
            self.run("gpuwatch report --all")

    def write(self) -> None:
        """Put in what was printed."""
        lines = self.page.read_text().splitlines()
        for block, made in reversed(self.made):
            text = "\n\n".join(made).splitlines()
            lines[block.line : block.line + len(block.lines)] = [(" " * block.indent + line).rstrip() for line in text]
        self.page.write_text("\n".join(lines) + "\n")

    def run(self, command: str) -> None:
        """Run one command as it stands, or Python. The exit code is that of the verdict that it printed, or 0."""
        argv = ["bash", "-c", command]
        if PYTHON.match(command):
            argv = [sys.executable, "-c", (SCRIPTS / "prelude.py").read_text() + command]
        environ = {**os.environ, "PATH": PATH, "OMP_NUM_THREADS": "1", "BROWSER": "true", "COLUMNS": "80"}
        environ["XDG_STATE_HOME"] = str(self.folder / "state")
        process = subprocess.Popen(
            argv,
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.groups.append(process.pid)
        try:
            text, _ = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text = process.communicate()[0] + f"\n(ended after {LONGEST_S} s)"
        text = text.replace(str(self.folder), "~").replace(str(ROOT), "~/gpuwatch")
        text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "vm", text)
        self.printed.append(text)
        verdict = re.search(r"^VERDICT  (\w+)", text, re.MULTILINE)
        ends_so = ENDS_AS_THE_RUN.search(command) or "gpuwatch explain-log" in command
        code = VerdictKind(verdict[1]).exit_code if verdict and ends_so else ExitCode.CLEAN
        wanted = {int(code)} if code is not ExitCode.SIGNAL else {130}
        if "gpuwatch diff" in command:
            wanted.add(1)
        if process.returncode not in wanted:
            self.trouble.append(f"{name_of(self.page)}: exit code {process.returncode}: {command}\n{text[-3000:]}")


@contextlib.contextmanager
def place(page: Path) -> Iterator[Path]:
    """A folder as the reader's: the checkout's examples, and a script of his own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for linked in ("examples", "benchmarks", "tests"):
            (folder / linked).symlink_to(ROOT / linked)
        for script in SCRIPTS.glob("*.py"):
            shutil.copy(script, folder / script.name)
        own = SCRIPTS / f"{page.stem}.py"
        if own.exists():
            shutil.copy(own, folder / "train.py")
        yield folder


def renewed(shown: str, printed: list[str]) -> str:
    """A paragraph as it was printed last: of those that begin as it does, the one that does so for longest."""
    paragraphs = [text.strip("\n") for each in printed for text in re.split(r"\n(?:\s*\n)+", each)]
    below_the_head = (text[text.find("VERDICT  ") :] for text in paragraphs if "─\nVERDICT  " in text)
    words = masked(shown).split()

    def begins_alike(text: str) -> int:
        return sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words, masked(text).split(), strict=False))
        )

    alike = [(begins_alike(text), text) for text in [*paragraphs, *below_the_head]]
    most = max((num for num, _ in alike), default=0)
    found = [text for num, text in alike if num == most > 0]
    cut = shown.endswith("...")
    if not found or "..." in shown.removesuffix("..."):
        return shown
    return "\n".join([*found[-1].splitlines()[: shown.count("\n")], "..."]) if cut else found[-1]


def main(pages: list[str], write: bool) -> int:
    """Walk the pages, or all; 1 if something is not as shown."""
    trouble = []
    for page in [ROOT / name for name in pages] or PAGES:
        print(name_of(page), flush=True)
        with place(page) as folder:
            walk = Walk(page, folder)
            walk.walk()
        if write:
            walk.write()
        for each in walk.trouble:
            print(each, flush=True)
        trouble += walk.trouble
    return bool(trouble)


if __name__ == "__main__":
    names = sys.argv[1:]
    sys.exit(main([name for name in names if name != "--write"], "--write" in names))
