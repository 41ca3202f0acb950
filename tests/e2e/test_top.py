"""`gpuwatch top` and the metrics beside a job of four ranks that trains, stands, and ends."""

import json
import pathlib
import shlex
import shutil
import socket
import sys
import urllib.request

import pytest
from gpuwatch.collector.views.publisher import job_viewer
from gpuwatch.collector.views.top_model import TopModel
from gpuwatch.core.host import host_name
from prometheus_client.parser import text_string_to_metric_families

from ..waiting import until
from .tmux import Terminal

pytestmark = pytest.mark.slow
DEADLINE_S = 300


def screen_of(job, link, model, seen):
    """Take pictures until the screen is as wanted; the job goes on meanwhile."""
    screens = []

    def is_seen() -> bool:
        assert job.poll() is None, job.communicate()
        view = link.newest(1.0)
        if view is not None:
            model.see(view)
        screens[:] = [model.screen(100)]
        return seen(screens[0])

    def what_is_there() -> str:
        (pathlib.Path(job.args[-1]) / "go").touch()
        return f"the last screen: {screens}; {job.communicate()}"

    until(is_seen, "a screen as wanted", what_is_there, look_s=0)
    return screens[0]


def test_it_shows_a_job_of_four_ranks_while_it_runs(bench, tmp_path, port):
    job = bench.start(
        *("gpuwatch.cli.main", "launch", "--nproc-per-node", "4", "--preflight", "off", "--run-name", "shown"),
        *("--hang-timeout", "0", "--metrics-port", str(port), bench.script("looked_at.py"), str(tmp_path)),
    )
    folder = bench.cwd / "gpuwatch-runs" / "shown"
    link, model = job_viewer(folder), TopModel()
    try:
        screen = screen_of(job, link, model, lambda screen: "batches/s" in str(screen.head) and screen.hot)
        assert [line.text.split()[0] for line in screen.ranks] == ["0", "1", "2", "3"]
        assert "4 ranks on 1 node" in screen.head[1].text
        assert "powers of two left: " in screen.hot[0].text

        once = bench.gpuwatch("top", "shown", "--once")
        assert once.code == 0
        assert "4 ranks on 1 node" in once.stdout and "Closest to their limit" in once.stdout

        found = json.loads(bench.gpuwatch("top", "shown", "--once", "--format", "json").stdout)
        assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
        assert 0 < found["nodes"][0]["memory"] < 1

        (tmp_path / "stand").touch()
        _stacks(bench)
        early = bench.gpuwatch("report", "shown")
        assert early.code == 0 and "this run has not ended" in early.stderr
        screen = screen_of(job, link, model, lambda screen: "is waited for" in str(screen.head))
        assert any(line.text.startswith("rank 2 is waited for: it has not moved for") for line in screen.head)
        assert any(line.text.endswith("3 ranks wait") for line in screen.head)
        assert screen.ranks[0].text.split()[0] == "2"
        seen = scraped(port)
        while seen["gpuwatch_ranks", "waited for"] == 0:  # the picture is a second old, the numbers may be newer
            assert job.poll() is None
            link.newest(1.0)
            seen = scraped(port)
        assert seen["gpuwatch_ranks", "waited for"] == 1
        assert seen["gpuwatch_rank_state", host_name(), "2", "waited for"] == 1
        assert seen["gpuwatch_rank_batches_total", host_name(), "3"] > 1
        assert any(name == "gpuwatch_module_headroom" for name, *_ in seen)
        has_tmux = shutil.which("tmux") is not None
        if has_tmux:
            _in_a_terminal(bench)

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
    assert f"which has ended; its report: gpuwatch report {folder}" in over.stderr
    assert "has not ended" not in bench.gpuwatch("report", "shown").stderr
    if not has_tmux:
        pytest.skip("tmux is not installed here: all but the terminal has passed (.ci/run installs it)")


def scraped(port):
    """Name and values of labels, by the names of the labels -> number"""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
            for family in families
            for sample in family.samples
        }


def _stacks(bench):
    """Rank 2 may have yet to stand, or look for the file just now: then it is asked again."""
    wanted = ("rank 2 is in the forward of batch", "ranks 0, 1, 3 wait in all_reduce", "time.sleep(0.01)")
    tries = []

    def is_told() -> bool:
        tries.append(bench.gpuwatch("stacks", "shown"))
        assert tries[-1].code == 0, tries[-1].stderr
        return all(text in tries[-1].stdout for text in wanted)

    until(is_told, f"stacks with {wanted}", lambda: tries[-1].stdout)
    shown = tries[-1]
    assert "run shown: 4 running ranks of 4\n" in shown.stdout
    assert "Stack of ranks 0, 1, 3, innermost call last" in shown.stdout
    assert "in forward: time.sleep(0.01)" in shown.stdout
    innermost = set[str]()

    def is_shown() -> bool:
        found = json.loads(bench.gpuwatch("stacks", "shown", "--format", "json").stdout)
        assert [look["where"]["rank"] for look in found["looks"]] == [0, 1, 2, 3]
        innermost.update(look["stack"][0]["function"] for look in found["looks"])
        return innermost >= {"all_reduce", "forward"}

    until(is_shown, "the innermost functions all_reduce and forward", lambda: innermost)


def _in_a_terminal(bench):
    """80 columns by 24 lines: what is seen, keys, another size, and that the terminal is left as it was."""
    terminal = Terminal(bench.cwd, bench.environment, 80, 24)
    flags = ("alternate_on", "cursor_flag", "mouse_any_flag", "mouse_sgr_flag", "keypad_flag", "keypad_cursor_flag")
    try:
        terminal.run("stty -a > before")
        plain = terminal.state(*flags)
        terminal.run(f"clear; {shlex.quote(sys.executable)} -m gpuwatch.cli.main top shown; echo ended with $?")
        screen = terminal.until(lambda screen: "is waited for" in "".join(screen) and "Quit" in screen[-1])
        assert len(screen) == 24 and max(map(len, screen)) <= 80
        text = "\n".join(screen)
        assert "4 ranks on 1 node" in text and "powers of two" not in text, "nothing comes closer to a limit in a hang"
        title = next(n for n, line in enumerate(screen) if line.split()[:3] == ["rank", "host", "phase"])
        assert [line.split()[0] for line in screen[title + 1 : title + 5]] == ["2", "0", "1", "3"]
        assert terminal.state("alternate_on") == ["1"], "what was on the screen is kept below it"

        terminal.type("s")
        screen = terminal.until(lambda screen: "in all_reduce" in "".join(screen) and "in forward" in "".join(screen))
        assert any(line.startswith("stacks; s: the ranks again") for line in screen)
        terminal.type("s")
        terminal.until(lambda screen: screen[title].split()[:3] == ["rank", "host", "phase"])

        terminal.type("o")
        terminal.until(
            lambda screen: [line.split()[:1] for line in screen[title + 1 : title + 5]] == [[n] for n in "0123"]
        )
        terminal.resize(60, 20)
        screen = terminal.until(
            lambda screen: len(screen) == 20 and "is waited for" in "".join(screen) and "Quit" in screen[-1]
        )
        assert max(map(len, screen)) <= 60
        terminal.resize(80, 24)

        terminal.type("q")
        screen = terminal.until(lambda screen: "ended with" in "".join(screen) and "ready>" in screen[1])
        assert screen[0] == "ended with 0"
        assert not any(screen[2:]), "nothing of it is left on the screen"
        assert terminal.state(*flags) == plain
        terminal.run("stty -a > after; echo $((6 * 7))")
        terminal.until(lambda screen: "42" in screen)
        assert (bench.cwd / "after").read_text() == (bench.cwd / "before").read_text(), "echo, line mode, control keys"
    finally:
        terminal.close()


def test_a_port_of_the_metrics_that_is_in_use_is_one_sentence(bench):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = bench.launch("looked_at.py", "--preflight", "off", "--metrics-port", address)
    assert run.code == 2
    assert f"--metrics-port: expected an address that is free, found {address}: Address already in use" in run.stderr
    assert not (bench.cwd / "gpuwatch-runs").exists(), "nothing was started"
