"""The screen itself, driven as a user drives it."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("textual")

from gpuwatch.collector.views.top_app import RankTable, TopApp
from gpuwatch.collector.views.top_model import JobEnd
from gpuwatch.core.wire.view import NodeView


def drive(views, act, size=(80, 24), ask_stacks=lambda: lambda: [], end=JobEnd):
    """Run the app over the pictures, do something with it, and return what is on the screen, line by line."""
    left = list(views)

    async def run():
        app = TopApp(lambda: left.pop(0) if left else None, lambda: not left, "gpuwatch report run-1", ask_stacks, end)
        async with app.run_test(size=size) as pilot:
            for _ in range(len(views) + 1):
                app.poll()
            await act(pilot, app)
            await pilot.pause()
            return [
                "".join(segment.text for segment in strip).rstrip() for strip in app.screen._compositor.render_strips()
            ]

    return asyncio.run(run())


async def nothing(pilot, app):
    await pilot.pause()


def test_all_parts_stand_on_80_by_24(picture):
    lines = drive([picture.view([picture.rank(n) for n in range(4)])], nothing)
    assert len(lines) == 24
    text = "\n".join(lines)
    for part in (
        "run run-1: train.py --lr 1",
        " rank host",
        "    3 node-a",
        "powers of two left: net.fc2, rank 3",
        "rank 1 raised",
    ):
        assert part in text
    assert "the job is over: gpuwatch report run-1" in text


def test_after_the_end_the_last_picture_says_how_the_job_ended(picture):
    """It was made before the ranks had ended."""
    ranks = [picture.rank(n, phase="script", still=4.0) for n in range(2)]
    statement = (
        "Rank 1 on vm was killed by SIGKILL after the optimizer step of batch 19, which is a sentence of two lines."
    )
    lines = drive(
        [picture.view(ranks, hang="rank 0 waits", hang_ranks=[1])], nothing, end=lambda: JobEnd("lost", statement)
    )
    text = " ".join(" ".join(lines).split())
    assert statement in text and "the job is over: gpuwatch report run-1" in text
    assert "2 ended" in text and "0 node-a ended" in text
    assert "script" not in text and "waited for" not in text and "rank 0 waits" not in text


def test_s_asks_for_the_stacks_and_shows_them_in_place_of_the_ranks(picture):
    stacks = ["run run-1: 1 running rank of 1", f"  - rank 0 waits: {'x' * 9} " + "in all_reduce " * 9]
    come, shown = [], []  # the screen's own clock polls, too

    async def act(pilot, app):
        await pilot.press("s")
        app.poll()
        await pilot.pause()
        shown.append([line.text for line in app.query_one(RankTable).lines])
        come.append(stacks)
        app.poll()
        await pilot.pause()
        shown.append([line.text for line in app.query_one(RankTable).lines])

    text = "\n".join(
        drive([picture.view([picture.rank(0)])], act, ask_stacks=lambda: lambda: come[0] if come else None)
    )
    assert shown[0] == ["the ranks are asked for their stacks"]
    assert shown[1][0] == "run run-1: 1 running rank of 1" and max(map(len, shown[1])) < 80
    assert " ".join(" ".join(shown[1][1:]).split()).count("in all_reduce") == 9, "nothing is cut"
    assert "stacks; s: the ranks again" in text and "node-a" not in text

    async def there_and_back(pilot, app):
        await pilot.press("s", "s")

    assert "    0 node-a" in "\n".join(drive([picture.view([picture.rank(0)])], there_and_back))


@pytest.mark.slow
def test_a_thousand_ranks_can_be_scrolled_and_the_head_stays(picture):
    async def act(pilot, app):
        await pilot.press("end")
        await pilot.pause()
        app.query_one(RankTable).scroll_end(animate=False)

    lines = drive([picture.view([picture.rank(n) for n in range(1024)])], act)
    text = "\n".join(lines)
    assert " 1023 node-a" in text
    assert "1024 ranks on 1 node" in text
    assert "    0 node-a" not in text


@pytest.mark.slow
def test_a_filter_is_typed_and_taken_away_again_and_n_shows_the_nodes(picture):
    ranks = [picture.rank(n, host=f"gpu-{n // 8}") for n in range(64)]
    nodes = [NodeView(f"gpu-{n}", False, "ok", cpu=0.5, memory=0.5) for n in range(8)]
    numbers = []

    async def act(pilot, app):
        for keys in (("slash", *"gpu-3"), ("enter",), ("n",), ("n",), ("escape",)):
            await pilot.press(*keys)
            await pilot.pause()
            numbers.append(len(app.query_one(RankTable).lines))

    drive([picture.view(ranks, nodes=nodes)], act)
    assert numbers == [8, 8, 1, 8, 64]


def test_o_orders_the_ranks_and_q_ends_it(picture):
    ranks = [picture.rank(n, overflow=n == 900) for n in range(1024)]
    firsts = []

    async def act(pilot, app):
        for _ in range(2):
            firsts.append(app.query_one(RankTable).lines[0].text.split()[0])
            await pilot.press("o")
        await pilot.press("q")
        assert app._exit

    drive([picture.view(ranks)], act)
    assert firsts == ["900", "0"]


def test_a_last_look_when_the_screen_is_gone_draws_nothing(picture):
    """The timer of an app that ends may fire once more."""

    async def act(pilot, app):
        await app.query_one("#events").remove()
        await app.query_one(RankTable).remove()
        app.poll()

    drive([picture.view([picture.rank(0)])], act)


@pytest.mark.parametrize("before", [[], ["slash", "x"]], ids=["in the table", "in the filter"])
def test_ctrl_c_ends_it(picture, before):
    async def act(pilot, app):
        await pilot.press(*before, "ctrl+c")
        assert app._exit

    drive([picture.view([picture.rank(0)])], act)
