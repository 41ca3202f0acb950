"""torch.export under the hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_module

X = torch.randn(2, 4)


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_exported_is_the_same_as_without_us_and_no_batch(watch: Callable[..., Any], strict: bool) -> None:
    model = net()
    expected = torch.export.export(model, (X,), strict=strict).graph_module.code
    watched = watch()
    model(X)
    batches = len(watched.pages)
    assert torch.export.export(model, (X,), strict=strict).graph_module.code == expected
    assert len(watched.pages) == batches
    model(X)
    assert len(watched.pages) == batches + 1
    assert not watched.faults


def test_hooks_keep_their_places_and_come_back_where_an_export_raises(watch: Callable[..., Any]) -> None:
    table = torch_module._global_forward_pre_hooks
    earlier = torch_module.register_module_forward_pre_hook(lambda *_: None)
    watch()
    later = torch_module.register_module_forward_pre_hook(lambda *_: None)
    order = [*table]

    class Refused(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            later.remove()
            assert earlier.id in table
            assert len(table) == 1
            raise ValueError

    with pytest.raises(ValueError):
        torch.export.export(Refused(), (X,), strict=False)
    assert [*table] == order[:-1]
    earlier.remove()


def test_hooks_that_were_detached_within_an_export_stay_away(watch: Callable[..., Any]) -> None:
    export = torch.export.export
    watched = watch()

    class Ends(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            watched.hooks.detach()
            return x * 2

    torch.export.export(Ends(), (X,), strict=False)
    assert not torch_module._global_forward_hooks
    assert torch.export.export is export
