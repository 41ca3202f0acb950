"""The examples in docs/verdicts say what the commands beside them report."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load():
    spec = importlib.util.spec_from_file_location("make_verdicts", ROOT / "docs" / "make_verdicts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE = _load()
EXAMPLES = [(page.stem, *each) for page in sorted(MAKE.FOLDER.glob("*.md")) for each in MAKE.examples(page)]


def opening(text: str) -> str:
    """The kind, how sure it is, and the sentence: without numbers, host names and the ends of lines."""
    words = " ".join(text.split())
    return re.sub(r"on \w+ |[\d.]+", "", words.split(" Why ")[0].split(" Next ")[0])


def test_every_kind_has_a_page_with_an_example():
    assert {page for page, _, _ in EXAMPLES} == {path.stem for path in MAKE.FOLDER.glob("*.md")} - {"index"}
    assert all(re.search(rf"VERDICT  {page}\b", output) for page, _, output in EXAMPLES)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("page", "command", "output"), EXAMPLES, ids=lambda value: value[-20:].strip())
def test_the_example_is_what_the_command_reports(page, command, output):
    assert opening(MAKE.run(command)) == opening(output)
