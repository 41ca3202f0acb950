"""Clears what the process groups of an earlier attempt left in torchrun's store.

torchrun's agent keeps one store over elastic restarts (torch 2.13 still), so the ranks of a new attempt can read the
addresses of the old ones and then wait for each other until the process group's timeout, which is half an hour.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

_GROUP_KEYS = "default_pg/"
_TIMEOUT = timedelta(seconds=20)


def purge_group_keys(master_addr: str, master_port: int) -> int:
    """Delete the keys of process groups that have ended; returns how many.

    To be called when no rank of any node runs. Raises what the store raises when it cannot be reached. A torch whose
    store cannot list its keys (2.5) keeps them.
    """
    import torch.distributed as dist

    store: Any = dist.TCPStore(  # type: ignore[attr-defined]  # torch re-exports it without saying so
        master_addr, master_port, world_size=None, is_master=False, timeout=_TIMEOUT, wait_for_workers=False
    )
    if not hasattr(store, "list_keys"):
        return 0
    stale = [key for key in store.list_keys() if key.removeprefix("/").startswith(_GROUP_KEYS)]
    for key in stale:
        store.delete_key(key.removeprefix("/"))
    return len(stale)
