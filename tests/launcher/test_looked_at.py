"""What an agent tells only while somebody looks on: the collector's own, and a viewer that comes and leaves."""

from __future__ import annotations

from contextlib import closing

import pytest
from gpuwatch.collector.store import RunStore
from gpuwatch.collector.views.publisher import job_viewer
from gpuwatch.core.wire.beat import HotModule, NodeBeat, unpack_list

from ..waiting import until


def told(node) -> list:
    """The modules that are closest to their limit, as the last beat in the run's store has them."""
    with closing(RunStore(node.run_dir / "run.sqlite")) as store:
        beats = [body for _, _, body in store.messages() if isinstance(body, NodeBeat)]
    return [hot for beat in beats for hot in unpack_list(beat.hot, HotModule)]


@pytest.mark.slow
def test_the_modules_closest_to_their_limits_are_told_while_somebody_looks_and_not_after(make_node):
    node = make_node()
    node.is_shown = True
    node.start_agent(node.start_collector())
    node.train(0, 1, 2)
    link = job_viewer(node.run_dir)
    try:
        until(lambda: (view := link.newest(0.1)) is not None and view.ranks, "a picture")
        until(lambda: told(node), "a beat with the modules, though a picture has none that is far from its limit")
        assert {hot.module for hot in told(node)} == {"fc"}
    finally:
        link.close()
    until(lambda: not told(node), "a beat without them")
    assert node.agent is not None and not node.agent.verdict
    node.end_ranks()
    assert node.verdict().kind == "clean"
