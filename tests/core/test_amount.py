from __future__ import annotations

import pytest
from gpuwatch.core.text import MemoryAmount, parse_amount, parse_size


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
