"""The documentation as a site: mkdocs-material builds it without a warning, and no page asks another host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow
pytest.importorskip("material")


def sources():
    """What the site is made of. Tools leave files of their own in folders with a dot: pytest a README.md, for one."""
    for path in ROOT.rglob("*.*"):
        parts = path.relative_to(ROOT).parts
        if path.suffix in (".md", ".py", ".yml") and parts[0] != "build" and not any(part[0] == "." for part in parts):
            yield path


@pytest.fixture
def site(tmp_path):
    """What `make docs` has built of the files as they are, or a build of its own."""
    built = ROOT / "build" / "site"
    if (built / "index.html").exists():
        when = (built / "index.html").stat().st_mtime
        if all(path.stat().st_mtime < when for path in sources()):
            return built
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return tmp_path / "site"


def test_it_builds_without_a_warning_and_loads_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= len(list((ROOT / "docs").rglob("*.md")))
    for page in pages:
        loaded = re.findall(r'<(?:script|link|img)\b[^>]*(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert [url for url in loaded if "canonical" not in url] == [], page
