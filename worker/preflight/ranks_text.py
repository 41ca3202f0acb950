"""Ranks in words, for the whole preflight."""

from __future__ import annotations

from ...core.ranks_text import ranks_text

__all__ = ["ranks_text"]
