"""The wheel: built from a copy of the sources, opened, installed elsewhere, and run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = ("report.html.jinja", "macros.html.jinja", "sections.html.jinja", "report.css", "report.js")
DATA = [
    "gpuwatch/py.typed",
    "gpuwatch/docs/codes.md",
    "gpuwatch/slurm/gpuwatch.sbatch",
    "gpuwatch/slurm/gpuwatch.sbatch.jinja",
]
DATA += ["gpuwatch/collector/views/dashboard.json"]
DATA += [f"gpuwatch/collector/report/html/templates/{name}" for name in TEMPLATES]
pytestmark = pytest.mark.xdist_group("packaging")  # one wheel for all of them
NOT_SHIPPED = {"tests", "docs", "examples", "benchmarks", "build", "dist"}


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shipped(root: Path) -> list[Path]:
    """The package's files in a checkout, by its own rule: every folder at the root that is not in NOT_SHIPPED."""
    files = sorted(path.relative_to(root) for path in root.glob("**/*.py*") if path.suffix in (".py", ".pyi"))
    return [file for file in files if not NOT_SHIPPED.intersection(file.parts)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: a build leaves a folder `build` beside the sources, and the next build would take files from it."""
    copy = tmp_path_factory.mktemp("sources") / "checkout"
    made = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "gpuwatch-runs")
    shutil.copytree(ROOT, copy, ignore=made)
    return copy


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", cwd=sources)
    (wheel,) = (sources / "dist").iterdir()
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=target)
    return target


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(sources, wheel):
    assert wheel.name.startswith("gpuwatch_cluster-")
    names = zipfile.ZipFile(wheel).namelist()

    in_wheel = sorted(name for name in names if ".dist-info/" not in name and not name.endswith(".so"))
    assert in_wheel == sorted([*DATA, *(f"gpuwatch/{file.as_posix()}" for file in shipped(sources))])
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_wheel_holds_the_compiled_loops_and_the_sources_hold_the_code(wheel, installed, tmp_path):
    elsewhere = {"cwd": tmp_path, "PYTHONPATH": str(installed)}
    where = run("-c", "from gpuwatch.worker.native import core; print(core.__file__)", **elsewhere)
    assert Path(where.strip()).parent == installed / "gpuwatch" / "worker" / "native"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_sdist_holds_the_native_sources_and_builds_from_them(sources, tmp_path):
    copy = tmp_path / "checkout"
    shutil.copytree(sources, copy, ignore=shutil.ignore_patterns("*.so", "build", "dist"))
    run("-m", "build", "--sdist", "--no-isolation", "--outdir", "dist", cwd=copy)
    (sdist,) = (copy / "dist").iterdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    native = [file.relative_to(copy) for file in (copy / "worker" / "native").rglob("*.[ch]")]
    assert {file.suffix for file in native} == {".c", ".h"}
    assert [file for file in native if not (unpacked / file).exists()] == []
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", cwd=unpacked)
    (wheel,) = (unpacked / "dist").iterdir()
    assert [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


@pytest.mark.slow
def test_without_a_compiler_it_installs_all_the_same(sources, tmp_path):
    copy = tmp_path / "checkout"
    shutil.copytree(sources, copy, ignore=shutil.ignore_patterns("*.so", "build", "dist"))
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", cwd=copy, CC="/nowhere/cc")
    (wheel,) = (copy / "dist").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert "gpuwatch/worker/record/host_reduce.py" in names
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_without_recursion_c_the_rest_of_the_part_in_c_is_built(sources, tmp_path):
    """It writes CPython's own state, and so a new Python may refuse it alone."""
    copy = tmp_path / "checkout"
    shutil.copytree(sources, copy, ignore=shutil.ignore_patterns("*.so", "build", "dist"))
    with (copy / "worker" / "native" / "recursion.c").open("a") as file:
        file.write("static int unknown(PyThreadState *thread) { return thread->renamed; }\n")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", cwd=copy)
    (wheel,) = (copy / "dist").iterdir()
    built = [Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert sorted(name.partition(".")[0] for name in built) == ["core", "signals"]
    target = tmp_path / "installed"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=copy)
    found = (
        "from gpuwatch.worker.hooks.native_writer import NativeFrameWriter\n"
        "from gpuwatch.worker.hooks.hook_bounds import call_begins\n"
        "from gpuwatch.launcher.life import without_c\n"
        "print(NativeFrameWriter.__module__, call_begins(), 'recursion.c' in without_c())"
    )
    elsewhere = {"cwd": tmp_path, "PYTHONPATH": str(target)}
    assert run("-c", found, **elsewhere) == "gpuwatch.worker.native.core None True\n"


def test_the_root_of_the_checkout_ships_the_package_and_its_command_only(sources):
    assert {file.name for file in shipped(sources) if len(file.parts) == 1} == {"__init__.py", "__main__.py"}


@pytest.mark.slow
def test_it_runs_where_it_was_installed(installed, tmp_path):
    elsewhere = {"cwd": tmp_path, "PYTHONPATH": str(installed)}

    where = run("-c", "import gpuwatch.cli.main as main; print(main.__file__)", **elsewhere)
    assert Path(where.strip()) == installed / "gpuwatch" / "cli" / "main.py"
    help_text = run("-m", "gpuwatch", "--help", **elsewhere)
    assert "gpuwatch launch --nproc-per-node 8 train.py" in help_text
    assert "Exit codes" in help_text
    rendered = "from gpuwatch.slurm.submission import BatchScript, render; print(render(BatchScript()), end='')"
    assert run("-c", rendered, **elsewhere) == (installed / "gpuwatch" / "slurm" / "gpuwatch.sbatch").read_text()
    script = installed / "bin" / "gpuwatch"
    assert run(str(script), "--version", **elsewhere).startswith("gpuwatch, version ")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_wheel_runs_in_a_new_environment_without_a_compiler(wheel, tmp_path):
    """.ci/smoke.py does the same with each Python, and takes all packages from the index."""
    beside = sysconfig.get_path("purelib")
    said = run(str(ROOT / ".ci/smoke.py"), "--wheel", str(wheel), "--packages", beside, cwd=tmp_path)
    assert f"{wheel.name}: ok" in said


@pytest.mark.slow
def test_the_smoke_test_fails_with_a_wheel_that_lacks_a_module(wheel, tmp_path):
    broken = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(broken, "w") as less:
        for name in whole.namelist():
            if name != "gpuwatch/launcher/life.py":
                less.writestr(name, whole.read(name))
    command = [sys.executable, str(ROOT / ".ci/smoke.py"), "--wheel", str(broken)]
    done = subprocess.run(
        [*command, "--packages", sysconfig.get_path("purelib")], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "gpuwatch launch --nproc-per-node 2 train.py: ended with " in done.stdout


def test_the_smoke_test_leaves_out_a_python_that_does_not_start(tmp_path):
    """As a shim of pyenv for a release that is there and not chosen."""
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci/smoke.py")], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, f"{shim} does not start: left out\n")
    assert done.stderr.startswith("expected a Python from 3.10 to 3.14 on PATH, found none that starts")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_release_is_what_pypi_takes(tmp_path):
    """`twine check --strict`, a wheel for any Linux of its glibc, and a page whose links lead into the repository."""
    pytest.importorskip("auditwheel")
    repository = "https://example.org/gpuwatch"
    run(".ci/release.py", "--repository", f"{repository}/", "--output", str(tmp_path / "dist"), cwd=ROOT)
    sdist, wheel = sorted((tmp_path / "dist").iterdir(), key=lambda made: made.suffix)
    assert sdist.name.endswith(".tar.gz") and "-manylinux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    assert f"Project-URL: Homepage, {repository}\n" in metadata
    targets = re.findall(r"\]\(([^)#\s]+)", metadata)
    tree = re.compile(rf"{repository}/(?:blob|raw)/v[\d.]+/(.+)")
    assert len(targets) > 10
    assert [target for target in targets if not (found := tree.match(target)) or not (ROOT / found[1]).exists()] == []


@pytest.mark.slow
def test_type_checkers_find_the_types(installed):
    assert (installed / "gpuwatch" / "py.typed").exists()
