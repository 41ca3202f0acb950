"""Which module made a non-finite gradient, from one rank's page.

The backward of an output's users makes its gradient. The frames of the forward show which calls received that tensor.
If one call did, and nothing else can have used the tensor, that call's backward made the gradient. Code between calls
may have used it if that code made a tensor of its own afterwards; so may the loss, if the model returned the tensor.

    h = self.enter(x); y = self.root(h); return self.leave(y)     the gradient of h: made by the backward of `root`
    h = self.enter(x); return self.leave(self.root(h).sqrt())     of what `root` returned: `leave` or this module's code
    h = self.enter(x); return self.leave(h + self.root(h))        of h: made by `root`, most likely: own code had to use
                                                                  what `root` returned, and may have used h as well
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.frames import Frame, FramePhase, Row
from ...core.roles import RoleKind
from ...core.values import DTYPE_MAX
from .calls import TensorUsers, users_inside, users_of
from .diagnosis import AlarmPage, LocalDiagnosis, Source, quoted
from .diagnosis_parts import PossibleMakers
from .gradient_makers import GradientMaker, largest_gradient, makers_of
from .seen_gradients import SeenGradients, is_inside

_OPERATIONS = {"Linear": ("AddmmBackward0",), "Embedding": ("EmbeddingBackward0",)}
"""class -> the autograd nodes of its forward"""
_FAR = 2.0**8
"""Gradients smaller than the dtype's maximum by this factor do not overflow when they are added."""


def explain_gradient(alarm: AlarmPage, frame: Frame, row: Row) -> LocalDiagnosis:
    """The diagnosis of a gradient that was non-finite as soon as the backward had made it."""
    left = alarm.left_before(frame, row)
    if left is not None:
        return left
    backward = _BackwardTrail(alarm, frame, row)
    return backward.of_output() if row.role_kind is RoleKind.GRAD_OUTPUT else backward.of_parameter()


class _BackwardTrail:
    def __init__(self, alarm: AlarmPage, frame: Frame, row: Row) -> None:
        self._alarm = alarm
        self._frame = frame
        self._row = row
        self._seen = SeenGradients(alarm, frame, row)
        self._name = frame.module or frame.cls
        """The name of the gradient's module in `between`."""

    def of_parameter(self) -> LocalDiagnosis:
        """A parameter's gradient. The module itself made it, if the gradient of its output was finite."""
        module = self._frame.module
        if self._seen.sharing():  # of a module's own parameters the frames tell enough
            found = self._of_graph()
            if found is not None:
                return found
        mine = self._seen.calls_of(module) or self._seen.calls_around(module)
        if not mine or not self._seen.are_finite(mine):
            around = self._seen.unseen_around(mine[0]) if mine else None
            if around is not None:
                return self._of_unseen(around)
            if self._seen.is_unreached(mine):
                note = (
                    "the backward had reached no module's output by then: the loss may have used the parameter itself"
                )
                return self._diagnosis((module, self._frame.cls), source="outside", sure=False, notes=(note,))
            users = users_of(self._seen.calls, mine, [row.role for call in mine for row in call.outputs])
            users.own_code.append(module)
            users.unwatched = users.unwatched or not mine
            return self._somewhere(users, sure=False)
        first = mine[0]
        if not self._seen.calls_of(module) and first.cls != "MultiheadAttention":  # it uses its `out_proj` itself
            compiled = "compiled code that was not inspected, in which case a module inside it can have made it"
            used = f"{quoted(first.module)} used its parameter itself, or ran {compiled}"
            note = f"no frame shows a call of {quoted(module)}: {used}"
            return self._made_inside(first, note, below=True)
        if self._seen.may_be_reduced(mine):
            return self._diagnosis((module, self._frame.cls), received=True)
        sharing = sorted(self._seen.sharing())
        if sharing:
            named = ", ".join(map(quoted, sharing))
            note = f"{named} used the same parameter: its gradient is the sum over all of them"
            return self._diagnosis((module, self._frame.cls), sure=False, notes=(note,))
        if any(is_inside(other.module, first.module) for other in self._seen.calls.frames):
            # made by its own code, or by a call that used what its own code had made
            inside = users_inside(self._seen.calls, first, -1)
            suspects = tuple(dict.fromkeys(call.module for call in inside.takers))
            return self._diagnosis(
                (first.module, first.cls),
                between=(self._seen.last_finite(first.module, below=True), self._name),
                sure=not suspects,
                makers=PossibleMakers(suspects, own_code=(first.module,)),
            )
        if self._is_too_large_for(mine):
            note = "what it received is too small for that: the loss, or other code, may have used the parameter, too"
            return self._diagnosis((module, self._frame.cls), sure=False, notes=(note,))
        return self._diagnosis((module, self._frame.cls))

    def _is_too_large_for(self, mine: list[Frame]) -> bool:
        """Whether a Linear or an Embedding cannot have made this gradient of its parameter itself.

        The loss may use a parameter, too, as a penalty or a second differentiation does.
        """
        ops = _OPERATIONS.get(self._frame.cls)
        limit = DTYPE_MAX.get(self._row.dtype)
        if ops is None or limit is None or any(call.module != self._frame.module for call in mine):
            return False
        handed = ([row for _, row in self._seen.gradients_of(call)] for call in mine)
        bounds = [largest_gradient(c, ops, rows, of_parameter=True) for c, rows in zip(mine, handed, strict=True)]
        return all(bound is not None and bound < limit / _FAR for bound in bounds)

    def _of_unseen(self, call: Frame, own_code: tuple[str, ...] = ()) -> LocalDiagnosis:
        """A call that received a finite gradient and has none inside: a graph, whose runs overwrite them."""
        note = f"no gradient was seen inside {quoted(call.module)}: anything inside it can have made it"
        return self._made_inside(call, note, own_code)

    def _made_inside(
        self, call: Frame, note: str, own_code: tuple[str, ...] = (), *, below: bool = False
    ) -> LocalDiagnosis:
        """Made inside of a call that shows no more. The last finite gradient there may be its own, unless `below`."""
        return self._diagnosis(
            (call.module, call.cls),
            received=self._seen.may_be_reduced([call]),
            between=(self._seen.last_finite(call.module, below=below), self._name),
            sure=False,
            makers=PossibleMakers(own_code=(*own_code, call.module)),
            notes=(note,),
        )

    def of_output(self) -> LocalDiagnosis:
        """The gradient of an output: a user of that output made it."""
        found = self._of_graph()
        if found is not None:
            return found
        made = self._seen.calls_of(self._frame.module)
        users = users_of(self._seen.calls, made, [self._row.parsed_role.name])
        if len(made) != 1:  # it is unknown which of its calls this gradient belongs to
            users.own_code.append(self._frame.module.rpartition(".")[0])
            return self._somewhere(users, sure=bool(made))
        return self._of_users(users)

    def _of_graph(self) -> LocalDiagnosis | None:
        """The diagnosis where the graph's operations and the gradients above leave a known choice; else None."""
        if not self._alarm.is_about(self._frame, self._row):
            return None
        is_nan = self._row.nan and not (self._row.posinf or self._row.neginf)
        found = makers_of(
            self._alarm.again.graph, self._seen.all_finite, self._seen.returned_finite if is_nan else None
        )
        if found is None or not self._is_no_sum():
            return None
        calls: dict[GradientMaker, Frame] = {}
        excluded = [f"{node.op} of {quoted(node.module)}" for node in found.passed]
        for maker in found.makers:
            of = self._seen.calls_of(maker.module)
            if maker.call < 0 or len(of) != 1 or (maker.opaque and self._seen.calls.children(of[0])):
                return None  # of the script's own code, of an unknown one of several calls, or modules are hidden in it
            if not self._cannot_overflow(maker, of[0]):
                calls[maker] = of[0]
            else:
                excluded.append(f"{quoted(maker.module)}, whose values are too small")
        if (
            not calls
            or any(call.collectives for call in calls.values())
            or self._seen.may_be_received([*calls.values()])
        ):
            return None
        if len(calls) > 1:
            inner = [call for call in calls.values() if not self._seen.calls.children(call)]
            users = TensorUsers(inner, [call.module for call in calls.values() if self._seen.calls.children(call)])
            return self._somewhere(users, sure=False, excluded=tuple(excluded))
        (call,) = calls.values()
        role = self._role_in(call)
        if self._seen.calls.children(call) or not role:
            between = (self._seen.last_finite(call.module, below=True), self._name)
            makers = PossibleMakers(own_code=(call.module,), excluded=tuple(excluded))
            return self._diagnosis((call.module, call.cls), between=between, makers=makers)
        makers = PossibleMakers(excluded=tuple(excluded))
        return self._diagnosis((call.module, call.cls), role=f"grad {role}", makers=makers)

    def _cannot_overflow(self, maker: GradientMaker, call: Frame) -> bool:
        """Whether a call's operations are of a kind, and its numbers so small, that it can only make finite ones."""
        if self._seen.calls.exchange or self._seen.calls.children(call):
            return False
        of_parameter = self._row.role_kind is not RoleKind.GRAD_OUTPUT
        gradients = [row for _, row in self._seen.gradients_of(call)]
        bound = largest_gradient(call, maker.ops, gradients, of_parameter=of_parameter)
        dtypes = [row.dtype for row in (self._row, *gradients, *call.weights)]
        return bound is not None and bound < min(DTYPE_MAX.get(dtype, 0.0) for dtype in dtypes) / _FAR

    def _role_in(self, call: Frame) -> str:
        """Which argument of a call the bad gradient belongs to, or its parameter's role; "" if that is unclear."""
        if self._row.role_kind is not RoleKind.GRAD_OUTPUT:
            return self._row.parsed_role.name
        values = {
            row.value for made in self._seen.calls_of(self._frame.module) for row in made.outputs if row.value >= 0
        }
        handed = next((row.role for row in call.inputs if row.value in values), "")
        able = [row.role for row in call.inputs if row.dtype.startswith(("float", "bfloat", "complex"))]
        return handed or (able[0] if len(able) == 1 else "")

    def _of_users(self, users: TensorUsers, own_code: tuple[str, ...] = ()) -> LocalDiagnosis:
        """Descend into the only call that used the tensor, for as long as there is only one.

        `own_code`: modules around it whose own code may have used it as well.
        """
        user = users.only_call
        if user is None and users.likely_call is not None and self._is_no_sum():
            user = users.likely_call
            own_code = (*own_code, *users.own_code)
        if user is None:
            if users.returned and not users.calls and not users.own_code:
                # the script's own loss made the gradient, or the next stage of a pipeline
                return self._diagnosis(("", self._alarm.root_class), source="outside", between=("", self._name))
            return self._somewhere(users, own_code, sure=bool(users.calls or users.own_code))
        if not self._seen.calls.children(user):
            if not self._seen.are_finite([user]):
                return self._somewhere(users, own_code, sure=False)
            role = next(row.role for row in user.inputs if row.value == users.value)
            return self._diagnosis(
                (user.module, user.cls),
                role=f"grad {role}",
                received=user.collectives > 0 or self._seen.may_be_received([user]),
                sure=not own_code,
                makers=PossibleMakers(own_code=own_code),
            )
        if self._seen.are_finite([user]) and self._seen.is_unseen_inside(user):
            return self._of_unseen(user, own_code)
        return self._of_users(users_inside(self._seen.calls, user, users.value), own_code)

    def _is_no_sum(self) -> bool:
        """Whether the value is no sum of finite gradients: it is nan, or those before were far from overflow."""
        if self._row.nan:
            return True
        rows = [row for frame in self._seen.before for row in frame.gradients if row.finite]
        largest = DTYPE_MAX.get(self._row.dtype)
        return largest is not None and max((row.abs_max or 0.0 for row in rows), default=0.0) < largest / _FAR

    def _somewhere(
        self, users: TensorUsers, own_code: tuple[str, ...] = (), *, sure: bool = True, excluded: tuple[str, ...] = ()
    ) -> LocalDiagnosis:
        """Several users, or their sum, can have made it. Name the smallest module that holds all of them."""
        suspects = tuple(dict.fromkeys(call.module for call in [*users.calls, *users.takers]))
        scope = users.scope
        last = [(frame.index, call.module) for call in users.calls for frame, row in self._seen.gradients_of(call)]
        after = max(last)[1] if last else self._seen.last_finite(scope)
        calls = self._seen.calls_of(scope)
        cls = calls[-1].cls if calls else self._alarm.root_class if scope == "" else "?"
        return self._diagnosis(
            (scope, cls),
            received=self._seen.may_be_received(users.calls),
            between=(after, self._name),
            sure=sure and not suspects and not own_code,
            makers=PossibleMakers(suspects, tuple(dict.fromkeys((*own_code, *users.own_code))), excluded),
        )

    def _diagnosis(
        self,
        place: tuple[str, str],
        *,
        received: bool = False,
        source: Source = "made",
        role: str = "",
        between: tuple[str, str | None] | None = None,
        sure: bool = True,
        makers: PossibleMakers | None = None,
        notes: Iterable[str] = (),
    ) -> LocalDiagnosis:
        return self._alarm.diagnosis(
            self._frame,
            self._row,
            "received" if received else source,
            FramePhase.BACKWARD,
            place=place,
            role=role,
            between=between,
            sure=sure,
            makers=makers,
            notes=notes,
        )
