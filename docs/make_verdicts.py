"""Write the examples of docs/verdicts: run each command that is shown, and put in what the report opens with.

    python docs/make_verdicts.py [PAGE...]

An example is an indented command, and behind it two comments, `made` and `end`. What stands between these is made here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "verdicts"
EXAMPLE = re.compile(
    r"^    (?P<command>\S[^\n]*)\n\n<!-- made -->\n(?P<output>.*?)<!-- end -->", re.MULTILINE | re.DOTALL
)


def run(command: str) -> str:
    """What the report of a command opens with, indented: from the verdict to the first empty line."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "COLUMNS": "110", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command.split(), cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        report = Path(folder) / "gpuwatch-runs" / "latest" / "report.txt"
        printed = report.read_text() if report.exists() else done.stdout + done.stderr
    found = re.search(r"^VERDICT  .*?(?=\n\n|\Z)", printed, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"no verdict from {command}:\n{printed}")
    text = found[0].replace(folder, "~/gpuwatch").replace(str(ROOT), "~/gpuwatch")
    return "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())


def examples(page: Path) -> list[tuple[str, str]]:
    """(command, what the page has of its report) of each example."""
    return [(found["command"], found["output"]) for found in EXAMPLE.finditer(page.read_text())]


def main(pages: list[Path]) -> None:
    """Make the examples of the pages anew."""
    for page in pages:
        text = EXAMPLE.sub(
            lambda found: f"    {found['command']}\n\n<!-- made -->\n\n{run(found['command'])}\n<!-- end -->",
            page.read_text(),
        )
        page.write_text(text)
        print(page.relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main([FOLDER / name for name in sys.argv[1:]] or sorted(FOLDER.glob("*.md")))
