"""Notes that the script takes its default process group down while it handles an exception.

A script that fails often calls destroy_process_group in a `finally`. Its peers lose their connections then, and
torchrun may stop this rank before the exception has left the script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from ..patches import PatchLedger

_MODULES = ("torch.distributed", "torch.distributed.distributed_c10d")
_NAME = "destroy_process_group"


def note_teardowns(patches: PatchLedger, note: Callable[[BaseException], None]) -> None:
    """Have `note` called with the exception, before the group is taken down. It may not raise."""
    for module in filter(None, map(sys.modules.get, _MODULES)):
        if _NAME in vars(module):  # torch may be built without it
            patches.replace(module, _NAME, partial(_noting, note, module))


def _noting(note: Callable[[BaseException], None], groups: Any, before: Any) -> Callable[..., Any]:
    @wraps(before)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None:
            group, world = args[0] if args else kwargs.get("group"), groups.GroupMember.WORLD
            if world is not None and (group is None or group is world):
                note(error)
        return before(*args, **kwargs)

    return destroy_process_group
