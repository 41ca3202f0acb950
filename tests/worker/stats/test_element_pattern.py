"""Which elements are not finite, in words."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from gpuwatch.worker.stats.element_pattern import pattern_of


def bad(shape, *indices):
    tensor = torch.ones(shape)
    for index in indices:
        tensor[index] = math.nan
    return tensor


ALL = slice(None)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(3), ""),
        (torch.tensor(math.inf), "everything"),
        (torch.full((2, 3), -math.inf), "everything"),
        (bad((2000, 2100), (3, 5)), "one element of 4.2M, at [3, 5]"),
        (bad((32, 8), 17), "all of row 17 (dim 0)"),
        (bad((32, 8), (ALL, 2), (ALL, 3)), "all of columns 2, 3 (dim 1)"),
        (bad((32, 8), (17, slice(2, 4))), "all of row 17 (dim 0), columns 2, 3 (dim 1)"),
        (bad((2, 4, 8, 8), (ALL, 2)), "all of index 2 of dim 1"),
        (bad((64, 8), slice(10, 20)), "all of 10 of 64 rows (dim 0) from 10 to 19"),
        (bad((32, 8), (17, 0), (17, 2), (17, 5)), "all of row 17 (dim 0), columns 0, 2, 5 (dim 1)"),
        (
            bad((4, 4), (0, 1), (2, 3)),
            "2 of 16 elements, all in rows 0, 2 (dim 0), columns 1, 3 (dim 1), the first at [0, 1]",
        ),
        (bad((9,), 2, 4), "all of elements 2, 4"),
        (bad((4,), 1).to(torch.float8_e5m2), "one element of 4, at [1]"),
        (torch.ones(2, device="meta"), ""),
    ],
)
def test_words(tensor, words):
    assert pattern_of(tensor) == words


def test_nothing_is_imported_for_it():
    """It may be asked within a collective: torch.unravel_index imports sympy, which takes seconds."""
    code = "import sys, torch\nfrom gpuwatch.worker.stats.element_pattern import pattern_of\nhad = set(sys.modules)\n"
    code += "print(pattern_of(1 / torch.tensor([1.0, 0.0, 1.0])), set(sys.modules) - had)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "one element of 3, at [1] set()\n"
