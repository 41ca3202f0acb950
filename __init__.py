"""gpuwatch wraps torchrun and names the first rank and module to overflow.

Importing it imports no torch and changes nothing: what needs torch is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
import typing

from .core.errors import GpuwatchError, OverflowDetected

if typing.TYPE_CHECKING:
    from .core.recorder.run_folder import env
    from .worker.debug_underflow_overflow import DebugUnderflowOverflow
    from .worker.detect_overflow import detect_overflow
    from .worker.explain.forward_thread import explain
    from .worker.lightning_callback import LightningCallback as LightningCallback
    from .worker.log_to import log_to
    from .worker.trainer_callback import TrainerCallback as TrainerCallback
    from .worker.watch import watch

__all__ = [
    "DebugUnderflowOverflow",
    "GpuwatchError",
    "OverflowDetected",
    "detect_overflow",
    "env",
    "explain",
    "log_to",
    "watch",
]

_HOME = {
    "DebugUnderflowOverflow": ".worker.debug_underflow_overflow",
    "LightningCallback": ".worker.lightning_callback",
    "TrainerCallback": ".worker.trainer_callback",
    "detect_overflow": ".worker.detect_overflow",
    "explain": ".worker.explain.forward_thread",
    "env": ".core.recorder.run_folder",
    "log_to": ".worker.log_to",
    "watch": ".worker.watch",
}
"""Public name -> the module that has it, and imports torch or what else takes long. The callbacks are not in `__all__`:
their packages may not be there."""


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
