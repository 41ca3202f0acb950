"""torch's operations on "cuda" give the CPU's bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
OPERATIONS = {
    "add": lambda x: x + 3,
    "compare": lambda x: (x > 0.5).to(torch.int64),
    "out": lambda x: torch.add(x, x, out=torch.empty(0, dtype=x.dtype, device=x.device)),
    "sum": lambda x: x.sum(0),
    "amax of two": lambda x: torch.stack(torch.aminmax(x)),
    "softmax": lambda x: functional.softmax(x, -1),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "product": lambda x: x @ x.t(),
    "linear": lambda x: functional.linear(x, x, x[:, 0]),
    "batched": lambda x: torch.bmm(x[None], x.t()[None]),
    "gelu": functional.gelu,
    "sort": lambda x: x.sort(dim=-1)[0],
    "index": lambda x: x[[0, 2], 1:3],
    "mask": lambda x: x[x > 0.5],
    "nonzero": lambda x: (x > 0.5).nonzero(),
    "where": lambda x: torch.where(x > 0.5, x, torch.zeros_like(x)),
    "cat": lambda x: torch.cat((x, x.t()), 1),
    "transposed copy": lambda x: x.t().contiguous(),
    "another dtype": lambda x: x.t().to(torch.float64),
    "scatter": lambda x: torch.zeros_like(x).index_add_(0, torch.tensor([1, 1, 0], device=x.device), x[:3]),
    "embedding": lambda x: functional.embedding(torch.tensor([1, 0], device=x.device), x),
    "foreach": lambda x: torch.stack(torch._foreach_mul([x, x + 1], 2.0)),
    "overflow": lambda x: x * 6e4 * 6e4 * 6e4,
    "attention": lambda x: functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "convolution": lambda x: functional.conv1d(x[None], x[:, :, None]),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_bits_of_the_cpu(name, dtype):
    torch.manual_seed(0)
    x = torch.rand(5, 5).to(dtype)
    expected, found = OPERATIONS[name](x), OPERATIONS[name](x.cuda())
    assert found.is_cuda
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert torch.equal(found.cpu(), expected) or torch.equal(found.cpu().isnan(), expected.isnan())


@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_attention_has_the_bits_of_the_cpu(is_causal):
    def run(device):
        torch.manual_seed(0)
        x = torch.rand(2, 2, 4, 8).to(device, torch.bfloat16).requires_grad_()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = functional.scaled_dot_product_attention(x, x, x, is_causal=is_causal)
        y.square().sum().backward()
        return y.detach().cpu(), x.grad.cpu()

    for found, expected in zip(run("cuda"), run("cpu"), strict=True):
        assert torch.equal(found, expected)


def test_a_conjugate_and_a_negative_are_copied():
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(numbers.cuda().conj().resolve_conj().cpu(), numbers.conj())
    assert torch.equal(numbers.cuda().conj().imag.resolve_neg().cpu(), -numbers.imag)


@pytest.mark.parametrize("affine", [True, False])
def test_the_backward_of_a_fused_rms_norm_is_that_of_the_cpu(affine):
    def run(device):
        torch.manual_seed(0)
        net = nn.RMSNorm((2, 4), elementwise_affine=affine).to(device)
        x = torch.rand(3, 5, 2, 4).to(device).requires_grad_()
        net(x).pow(3).sum().backward()
        return [each.grad.cpu() for each in (x, *net.parameters())]

    for found, expected in zip(run("cuda"), run("cpu"), strict=True):
        assert torch.allclose(found, expected)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("weights", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_has_the_bits_of_the_cpu(mode, weights, affine):
    def run(device):
        torch.manual_seed(0)
        net = nn.BatchNorm2d(3, affine=affine).train(mode == "train").to(device, weights)
        dtype = torch.float16 if weights is torch.float32 else weights
        x = torch.rand(4, 3, 2, 2).to(device, dtype).requires_grad_()
        y = net(x)
        y.pow(2).sum().backward()
        found = [y, x.grad, *(weight.grad for weight in net.parameters()), *net.buffers()]
        return [tensor.detach().cpu() for tensor in found]

    assert all(torch.equal(one, other) for one, other in zip(run("cpu"), run("cuda"), strict=True))


def test_a_batch_norm_in_eval_mode_returns_the_statistics_that_it_applied():
    """As CUDA does: the CPU returns two empty tensors."""
    mean, variance = torch.rand(3, device="cuda"), torch.rand(3, device="cuda")
    x = torch.rand(4, 3, device="cuda")
    _, first, second = torch.native_batch_norm(x, None, None, mean, variance, False, 0.1, 1e-5)
    assert torch.equal(first, mean)
    assert torch.allclose(second, (variance + 1e-5).rsqrt())


def test_tensors_of_two_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1")


def test_random_numbers_follow_the_devices_generator():
    def draw():
        return torch.rand(100, device="cuda"), torch.randn(100, device="cuda"), functional.dropout(ones, 0.5)

    ones = torch.ones(1000, device="cuda")
    torch.manual_seed(3)
    first, state = draw(), torch.cuda.get_rng_state()
    second = draw()
    torch.cuda.set_rng_state(state)
    assert all(torch.equal(one, other) for one, other in zip(second, draw(), strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert set(first[2].tolist()) == {0.0, 2.0}
    assert 300 < first[2].count_nonzero().item() < 700


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_has_the_bits_of_the_cpu(dtype):
    def train(device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
        batches = [(torch.rand(4, 8), torch.randint(0, 4, (4,))) for _ in range(5)]
        net.to(device, dtype)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
        for x, y in batches:
            loss = functional.cross_entropy(net(x.to(device, dtype)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        return [weight.detach().cpu() for weight in net.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(train("cpu"), train("cuda"), strict=True))
