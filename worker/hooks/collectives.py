"""Sees every operation that Python begins on a process group, and every wait for one.

All of torch's own Python (`all_reduce`, FSDP, object collectives, `barrier`) calls the methods of `ProcessGroup` and of
`Work`; what C++ issues by itself, such as DDP's reductions, is only counted. A method is replaced on its class by one
of the same name that notes and calls it: no tensor is touched, and an error of ours is recorded and goes no further. A
subclass that has a method of its own keeps it.

Where worker/native was built, the new method is a C function: it has no line in a traceback of the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from ...core.recorder.group_table import OPERATIONS
from ..record.collectives import count_with
from ..record.group_table import GroupCall, GroupTable, Place, described
from .native_writer import difference

try:
    from ..native.core import LAYOUT, GroupWriter
except ImportError:  # gpuwatch was installed without a C compiler
    LAYOUT, GroupWriter = {}, None  # type: ignore[assignment,misc]


@dataclass(frozen=True)
class Method:
    """One that is replaced."""

    name: str
    call: GroupCall
    operation: str = ""
    tensor: int = -1
    """Which argument has the tensor that all ranks have alike; -1: none."""
    peer: int = -1
    """Which argument is the other rank; -1: none."""
    is_rooted: bool = False
    """Its last argument has `rootRank`."""


def _collective(name: str, operation: str, tensor: int = 0, is_rooted: bool = False) -> Method:
    return Method(name, GroupCall.COLLECTIVE, operation, tensor, is_rooted=is_rooted)


METHODS = (
    _collective("allreduce", "all_reduce"),
    _collective("allreduce_coalesced", "all_reduce"),
    _collective("broadcast", "broadcast", is_rooted=True),
    _collective("reduce", "reduce", is_rooted=True),
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
    _collective("scatter", "scatter", is_rooted=True),
    _collective("alltoall", "all_to_all", 1),
    _collective("alltoall_base", "all_to_all", 1),
    _collective("all_to_all_single", "all_to_all", 1),
    _collective("barrier", "barrier", -1),
    Method("send", GroupCall.P2P, "send", tensor=0, peer=1),
    Method("recv", GroupCall.P2P, "recv", tensor=0, peer=1),
    Method("recv_anysource", GroupCall.P2P, "recv", tensor=0),
    Method("monitored_barrier", GroupCall.BARRIER, "monitored_barrier"),
)
"""Of a process group."""
WAIT = Method("wait", GroupCall.WAIT)
"""Of a work."""


class Collectives:
    """The replaced methods. `attach` puts them in place, `detach` takes them away."""

    def __init__(self, groups: GroupTable, on_fault: Callable[[str, Exception], None], native: bool = True) -> None:
        self._groups = groups
        self._on_fault = on_fault
        self._native = native
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def attach(self) -> None:
        """Of this process's torch, if it was built with `torch.distributed`."""
        module = sys.modules.get("torch.distributed.distributed_c10d")
        if module is None:
            return
        self._groups.shows = True
        count_with(self._groups)
        self._groups.native = self._writer(module.ProcessGroup) if self._native else None
        for method in METHODS:
            self._replace(module.ProcessGroup, method)
        self._replace(module.Work, WAIT)

    def detach(self, failed: bool = False) -> None:
        """Put back what was there. A method that somebody else has replaced since stays.

        What the table shows would grow old: it is taken away. `failed`: and the rank goes on.
        """
        for owner, name, before, ours in reversed(self._replaced):
            if owner.__dict__.get(name) is ours:
                setattr(owner, name, before)
        self._replaced = []
        self._groups.clear(failed)

    def _fault(self, error: Exception) -> None:
        """One error of ours is enough: this rank then shows nothing of its communication, rather than half of it."""
        self.detach(failed=True)
        self._on_fault("collectives", error)

    def _writer(self, group: Any) -> Any:
        """The compiled writer of the table; None if it was not built, or for another layout."""
        if GroupWriter is None or difference(LAYOUT):
            return None
        try:
            return GroupWriter(
                memory=self._groups.memory,
                tensor=torch.Tensor,
                parameter=torch.nn.Parameter,
                group=group,
                counter=group.__dict__["_get_sequence_number_for_group"],
                describe=described,
                find_slot=self._groups.slot_of,
                message_begun=self._groups.message_begun,
                message_received=self._groups.message_received,
                on_fault=self._fault,
                exchange=getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
            )
        except (KeyError, TypeError, ValueError):  # a torch version whose internals differ
            return None

    def _replace(self, owner: Any, method: Method) -> None:
        before = owner.__dict__.get(method.name)
        if before is None:  # another version of torch
            return
        writer = self._groups.native
        if writer is not None:
            operation = OPERATIONS.index(method.operation)
            call, tensor, peer = method.call, method.tensor, method.peer
            ours = writer.method(method.name, before, call, operation, tensor, peer, method.is_rooted)
        else:
            ours = self._around(before, method)
        setattr(owner, method.name, ours)
        self._replaced.append((owner, method.name, before, ours))

    # -- what worker/native/group_methods.c does likewise -------------------------------------------------------

    def _around(self, before: Any, method: Method) -> FunctionType:
        on_fault, groups = self._fault, self._groups
        begin, finish = self._begin_of(method), self._finish_of(method)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            place = None
            try:
                place = begin(self, args)
            except Exception as error:
                on_fault(error)
            if place is None:
                return before(self, *args, **kwargs)
            try:
                result = before(self, *args, **kwargs)
            except BaseException:
                with suppress(Exception):  # the error of the call is what goes on
                    groups.failed(place)
                raise
            try:
                finish(place, self, result)
            except Exception as error:
                on_fault(error)
            return result

        assert isinstance(call, FunctionType)
        # pybind11 tells by its caller's name that a method's own override calls it, and then calls the base's
        code = call.__code__.replace(co_name=method.name)
        ours = FunctionType(code, call.__globals__, method.name, call.__defaults__, call.__closure__)
        ours.__doc__ = before.__doc__
        return ours

    def _begin_of(self, method: Method) -> Callable[[Any, tuple[Any, ...]], Place | None]:
        groups, code = self._groups, OPERATIONS.index(method.operation)
        if method.call == GroupCall.WAIT:
            return lambda work, args: groups.waits_for(work)

        def begin(group: Any, args: tuple[Any, ...]) -> Place | None:
            if method.tensor >= len(args):  # called with names: the group's own counter tells that it was
                return None
            tensor = args[method.tensor] if method.tensor >= 0 else None
            while tensor.__class__ is list:
                tensor = tensor[0] if tensor else None
            if method.call == GroupCall.P2P:
                peer = args[method.peer] if 0 <= method.peer < len(args) else -1
                return groups.begin_p2p(group, code, tensor, peer)
            return groups.begin(group, code, tensor, getattr(args[-1], "rootRank", -1) if method.is_rooted else -1)

        return begin

    def _finish_of(self, method: Method) -> Callable[[Place, Any, Any], None]:
        groups = self._groups
        counts_again = method.call in (GroupCall.P2P, GroupCall.BARRIER)
        ends = method.call in (GroupCall.WAIT, GroupCall.BARRIER)

        def finish(place: Place, owner: Any, result: Any) -> None:
            if counts_again:
                groups.count_again(place, owner)
            if ends:
                groups.ended(place)
            else:
                groups.issued(place, result)

        return finish
