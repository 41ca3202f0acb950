"""The line of the operation that made a loss bad, in drawn scripts: where one is told, that line has run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from .loss_programs import count


@pytest.mark.parametrize("is_later", [False, True], ids=["at once", "later, as on a device"])
@pytest.mark.parametrize("scripts", [300, pytest.param(6000, marks=pytest.mark.soak)])
def test_no_line_is_told_that_has_not_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: int, is_later: bool
) -> None:
    ends = count(range(scripts), tmp_path, monkeypatch, is_later)
    assert [end for end in ends if end.startswith("wrong")] == []
    assert ends["right"] >= scripts / 100, ends
