"""Who this rank is, from torchrun's environment: variable name -> property, read in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """A rank as torchrun describes it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    agent_store: bool
    """torchrun's agent hosts the store, so a client can connect to it before the script does."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Identity:
        """Read torchrun's variables. Raises KeyError for a missing one."""
        return cls(
            rank=int(environ["RANK"]),
            local_rank=int(environ["LOCAL_RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
            master_addr=environ["MASTER_ADDR"],
            master_port=int(environ["MASTER_PORT"]),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True",
        )
