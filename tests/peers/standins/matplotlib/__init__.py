"""Stands in for matplotlib: no picture is drawn."""

from __future__ import annotations


def use(backend: str) -> None:
    pass
