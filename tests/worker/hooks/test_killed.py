"""A rank that is killed in the middle of anything: what it leaves is right, or is told to have never arrived."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch
from gpuwatch.core.recorder.pages import NameTable, decode_page
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.tests.fakes.late_device import LateDevice
from torch import nn

from ..conftest import Watched, use_late_device

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:.*fork"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def train(path: Path, batches: int | None, tell: int | None = None) -> Watched:
    """So many equal batches; None: until it is killed. Tells each of them to a pipe."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 1))
    watched = Watched(path, watch=("forward", "weights", "grads"))
    x = torch.randn(4, 8)
    while batches is None or batches > 0:
        model.zero_grad()
        model(x).sum().backward()
        batches = batches - 1 if batches is not None else None
        if tell is not None:
            os.write(tell, b".")
    return watched


def numbers(page) -> list[tuple]:
    return [(f.phase, f.module, r.role, r.kind, r.abs_min, r.abs_max, r.nan) for f in page.frames for r in f.rows]


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("late", [False, True], ids=["in host memory", "on a late device"])
def test_what_a_killed_rank_leaves_is_right_or_has_not_arrived(tmp_path, monkeypatch, late):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    watched = train(tmp_path / "whole", 3)
    whole = [numbers(page) for page in watched.pages]
    watched.close()
    choose = random.Random(0)
    arrived = pending = 0
    for kill in range(12):
        path = tmp_path / f"{kill}"
        reads, tells = os.pipe()
        child = os.fork()
        if not child:
            try:
                use_late_device(monkeypatch, LateDevice(kill) if late else None)
                train(path, None, tells)
            finally:
                os._exit(1)
        os.close(tells)
        for _ in range(choose.randrange(1, 8)):
            assert os.read(reads, 1) == b"."
        for _ in range(choose.randrange(20_000)):  # somewhere in the next batch
            pass
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        os.close(reads)
        reader, names = RecorderReader(path), NameTable()
        names.add(reader.new_entries()[0])
        pages = [decode_page(page, names) for page in map(reader.page, (held.number for held in reader.held())) if page]
        reader.close()
        assert pages
        for page in pages:
            found = numbers(page)
            expected = whole[min(page.batch, 2)]
            for one, other in zip(found, expected, strict=False):
                if one[3] == "pending":
                    pending += 1
                    assert one[:3] == other[:3]
                else:
                    arrived += 1
                    assert one == other
    torch.set_num_threads(threads)
    assert arrived
    assert late == bool(pending)
