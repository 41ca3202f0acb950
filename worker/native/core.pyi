"""The compiled part of the worker: worker/native/module.c"""

from typing import Any

LAYOUT: dict[str, int]
"""The numbers that it shares with Python: see include/layout.h."""

def extremes(address: int, count: int, bytes: int, /) -> tuple[int, int]: ...
def use_threads(*addresses: int | None) -> None: ...
def below(address: int, count: int, bytes: int, limit: int, /) -> tuple[int, int]: ...

class Look:
    def __init__(self, **parts: Any) -> None: ...
    def __call__(self, tensor: Any, token: Any, place: int, /) -> None: ...

class FrameWriter:
    def __init__(self, **parts: Any) -> None: ...
    def frame(
        self,
        info: Any,
        module: Any,
        args: Any,
        kwargs: Any,
        output: Any,
        page: Any,
        parent: int,
        depth: int,
        phase: int,
        step: int,
        /,
    ) -> bool: ...
    def weights(self, info: Any, parameters: list[tuple[str, Any]], step: int, /) -> bool: ...
    def all_local(self, parameters: list[tuple[str, Any]], /) -> bool: ...
    def hook(self, info: Any, role: str, page: Any = ..., /) -> Any: ...
