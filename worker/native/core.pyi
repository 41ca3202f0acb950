"""The compiled part of the worker: worker/native/module.c"""

from collections.abc import Callable
from typing import Any

LAYOUT: dict[str, int]
"""The numbers that it shares with Python: see include/layout.h."""

def extremes(address: int, count: int, bytes: int, /) -> tuple[int, int]: ...
def use_threads(*addresses: int | None) -> None: ...
def below(address: int, count: int, bytes: int, limit: int, /) -> tuple[int, int]: ...
def may_be_notable(values: Any, limits: Any, /) -> bool: ...
def readings(
    exchange: Any,
    types: tuple[type, type],
    waiting: list[Any],
    at: int,
    tensors: list[Any],
    earlier: list[Any],
    device_type: int,
    device_id: int,
    /,
) -> tuple[bytes, int]: ...
def tables(
    entries: bytes, share_of: Callable[[int], int], most: int, rows: int, /
) -> tuple[bytes, list[tuple[int, int, bytes]]]: ...

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

class GroupWriter:
    def __init__(self, **parts: Any) -> None: ...
    def method(
        self, name: str, before: Any, call: int, operation: int, tensor: int, peer: int, is_rooted: bool, /
    ) -> Any: ...
    def enter(self, number: int, group: Any, /) -> None: ...
    def forget(self) -> None: ...
