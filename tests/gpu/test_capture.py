"""A forward on a GPU is captured, and runs again on the GPU with the same random numbers, and without it."""

from __future__ import annotations

import gpuwatch
import pytest
import torch
from gpuwatch.worker.explain import reproduce
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SEEN: list[torch.Tensor] = []


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        out = self.drop(self.fc(x)).abs() * 3e38 * 100
        SEEN.append(out.detach().clone())
        return out


def test_it_runs_again_with_the_same_random_numbers(tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    model, x = Noisy().to(device), torch.full((4, 8), 9.0, device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(7)
    with gpuwatch.watch(model, capture=tmp_path) as watch, pytest.raises(gpuwatch.OverflowDetected):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).sum()
        loss.backward()
        watch.verdict()  # waits for the numbers
        optimizer.step()
    capture = reproduce.load(tmp_path / "overflow.pt", "cuda")
    assert capture["autocast"] == {"cuda": torch.bfloat16}
    call = reproduce.rebuild(capture, "cuda")
    with reproduce.surroundings(capture, "cuda"), torch.no_grad():
        assert torch.equal(call.module(*call.args), SEEN[0])
    there = reproduce.load(tmp_path / "overflow.pt")
    assert {tensor.device.type for tensor in (*there["state_dict"].values(), *there["args"])} == {"cpu"}
    on_host = reproduce.rebuild(there)
    with reproduce.surroundings(there, "cpu"), torch.no_grad():
        assert not on_host.module(*on_host.args).isfinite().all()
