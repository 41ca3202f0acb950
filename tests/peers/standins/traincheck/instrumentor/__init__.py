"""Where the programs note their step."""

from __future__ import annotations

from collections import defaultdict

from . import tracer

meta_vars: defaultdict[str, int] = defaultdict(int)

__all__ = ["meta_vars", "tracer"]
