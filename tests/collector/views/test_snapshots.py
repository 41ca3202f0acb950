"""Pictures of the screen, as textual itself draws them, compared with those in golden/.

After a change that is meant: WRITE_GOLDEN=1 python -m pytest tests/collector/views/test_snapshots.py, and look at the
SVG files. (The plugin for this, pytest-textual-snapshot, needs a pytest before 9.)
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

pytest.importorskip("textual")

from gpuwatch.collector.views.top_app import TopApp
from gpuwatch.core.wire.view import NodeView, ViewStraggler

GOLDEN = Path(__file__).parent / "golden"


def drawn(views, columns, lines, *keys):
    """The screen after these pictures and keys, as SVG. The number in its names is of its contents."""
    left = list(views)

    async def run():
        app = TopApp(lambda: left.pop(0) if left else None, lambda: False, "gpuwatch report run-1")
        async with app.run_test(size=(columns, lines)) as pilot:
            await pilot.pause()  # its widgets are there
            while left:
                app.poll()
            await pilot.pause()
            await pilot.press(*keys)
            await pilot.pause()
            return app.export_screenshot(title="gpuwatch top", simplify=True)

    return re.sub(r"\bterminal-\d+", "terminal", asyncio.run(run())) + "\n"


def healthy(picture):
    views = [
        picture.view([picture.rank(n, batch=batch + n) for n in range(4)], events=[], time_s=time_s)
        for batch, time_s in ((10, 100), (30, 110))
    ]
    return drawn(views, 80, 24)


def waited_for(picture):
    ranks = [picture.rank(n, still=30.0, waits=True) for n in range(1024)]
    ranks[611] = picture.rank(611, still=41.0, begun=38)
    return drawn([picture.view(ranks)], 100, 40)


def gpus_and_an_overflow(picture):
    ranks = [picture.rank(n, gpu_use=0.9 + n / 100, gpu_memory=0.5, overflow=n == 2) for n in range(8)]
    ranks[5] = picture.rank(5, exit=1, ended=True)
    nodes = [NodeView("node-a", False, "ok"), NodeView("node-b", True, "ok", [79])]
    verdict = "rank 2 overflowed first: +inf in the output of `net.fc1`"
    view = picture.view(ranks, nodes=nodes, verdict=verdict, kind="overflow", slow=ViewStraggler(3, "node-a", 0.24))
    return drawn([view], 100, 30)


def narrow_in_another_order(picture):
    ranks = [picture.rank(n) for n in range(16)]
    ranks[9] = picture.rank(9, overflow=True)
    return drawn([picture.view(ranks)], 60, 20, "o")


@pytest.mark.parametrize("of", [healthy, waited_for, gpus_and_an_overflow, narrow_in_another_order])
def test_the_screen_is_drawn_as_it_was(picture, of):
    svg, path = of(picture), GOLDEN / f"{of.__name__}.svg"
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(svg)
    assert svg == path.read_text()
