"""Does gpuwatch hold on this machine's GPUs? The tests marked gpu, then measurements, each with pass or fail.

    python benchmarks/gpu_acceptance.py --quick 1          (or: make gpu-quick) what decides, in six minutes at most
    python benchmarks/gpu_acceptance.py --quick 2          the rest of it, in six more
    python benchmarks/gpu_acceptance.py                    (or: make gpu) all of it
    python benchmarks/gpu_acceptance.py --lines registration,syncs,overflow --no-tests
    python benchmarks/gpu_acceptance.py --device cpu-late  (no GPU: a device on the CPU whose numbers arrive late)

It needs no network and installs nothing. It runs with the Python and the torch that are there. What else it needs may
lie in one folder of unpacked wheels:

    mkdir deps && for wheel in wheels/*.whl; do python -m zipfile -e "$wheel" deps; done
    PYTHONPATH=$PWD/deps python benchmarks/gpu_acceptance.py

Those are, where they are not installed: pyzmq, msgspec, click, rich, psutil, jinja2, numpy, nvidia-ml-py; for the tests
pytest and hypothesis; for the comparison with its class transformers. gpuwatch itself need not be installed: a link
named `gpuwatch` to the checkout, in a folder on PYTHONPATH, stands for an install, and is made here if it is missing.

Each line runs in a process of its own: one that fails or hangs does not stop the others. Each row is printed, and
written into a JSON file and a table in Markdown beside it, as soon as it is known: a run that is cut off leaves all
that it found, and `--after LINE` goes on. The exit code is 1 if a line failed, 2 for wrong usage. docs/gpu.md says
what each means.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_lines.lines import LINES, QUICK, REHEARSAL, Line, Row, first_line, passed

CHECKOUT = Path(__file__).resolve().parents[1]
_MARK = "gpu-acceptance-rows "
_TESTS_S = 900
_QUICK_MINUTES = 5.5
"""A command on a machine that is lent for a quarter of an hour."""
_QUICK_LINE_S = 120.0
"""No line of a quick run may take the time of all others."""
_TOO_SHORT_S = 5.0
"""A line that has less time is not begun."""
_ASK_S = 0.2
_INI = """\
[pytest]
addopts = --import-mode=importlib --confcutdir={checkout}/tests
markers =
    gpu: needs a CUDA device
    slow: takes long
    alone: measures time
    timeout: of pytest-timeout, which may be missing
"""


def main() -> int:
    """Run the lines, print the table, write the JSON file."""
    options = parse()
    if options.one:
        return one(options.one, options.device)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the line that runs ends with us
    why = "" if options.device == "cpu-late" else why_no_gpu()
    if why:
        print(f"gpuwatch: no GPU here, nothing to do ({why}); without one: --device cpu-late")
        return 0
    ends = time.monotonic() + options.minutes * 60
    lines, goes_on = list(options.lines), options.after is not None or options.quick == max(QUICK)
    if options.after is not None:
        lines = lines[lines.index(options.after) + 1 :]
    kept = rows_in(options.json, lines) if goes_on else []
    found = Findings(options.json, options.device, kept, machine(options.device))
    with tempfile.TemporaryDirectory(prefix="gpuwatch-acceptance-") as folder:
        environment = environment_of(options.device, folder)
        if options.tests and options.device == "cuda":
            found.add("tests", [gpu_tests(environment, folder)])
        for line in lines:
            longest_s = _QUICK_LINE_S if options.quick and not options.rehearsal else line.limit_s
            limit_s = min(longest_s, line.limit_s, ends - time.monotonic())
            if options.device == "cpu-late" and not line.late:
                found.add(line.name, [Row(line.what, "skipped", note="needs a GPU")])
            elif limit_s < _TOO_SHORT_S:
                note = f"not begun: the {options.minutes:g} minutes are over; --after and the line before it goes on"
                found.add(line.name, [Row(line.what, "skipped", note=note)])
            else:
                found.add(line.name, run(line, options.device, environment, limit_s))
    print(f"\n{found.table}")
    failed = [row for _, row in found.rows if row.verdict == "fail"]
    print(f"\n{len(failed)} of {len(found.rows)} rows failed; written to {options.json} and {found.markdown}")
    return 1 if failed else 0


@dataclass
class Findings:
    """All rows, in a file from the first one on."""

    file: Path
    device: str
    rows: list[tuple[str, Row]]
    """(name of the line, row); at first those of earlier calls."""
    machine: str

    @property
    def markdown(self) -> Path:
        """The table's file."""
        return self.file.with_suffix(".md")

    @property
    def table(self) -> str:
        """In Markdown."""
        lines = ["| line | what | verdict | figure | target | note |", "|---|---|---|---|---|---|"]
        for name, row in self.rows:
            cells = (name, row.what, row.verdict, row.figure, row.target, row.note)
            lines.append(f"| {' | '.join(text.replace('|', '/').replace(chr(10), ' ') for text in cells)} |")
        return "\n".join(lines)

    def add(self, name: str, rows: Iterable[Row]) -> None:
        """Write and print each row as it comes."""
        for row in rows:
            self.rows.append((name, row))
            document = {
                "device": self.device,
                "machine": self.machine,
                "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "rows": [{"line": name, **asdict(row)} for name, row in self.rows],
            }
            write(self.file, json.dumps(document, indent=1) + "\n")
            write(self.markdown, f"{self.table}\n")
            parts = [row.figure, f"({row.target})" if row.target else "", row.note]
            print(f"{row.verdict:<8}{row.what}: {' '.join(part for part in parts if part)}", flush=True)


def write(file: Path, text: str) -> None:
    """Whole, or not at all."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.replace(file)


def rows_in(file: Path, lines: list[Line]) -> list[tuple[str, Row]]:
    """Those that an earlier call has written, but for lines that are run now."""
    if not file.is_file():
        return []
    names = {line.name for line in lines}
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return [(name, Row(**row)) for row in rows if (name := row.pop("line")) not in names]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu-late"), default="cuda")
    parser.add_argument("--lines", type=chosen, default=list(LINES), help=f"of {', '.join(one.name for one in LINES)}")
    quick = "the lines that decide, in their order: 1, then 2, which adds its rows to those of 1"
    parser.add_argument("--quick", type=int, choices=list(QUICK), help=quick)
    after = "go on after this line of the choice: the rows of the JSON file that is there are kept"
    parser.add_argument("--after", metavar="LINE", help=after)
    most = f"end after so many ({_QUICK_MINUTES:g} with --quick, else no limit)"
    parser.add_argument("--minutes", type=float, help=most)
    parser.add_argument("--rehearsal", action="store_true", help="small sizes: no figure counts")
    parser.add_argument("--no-tests", dest="tests", action="store_false", help="leave out the tests marked gpu")
    parser.add_argument("--json", type=Path, default=Path("gpu-acceptance.json"), metavar="FILE")
    parser.add_argument("--one", choices=[line.name for line in LINES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.tests = False
        options.lines = chosen(",".join(QUICK[options.quick]))
    if options.minutes is None:
        options.minutes = _QUICK_MINUTES if options.quick else float("inf")
    if options.after is not None:
        names = [line.name for line in options.lines]
        if options.after not in names:
            parser.error(f"argument --after: expected one of {', '.join(names)}, found {options.after!r}")
        options.after = options.lines[names.index(options.after)]
        options.tests = False
    if options.rehearsal:
        os.environ[REHEARSAL] = "1"
    return options


def chosen(text: str) -> list[Line]:
    """Lines by their names, with commas between them."""
    by_name = {line.name: line for line in LINES}
    names = [name.strip() for name in text.split(",")]
    if wrong := [name for name in names if name not in by_name]:
        raise argparse.ArgumentTypeError(f"expected lines of {', '.join(by_name)}, found {wrong[0]!r}")
    return [by_name[name] for name in names]


def why_no_gpu() -> str:
    """In a few words; "" if there is one."""
    try:
        import torch
    except ImportError as error:
        return first_line(error)
    if not (torch.version.cuda or torch.version.hip):
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else "torch sees none"


def environment_of(device: str, folder: str) -> dict[str, str]:
    """Environment of all children: gpuwatch is importable, cuBLAS gives the same bits twice, a late device is late."""
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    # of this run alone: a compilation elsewhere on the machine may be in the middle of writing a file
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(folder, "inductor")))
    if importlib.util.find_spec("gpuwatch") is None:
        Path(folder, "gpuwatch").symlink_to(CHECKOUT)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, environment.get("PYTHONPATH", ""))))
    if device == "cpu-late":
        environment.setdefault("GPUWATCH_LATE_DEVICE", "0")
        environment.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other measure the machine's load
    return environment


def one(name: str, device: str) -> int:
    """One line, in a process of its own; it prints its rows between whatever libraries print."""
    import torch

    (line,) = (line for line in LINES if line.name == name)
    for row in line.rows(torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")):
        print(f"\n{_MARK}{json.dumps(asdict(row))}", flush=True)
    return 0


def run(line: Line, device: str, environment: dict[str, str], limit_s: float) -> Iterator[Row]:
    """A line's rows as they come; the last one says how it failed, if it did."""
    command = [sys.executable, __file__, "--one", line.name, "--device", device]
    ends, code, words, left = time.monotonic() + limit_s, None, "", ""
    with tempfile.NamedTemporaryFile("w") as file, Path(file.name).open(errors="replace") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            while code is None and time.monotonic() < ends:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(_ASK_S)
                *lines, left = (left + output.read()).split("\n")
                words = next((text for text in reversed(lines) if text.strip()), words)
                for text in lines:
                    if text.startswith(_MARK):
                        yield Row(**json.loads(text.removeprefix(_MARK)))
        finally:
            end(process)
    if code != 0:
        how = f"did not end within {limit_s:.3g} s" if code is None else f"ended with exit code {code}"
        words = left.strip() or words or "no word"
        yield Row(line.what, "fail", how, note="" if words.startswith(_MARK) else first_line(words))


def end(process: subprocess.Popen[str]) -> None:
    """With all that it has started, also in sessions of their own, as ranks are."""
    left = []
    if importlib.util.find_spec("psutil"):
        import psutil

        with contextlib.suppress(psutil.Error):
            left = psutil.Process(process.pid).children(recursive=True)
    for child in left:
        with contextlib.suppress(psutil.Error):
            child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def gpu_tests(environment: dict[str, str], folder: str) -> Row:
    """pytest -m gpu; a test file whose imports are not installed is reported and does not fail."""
    what = "tests marked gpu"
    if importlib.util.find_spec("pytest") is None:
        return Row(what, "skipped", note="pytest is not installed")
    ini, results = Path(folder, "pytest.ini"), Path(folder, "results.xml")
    ini.write_text(_INI.format(checkout=CHECKOUT))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-c", str(ini), "--rootdir", str(CHECKOUT)]
    command += ["--continue-on-collection-errors", "-p", "no:cacheprovider", f"--junitxml={results}", "tests"]
    try:
        done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=_TESTS_S)
    except subprocess.TimeoutExpired:
        return Row(what, "fail", f"did not end within {_TESTS_S} s")
    if not results.is_file():
        return Row(what, "fail", f"exit code {done.returncode}", note=first_line(done.stdout + done.stderr))
    good, bad, blind = count(results)
    note = "; ".join(bad[:5])
    if blind:
        note += f"{'; ' if note else ''}{len(blind)} files were not collected: {blind[0]}"
    return Row(what, passed(not bad and good > 0), f"{good} passed, {len(bad)} failed", "none failed", note)


def count(results: Path) -> tuple[int, list[str], list[str]]:
    """(how many passed, which failed, why files could not be imported)."""
    good, bad, blind = 0, [], []
    for case in ElementTree.parse(results).iter("testcase"):
        wrong = [*case.findall("failure"), *case.findall("error")]
        text = " ".join((one.text or "") + one.get("message", "") for one in wrong)
        if "ModuleNotFoundError" in text and "collection failure" in text:
            blind.append(next(line for line in text.splitlines() if "ModuleNotFoundError" in line).strip("E "))
        elif wrong:
            bad.append(f"{case.get('classname')}.{case.get('name')}")
        elif case.find("skipped") is None:
            good += 1
    return good, bad, blind


def machine(device: str) -> str:
    """What this ran on."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else platform.machine()
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
