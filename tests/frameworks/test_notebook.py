"""A watch in a notebook, which Jupyter's own kernel runs and nbconvert converts: its last line shows the page."""

from __future__ import annotations

import re
from html import unescape

import pytest

pytestmark = pytest.mark.slow

CELLS = [
    "import gpuwatch, torch\n"
    "net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())\n"
    "watch = gpuwatch.watch(net)\n"
    "net(torch.ones(2, 4))\n"
    "watch",
    "net[0].weight.data.fill_(1)\nnet(torch.full((2, 4), 3e38))",
    "watch",
]


def test_the_page_is_in_the_notebook_and_an_overflow_is_one_exception():
    nbformat = pytest.importorskip("nbformat", reason="needs Jupyter: pip install nbconvert ipykernel")
    pytest.importorskip("ipykernel", reason="needs Jupyter: pip install nbconvert ipykernel")
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=300, kernel_name="python3", allow_errors=True).execute()

    (error,) = [out for cell in notebook.cells for out in cell.outputs if out.output_type == "error"]
    assert error.ename == "OverflowDetected"
    assert "forward of batch 1" in error.evalue
    html, _ = HTMLExporter().from_notebook_node(notebook)
    before, after = (unescape(page) for page in re.findall(r'<iframe srcdoc="(.*?)"', html, re.DOTALL))
    assert '<h1 id="statement">No overflow' in before
    (statement,) = re.findall(r'<h1 id="statement">(.*?)</h1>', after)
    assert re.fullmatch("Rank 0 on .* overflowed first: .inf in the output of <code>0</code> .*", statement)
