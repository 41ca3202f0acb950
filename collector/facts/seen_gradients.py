"""What one rank's page shows of gradients before a bad one, and of the calls that these belong to. Pure."""

from __future__ import annotations

from ...core.frames import Frame, FramePhase, Row, RowKind
from ...core.roles import RoleKind
from .calls import FrameCalls
from .diagnosis import AlarmPage


class SeenGradients:
    """Of the page of an alarm, up to the frame and the row of the bad gradient."""

    def __init__(self, alarm: AlarmPage, frame: Frame, row: Row) -> None:
        self._frame, self._row = frame, row
        self.calls = FrameCalls(other for other in alarm.frames if other.phase == FramePhase.FORWARD)
        """Those of the forward."""
        self.before = [f for f in alarm.frames if f.phase == FramePhase.BACKWARD and f.index < frame.index]
        """The frames of the backward before the bad gradient."""

    def all_finite(self, module: str, outputs: int) -> bool:
        """Whether the gradients of all outputs of a module, at least `outputs` of them, were seen and finite."""
        calls = self.calls_of(module)
        if not calls or not self.are_finite(calls):
            return False
        return len({row.role for call in calls for _, row in self.gradients_of(call)}) >= outputs

    def returned_finite(self, module: str) -> bool:
        """Whether all outputs of a module in the forward were measured and finite."""
        rows = [row for call in self.calls_of(module) for row in call.outputs]
        return bool(rows) and all(row.finite and row.kind == RowKind.MEASURED for row in rows)

    def sharing(self) -> set[str]:
        """Other modules that used the same parameter."""
        name, module = self._row.parsed_role.name, self._frame.module
        weights = [row for call in self.calls_of(module) for row in call.weights]
        values = {row.value for row in weights if row.parsed_role.name == name and row.value >= 0}
        others = (call for call in self.calls.frames if call.module != module)
        return {call.module for call in others if any(row.value in values for row in call.weights)}

    def calls_of(self, module: str) -> list[Frame]:
        """The calls of a module in the forward."""
        return [call for call in self.calls.frames if call.module == module]

    def calls_around(self, module: str) -> list[Frame]:
        """For a module that is never called, the calls of the innermost module around it, which uses its parameters."""
        around = [call.module for call in self.calls.frames if is_inside(module, call.module)]
        return self.calls_of(max(around, key=len)) if around else []

    def gradients_of(self, call: Frame) -> list[tuple[Frame, Row]]:
        """The gradients of a call's outputs. They carry the name of the first call that returned those tensors."""
        values = {row.value for row in call.outputs if row.value >= 0}
        outputs = ((other.module, row) for other in self.calls.frames for row in other.outputs)
        names = {(module, f"grad {row.role}") for module, row in outputs if row.value in values}
        return [(frame, row) for frame in self.before for row in frame.rows if (frame.module, row.role) in names]

    def are_finite(self, calls: list[Frame]) -> bool:
        """Whether each call of these modules has a gradient before this one, and all of those are finite."""
        every = [call for module in {call.module for call in calls} for call in self.calls_of(module)]
        found = {frame.index: row.finite for call in every for frame, row in self.gradients_of(call)}
        return len(found) >= len(every) and all(found.values())

    def is_unreached(self, calls: list[Frame]) -> bool:
        """Whether these calls returned tensors that are watched, and the backward has not reached any output yet."""
        returned = any(row.kind == RowKind.MEASURED for call in calls for row in call.outputs)
        reached = any(row.role_kind is RoleKind.GRAD_OUTPUT for frame in self.before for row in frame.rows)
        return returned and not reached

    def is_unseen_inside(self, call: Frame) -> bool:
        """Whether no gradient was seen for the outputs of calls inside of this one."""
        own = {row.value for row in call.outputs}
        below = (other for other in self.calls.frames if is_inside(other.module, call.module))
        inside = [other for other in below if not any(row.value in own for row in other.outputs)]
        return bool(inside) and not any(self.gradients_of(other) for other in inside)

    def unseen_around(self, call: Frame) -> Frame | None:
        """The nearest call around this one whose gradient was seen and finite, if none was seen inside of it."""
        around = [other for other in self.calls.frames if is_inside(call.module, other.module)]
        for other in sorted(around, key=lambda other: -len(other.module)):
            if self.are_finite([other]):
                return other if self.is_unseen_inside(other) else None
        return None

    def last_finite(self, scope: str, *, below: bool = False) -> str:
        """The module of the last finite gradient inside of this one, or its own unless `below`; "" if there is none."""
        for frame in reversed(self.before):
            inside = is_inside(frame.module, scope) or (frame.module == scope and not below)
            if inside and any(row.role_kind is RoleKind.GRAD_OUTPUT and row.finite for row in frame.rows):
                return frame.module
        return ""

    def may_be_received(self, finite: list[Frame]) -> bool:
        """Whether collectives ran between the last finite gradient and this one, in a model spread over ranks.

        DDP's collectives and FSDP's all-gathers do not change the gradients of activations.
        """
        return self.calls.exchange and self._moved_since(finite)

    def may_be_reduced(self, mine: list[Frame]) -> bool:
        """Whether a parameter's gradient came out of a collective: FSDP's gradients are already reduced."""
        own = [
            call.collectives - sum(child.collectives for child in self.calls.children(call))
            for call in self.calls.frames
            if self.calls.children(call)
        ]
        return any(number > 0 for number in own) and self._moved_since(mine)

    def _moved_since(self, finite: list[Frame]) -> bool:
        seen = [frame.seq for call in finite for frame, row in self.gradients_of(call) if row.finite]
        last = max(seen, default=self.before[-1].seq if self.before else -1)
        return 0 <= last < self._frame.seq


def is_inside(module: str, scope: str) -> bool:
    """Whether a module is part of another one; "" is the root."""
    return module != scope and (scope == "" or module.startswith(f"{scope}."))
