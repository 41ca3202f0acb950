"""What `gpuwatch top` says of made pictures."""

from __future__ import annotations

import math

import pytest
from gpuwatch.collector.report.sentence_parts import elapsed_text
from gpuwatch.collector.views.snapshot import behind_of
from gpuwatch.collector.views.top_model import JobEnd, ScreenLine, TopModel, plain
from gpuwatch.core.wire.beat import HotModule
from gpuwatch.core.wire.view import NodeView, ViewStraggler


def seen(*views, width=100, **settings):
    model = TopModel(**settings)
    for view in views:
        model.see(view)
    return model.screen(width)


def test_the_screen_of_a_healthy_job(picture):
    before = picture.view([picture.rank(n, batch=10) for n in range(3)], time_s=100)
    after = picture.view([picture.rank(n, batch=30 + n) for n in range(3)], time_s=110)
    assert plain(seen(before, after), 64) == (
        "run run-1: train.py --lr 1\n"
        "3 ranks on 1 node, 2.1 batches/s (2 to 2.2), step 9\n"
        "3 forward\n"
        "\n"
        " rank host           phase          step    batch     /s  still warned  in\n"
        "    0 node-a         forward           9       30      2                net.fc1\n"
        "    1 node-a         forward           9       31    2.1                net.fc1\n"
        "    2 node-a         forward           9       32    2.2                net.fc1\n"
        "\n"
        "Closest to their limit\n"
        "███████░   1.1 powers of two left: net.fc2, rank 3, to float16's 6.55e+04, +0.05 a batch, batch 10\n"
        "\n"
        "What happened\n"
        "rank 1 raised ValueError"
    )


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize(("use", "loss"), [(-1.0, -1.0), (0.5, -1.0), (0.5, 2.25)])
def test_what_is_to_be_said_of_a_rank_has_room_in_a_narrow_terminal(picture, width, use, loss):
    view = picture.view([picture.rank(0, overflow=True, gpu_use=use, gpu_memory=use, loss=loss)])
    screen = seen(view, width=width)
    assert screen.ranks[0].text.endswith("OVERFLOW net.fc1")
    assert {"rank", "phase", "batch", "still", "in"} <= set(screen.ranks_title.text.split())
    assert ("gpu%" in screen.ranks_title.text) == (use >= 0)


def test_a_module_close_to_its_limit_is_named_with_its_rank_in_a_narrow_terminal(picture):
    hot = [HotModule(1, 120, "layers.11.self_attn.out_proj", "float16", 3e4, 1.1, -0.05)]
    (line,) = seen(picture.view([picture.rank(1)], hot=hot), width=80).hot
    assert "layers.11.self_attn.out_proj, rank 1" in line.text


def test_each_rank_shows_its_loss_where_any_has_one(picture):
    losses = [2.34375, math.nan, 0.0, 6.6e-05, 1.2e38]
    screen = seen(picture.view([*(picture.rank(n, loss=loss) for n, loss in enumerate(losses)), picture.rank(5)]))
    end = screen.ranks_title.text.index(" loss") + 5
    assert [line.text[end - 8 : end].strip() for line in screen.ranks] == ["2.34", "nan", "0", "6.6e-05", "1.2e+38", ""]
    assert "loss" not in seen(picture.view([picture.rank(0)])).ranks_title.text


def test_with_gpus_each_rank_shows_its_own(picture):
    ranks = [picture.rank(n, gpu_use=use, gpu_memory=0.5 + n / 10) for n, use in enumerate((0.97, 0.03, 0.99))]
    screen = seen(picture.view([*ranks, picture.rank(3)]))
    assert ("GPUs in use 97 % of the time (3 to 99 %), memory up to 70 %", "") in screen.head
    at = screen.ranks_title.text.index("gpu%")
    assert [line.text[at : at + 9].split() for line in screen.ranks] == [["97", "50"], ["3", "60"], ["99", "70"], []]


def test_the_rank_that_the_others_wait_for_stands_in_the_head_and_first(picture):
    ranks = [picture.rank(n, still=30.0, waits=True) for n in range(4)]
    ranks[2] = picture.rank(2, still=41.0, begun=38)
    screen = seen(picture.view(ranks))
    said = "rank 2 is waited for: it has not moved for 41 s in forward, `net.fc1`; 3 ranks wait"
    assert (said, "bad") in screen.head
    assert "WAITED FOR" in screen.ranks[0].text and screen.ranks[0].text.split()[0] == "2"
    assert seen(picture.view(ranks), order="number").ranks[0].text.split()[0] == "0"


def test_the_rank_that_costs_the_others_time_stands_in_the_head(picture):
    view = picture.view([picture.rank(n) for n in range(4)], slow=ViewStraggler(3, "node-a", 0.24))
    assert ("rank 3 costs the job 24% of its time now", "warn") in seen(view).head


@pytest.mark.parametrize(
    "changed",
    [
        {"still": 0.2, "begun": 38},  # it moves: the others are only ahead
        {"still": 41.0, "begun": 40},  # all have begun as many
        {"still": 41.0, "begun": 38, "waits": True},  # it waits for somebody else
        {"still": 41.0, "begun": -1},  # nobody knows how many
    ],
)
def test_nobody_is_waited_for_without_proof(picture, changed):
    ranks = [picture.rank(n, still=30.0, waits=True) for n in range(4)]
    assert behind_of(picture.view([*ranks[:2], picture.rank(2, **changed), ranks[3]])) == set()


def test_a_rank_that_has_ended_is_waited_for_by_nobody(picture):
    ranks = [picture.rank(0, still=9.0), picture.rank(1, still=9.0), picture.rank(2, begun=3, ended=True, exit=0)]
    assert behind_of(picture.view(ranks)) == set()


def test_the_rank_of_a_hang_is_waited_for_whatever_was_counted_until_a_rank_moves(picture):
    """DDP's reduction in a backward is torch's own: with torch before 2.14 both ranks have begun as many."""

    def view(still):
        ranks = [picture.rank(0, still=30.0), picture.rank(1, still=still)]
        return picture.view(ranks, hang="Rank 1 never reached the reduction.", hang_ranks=[1])

    screen = seen(view(41.0))
    assert "WAITED FOR" in screen.ranks[0].text and screen.ranks[0].text.split()[0] == "1"
    assert ("Rank 1 never reached the reduction.", "bad") in screen.head
    screen = seen(view(0.2))
    assert not any("WAITED FOR" in line.text for line in screen.ranks)
    assert not any("never reached" in line.text for line in screen.head)


HANG = (
    "Rank 1 is at ddp.py:13 in <module>, after batch 24: time.sleep(1000). It never reached the backward's reduction "
    "of gradients, in which rank 0 has waited for 41 s."
)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_sentence_of_a_hang_is_whole_at_any_width_and_headroom_is_of_no_matter_then(picture, width):
    ranks = [picture.rank(n, still=41.0) for n in range(2)]
    screen = seen(picture.view(ranks, hang=HANG, hang_ranks=[1]), width=width)
    assert HANG in " ".join(line.text for line in screen.head if line.look == "bad")
    assert all(len(line.text) <= width for line in screen.head)
    assert screen.hot == []
    assert seen(picture.view([picture.rank(0)])).hot != []


def test_ranks_are_ordered_by_their_rest_and_by_their_gpu(picture):
    ranks = [
        picture.rank(n, still=still, gpu_use=use) for n, (still, use) in enumerate([(1, 0.9), (9, 0.5), (4, -1.0)])
    ]
    orders = {"longest at rest": ["1", "2", "0"], "least used GPU": ["1", "0", "2"]}
    for order, wanted in orders.items():
        assert [line.text.split()[0] for line in seen(picture.view(ranks), order=order).ranks] == wanted


def test_a_wide_terminal_has_bars_of_each_ranks_gpu(picture):
    view = picture.view([picture.rank(0, gpu_use=0.75, gpu_memory=0.5), picture.rank(1)])
    screen = seen(view, width=140)
    assert "██████░░  75 % ████░░░░  50 %" in screen.ranks[0].text
    at = screen.ranks_title.text.index("gpu%")
    assert screen.ranks[0].text[at] == "█" and not screen.ranks[1].text[at : at + 29].strip()
    assert "█" not in seen(view, width=100).ranks[0].text


def test_overflows_and_ends_come_first(picture):
    ranks = [picture.rank(n) for n in range(5)]
    ranks[3] = picture.rank(3, overflow=True)
    ranks[4] = picture.rank(4, ended=True, exit=-9)
    ranks[0] = picture.rank(0, ended=True, exit=0)
    screen = seen(picture.view(ranks, verdict="the verdict so far: supported: Rank 3"))
    assert [line.text.split()[0] for line in screen.ranks] == ["3", "4", "1", "2", "0"]
    assert ("OVERFLOW" in screen.ranks[0].text, " SIGKILL " in screen.ranks[1].text) == (True, True)
    assert ("the verdict so far: supported: Rank 3", "bad") in screen.head


def test_the_time_of_a_batch_is_drawn_and_how_long_the_job_has_run(picture):
    batches = (1, 2, 3, 3, 3, 4, 6)  # a picture a second: a batch of three seconds, then two in one
    views = [
        picture.view([picture.rank(n, batch=batch) for n in range(3)], time_s=4000.0 + at, started_ns=int(400e9))
        for at, batch in enumerate(batches)
    ]
    head = [line.text for line in seen(*views).head]
    assert "a batch takes 500 ms (500 ms to 3 s) ▃▃█▂" in head
    assert head[1].endswith("for 1:00:06")
    assert elapsed_text(2 * 86400 + 61) == "2 days 0:01:01"


def test_ranks_and_nodes_are_filtered_and_the_slowest_come_first(picture):
    def at(time_s, *batches):
        ranks = [picture.rank(n, batch=b, host=f"gpu-{n}", module=f"layers.{n}") for n, b in enumerate(batches)]
        nodes = [NodeView(f"gpu-{n}", False, "ok", cpu=n / 10, memory=0.5) for n in range(3)]
        return picture.view(ranks, time_s=time_s, nodes=nodes)

    views = at(100.0, 5, 5, 5), at(110.0, 25, 9, 15)
    assert [line.text.split()[0] for line in seen(*views, order="slowest").ranks] == ["1", "2", "0"]
    for wanted in ("GPU-2", "layers.2"):
        screen = seen(*views, wanted=wanted)
        assert [line.text.split()[0] for line in screen.ranks] == ["2"]
        assert any(line.text.endswith(": 1 of 3 ranks") for line in screen.head)
    assert [line.text.split()[0] for line in seen(*views).nodes] == ["node", "gpu-2", "gpu-1", "gpu-0"]
    assert [line.text.split()[0] for line in seen(*views, wanted="gpu-1").nodes] == ["node", "gpu-1"]


def test_a_node_has_a_line_with_its_processors_memory_and_gpus(picture):
    busy = NodeView("gpu-1", False, "ok", [79], 0.75, 0.25, 0.5, 1.0, 71.0, 2340.0)
    screen = seen(picture.view([picture.rank(0)], nodes=[NodeView("gpu-0", True, ""), busy]))
    assert [line.text for line in screen.nodes] == [
        "node            processors      memory          GPUs            GPU memory",
        "gpu-0                                                                           silent",
        "gpu-1           ██████░░  75 %  ██░░░░░░  25 %  ████░░░░  50 %  ████████ 100 %  71 C  2340 W  XID 79",
    ]
    assert [line.look for line in screen.nodes] == ["dim", "bad", "bad"]
    assert seen(picture.view([picture.rank(0)])).nodes == []


def test_a_restart_begins_the_speed_anew(picture):
    first = picture.view([picture.rank(0, batch=500)], time_s=100)
    again = picture.view([picture.rank(0, batch=2)], time_s=110)
    again = type(again)(**{**{f: getattr(again, f) for f in again.__struct_fields__}, "attempt": 1})
    head = seen(first, again).head[1].text
    assert "batches/s" not in head and "attempt 2" in head


@pytest.mark.parametrize("width", [80, 40, 200])
def test_no_line_is_wider_than_the_terminal_and_none_moves_its_cursor(picture, width):
    ranks = [picture.rank(n, module="m" * 300, host="h\x1b[2J" * 9) for n in range(3)]
    nodes = [NodeView("host" * 40, True, "NVML " * 40, [79, 48])]
    screen = seen(picture.view(ranks, nodes=nodes), width=width)
    lines = [*screen.head, screen.ranks_title, *screen.ranks, *screen.hot, *screen.events]
    assert all(len(line.text) <= width and line.text.isprintable() for line in lines)


def test_a_thousand_ranks_are_one_line_each_and_as_text_a_few(picture):
    ranks = [picture.rank(n) for n in range(1024)]
    screen = seen(picture.view(ranks))
    assert len(screen.ranks) == 1024
    assert "... 1014 more ranks" in plain(screen, 10)


def test_the_end_of_a_clean_run_is_no_trouble(picture):
    model = TopModel()
    model.see(picture.view([picture.rank(0, phase="script")]))
    model.end = JobEnd("clean", "No overflow: 1 rank, 11 batches.")
    assert ScreenLine("No overflow: 1 rank, 11 batches.", "good") in model.screen(80).head


def test_before_the_first_picture_it_says_so():
    assert "waiting for the first update" in plain(TopModel().screen(80), 5)


@pytest.mark.parametrize(
    ("end", "word"),
    [
        ({"exit": 0}, "ended"),
        ({"exit": 3}, "exit 3"),
        ({"exit": -15, "stopped": True}, "stopped"),
        ({"exit": 94, "overflow": True}, "ended"),
        ({"exit": 94}, "exit 94"),
    ],
)
def test_how_a_rank_ended_is_said_in_words(picture, end, word):
    (line,) = seen(picture.view([picture.rank(4, ended=True, **end)])).ranks
    assert f" {word}   " in line.text
