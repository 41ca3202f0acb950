"""A process group over some ranks: do the collectives come through, and are their values right? If not: whose fault?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.distributed_c10d import Store


def check_group(
    store: Store,
    device: torch.device,
    backend: str,
    ranks: Sequence[int],
    rank: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> str:
    """Run every kind of collective among `ranks` (global numbers, this is `rank`); what was done, in words.

    `store` is a PrefixStore of this one test: no other may use its prefix. `say` hears each step as it begins.
    Raises ProbeFailure: peers None is this rank's own fault, peers [] is nobody's by name, else the ranks to blame.
    """
    raise NotImplementedError
