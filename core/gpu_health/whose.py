"""Which GPU a rank has, as far as that is known without asking it. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def gpu_of_rank(uuid: str, local_rank: int, environment: Mapping[str, str]) -> str:
    """UUID of the rank's GPU: from CUDA, or else from CUDA_VISIBLE_DEVICES if that lists UUIDs; "" is none.

    The second source helps when CUDA does not work at all, which is when the GPU's health matters most.
    """
    if uuid:
        return uuid
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if local_rank < len(visible) and visible[local_rank].startswith(("GPU-", "MIG-")):
        return visible[local_rank]
    return ""
