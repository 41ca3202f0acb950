"""The methods of process groups and works that are replaced, and torch's own hooks of groups beside them.

The hooks see what C++ issues by itself. torch 2.14 and later have them. DDP's reductions and its broadcasts at
construction, and functional collectives (those of compiled code), call no method in Python. All others are noted by the
replaced methods, and the hook leaves them alone.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from ...core.recorder.group_table import OPERATIONS, GroupPhase
from ...core.signal_errors import from_outside, suppress_own
from ...core.torch_names import name_in_torch
from ..patches import PatchLedger
from ..record.group_operations import GroupTable
from ..record.operation_place import GroupCall, OperationPlace


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


_OPERATIONS = {
    **{"ALLREDUCE": "all_reduce", "BROADCAST": "broadcast", "REDUCE": "reduce", "ALLGATHER": "all_gather"},
    **{"REDUCE_SCATTER": "reduce_scatter", "ALLTOALL": "all_to_all", "BARRIER": "barrier"},
    **{"SCATTER": "scatter", "GATHER": "gather"},
}
"""By the name of torch's HookOpName."""
_ID = 0x67707577
"""Of our hook in a group: torch's own count from 0."""


class GroupHooks:
    """A hook in each group of this process."""

    def __init__(
        self, groups: GroupTable, on_fault: Callable[[Exception], None], send_before: Callable[[], object] | None
    ) -> None:
        self._groups = groups
        self._on_fault = on_fault
        self._send_before = send_before
        self._operations: dict[int, int] = {}
        self._registers = False
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()

    def attach(self, module: Any, patches: PatchLedger) -> None:
        """Register with the groups that there are, and with each new one before its first collective."""
        names = name_in_torch("torch._C._distributed_c10d.HookOpName")
        if names is None or not hasattr(module.ProcessGroup, "register_pre_hook"):
            return
        self._operations = {getattr(names, name).value: OPERATIONS.index(ours) for name, ours in _OPERATIONS.items()}
        self._groups.sees_all = self._registers = True
        atexit.register(self._leave)  # C++ may keep a group for longer than Python lives, and frees its hook then
        for group in list(module._pg_map):
            self._register(group)
        patches.replace(module, "_register_process_group", self._and_register)

    def detach(self) -> None:
        """Take the hooks away, unless another thread may be inside of one: torch then calls what was freed."""
        if threading.active_count() == 1:
            atexit.unregister(self._leave)
            self._leave()

    def _leave(self) -> None:
        self._registers = False
        for group in list(self._hooked):
            with suppress_own(RuntimeError):
                group.unregister_pre_hook(_ID)
        self._hooked.clear()

    def _and_register(self, before: Any) -> Callable[..., Any]:
        def _register_process_group(*args: Any, **kwargs: Any) -> Any:
            result = before(*args, **kwargs)
            for group in (*args, *kwargs.values()):
                if hasattr(group, "register_pre_hook"):
                    self._register(group)
            return result

        return _register_process_group

    def _register(self, group: Any) -> None:
        if not self._registers:
            return
        writer = self._groups.native
        try:
            group.register_pre_hook(_ID, writer.hook(group, self._operations) if writer else self._hook(group))
            self._hooked.add(group)
        except Exception as error:  # the script makes a group
            if from_outside(error):
                raise
            self._on_fault(error)

    def _hook(self, group: Any) -> Callable[[Any], None]:
        """What worker/native/group_hook.c does likewise."""
        # weak: the group holds this hook, and would never be freed
        groups, ref, operations = self._groups, weakref.ref(group), self._operations

        def before(call: Any) -> None:
            begun: list[OperationPlace | None] = [None]
            try:
                # A replaced method notes its own operation, and torch calls this hook for it as well, in the same
                # thread. `threads_inside` keeps it from being counted twice. A thread that is not inside of one comes
                # from C++: DDP, or a functional collective.
                operation, group = operations.get(call.name.value), ref()
                if operation is None or group is None or threading.get_ident() in groups.threads_inside:
                    return
                tensors = call.input_tensors or call.output_tensors
                place = groups.begin(group, operation, tensors[0] if tensors else None, call.root, begun)
                if place is not None:
                    groups.leave_phase(place, GroupPhase.ISSUED)
                    if self._send_before is not None:
                        self._send_before()
            except BaseException as error:  # torch raises it from the script's collective, which has not begun
                if from_outside(error):
                    if begun[0] is not None:
                        groups.take_back(begun[0])
                    raise
                assert isinstance(error, Exception)
                self._on_fault(error)

        return before
