from __future__ import annotations

import os

import msgspec
import pytest
from gpuwatch.core.settings import VARIABLE, WorkerSettings
from gpuwatch.core.text import from_json, to_json
from gpuwatch.core.verdicts import VerdictKind
from gpuwatch.core.wire.messages import CollectorMessage, RunWelcome, decode_collector, encode
from gpuwatch.core.wire.pipe import JobResult, WorkersStarted, read_from_agent, read_to_agent
from hypothesis import example, given
from hypothesis import strategies as st

names = st.binary(max_size=20).map(os.fsdecode)


@given(names)
@example(os.fsdecode(bytes(range(1, 256))))
@example("Grüße \N{SNOWMAN}")
def test_any_name_of_a_file_comes_back(name):
    verdict = JobResult(0, VerdictKind.CLEAN, f"report: {name}", name)
    assert read_from_agent(to_json(verdict)) == verdict
    welcome: CollectorMessage = RunWelcome("run", name)
    assert decode_collector(encode(welcome)) == welcome
    settings = WorkerSettings(name, modules=[name])
    text = settings.to_json()
    assert text.isascii()
    assert WorkerSettings.from_json(text.encode()) == settings


def test_numbers_stay_keys():
    message = WorkersStarted(0, {3: 4242})
    assert read_to_agent(to_json(message)) == message


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_what_no_byte_is_is_spelled_out(text):
    class Said(msgspec.Struct):
        text: str

    assert from_json(to_json(Said(text)), Said).text == text.encode(errors="backslashreplace").decode()


def test_the_variable_of_a_rank_holds_any_folder(monkeypatch):
    settings = WorkerSettings("/w\udcff")
    monkeypatch.setenv(VARIABLE, settings.to_json())
    assert WorkerSettings.from_environment() == settings
