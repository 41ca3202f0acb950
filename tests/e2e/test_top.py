"""`gpuwatch top` beside a job of four ranks that trains, stands, and ends."""

import pathlib
import time

import pytest
from gpuwatch.collector.top.link import Link
from gpuwatch.collector.top.model import Model

pytestmark = pytest.mark.slow
DEADLINE_S = 300


def until(job, link, model, seen):
    """Take pictures until the screen is as wanted; the job goes on meanwhile."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        assert job.poll() is None, job.communicate()
        view = link.newest(1.0)
        if view is not None:
            model.see(view)
        screen = model.screen(100)
        if seen(screen):
            return screen
    (pathlib.Path(job.args[-1]) / "go").touch()
    raise AssertionError(f"it was never seen; the last screen: {screen}; {job.communicate()}")


def test_it_shows_a_job_of_four_ranks_while_it_runs(bench, tmp_path):
    job = bench.start(
        *("gpuwatch.cli.main", "launch", "--nproc-per-node", "4", "--preflight", "off", "--run-name", "shown"),
        *("--hang-timeout", "0", bench.script("looked_at.py"), str(tmp_path)),
    )
    folder = bench.cwd / "gpuwatch-runs" / "shown"
    link, model = Link(folder), Model()
    try:
        screen = until(job, link, model, lambda screen: "batches/s" in str(screen.head) and screen.hot)
        assert [line.text.split()[0] for line in screen.ranks] == ["0", "1", "2", "3"]
        assert "4 ranks on 1 node" in screen.head[1].text
        assert "powers of two below float16's" in screen.hot[0].text

        once = bench.gpuwatch("top", "shown", "--once")
        assert once.code == 0
        assert "4 ranks on 1 node" in once.stdout and "Closest to their limit" in once.stdout

        (tmp_path / "stand").touch()
        screen = until(job, link, model, lambda screen: "is waited for" in str(screen.head))
        assert any(line.text.startswith("rank 2 is waited for: it has stood for") for line in screen.head)
        assert any(line.text.endswith("3 ranks wait") for line in screen.head)
        assert screen.ranks[0].text.split()[0] == "2"
        _on_a_terminal(folder)

        (tmp_path / "go").touch()
        (tmp_path / "stand").unlink()
        run = bench.finish(job)
        assert (run.code, run.verdict["kind"]) == (0, "clean"), "it changes nothing for the job"
        assert run.report["collector"]["from_viewers"] == 0
        assert not link.is_shown
    finally:
        link.close()
        (tmp_path / "go").touch()  # whatever has failed, the job ends
    over = bench.gpuwatch("top", "shown")
    assert over.code == 2
    assert "what it came to: gpuwatch report shown" in over.stderr


def _on_a_terminal(folder):
    """The screen itself, where textual is installed."""
    try:
        from gpuwatch.collector.top.app import Top
    except ImportError:
        return
    import asyncio

    async def run():
        link = Link(folder)
        try:
            app = Top(lambda: link.newest(1.0), lambda: not link.is_shown, "shown")
            async with app.run_test(size=(80, 24)) as pilot:
                while "is waited for" not in str(app.query_one("#head").render()):
                    app.look()
                    await pilot.pause()
        finally:
            link.close()

    asyncio.run(run())
