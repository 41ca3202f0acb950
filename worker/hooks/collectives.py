"""Sees every operation that Python begins on a process group, and every wait for one.

All of torch's own Python (`all_reduce`, FSDP, object collectives, `barrier`) calls the methods of `ProcessGroup` and of
`Work`; what C++ issues by itself, such as DDP's reductions, is only counted. A method is replaced on its class by a
function of the same name that notes and calls it: no tensor is touched, and an error of ours is recorded and goes no
further. A subclass that has a method of its own keeps it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any

from ...core.recorder.group_table import OPERATIONS
from ..record.group_table import GroupTable, Place

_CODE = {name: code for code, name in enumerate(OPERATIONS)}
_COLLECTIVES: dict[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "barrier": ("barrier", -1),
}
"""Method -> (operation, which argument has the tensor that all ranks have alike; -1: none)."""
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
"""Their last argument has `rootRank`."""

_Begin = Callable[[Any, tuple[Any, ...]], Place | None]
_After = Callable[[Place, Any, Any], None]


class Collectives:
    """The replaced methods. `attach` puts them in place, `detach` takes them away."""

    def __init__(self, groups: GroupTable, on_fault: Callable[[str, Exception], None]) -> None:
        self._groups = groups
        self._on_fault = on_fault
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def attach(self) -> None:
        """Of this process's torch, if it was built with `torch.distributed`."""
        module = sys.modules.get("torch.distributed.distributed_c10d")
        if module is None:
            return
        groups = self._groups
        groups.shows = True
        for name, (operation, argument) in _COLLECTIVES.items():
            begin = self._begin_collective(_CODE[operation], argument, name in _ROOTED)
            self._replace(module.ProcessGroup, name, begin, groups.issued)
        self._replace(module.ProcessGroup, "send", self._begin_p2p(_CODE["send"]), groups.issued_uncounted)
        self._replace(module.ProcessGroup, "recv", self._begin_p2p(_CODE["recv"]), groups.issued_uncounted)
        self._replace(
            module.ProcessGroup,
            "recv_anysource",
            lambda group, args: groups.begin_p2p(group, _CODE["recv"], args[0][0], -1),
            groups.issued_uncounted,
        )
        self._replace(
            module.ProcessGroup,
            "monitored_barrier",  # it returns when all have come
            lambda group, args: groups.begin(group, _CODE["monitored_barrier"], None),
            groups.ended_uncounted,
        )
        self._replace(module.Work, "wait", lambda work, args: groups.waits_for(work), groups.ended)

    def detach(self) -> None:
        """Put back what was there. A method that somebody else has replaced since stays.

        What the table shows would grow old: it is taken away.
        """
        for owner, name, before, ours in reversed(self._replaced):
            if owner.__dict__.get(name) is ours:
                setattr(owner, name, before)
        self._replaced = []
        self._groups.clear()

    def _fault(self, error: Exception) -> None:
        """One error of ours is enough: this rank then shows nothing of its communication, rather than half of it."""
        self.detach()
        self._on_fault("collectives", error)

    def _begin_collective(self, code: int, argument: int, rooted: bool) -> _Begin:
        begin = self._groups.begin

        def begins(group: Any, args: tuple[Any, ...]) -> Place | None:
            if argument >= len(args):  # called with names: the group's own counter tells that it was
                return None
            tensor = args[argument] if argument >= 0 else None
            while tensor.__class__ is list:
                tensor = tensor[0] if tensor else None
            return begin(group, code, tensor, getattr(args[-1], "rootRank", -1) if rooted and args else -1)

        return begins

    def _begin_p2p(self, code: int) -> _Begin:
        return lambda group, args: self._groups.begin_p2p(group, code, args[0][0], args[1] if len(args) > 1 else -1)

    def _replace(self, owner: Any, name: str, begin: _Begin, after: _After) -> None:
        before = owner.__dict__.get(name)
        if before is None:  # another version of torch
            return
        made = self._around(before, begin, after)
        # pybind11 tells by its caller's name that a method's own override calls it, and then calls the base's
        code = made.__code__.replace(co_name=name)
        ours = FunctionType(code, made.__globals__, name, made.__defaults__, made.__closure__)
        ours.__doc__ = before.__doc__
        setattr(owner, name, ours)
        self._replaced.append((owner, name, before, ours))

    def _around(self, before: Any, begin: _Begin, after: _After) -> FunctionType:
        on_fault, failed = self._fault, self._groups.failed

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
                    failed(place)
                raise
            try:
                after(place, self, result)
            except Exception as error:
                on_fault(error)
            return result

        assert isinstance(call, FunctionType)
        return call
