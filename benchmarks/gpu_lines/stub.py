"""What a watched step of GPT-2 asks of the device: the same counts on a GPU as on the stand-in (tests/fakes/cuda)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import gpuwatch
import torch

from .driver import is_kernel, nothing_profiled, on_device
from .lines import Row, passed

CASES = {
    "forward": (("forward",), 30),
    "forward, weights": (("forward", "weights"), 33),
    "all": (("forward", "grads", "weights", "comms"), 62),
}
"""What is watched -> launches of a step of GPT-2 of two layers. tests/fakes/cuda/test_costs.py counts them on the
stand-in: a number that falls there is a gain."""
WARM = 5
"""Steps until each kernel is compiled, and each parameter's row is known."""
_STEPS = 4
_PAGEABLE = "Pageable"


def gpt2(layers: int) -> torch.nn.Module:
    """Of no size. Raises ImportError without transformers."""
    import transformers

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    found: torch.nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=layers, use_cache=False, **sizes)
    )
    return found.cuda()


def step_of(net: torch.nn.Module) -> Callable[[], None]:
    """One step of its training."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x = torch.arange(8, device="cuda")[None]

    def step() -> None:
        loss = net(input_ids=x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def stub(device: torch.device) -> Iterator[Row]:
    """A difference says where the stand-in is not what it stands for."""
    if importlib.util.find_spec("transformers") is None:
        yield Row("launches as on the stand-in", "skipped", note="needs transformers")
        return
    plain = _steps_of(gpt2(2))
    if not _kernels(plain):
        yield nothing_profiled("launches as on the stand-in")
        return
    for name, (what, launches) in CASES.items():
        net = gpt2(2)
        with gpuwatch.watch(net, watch=what, on_overflow="continue"):
            found = _steps_of(net)
        added = (_kernels(found) - _kernels(plain)) / _STEPS
        yield Row(f"launches a step of GPT-2, {name}", passed(added == launches), f"{added:g}", f"{launches}, exactly")
        copies = (_pageable(found) - _pageable(plain)) / _STEPS
        yield Row(f"copies of pageable memory a step, {name}", passed(copies == 0), f"{copies:g}", "none")


def _steps_of(net: torch.nn.Module) -> list[tuple[str, float]]:
    step = step_of(net)
    _repeat(step, WARM)
    return on_device(partial(_repeat, step, _STEPS))


def _repeat(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()
    torch.cuda.synchronize()


def _kernels(found: list[tuple[str, float]]) -> int:
    return sum(is_kernel(name) for name, _ in found)


def _pageable(found: list[tuple[str, float]]) -> int:
    return sum(name.startswith("Memcpy") and _PAGEABLE in name for name, _ in found)
