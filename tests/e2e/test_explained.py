"""The verdict on a backward names the command that finds its line, and that command finds it."""

from __future__ import annotations

import shlex

import pytest


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_command_of_next_finds_the_line(bench, kind):
    first = bench.launch("explained.py", "--preflight", "off", args=(kind,))
    assert (first.code, first.verdict["rank"], first.verdict["module"]) == (4, 1, "norm")
    assert first.verdict["operation"] is None
    command = first.verdict["next"][-1].rpartition(": ")[2]
    _, launch, *words = shlex.split(command)
    assert words[:4] == ["--explain", "3", "--rank", "1"]

    again = bench.gpuwatch(launch, *words)
    operation = again.verdict["operation"]
    assert (operation["node"], operation["module"]) == ("SqrtBackward0", "norm")
    assert operation["code"].endswith("# the line")
    assert again.verdict["statement"] == first.verdict["statement"]
