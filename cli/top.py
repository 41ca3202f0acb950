"""`gpuwatch top`: look at a job while it runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core.errors import GpuwatchError, UsageError
from .report import RUNS_DIR, complete_runs, find_run

if TYPE_CHECKING:
    from ..collector.live.top_link import ViewSubscriber

_PATIENCE_S = 15.0
_MORE, _MORE_S = 3, 1.5
"""Pictures after the first, and how long each is waited for: they tell how fast the job goes, and what is close to its
limit."""


@click.command(name="top")
@click.argument("run", required=False, shell_complete=complete_runs)
@RUNS_DIR
@click.option("--once", is_flag=True, help="Print one picture as text and end. It needs no textual.")
def top(run: str | None, runs_dir: str, once: bool) -> int:
    """Look at a job while it runs: its ranks, who waits for whom, what comes close to its limit, and what happened.

    Without RUN: the latest one. It only looks: the job is not told of it, and does not wait for it. q ends it.
    """
    from ..collector.live.top_link import ViewSubscriber

    path = find_run(run, Path(runs_dir))
    link = ViewSubscriber(path)
    try:
        if not link.is_shown:
            raise UsageError(
                f"expected a run that goes on, found no collector that shows {path.name}; what it came to: "
                f"gpuwatch report {path.name}"
            )
        if once:
            return _print_once(link, path.name)
        return _watch(link, path.name)
    finally:
        link.close()


def _print_once(link: ViewSubscriber, run: str) -> int:
    from ..collector.live.top_model import TopModel, plain

    view = link.newest(_PATIENCE_S)
    if view is None:
        raise GpuwatchError(f"the collector of {run} shows nothing for {_PATIENCE_S:.0f} s; is its host in reach?")
    model = TopModel()
    model.see(view)
    for _ in range(_MORE):
        view = link.newest(_MORE_S)
        if view is not None:
            model.see(view)
            if view.hot:  # the agents tell of them when they have heard that somebody looks
                break
    size = shutil.get_terminal_size((110, 24))
    click.echo(plain(model.screen(size.columns), 64))
    return 0


def _watch(link: ViewSubscriber, run: str) -> int:
    from importlib.util import find_spec

    if find_spec("textual") is None:
        raise UsageError(
            "expected textual, which draws the screen, found it not installed; install it with: pip install "
            '"gpuwatch-cluster[top]", or print one picture: gpuwatch top --once'
        )
    from ..collector.live.top_app import TopApp

    for name in ("COLUMNS", "LINES"):  # where they are exported, textual believes them, and not the terminal
        os.environ.pop(name, None)
    return TopApp(lambda: link.newest(0), lambda: not link.is_shown, run).run() or 0
