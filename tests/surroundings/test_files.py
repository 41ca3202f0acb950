"""A script that closes what it has not opened, and then opens its checkpoint. torchrun alone is the control."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .place import LAUNCH, TORCHRUN, Place, finish

SCRIPT = """
import gc, os, signal, sys, time
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
os.closerange(3, 4096)
files = [open(f"losses-{os.environ['RANK']}-{number}", "w", buffering=1) for number in range(12)]
for batch in range(3):
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    gc.collect()
    for file in files:
        file.write(f"{loss.item()} ")
        file.flush()
open(f"here-{os.environ['RANK']}", "w").close()
while not all(os.path.exists(f"here-{rank}") for rank in range(2)):  # torchrun ends the other with the first
    time.sleep(0.01)
END
"""
ENDS = {
    "well": "",
    "dies": "os.kill(os.getpid(), signal.SIGSEGV)",
    "raises": "raise ValueError('x')",
    "leaves": "os._exit(0)",
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    assert made.left() == []


@pytest.mark.slow
@pytest.mark.sample(1, of="surroundings", turns=True)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", ENDS)
def test_the_files_of_a_script_that_closes_all_descriptors_are_its_own(place, end):
    script = place.cwd / "closes.py"
    script.write_text(SCRIPT.replace("END", ENDS[end]))

    def run(module: list[str]) -> tuple[int, dict[str, str]]:
        return finish(place.start(module, [str(script)])), place.losses()

    code, losses = run(TORCHRUN)
    assert len(losses) == 24
    assert all(len(text.split()) == 3 for text in losses.values())
    watched, watched_losses = run(LAUNCH)
    assert watched_losses == losses
    assert watched == (5 if end == "dies" else code)
    verdict = place.verdict()
    assert verdict["kind"] == {"well": "clean", "dies": "lost", "raises": "crash", "leaves": "clean"}[end]
