"""Pictures are not written."""

from __future__ import annotations

from typing import Any


def save_image(*args: Any, **kwargs: Any) -> None:
    pass


def make_grid(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor
