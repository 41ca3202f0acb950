"""Amounts of memory, ranks in words, what is safe to show, and text that is no UTF-8."""

from __future__ import annotations

import os
import re

import msgspec
import pytest
from gpuwatch.core.codes import VerdictKind
from gpuwatch.core.settings import VARIABLE, WorkerSettings
from gpuwatch.core.text import (
    MOST_OF_A_NAME,
    MemoryAmount,
    from_json,
    is_shown,
    parse_amount,
    parse_size,
    ranks_text,
    shown,
    shown_lines,
    shown_name,
    to_json,
)
from gpuwatch.core.wire.messages import CollectorMessage, RunWelcome, decode_collector, encode
from gpuwatch.core.wire.pipe import FromAgent, JobResult, ToAgent, WorkersStarted
from hypothesis import example, given
from hypothesis import strategies as st

# What a script calls its modules is shown on one line, without control characters.


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("encoder.layers.0", "encoder.layers.0"),
        ("größe 数", "größe 数"),
        ("a\nb\r\n", "a\\nb\\r\\n"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("a\u2028b\x85c", "a\\u2028b\\x85c"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_is_not_printable_is_escaped(text, line):
    assert shown(text) == line


@given(st.text(st.characters()))
def test_any_text_is_one_printable_line_and_stays_as_it_is(text):
    line = shown(text)
    assert line.isprintable()
    assert len(line.splitlines()) <= 1
    assert shown(line) == line
    name = shown_name(text)
    assert len(name) <= MOST_OF_A_NAME
    assert shown_name(name) == name
    assert is_shown(text) == (name == text)


def test_a_long_name_keeps_both_of_its_ends():
    name = shown_name("model." + "x" * 500 + ".fc2")
    assert len(name) == MOST_OF_A_NAME
    assert name.startswith("model.x")
    assert name.endswith("x.fc2")


def test_a_traceback_keeps_its_lines():
    assert shown_lines("Traceback:\n  \x1b[1mboom\r\n") == "Traceback:\n  \\x1b[1mboom\\r\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("1k", 1024),
        ("256M", 256 << 20),
        ("256MiB", 256 << 20),
        ("256 mib", 256 << 20),
        ("16MB", 16_000_000),
        ("1.5GiB", 3 << 29),
        ("2T", 2 << 40),
        (" 8B ", 8),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size
    assert parse_amount(text) == MemoryAmount(size=size)


@pytest.mark.parametrize("text", ["", "0", "-1", "1e6", "M", "1PiB", "1 2", "²", "0x10", "9999TiB", "0.5", "1M%"])
def test_what_is_no_size(text):
    assert parse_size(text) is None
    assert parse_amount(text) is None


@pytest.mark.parametrize(("text", "share"), [("80%", 0.8), ("100 %", 1.0), ("0.5%", 0.005)])
def test_shares(text, share):
    assert parse_amount(text) == MemoryAmount(share=share)
    assert parse_size(text) is None


@pytest.mark.parametrize("text", ["0%", "100.1%", "-5%", "%"])
def test_what_is_no_share(text):
    assert parse_amount(text) is None


def test_an_amount_of_what_is_free():
    assert MemoryAmount(share=0.25).of(1000) == 250
    assert MemoryAmount(size=64).of(1000) == 64


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no rank"),
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2, 3, 7], "ranks 0-3, 7"),
        ([5, 5, 6, 7], "ranks 5-7"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
        ([*range(9), *range(20, 29), *range(40, 60)], "ranks 0-8, 20-28, 40-59"),
    ],
)
def test_in_words(ranks, text):
    assert ranks_text(ranks) == text


@given(st.sets(st.integers(0, 200), min_size=2))
def test_the_words_name_these_ranks_and_no_other(ranks):
    named = set()
    for piece in re.findall(r"\d+(?:-\d+)?", ranks_text(ranks, most=1000)):
        first, _, last = piece.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == ranks


@given(st.sets(st.integers(0, 10_000), min_size=2))
def test_it_stays_short(ranks):
    text = ranks_text(ranks)
    assert len(text) < 130
    shown, _, rest = text.partition(" and ")
    counted = sum(int(last or first) - int(first) + 1 for first, last in re.findall(r"(\d+)(?:-(\d+))?", shown))
    assert counted + (int(rest.split()[0]) if rest else 0) == len(ranks)


names = st.binary(max_size=20).map(os.fsdecode)


@given(names)
@example(os.fsdecode(bytes(range(1, 256))))
@example("Grüße \N{SNOWMAN}")
def test_any_name_of_a_file_comes_back(name):
    verdict = JobResult(0, VerdictKind.CLEAN, f"report: {name}", name)
    assert from_json(to_json(verdict), FromAgent) == verdict
    welcome: CollectorMessage = RunWelcome(name)
    assert decode_collector(encode(welcome)) == welcome
    settings = WorkerSettings(name, modules=[name])
    text = settings.to_json()
    assert text.isascii()
    assert WorkerSettings.from_json(text.encode()) == settings


def test_numbers_stay_keys():
    message = WorkersStarted(0, {3: 4242})
    assert from_json(to_json(message), ToAgent) == message


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_what_no_byte_is_is_spelled_out(text):
    class Said(msgspec.Struct):
        text: str

    assert from_json(to_json(Said(text)), Said).text == text.encode(errors="backslashreplace").decode()


def test_the_variable_of_a_rank_holds_any_folder(monkeypatch):
    settings = WorkerSettings("/w\udcff")
    monkeypatch.setenv(VARIABLE, settings.to_json())
    assert WorkerSettings.from_environment() == settings
