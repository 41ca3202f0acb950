"""fast.c"""

from typing import Any

LAYOUT: tuple[int, ...]

def extremes(address: int, count: int, bytes: int, /) -> tuple[int, int]: ...
def below(address: int, count: int, bytes: int, limit: int, /) -> tuple[int, int]: ...

class Taker:
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
