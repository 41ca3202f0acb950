"""What a model is handed by other ways than its own batch: another model's output, a generator, an object."""

from __future__ import annotations

import math
from types import SimpleNamespace

import gpuwatch
import pytest
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x)


class Decoder(Encoder):
    pass


def verdict_of(train):
    handle = gpuwatch.watch(on_overflow="continue")
    try:
        train()
        return handle.verdict()
    finally:
        handle.remove()


@pytest.mark.parametrize("other", ["an encoder", "a loss", "nothing"])
def test_another_model_that_was_called_in_the_same_step_leaves_a_doubt(other):
    """The script divides what the encoder returned. A loss returns a scalar, of which no batch is made."""
    encoder, decoder, loss = Encoder(), Decoder(), nn.MSELoss()
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)

    def train():
        for batch in range(3):
            bad = math.nan if batch == 2 else 1.0
            x = (encoder(torch.ones(2, 4)).detach() if other == "an encoder" else torch.ones(2, 4)).abs() * bad
            y = decoder(x)
            (loss(y, torch.zeros(2, 4)) if other == "a loss" else y.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    verdict = verdict_of(train)
    assert (verdict.root, verdict.phase, verdict.module) == ("Decoder", "input", "")
    assert verdict.certainty == ("supported" if other == "an encoder" else "established")
    said = any("`Encoder` was called in between" in line for line in verdict.evidence)
    assert said == (other == "an encoder")
    assert ("receives, and at what it calls before" in verdict.next[0]) == said


class OfObject(nn.Module):
    """Takes its tensors out of what it is handed."""

    def __init__(self, take):
        super().__init__()
        self.take, self.first, self.second = take, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, handed):
        return self.second(self.first(self.take(handed)) + self.take(handed))


def batches(bad):
    """The second tensor of a batch may be bad."""
    yield torch.ones(2, 4)
    yield torch.full((2, 4), bad)


@pytest.mark.parametrize(
    ("take", "make"),
    [(next, batches), (lambda holder: holder.values.pop(0), lambda bad: SimpleNamespace(values=list(batches(bad))))],
    ids=["a generator", "an object"],
)
def test_a_value_that_may_have_come_in_an_object_leaves_a_doubt(take, make):
    """Also after the first call in the model: a generator is asked when its next tensor is needed."""
    model = OfObject(take)

    def train():
        for batch in range(3):
            model(make(math.nan if batch == 2 else 1.0))

    verdict = verdict_of(train)
    assert (verdict.module, verdict.between, verdict.certainty) == ("", ("first", "second"), "supported")
    assert any("received an object that is not inspected" in line for line in verdict.evidence)
