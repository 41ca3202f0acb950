"""The line of a backward under DDP; of a sharded model the verdict names the command that finds it."""

from __future__ import annotations

import shlex

import pytest


@pytest.mark.slow
@pytest.mark.sample(1)
def test_the_line_in_the_same_run(bench):
    first = bench.launch("explained.py", "--preflight", "off", args=("ddp",))
    assert (first.code, first.verdict["rank"], first.verdict["module"]) == (4, 1, "norm")
    operation = first.verdict["operation"]
    assert (operation["node"], operation["module"]) == ("SqrtBackward0", "norm")
    assert operation["code"].endswith("# the line")
    assert not any("--explain" in step for step in first.verdict["next"])


@pytest.mark.slow
@pytest.mark.sample(1)
def test_the_command_of_next_finds_the_line(bench):
    first = bench.launch("explained.py", "--preflight", "off", args=("fsdp",))
    assert (first.code, first.verdict["rank"], first.verdict["module"]) == (4, 1, "norm")
    assert first.verdict["operation"] is None
    assert "which operation made it is not known: its model is sharded" in first.verdict["evidence"]
    command = first.verdict["next"][-1].rpartition(": ")[2]
    _, launch, *words = shlex.split(command)
    assert words[:4] == ["--explain", "3", "--rank", "1"]

    again = bench.gpuwatch(launch, *words)
    operation = again.verdict["operation"]
    assert (operation["node"], operation["module"]) == ("SqrtBackward0", "norm")
    assert operation["code"].endswith("# the line")
    assert again.verdict["statement"] == first.verdict["statement"]
