"""What the report says of the samples of a batch."""

from __future__ import annotations

import pytest
from gpuwatch.collector.decide.batch_words import source_line
from gpuwatch.core.events.alarm_evidence import BatchSource
from gpuwatch.core.events.run_position import RunPosition

HERE = RunPosition(1, batch=5)
FOUND = {
    "of data set D (index 7, 3)": BatchSource(HERE, "D", [7, 3], {}, 0, 5, 1),
    "batch 5 is batch 5 of epoch 0 of its DataLoader: 1 sample of data set D (index 7)": BatchSource(
        HERE, "D", [7, 7], {}, 0, 5, -1
    ),
    "batch 5 holds: 2 samples of data set D (index 7, 3)": BatchSource(HERE, "D", [7, 3], worker=-2),
    "made by worker 1: samples of data set D, whose indices are not known: so; path a, b": BatchSource(
        HERE, "D", [], {"path": ["a", "b"]}, 0, 5, 1, "so"
    ),
    "samples of data set D among index 1, 2; which of them is in which row is not known: so": BatchSource(
        HERE, "D", [], {}, 0, 5, 1, "so", [1, 2]
    ),
    "the samples of batch 5 are not known: so": BatchSource(HERE, unknown="so"),
    "100 samples of data set D (index 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, and 84 more)": BatchSource(
        HERE, "D", list(range(100)), {}, 0, 5
    ),
}


@pytest.mark.parametrize("text", FOUND)
def test_a_line(text):
    assert text in source_line(FOUND[text], "batch 5")
