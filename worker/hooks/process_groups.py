"""Sees every operation that Python begins on a process group, and every wait for one.

All of torch's own Python (`all_reduce`, FSDP, object collectives, `barrier`) calls the methods of `ProcessGroup` and of
`Work`; what C++ issues by itself is noted by torch's own hooks where it has them (group_hooks.py). A method is replaced
on its class by one of the same name that notes and calls it: no tensor is touched, and an error of ours is recorded and
goes no further. A subclass that has a method of its own keeps it.

Where worker/native was built, the new method is a C function: it has no line in a traceback of the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from types import FunctionType
from typing import Any

import torch

from ...core.recorder.group_table import OPERATIONS, GroupPhase
from ...core.signal_errors import from_outside, suppress_own
from ..device.device import is_on_device, late_device, may_have_devices
from ..patches import PatchLedger
from ..record.collectives import count_with
from ..record.group_messages import NO_MESSAGE
from ..record.group_operations import GroupTable
from ..record.operation_place import GroupCall, OperationPlace, described
from ..record.passed import NOT_FINITE, LatePassed, PassedValues, PassedWhen, look_at, refs_to, tensors_in
from .group_hooks import METHODS, NOT_EVERYWHERE, WAITS, GroupHooks, ReplacedMethod
from .native_writer import difference

try:
    from ..native.core import LAYOUT, GroupWriter
except ImportError:  # gpuwatch was installed without a C compiler
    LAYOUT, GroupWriter = {}, None  # type: ignore[assignment,misc]


_Begun = list[OperationPlace | None]
"""The last item: see GroupTable.begin."""


class CollectivePatches:
    """The replaced methods. `attach` puts them in place, `detach` takes them away."""

    def __init__(
        self,
        groups: GroupTable,
        on_fault: Callable[[str, Exception], None],
        native: bool = True,
        passed: PassedValues | None = None,
        late: LatePassed | None = None,
        on_mesh: Callable[[Any], None] | None = None,
    ) -> None:
        """`passed` gets the tensors that are not finite; None: tensors are not read. `late` reads those on a device.

        `on_mesh` gets each new DeviceMesh.
        """
        self._on_mesh = on_mesh
        self._groups = groups
        self._passed = passed
        self._late = late if passed is not None else None
        self._send_before = late.send_before if late is not None and may_have_devices() else None
        self._on_fault = on_fault
        self._native = native
        self._patches = PatchLedger(on_fault)
        self._hooks = GroupHooks(groups, self._fault, self._send_before)

    def attach(self) -> None:
        """Replace the methods in this process's torch, if it was built with `torch.distributed`."""
        module = sys.modules.get("torch.distributed.distributed_c10d")
        if module is None:
            return
        # before the methods: what they note has a place from the first call on
        self._groups.shows = True
        count_with(self._groups)
        self._groups.native = self._writer(module.ProcessGroup) if self._native else None
        for method in METHODS:
            self._replace(module.ProcessGroup, method)
        for method in WAITS:
            self._replace(module.Work, method)
        bundle_begun, bundle_ended = self._groups.bundle_begun, self._groups.bundle_ended
        self._note_after(module.ProcessGroup, "_start_coalescing", lambda group, _: bundle_begun(group))
        self._note_after(module.ProcessGroup, "_end_coalescing", bundle_ended)
        got_backend = self._groups.got_backend
        self._note_after(module.ProcessGroup, "_register_backend", lambda group, _: got_backend(group))
        self._hooks.attach(module, self._patches)
        meshes = sys.modules.get("torch.distributed.device_mesh")
        if self._on_mesh is not None and meshes is not None:
            on_mesh = self._on_mesh
            self._note_after(meshes.DeviceMesh, "__init__", lambda mesh, _: on_mesh(mesh))

    def detach(self, failed: bool = False) -> None:
        """Restore torch's methods and clear the table, which would become outdated. `failed`: the rank continues."""
        self._patches.undo()
        self._groups.clear(failed)
        if not failed:  # else one of the hooks may call this
            self._hooks.detach()

    def _fault(self, error: Exception) -> None:
        """Detach at the first error of ours: the table then shows no communication, rather than half of it."""
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
                message_begun=self._groups.messages.begun,
                message_received=self._groups.messages.waited_for,
                message_taken_back=self._groups.messages.take_back,
                passed=self._passed.note if self._passed is not None else None,
                late=self._late.read if self._late is not None else None,
                send_before=self._send_before,
                on_fault=self._fault,
                exchange=getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
                is_host_late=late_device() is not None,
            )
        except (KeyError, TypeError, ValueError) as error:  # a torch version whose internals differ
            if from_outside(error):
                raise
            self._on_fault("collectives", error)
            return None

    def _replace(self, owner: Any, method: ReplacedMethod) -> None:
        if method.name not in NOT_EVERYWHERE or method.name in vars(owner):
            self._patches.replace(owner, method.name, lambda before: self._instead_of(before, method))

    def _instead_of(self, before: Any, method: ReplacedMethod) -> Any:
        writer = self._groups.native
        if writer is None:
            return self._around(before, method)
        # by position: C reads them in this order (group_methods.c)
        name, call, operation, *places = method
        return writer.method(name, before, call, OPERATIONS.index(operation), *places)

    def _note_after(self, owner: Any, name: str, note: Callable[[Any, Any], None]) -> None:
        """Have `note` called with the group and the result after each call: a bundle of messages begins or ends."""
        on_fault = self._fault

        def around(before: Any) -> FunctionType:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                result = before(self, *args, **kwargs)
                try:
                    note(self, result)
                except Exception as error:
                    if from_outside(error):
                        raise
                    on_fault(error)
                return result

            return _named(call, name, before)

        self._patches.replace(owner, name, around)

    # -- what worker/native/group_methods.c does likewise -------------------------------------------------------

    def _around(self, before: Any, method: ReplacedMethod) -> FunctionType:
        on_fault, groups = self._fault, self._groups
        begin, finish = self._begin_of(method), self._finish_of(method)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            place: OperationPlace | None = None
            begun: _Begun = [None]
            thread = get_ident()
            try:
                try:
                    place = begin(self, args, begun)
                except Exception as error:
                    if from_outside(error):
                        raise
                    on_fault(error)
                if place is not None:
                    groups.threads_inside.add(thread)
            # what a signal's handler raises: the script's call is not made
            except BaseException:
                groups.threads_inside.discard(thread)
                if begun[0] is not None:
                    groups.take_back(begun[0])
                raise
            if place is None:
                return before(self, *args, **kwargs)
            # Between the two lists of notes the script's collective runs as it would without us: outside of any `try`
            # that could end its error. It may block for minutes, or raise, or be left by a signal's handler. No call
            # lies between the last `try` and this one, so no handler runs there.
            try:
                result = before(self, *args, **kwargs)
            # also KeyboardInterrupt: a rank that left a collective no longer waits in it
            except BaseException as error:
                with suppress_own(Exception):  # the error of the call is raised
                    if method.call in (GroupCall.WAIT, GroupCall.BLOCK):
                        groups.leave_phase(place, GroupPhase.FAILED)
                    else:
                        groups.failed(place, self, method.call != GroupCall.BARRIER and not from_outside(error))
                raise
            finally:
                groups.threads_inside.discard(thread)
            try:
                finish(place, self, result)
            except Exception as error:
                if from_outside(error):
                    raise
                on_fault(error)
            return result

        return _named(call, method.name, before)

    def _begin_of(self, method: ReplacedMethod) -> Callable[[Any, tuple[Any, ...], _Begun], OperationPlace | None]:
        groups, code = self._groups, OPERATIONS.index(method.operation)
        if method.call in (GroupCall.WAIT, GroupCall.BLOCK):
            return lambda work, args, begun: groups.waits_for(work)

        def begin(group: Any, args: tuple[Any, ...], begun: _Begun) -> OperationPlace | None:
            if method.tensor >= len(args):  # called with keywords: only the group's own counter counts it
                return None
            tensor = args[method.tensor] if method.tensor >= 0 else None
            # collectives get lists of tensors, or lists of lists: the first tensor stands for all
            while tensor.__class__ is list:
                tensor = tensor[0] if tensor else None
            if method.call == GroupCall.P2P:
                peer = args[method.peer] if 0 <= method.peer < len(args) else -1
                tag = args[method.tag] if 0 <= method.tag < len(args) else 0
                place = groups.begin_p2p(group, code, tensor, peer, tag, begun)
            else:
                root = getattr(args[-1], "rootRank", -1) if method.is_rooted else -1
                place = groups.begin(group, code, tensor, root, begun)
            if place is not None and self._passed is not None:
                # before the call: a collective such as all_reduce writes its result over its input
                self._look_at_inputs(self._passed, place, group, method, args)
            if self._send_before is not None:
                self._send_before()
            return place

        return begin

    def _look_at_inputs(
        self, passed: PassedValues, place: OperationPlace, group: Any, method: ReplacedMethod, args: tuple[Any, ...]
    ) -> None:
        """Read the inputs, and remember the output tensors."""
        is_root = place.root < 0 or place.root == group.rank()
        if 0 <= method.returned < len(args) and (is_root or not method.returned_at_root):
            # Only remembered. When the call returns, another thread (Gloo) or another stream (NCCL) may still write
            # into them. They are read when the script has waited: `Work.wait` makes the current stream wait for the
            # operation (its docstring, and docs.pytorch.org/docs/stable/distributed.html, Synchronous and asynchronous
            # collective operations).
            place.outputs = refs_to(args[method.returned])
        if 0 <= method.given < len(args) and (is_root or not method.given_at_root):
            place.given = look_at(args[method.given])
            place.late = self._look_late(place, PassedWhen.GOES_IN, args[method.given])
            if place.given[0] == NOT_FINITE:
                _tell(passed, place, False, args[method.given])

    def _look_late(self, place: OperationPlace, when: PassedWhen, tensors: Any) -> Any:
        late = [tensor for tensor in tensors_in(tensors) if is_on_device(tensor)]
        if self._late is None or not late:
            return None
        return self._late.read(
            place.slot.number, place.number, place.operation, place.root, place.message, when, place.late, late
        )

    def _finish_of(self, method: ReplacedMethod) -> Callable[[OperationPlace, Any, Any], None]:
        groups = self._groups
        counts_again = method.call in (GroupCall.P2P, GroupCall.BARRIER)
        ends = method.call in (GroupCall.WAIT, GroupCall.BARRIER)

        def finish(place: OperationPlace, owner: Any, result: Any) -> None:
            # the group's own counter has counted a message, or those of a barrier, in a way of its own
            if counts_again:
                groups.count_again(place, owner)
            if method.call == GroupCall.BLOCK:
                # the stream waits and the host goes on: the tensors may be read on that stream, and not by the host
                groups.ended(place, on_host=False)
                self._look_late(place, PassedWhen.ISSUED, _alive(place))
            elif ends:
                groups.ended(place)
                alive = _alive(place)
                self._look_late(place, PassedWhen.CAME_OUT, alive)
                if self._passed is not None and look_at(alive).high == NOT_FINITE:
                    _tell(self._passed, place, True, alive)
            else:
                # Without a work there is nothing to wait for. The backend has made the current stream wait in C++
                # (distributed_c10d.py: "backends that don't sync at CPP level" return one), so a read on that stream
                # comes after the operation.
                if result is None or (method.call == GroupCall.P2P and place.message == NO_MESSAGE):
                    self._look_late(place, PassedWhen.ISSUED, _alive(place))
                groups.issued(place, result)

        return finish


def _alive(place: OperationPlace) -> list[torch.Tensor]:
    return [tensor for ref in place.outputs if (tensor := ref()) is not None]


def _named(call: Callable[..., Any], name: str, before: Any) -> FunctionType:
    """`call` in the place of `before`."""
    assert isinstance(call, FunctionType)
    # pybind11 detects by its caller's name that an override calls it, and then calls the base's method
    # (pybind11.h, get_type_override). Under another name our function would be called again, without end.
    code = call.__code__.replace(co_name=name)
    ours = FunctionType(code, call.__globals__, name, call.__defaults__, call.__closure__)
    ours.__doc__ = before.__doc__
    return ours


def _tell(passed: PassedValues, place: OperationPlace, came_out: bool, tensors: Any) -> None:
    passed.note(
        place.slot.number, place.number, place.operation, place.root, place.message, came_out, *place.given, tensors
    )
