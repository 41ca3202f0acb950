"""Which GPU a rank has, as far as that is known without its help: pure."""

from __future__ import annotations

from collections.abc import Mapping


def gpu_of_rank(uuid: str, local_rank: int, environment: Mapping[str, str]) -> str:
    """UUID of the rank's GPU: as CUDA tells it, or else the one that CUDA_VISIBLE_DEVICES gives it by UUID; "" is none.

    The second is what is left when CUDA does not work at all, which is when the GPU's health matters most.
    """
    if uuid:
        return uuid
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if local_rank < len(visible) and visible[local_rank].startswith(("GPU-", "MIG-")):
        return visible[local_rank]
    return ""
