"""Sixty architectures of transformers: no alarm, the same bits, and faults in the forward and the backward named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from gpuwatch.tests.fakes.late_device import LateDevice

from ..worker.conftest import use_late_device

sys.path.insert(0, str(Path(__file__).parent))  # as run.py, a script, finds its neighbours

pytest.importorskip("transformers")
from models import ARCHITECTURES
from trial import attempt, attempt_compiled

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")  # what the library warns of is not ours to mend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, id=each.name, marks=pytest.mark.sample(3, of="architectures")) for each in ARCHITECTURES],
)
def test_it_is_watched_without_an_alarm_and_its_faults_are_named(architecture, dtype):
    result = attempt(architecture, dtype)

    assert result.wrong == []
    assert len(result.right) + len(result.listed) == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, id=each.name, marks=pytest.mark.sample(3, of="architectures on a late device"))
        for each in ARCHITECTURES
    ],
)
def test_its_faults_are_named_where_the_numbers_come_late(architecture, monkeypatch):
    """The graph of a batch is then looked at when the next one has begun."""
    use_late_device(monkeypatch, LateDevice(7))
    result = attempt(architecture, torch.float32, late=True)

    assert result.wrong == []
    assert len(result.right) + len(result.listed) == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("late", [False, True], ids=["in host memory", "on a late device"])
@pytest.mark.parametrize(
    ("architecture", "blocks"),
    [
        pytest.param(each, blocks, id=f"{each.name}, {of}", marks=pytest.mark.sample(1, of="architectures compiled"))
        for of, blocks in (("compiled", False), ("its blocks compiled", True))
        for each in ARCHITECTURES
    ],
)
def test_its_faults_are_named_where_it_is_compiled(architecture, monkeypatch, late, blocks):
    if late:
        use_late_device(monkeypatch, LateDevice(7))
    result = attempt_compiled(architecture, blocks)

    assert result.wrong == []
    assert len(result.right) + len(result.listed) == 2


def test_there_are_sixty():
    assert len({architecture.name for architecture in ARCHITECTURES}) == len(ARCHITECTURES) == 60
