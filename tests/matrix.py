"""Runs the tests with other releases of torch and of Python, and writes docs/versions.md: `make matrix`.

Each pair gets a virtual environment in build/matrix, with the newest release of every other dependency, and gpuwatch
built into it. A build of torch for CUDA takes 5 GB: --remove removes an environment after its run.

    python tests/matrix.py --torch 2.8.0 --python python3.12 --short
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "matrix"
PAGE = ROOT / "docs" / "versions.md"

TORCH = ("2.5.1", "2.8.0", "2.11.0", "2.13.0", "2.14.1", "2.15.0")
PINNED = "2.13.0"
"""By constraints.txt: all other tests run with it."""
PYTHON = "python3.11"
"""Each torch is tried with it."""
OTHER_PYTHONS = {"python3.10": "2.14.1", **dict.fromkeys(("python3.12", "python3.13", "python3.14"), TORCH[-1])}
"""Each of them is tried with the newest torch that has a wheel for it."""

NEEDS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "setuptools>=77", "wheel", "jsonschema", "pyyaml")
QUICK = "not slow and not soak and not gpu"
OWN_PACKAGES = ("tests/worker/test_debug_underflow_overflow.py", "tests/worker/test_detect_overflow.py")
"""They import transformers, which has its own idea of the oldest torch."""
ALL = (
    ("tests/core", "tests/worker", *(f"--ignore={path}" for path in OWN_PACKAGES), "-m", QUICK),
    (
        "tests/e2e/test_overflow.py",
        "tests/e2e/test_run.py",
        "tests/e2e/test_preflight.py",
        "tests/e2e/test_nodes.py",
        "tests/e2e/test_rpc.py",
        "-m",
        f"({QUICK}) or (slow and not soak and not gpu)",
        "--sample",
    ),
)
SHORT = (
    (
        "tests/core/test_torch_names.py",
        "tests/core/test_torch_notes.py",
        "tests/worker/hooks/test_global_hooks.py",
        "tests/worker/hooks/test_forward.py",
        "tests/worker/hooks/test_collectives.py",
        "tests/worker/hooks/test_optimizer.py",
        "tests/worker/device/test_triton_reader.py",
        "tests/worker/explain/test_packed_nodes.py",
        "tests/worker/explain/test_kept_loss.py",
        "tests/e2e/test_overflow.py",
        "-m",
        QUICK,
    ),
)
ALONE = "==== once more, alone"
"""tests/once_more.py begins a line with it: what comes then is no longer the run itself."""
MARKS = "<!-- made by tests/matrix.py: from here -->", "<!-- to here -->"


@dataclass
class Row:
    """What came of one pair."""

    torch: str
    python: str
    date: str
    result: str
    is_good: bool = True

    @property
    def line(self) -> str:
        """`| 2.8.0 | 3.11.7 | 3498 passed | 2026-11-24 |`"""
        return f"| {self.torch} | {self.python} | {self.result} | {self.date} |"


def main() -> int:
    """Returns 1 if a test has failed."""
    args = arguments()
    rows = []
    for torch, python in pairs(args):
        row = run_pair(torch, python, args)
        rows.append(row)
        print(f"==== {row.line}", flush=True)
        if not args.no_page:
            write(row)
    return 0 if all(row.is_good for row in rows) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="", help=f"releases, with commas between them ({', '.join(TORCH)})")
    parser.add_argument("--python", default="", help=f"interpreters ({PYTHON}; the others, each with its newest torch)")
    parser.add_argument("--turn", default="", help="draws one more of the releases: CI takes the commit")
    parser.add_argument("--short", action="store_true", help="a minute of tests: attach, hooks, compile, one overflow")
    parser.add_argument("--remove", action="store_true", help="remove each environment after its run")
    parser.add_argument("--no-page", action="store_true", help="leave docs/versions.md as it is")
    parser.add_argument(
        "--once-more", action="store_true", help="run what failed once more, alone (tests/once_more.py)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="tests at the same time (2)")
    return parser.parse_args()


def pairs(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(torch, python) to be tried."""
    torches, pythons = args.torch.split(",") if args.torch else TORCH, args.python.split(",") if args.python else []
    found = [(torch, python) for torch in torches for python in pythons or [PYTHON]]
    if args.turn:  # one of the others, another one for each commit
        others = [torch for torch in TORCH[1:-1] if torch != PINNED]  # 2.5.1's gloo stands still now and then
        found.append((others[int(hashlib.sha256(args.turn.encode()).hexdigest(), 16) % len(others)], found[0][1]))
    if not args.torch and not args.python:
        found += [(torch, python) for python, torch in OTHER_PYTHONS.items()]
    return found


def run_pair(torch: str, python: str, args: argparse.Namespace) -> Row:
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    interpreter = shutil.which(python)
    version = version_of(interpreter) if interpreter else ""
    if not version:
        return Row(torch, python.removeprefix("python"), today, f"not tried: {python} was not found")
    place = FOLDER / f"torch-{torch}-python-{version}"
    print(f"\n==== torch {torch}, Python {version}: {place}", flush=True)
    began = time.monotonic()
    try:
        failed = install(place, str(interpreter), torch)
        if failed:
            return Row(torch, version, today, f"not tried: {failed}")
        print(f"==== installed in {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        counts: dict[str, int] = {}
        for selection in SHORT if args.short else ALL:
            for what, number in test(place, pytest_of(place, selection, args)).items():
                counts[what] = counts.get(what, 0) + number
        print(f"==== tested in {time.monotonic() - began:.0f} s", flush=True)
    finally:
        if args.remove:
            shutil.rmtree(place, ignore_errors=True)
    is_good = not (counts.get("failed") or counts.get("error") or counts.get("errors")) and bool(counts.get("passed"))
    kinds = [
        f"{number} {what}"
        for what in ("passed", "failed", "flaky", "error", "errors", "skipped")
        if (number := counts.get(what))
    ]
    text = ", ".join(kinds) or "nothing ran"
    return Row(torch, version, today, f"{text} (short)" if args.short else text, is_good)


def version_of(interpreter: str) -> str:
    """`3.12.1`; "" for what does not run, such as a shim of pyenv's without its Python."""
    done = subprocess.run(
        [interpreter, "-c", "import platform, ensurepip; print(platform.python_version())"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def install(place: Path, interpreter: str, torch: str) -> str:
    """Make the environment. Returns why it cannot be had; "" if all is there."""
    python = place / "bin" / "python"
    if not (place / ".ready").exists():
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", str(place)], check=True)
        pip = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--disable-pip-version-check",
            "--no-cache-dir",
        ]
        done = subprocess.run([*pip, f"torch=={torch}"], capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["pip failed"]
            return f"torch {torch} has no wheel for this Python" if "No matching dist" in reason[0] else reason[0][:100]
        subprocess.run([*pip, *NEEDS, *dependencies()], check=True)
        (place / ".ready").touch()
    # the compiled part needs no header of torch's: it is built for this Python, and its name says for which
    build = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*build, "-e", str(ROOT)], check=True)
    return ""


def dependencies() -> list[str]:
    """What gpuwatch needs, but for torch, in its newest release."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    return [name for name in re.findall(r'"([^"]+)"', block[1]) if not name.startswith("torch")]


def pytest_of(place: Path, selection: tuple[str, ...], args: argparse.Namespace) -> list[str]:
    how = ["tests/once_more.py", "run"] if args.once_more else ["-m", "pytest"]
    options = ["-q", "-p", "no:cacheprovider", "-n", str(args.jobs)]
    return [str(place / "bin" / "python"), *how, *options, *selection]


def test(place: Path, command: list[str], folder: Path = ROOT) -> dict[str, int]:
    """What pytest counts, with `flaky` for what failed and passed alone. Its output goes to this script's own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    last, is_alone = "", False
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            is_alone = is_alone or line.startswith(ALONE)
            last = line if not is_alone and re.search(r"\d+ (passed|failed|error|skipped)", line) else last
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}
    if process.returncode not in (0, 1) and not counts.get("failed"):
        counts["errors"] = counts.get("errors", 0) or 1
    if process.returncode == 0 and is_alone:
        counts["flaky"] = counts.pop("failed", 0) + counts.pop("error", 0) + counts.pop("errors", 0)
    return counts


def write(row: Row) -> None:
    """Put a row into the page, in the place of the one of the same pair."""
    text = PAGE.read_text()
    head, rest = text.split(MARKS[0])
    table, tail = rest.split(MARKS[1])
    minor = ".".join(row.python.split(".")[:2])
    rows = [line for line in table.strip().splitlines()[2:] if not re.match(pattern_of(row.torch, minor), line)]
    rows = sorted(
        [*rows, row.line], key=lambda line: [int(n) for n in re.findall(r"\d+", "".join(line.split("|")[1:3]))]
    )
    titles = "| torch | Python | tests | tried on |\n|---|---|---|---|"
    PAGE.write_text(f"{head}{MARKS[0]}\n{titles}\n" + "\n".join(rows) + f"\n{MARKS[1]}{tail}")


def pattern_of(torch: str, minor: str) -> str:
    return rf"\| {re.escape(torch)} \| {re.escape(minor)}(\.\d+)? \|"


if __name__ == "__main__":
    raise SystemExit(main())
