"""Who this rank is, from torchrun's environment: variable name -> property, read in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_DEVICE = "GPUWATCH_DEVICE"


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
    """A store answers at this address already: torchrun's agent hosts it, or rank 0 for its preflight."""
    node: int = 0
    device: int | None = None
    """Index of the rank's GPU among the visible ones; None: its local rank."""

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
            node=int(environ.get("GROUP_RANK", "0")),
            device=int(environ[_DEVICE]) if _DEVICE in environ else None,
        )

    def to_environment(self) -> dict[str, str]:
        """The variables for a process that is to read them."""
        device = {_DEVICE: str(self.device)} if self.device is not None else {}
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.agent_store),
            "GROUP_RANK": str(self.node),
            **device,
        }
