"""gpuwatch wraps torchrun and names the first rank and module to overflow.

Importing it imports no torch and changes nothing.
"""

from __future__ import annotations

from .core.errors import GpuwatchError, OverflowDetected

__all__ = ["GpuwatchError", "OverflowDetected"]
