"""What a garbage collection finds after each of these: `NAME: N tensors and frames`. Without gpuwatch it finds none.

Large trainings collect no garbage between their steps. A tensor that lies in a cycle keeps its memory until they do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
MODEL = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
ATTENTION = nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())
SCALER = torch.amp.GradScaler("cpu", init_scale=1e38)


def rows() -> torch.Tensor:
    return torch.randn(8, 16)


def training() -> None:
    OPTIMIZER.zero_grad()
    MODEL(rows()).square().mean().backward()
    OPTIMIZER.step()


def skipped_step() -> None:
    OPTIMIZER.zero_grad()
    SCALER.scale(MODEL(rows()).square().mean()).backward()
    SCALER.step(OPTIMIZER)
    SCALER.update(1e38)


def activation_checkpoint() -> None:
    checkpoint(MODEL, rows(), use_reentrant=False).sum().backward()


def inference_mode() -> None:
    with torch.inference_mode():
        MODEL(rows())


def fast_path_of_attention() -> None:
    with torch.inference_mode():
        ATTENTION(torch.randn(2, 5, 16))


def nested() -> None:
    MODEL(torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged))


def mapped() -> None:
    vmap(MODEL)(torch.randn(2, 8, 16))


def gradient_of_function() -> None:
    grad(lambda weights: functional_call(MODEL, weights, (rows(),)).sum())(
        {name: weight.detach() for name, weight in MODEL.named_parameters()}
    )


def refused_collective() -> None:
    with suppress(Exception):
        dist.all_gather([torch.zeros(3)], torch.zeros(4))


def refused_by_a_module() -> None:
    with suppress(Exception):
        MODEL(torch.randn(8, 4))


CASES: tuple[Callable[[], None], ...] = (
    *(training, skipped_step, activation_checkpoint, inference_mode, fast_path_of_attention, nested, mapped),
    *(gradient_of_function, refused_collective, refused_by_a_module),
)


def main() -> None:
    dist.init_process_group("gloo")
    for run in CASES:
        run()
        gc.collect()
        gc.disable()
        for _ in range(4):
            run()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = [each for each in gc.garbage if isinstance(each, (torch.Tensor, FrameType))]
        print(f"{run.__name__}: {len(found)} tensors and frames", flush=True)
        del found
        gc.garbage.clear()
        gc.enable()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
