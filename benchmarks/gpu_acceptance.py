"""Does gpuwatch hold on this machine's GPUs? The tests marked gpu, then measurements, each with pass or fail.

    python benchmarks/gpu_acceptance.py                    (or: make gpu)
    python benchmarks/gpu_acceptance.py --lines registration,syncs,overflow --no-tests
    python benchmarks/gpu_acceptance.py --device cpu-late  (no GPU: a device on the CPU whose numbers arrive late)

It needs no network and installs nothing. It runs with the Python and the torch that are there. What else it needs may
lie in one folder of unpacked wheels:

    mkdir deps && for wheel in wheels/*.whl; do python -m zipfile -e "$wheel" deps; done
    PYTHONPATH=$PWD/deps python benchmarks/gpu_acceptance.py

Those are, where they are not installed: pyzmq, msgspec, click, rich, psutil, jinja2, numpy, nvidia-ml-py; for the tests
pytest and hypothesis; for the comparison with its class transformers. gpuwatch itself need not be installed: a link
named `gpuwatch` to the checkout, in a folder on PYTHONPATH, stands for an install, and is made here if it is missing.

Each line runs in a process of its own: one that fails or hangs does not stop the others. At the end there is a table
in Markdown and a JSON file. The exit code is 1 if a line failed, 2 for wrong usage. docs/gpu.md says what each means.
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
from dataclasses import asdict
from pathlib import Path

from gpu_lines.lines import LINES, Line, Row, first_line, passed

CHECKOUT = Path(__file__).resolve().parents[1]
_MARK = "gpu-acceptance-rows "
_TESTS_S = 900
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
    with tempfile.TemporaryDirectory(prefix="gpuwatch-acceptance-") as folder:
        environment = environment_of(options.device, folder)
        found: list[tuple[str, Row]] = []
        if options.tests and options.device == "cuda":
            found += tell("tests", [gpu_tests(environment, folder)])
        for line in options.lines:
            late = options.device == "cpu-late"
            rows = run(line, options.device, environment) if line.late or not late else [needs_gpu(line)]
            found += tell(line.name, rows)
    text = table(found)
    print(f"\n{text}")
    document = {
        "device": options.device,
        "machine": machine(options.device),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rows": [{"line": name, **asdict(row)} for name, row in found],
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    failed = [row for _, row in found if row.verdict == "fail"]
    print(f"\n{len(failed)} of {len(found)} rows failed; written to {options.json}")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu-late"), default="cuda")
    parser.add_argument("--lines", type=chosen, default=list(LINES), help=f"of {', '.join(one.name for one in LINES)}")
    parser.add_argument("--no-tests", dest="tests", action="store_false", help="leave out the tests marked gpu")
    parser.add_argument("--json", type=Path, default=Path("gpu-acceptance.json"), metavar="FILE")
    parser.add_argument("--one", choices=[line.name for line in LINES], help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen(text: str) -> list[Line]:
    """Lines by their names."""
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


def run(line: Line, device: str, environment: dict[str, str]) -> list[Row]:
    """A line's rows; the last one says how it failed, if it did."""
    command = [sys.executable, __file__, "--one", line.name, "--device", device]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            code: int | None = process.wait(line.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        output.seek(0)
        lines = output.read().splitlines()
    rows = [Row(**json.loads(text.removeprefix(_MARK))) for text in lines if text.startswith(_MARK)]
    if code == 0:
        return rows
    words = next((text for text in reversed(lines) if text.strip()), "no word")
    how = f"did not end within {line.limit_s} s" if code is None else f"ended with exit code {code}"
    return [*rows, Row(line.what, "fail", how, note="" if words.startswith(_MARK) else first_line(words))]


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


def needs_gpu(line: Line) -> Row:
    """A late device on the CPU cannot tell."""
    return Row(line.what, "skipped", note="needs a GPU")


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


def tell(name: str, rows: list[Row]) -> list[tuple[str, Row]]:
    """A line for each row, as it comes."""
    for row in rows:
        parts = [row.figure, f"({row.target})" if row.target else "", row.note]
        print(f"{row.verdict:<8}{row.what}: {' '.join(part for part in parts if part)}", flush=True)
    return [(name, row) for row in rows]


def table(found: list[tuple[str, Row]]) -> str:
    """In Markdown."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    lines = ["| line | what | verdict | figure | target | note |", "|---|---|---|---|---|---|"]
    for name, row in found:
        cells = (name, row.what, row.verdict, row.figure, row.target, row.note)
        lines.append(f"| {' | '.join(map(cell, cells))} |")
    return "\n".join(lines)


def machine(device: str) -> str:
    """What this ran on."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else platform.machine()
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
