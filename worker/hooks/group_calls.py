"""The methods of process groups and works that are replaced, and where their arguments are."""

from __future__ import annotations

from typing import NamedTuple

from ..record.group_slots import GroupCall


class ReplacedMethod(NamedTuple):
    """One that is replaced. The fields are in the order of worker/native/group_methods.c."""

    name: str
    call: GroupCall
    operation: str = ""
    tensor: int = -1
    """Which argument has the tensor that all ranks have alike; -1: none."""
    peer: int = -1
    """Which argument is the other rank; -1: none."""
    is_rooted: bool = False
    """Its last argument has `rootRank`."""
    tag: int = -1
    """Which argument is a message's tag; -1: none."""
    given: int = -1
    """Which argument has the tensors that go in; -1: none."""
    returned: int = -1
    """Which argument has the tensors that it writes into; -1: none."""
    given_at_root: bool = False
    returned_at_root: bool = False
    """No other rank gives anything, or is given anything."""


def _collective(name: str, operation: str, tensor: int = 0, is_rooted: bool = False, given: int = 1) -> ReplacedMethod:
    return ReplacedMethod(
        name,
        GroupCall.COLLECTIVE,
        operation,
        tensor,
        is_rooted=is_rooted,
        given=given,
        returned=0,
        given_at_root=operation == "broadcast",
        returned_at_root=operation == "reduce",
    )


METHODS = (
    _collective("allreduce", "all_reduce", given=0),
    _collective("allreduce_coalesced", "all_reduce", given=0),
    _collective("broadcast", "broadcast", is_rooted=True, given=0),
    _collective("reduce", "reduce", is_rooted=True, given=0),
    _collective("allgather", "all_gather", 1),
    _collective("allgather_coalesced", "all_gather", 1),
    _collective("allgather_into_tensor_coalesced", "all_gather", 1),
    _collective("_allgather_base", "all_gather", 1),
    _collective("all_gather_single", "all_gather", 1),
    _collective("all_gather_single_coalesced", "all_gather", 1),
    _collective("reduce_scatter", "reduce_scatter"),
    _collective("reduce_scatter_tensor_coalesced", "reduce_scatter", 1),
    _collective("_reduce_scatter_base", "reduce_scatter", 1),
    _collective("reduce_scatter_single", "reduce_scatter", 1),
    _collective("reduce_scatter_single_coalesced", "reduce_scatter", 1),
    _collective("gather", "gather", 1, is_rooted=True),
    _collective("gather_single", "gather", 1, is_rooted=True),
    _collective("gather_into_tensor", "gather", 1, is_rooted=True),
    _collective("scatter", "scatter", is_rooted=True),
    _collective("alltoall", "all_to_all", 1),
    _collective("alltoall_base", "all_to_all", 1),
    _collective("all_to_all_single", "all_to_all", 1),
    ReplacedMethod("barrier", GroupCall.COLLECTIVE, "barrier"),
    ReplacedMethod("send", GroupCall.P2P, "send", tensor=0, peer=1, tag=2, given=0),
    ReplacedMethod("recv", GroupCall.P2P, "recv", tensor=0, peer=1, tag=2, returned=0),
    ReplacedMethod("recv_anysource", GroupCall.P2P, "recv", tensor=0, tag=1, returned=0),
    ReplacedMethod("monitored_barrier", GroupCall.BARRIER, "monitored_barrier"),
    ReplacedMethod("new_window", GroupCall.BARRIER, "new_window"),
)
"""The replaced methods of a process group."""
NOT_EVERYWHERE = {
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("gather_single", "gather_into_tensor", "all_to_all_single", "new_window", "block_current_stream"),
}
"""Some of the supported versions of torch (2.5 to 2.15) lack these."""
WAITS = (ReplacedMethod("wait", GroupCall.WAIT), ReplacedMethod("block_current_stream", GroupCall.BLOCK))
"""The replaced methods of a work."""
