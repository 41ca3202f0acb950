"""Notifications, sent to a real HTTP server and to real commands."""

from __future__ import annotations

import json
import socket
import sys
import threading

import pytest
from gpuwatch.collector.views.job_notifier import JobNotification, JobNotifier, _data_for

from ...webhooks import serve as serve

STALL = JobNotification("rank 1 does not move", "stall", "run-1", "/runs/run-1")
SAID = {"text": "rank 1 does not move", "event": "stall", "run": "run-1", "folder": "/runs/run-1"}


def notified(*targets, notifications=(STALL,), patience_s=60.0):
    """What was said of it."""
    said = []
    notifier = JobNotifier(targets, said.append, pauses_s=(0.0, 0.0))
    for notification in notifications:
        notifier.put(notification)
    notifier.close(patience_s)
    return said


def test_it_is_posted_as_json_in_order(serve):
    server = serve()
    verdict = JobNotification("overflow", "verdict", "run-1", "/runs/run-1", "overflow", "established", 4, 3, "fc1")

    assert notified(server.address, notifications=(STALL, verdict)) == []
    assert server.heard == [
        ("/hooks/a-secret", SAID),
        (
            "/hooks/a-secret",
            {"text": "overflow", "event": "verdict", "run": "run-1", "folder": "/runs/run-1", "verdict": "overflow"}
            | {"certainty": "established", "exit_code": 4, "rank": 3, "module": "fc1"},
        ),
    ]


def test_a_server_that_is_busy_is_asked_again(serve):
    server = serve(503, 429)

    assert notified(server.address) == []
    assert len(server.heard) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("codes", "requests"), [((404, 404), 1), ((500,) * 9, 3)])
def test_what_cannot_be_sent_is_said_once_and_without_the_secret(serve, codes, requests):
    server, other = serve(*codes), serve()

    said = notified(server.address, other.address, notifications=(STALL,) if requests == 3 else (STALL, STALL))

    assert len(said) == 1
    assert said[0].startswith(f"--notify: 127.0.0.1 could not be notified: it answered {codes[0]}")
    assert len(server.heard) == requests * (1 if requests == 3 else 2)
    assert len(other.heard) == (1 if requests == 3 else 2), "one target's fault is not another's"


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    (said,) = notified(f"http://127.0.0.1:{port}/a-secret")

    assert "refused" in said
    assert "a-secret" not in said


def test_the_end_of_the_job_does_not_wait_for_a_server_that_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = notified(f"http://127.0.0.1:{silent.getsockname()[1]}/a-secret", patience_s=0.2)

    assert said == ["--notify: 127.0.0.1 could not be notified: it was not done within 0.2 s [GW608]"]


def test_without_a_notification_nothing_begins_and_nothing_is_waited_for():
    before = threading.active_count()
    notifier = JobNotifier(["http://192.0.2.1/"], pytest.fail)

    assert threading.active_count() == before
    notifier.close()


def test_a_command_gets_it_on_its_stdin(tmp_path):
    told = tmp_path / "told here"

    assert (
        notified(f"{sys.executable} -c 'import sys; open(sys.argv[1], \"wb\").write(sys.stdin.buffer.read())' '{told}'")
        == []
    )
    assert json.loads(told.read_text()) == SAID


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (f"{sys.executable} -c 'import sys; sys.exit(\"no such channel\")'", "ended with 1: no such channel"),
        ("/no/such/program --flag", "the command did not start: No such file or directory"),
    ],
)
def test_a_command_that_fails(command, why):
    (said,) = notified(command)

    assert why in said


@pytest.mark.parametrize(
    ("address", "sent"),
    [
        ("https://hooks.slack.com/services/T/B/x", {"text": STALL.text}),
        ("https://discord.com/api/webhooks/1/x", {"content": STALL.text}),
        ("https://chat.example.org/hooks/x", SAID),
    ],
)
def test_slack_and_discord_get_what_they_take(address, sent):
    assert json.loads(_data_for(address, STALL)) == sent


@pytest.mark.parametrize(
    "target",
    [
        "http://me:hunter2@127.0.0.1:1/",
        "http://127.0.0.1:1/hunter2 and a blank",
        f"{sys.executable} -c 'import sys; sys.exit(\"refused: --token=hunter2\")'",
    ],
)
def test_what_failed_is_said_without_the_secret(target):
    (said,) = notified(target)

    assert "could not be notified" in said
    assert "hunter2" not in said
