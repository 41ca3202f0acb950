"""Who may import whom, and what must not be imported at all."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import gpuwatch
import pytest

from ..parsed import nodes_of

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"cli", "launcher", "worker", "collector", "slurm", "core"}
MAY_IMPORT = {
    "core": {"core"},
    "launcher": {"launcher", "core"},
    "worker": {"worker", "core"},
    "collector": {"collector", "core"},
    "slurm": {"slurm", "core"},
    "cli": ROOMS,
}

ASKS_FOR_A_VERDICT = {
    "worker/model_watch.py": {"collector"},
}
"""`gpuwatch.watch` has no launcher: the script itself asks for the verdict."""


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "code",
    [
        "import gpuwatch; gpuwatch.OverflowDetected",
        "import gpuwatch.collector.__main__",
        "import gpuwatch.launcher.agent.agent",
        "import gpuwatch.worker.__main__",
        "import gpuwatch.worker.joining",
        "import gpuwatch.launcher.run.run_job",
        "import gpuwatch.cli.main, gpuwatch.cli.report",
        "from gpuwatch.collector.facts.fold import fold\n"
        "from gpuwatch.collector.assemble.build import build_report\n"
        "from gpuwatch.collector.report.text_report import render_text\n"
        "render_text(build_report(fold([]), run_id='x', started=None, ended=None))",
    ],
)
def test_torch_is_not_imported(code):
    assert python(f"{code}\nimport sys\nprint('torch' in sys.modules)") == "False"


def test_a_written_report_is_shown_without_what_makes_one():
    code = "import gpuwatch.cli.report, gpuwatch.collector.run_files, gpuwatch.collector.report.text_report"
    assert (
        python(f"{code}\nimport sys\nprint([name for name in sys.modules if name in ('numpy', 'sqlite3', 'jinja2')])")
        == "[]"
    )


def test_importing_gpuwatch_starts_and_changes_nothing():
    assert (
        python(
            "import sys, os, threading; before = (sys.excepthook, dict(os.environ), list(sys.meta_path))\n"
            "import gpuwatch\n"
            "print(before == (sys.excepthook, dict(os.environ), list(sys.meta_path)), threading.active_count())"
        )
        == "True 1"
    )


def test_the_public_names_are_there():
    assert all(hasattr(gpuwatch, name) for name in gpuwatch.__all__)


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def rooms_imported(path: Path) -> set[str]:
    """Rooms of gpuwatch that a file imports, at its top or anywhere in it."""
    package = ["gpuwatch", *path.relative_to(ROOT).parent.parts]
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            targets = [stem, *(f"{stem}.{alias.name}" for alias in node.names)]
        else:
            continue
        found |= {parts[1] for target in targets if (parts := target.split("."))[0] == "gpuwatch" and len(parts) > 1}
    return found & ROOMS


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_imports_between_rooms_run_one_way(room):
    for path in modules(room):
        may = MAY_IMPORT[room] | ASKS_FOR_A_VERDICT.get(path.relative_to(ROOT).as_posix(), set())
        assert rooms_imported(path) <= may, f"{path} imports {rooms_imported(path) - may}"


FLOORS = {
    "worker": [
        "path",
        "lightning_callback.py trainer_callback.py",
        "log_to.py",
        "joining.py __main__.py __init__.py watch.py model_watch.py watched_models.py detect_overflow.py "
        "debug_underflow_overflow.py before_init.py meeting_place.py explain/replaying.py",
        "preflight",
        "preflight/blame",
        "preflight/meeting.py preflight/steps.py",
        "session.py rank_process.py",
        "module_hooks.py",
        "explain device/graph_replays.py",
        "hooks",
        "compile",
        "record",
        "device",
        "record/notable.py record/tensor_stats.py record/plain_tensor.py record/float_formats.py record/host_reduce.py",
        "native patches.py answers.py signal_notes.py folded_errors.py explain/reproduce.py",
    ],
    "launcher": [
        "run",
        ".",
        "fill_in.py",
        "plan.py",
        "scheduler_job.py slurm_variables.py",
        "option_types.py saved_settings.py",
        "agent",
    ],
    "collector": [
        ".",
        "views",
        "so_far.py stage_lines.py",
        "assemble",
        "decide",
        "ends",
        "cause",
        "facts",
        "report",
    ],
    "core": [
        "wire/columns.py",
        "recorder",
        "gpu wire",
        "guest",
        "judge.py events/log_entries.py",
        "events",
        ".",
    ],
}
"""Folders and files of a room, the highest floor first. A file imports from its own floor and from those below it."""


def floor_of(room: str, path: Path) -> int:
    """Index of the floor that a file, or a folder, stands on."""
    known = {Path(room, name): floor for floor, names in enumerate(FLOORS[room]) for name in names.split()}
    return next(known[place] for place in (path, *path.parents) if place in known)


def imported_files(path: Path) -> set[Path]:
    """What a file imports by a relative name, as paths from the root; a name in a module is the module."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            target = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            inside = [target / alias.name for alias in node.names] if target.is_dir() else [target]
            found |= {file.with_suffix(".py").relative_to(ROOT) for file in inside}
    return found


@pytest.mark.parametrize("room", sorted(FLOORS))
def test_imports_inside_of_a_room_run_downwards(room):
    for path in modules(room):
        own = path.relative_to(ROOT)
        for file in imported_files(path):
            if file.parts[0] == room:
                assert floor_of(room, file) >= floor_of(room, own), f"{own} imports {file}, which is above it"


def test_views_are_imported_by_the_server_and_the_commands_alone():
    """A report is made, and read, without what a user may turn on."""
    views = Path("collector", "views")
    for room in ROOMS:
        for path in modules(room):
            own = path.relative_to(ROOT)
            if own != Path("collector", "server.py") and own.parts[0] != "cli" and views not in own.parents:
                assert not any(views in file.parents for file in imported_files(path)), own


SMALL = {"slurm", "collector/report/html", "worker/preflight/blame", "worker/path", "worker/native"}


def test_folders_are_few_and_hold_much():
    """A folder is a process or a question: what has fewer than five files is part of another."""
    folders = {path.parent for room in ROOMS for path in modules(room)}
    assert len(folders) <= 30
    for folder in folders:
        own = folder.relative_to(ROOT).as_posix()
        files = [path for path in folder.iterdir() if path.is_file() and path.name != "__init__.py"]
        assert len(files) >= 5 or own in SMALL, f"{own} has {len(files)} files"
        assert own.count("/") <= 1 or own in SMALL, f"{own} is a third level"


def test_no_files_need_each_other():
    """Whether a name is imported at the top, in a function, or for types alone; and the files of C by their headers."""
    below = {
        path.relative_to(ROOT): imported_files(path) for room in ROOMS for path in modules(room)
    } | included_files()
    order: set[Path] = set()
    while ready := [
        path for path, found in below.items() if path not in order and found & below.keys() <= order | {path}
    ]:
        order |= set(ready)
    assert len(order) == len(below), f"in a circle: {sorted(map(str, below.keys() - order))}"


def included_files() -> dict[Path, set[Path]]:
    """What each file in C needs: a header stands for the file of its name, if there is one."""
    found: dict[str, set[str]] = {}
    files = sorted((ROOT / "worker" / "native").rglob("*.[ch]"))
    for path in files:
        found.setdefault(path.stem, set()).update(re.findall(r'#include "(.+)\.h"', path.read_text()))
    assert len(found) > 20
    return {Path(name): {Path(other) for other in others} for name, others in found.items()}


def test_a_frame_is_written_in_one_place_of_each_language():
    """Whoever knows a frame's rows hands them to FrameWriter of Python or to `store_frame` of C."""
    writers = set()
    for path in modules("worker"):
        calls = (node.func for node in nodes_of(path) if isinstance(node, ast.Call))
        methods = [func for func in calls if isinstance(func, ast.Attribute) and func.attr == "frame"]
        if any(ast.unparse(func.value).endswith("recorder") for func in methods):
            writers.add(path.relative_to(ROOT).as_posix())
    assert writers == {"worker/record/frame_writer.py"}
    files = sorted((ROOT / "worker" / "native").rglob("*.c"))
    assert [path.name for path in files if "FRAMES_PER_SEGMENT" in path.read_text()] == ["frame_store.c"]


def test_another_accelerator_is_added_in_one_folder():
    """Beside worker/device, these alone name a kind of GPU, each for a reason of its own."""
    may = {
        "cli/replay.py": "--device cuda",
        "collector/assemble/build.py": "the version of CUDA, in report.json",
        "core/known_job_errors.py": "what torch prints",
        "core/torch_names.py": "names of torch that releases have or lack",
        "launcher/fill_in.py": "how many GPUs there are, before any rank",
        "worker/explain/reproduce.py": "it runs beside a capture, alone",
        "worker/preflight/blame/consistency.py": "the version of CUDA",
        "worker/preflight/blame/host_setups.py": "advice for a script",
    }
    kinds = re.compile(r"torch\.(cuda|xpu|mps)\b|[\"'](cuda|xpu|mps)[\"']|\.is_(cuda|xpu|mps)\b")
    told = {path.relative_to(ROOT) for room in ROOMS for path in modules(room) if kinds.search(path.read_text())}
    assert {path.as_posix() for path in told if path.parent != Path("worker", "device")} == may.keys()


def test_the_fence_sees_relative_imports():
    assert rooms_imported(ROOT / "launcher" / "agent" / "agent.py") == {"launcher", "core"}


def test_imports_inside_the_package_are_relative():
    for room in ROOMS:
        for path in modules(room):
            if path.parent == ROOT / "worker" / "path":  # Python imports it by itself, as no part of us
                continue
            for node in nodes_of(path):
                if isinstance(node, ast.ImportFrom) and not node.level:
                    assert (node.module or "").split(".")[0] != "gpuwatch", path


def test_every_folder_with_python_in_it_is_packaged():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for room in ROOMS for path in modules(room)} | {ROOT}
    names = {".".join(["gpuwatch", *folder.relative_to(ROOT).parts]) for folder in folders}
    assert names == set(packages)
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_only_the_package_itself_lies_at_the_root():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}


def words_of_code(path: Path) -> set[str]:
    """Every name and every text in a module's code; docstrings and comments are left out."""
    prose = {
        id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found.add(node.value)
        for field in ("id", "attr", "arg", "name"):
            found.add(str(getattr(node, field, "")))
    return found


def test_schedulers_words_stay_in_their_modules():
    """Another scheduler is one more file beside launcher/slurm_variables.py."""
    may = {
        "launcher/fill_in.py",
        "launcher/slurm_variables.py",
        "core/recorder/run_folder.py",
    }
    may |= {"launcher/option_tables.py", "launcher/short_help.py"}  # `gpuwatch check --slurm`
    may |= {"core/known_job_errors.py", "collector/facts/log_lines.py"}  # lines of a log, as SLURM prints them
    may |= {"collector/facts/log_reader.py", "collector/facts/log_traceback.py", "collector/decide/log_verdict.py"}
    words = ("slurm", "sbatch", "srun", "scontrol", "sinfo")
    paths = [path for room in ("core", "launcher", "collector") for path in modules(room)]
    told = {
        str(path.relative_to(ROOT))
        for path in paths
        if any(word in text.lower() for text in words_of_code(path) for word in words)
    }
    assert told == may


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_none_of_what_they_do_not_need(option):
    """What that means in seconds: benchmarks/startup.py."""
    told = python(
        f"import sys; sys.argv = ['gpuwatch', {option!r}]\n"
        "from gpuwatch.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code\n"
        "heavy = {'torch', 'numpy', 'zmq', 'msgspec', 'psutil', 'rich', 'jinja2', 'sqlite3', 'pynvml', 'asyncio'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert told.splitlines()[0].startswith(("Usage: gpuwatch", "gpuwatch, version"))
    assert told.splitlines()[-1] == "[]"
