"""`gpuwatch explain`: the text of a code, all codes, and what is near a wrong one."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from gpuwatch.cli.main import cli
from gpuwatch.core.codes import Code, code_texts
from gpuwatch.core.errors import UsageError


def explained(*words: str, width: int = 80) -> str:
    done = CliRunner().invoke(cli, ["explain", *words], env={"COLUMNS": str(width)}, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    assert done.return_value == 0
    return done.stdout


@pytest.mark.parametrize("word", ["GW205", "gw205", "205", "[GW205]", "near_overflow", "near-overflow"])
def test_a_code_is_known_however_it_is_written(word):
    title, text = code_texts()["GW205"]
    first, empty, *lines = explained(word).splitlines()
    assert (first, empty, " ".join(lines)) == (f"GW205  {title}", "", text)
    assert max(map(len, lines)) <= 80


def test_without_a_code_all_are_listed():
    assert [line[:5] for line in explained(width=160).splitlines()] == list(Code)


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("GW299", "near it: GW301 (not_arrived), GW302 (rank_silent), GW303 (store_lost); all: gpuwatch explain"),
        ("nearoverflow", "near it: GW205 (near_overflow), "),
        ("what", "found 'what'; all: gpuwatch explain"),
        ("GW99999999999", "found 'GW99999999999'; all: gpuwatch explain"),
    ],
)
def test_an_unknown_code_is_wrong_usage_and_names_those_near_it(word, near):
    with pytest.raises(UsageError, match="expected a code such as GW205") as refused:
        explained(word)
    assert near in str(refused.value)
    assert (refused.value.exit_code, refused.value.code) == (2, Code.NO_SUCH_CODE)
