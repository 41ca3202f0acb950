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

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...core.events.looked_again import GraphNode
from ...core.frames import Frame, FramePhase, Row, RowKind
from ...core.roles import RoleKind
from ...core.values import DTYPE_MAX
from .calls import FrameCalls, TensorUsers, users_inside, users_of
from .diagnosis import AlarmPage, LocalDiagnosis, Source, quoted
from .diagnosis_parts import PossibleMakers

# Which calls' operations can have made a bad gradient, from autograd's graph and the gradients above it.
#
# The gradients of module outputs are known: the bad one is the first of its page. An operation whose backward received
# a finite gradient and only passes gradients on is ruled out. The remaining operations, by call, can have made it:
#
# x + f(norm(x))                 of x: `norm`. AddBackward0 passed on the gradient of what the block returned
# norm(x + f(x))                 of what f returned: `norm`. AddBackward0 passed on what it was handed
# h = x + f(norm(x)); h + g(h)   of x: `norm`. The first sum handed the same gradient to f, and f's was finite
# x * norm(x)                    of x: `norm`, if it is nan: a product with finite numbers makes none of a finite one
# x * exp(norm(x))               of x: `norm` or the block's own code


@dataclass(frozen=True)
class GradientMaker:
    """Operations of one call that can have made it."""

    module: str
    call: int
    """-1: of no call. They are the script's own."""
    ops: tuple[str, ...]
    opaque: bool
    """One of them is a torch.autograd.Function, in whose forward modules may have been called."""


@dataclass(frozen=True)
class GradientMakers:
    """Operations that can have made a bad gradient, and some that cannot."""

    makers: tuple[GradientMaker, ...]
    passed: tuple[GraphNode, ...]
    """Operations that have used the tensor, and that only passed on a finite gradient."""


def makers_of(
    graph: Sequence[GraphNode], finite: Callable[[str, int], bool], returned_finite: Callable[[str], bool] | None = None
) -> GradientMakers | None:
    """The operations that can have made the gradient that the first node received; None if that is unknown.

    `finite(module, outputs)`: whether the gradients of all outputs of the module, at least `outputs` of them, were seen
    and finite. `returned_finite(module)`: whether all outputs of the module are known to be finite; asked only if the
    gradient is nan.
    """
    outputs = Counter(node.module for node in graph[1:] if node.output)
    if not graph or not all(finite(module, number) for module, number in outputs.items()):
        return None
    able: dict[tuple[str, int], list[GraphNode]] = {}
    passed: list[GraphNode] = []
    reached: set[int] = set()
    left = list(graph[0].users)
    while left:
        position = left.pop()
        if position in reached or not 0 < position < len(graph):
            continue
        reached.add(position)
        node = graph[position]
        # it multiplies two tensors that are known to be finite: that makes no nan
        passes = node.passes or (
            node.product and returned_finite is not None and all(map(returned_finite, node.operands))
        )
        handed_finite = node.output or (node.passes and any(finite(module, 1) for module in node.operands))
        if passes and handed_finite:
            passed.append(node)
            continue
        left += node.users
        if not passes or not node.users:
            able.setdefault((node.module if node.call >= 0 else "", node.call), []).append(node)
    made = tuple(
        GradientMaker(module, call, tuple(sorted({node.op for node in nodes})), any(node.opaque for node in nodes))
        for (module, call), nodes in sorted(able.items())
    )
    return GradientMakers(made, tuple(passed))


# How large a gradient can be that a matrix product, a convolution or an embedding has made, from frames' numbers.
#
# y = x @ W.T      |grad x| <= rows of W * max |W| * max |grad y|
# |grad W| <= rows of x * max |x| * max |grad y|

_PRODUCTS = frozenset(("AddmmBackward0", "ConvolutionBackward0", "LinearBackward0", "MmBackward0", "ToCopyBackward0"))
_LOOKUPS = frozenset(("EmbeddingBackward0",))


def largest_gradient(call: Frame, ops: Iterable[str], gradients: list[Row], *, of_parameter: bool) -> float | None:
    """An upper bound of abs max of the gradient that a call makes of its input, or of its parameter; None if unknown.

    `ops` are its operations in autograd's graph, `gradients` those of what it returned.
    """
    used = frozenset(ops)
    handed = _largest(gradients)
    rows = [math.prod(row.shape[:-1]) for row in call.outputs if row.shape]
    if handed is None or not rows:
        return None
    if of_parameter and used <= _LOOKUPS:
        return max(rows) * handed
    if not used <= _PRODUCTS:
        return None
    if of_parameter:
        given = _largest([row for row in call.inputs if row.kind == RowKind.MEASURED])
        is_known = given is not None and "ConvolutionBackward0" not in used
        return max(rows) * handed * max(given or 0.0, 1.0) if is_known else None
    weight = _largest(call.weights)
    shapes = [row.shape for row in call.weights if row.shape and len(row.shape) > 1]
    if weight is None or not shapes:
        return None
    return max(max(shape) if len(shape) == 2 else math.prod(shape) for shape in shapes) * weight * handed


def _largest(rows: list[Row]) -> float | None:
    """abs max of all of these tensors; None if one is unknown or not finite, or if there is none."""
    known = [row.abs_max for row in rows if row.finite and row.abs_max is not None]
    return max(known) if known and len(known) == len(rows) else None


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
        self._calls = FrameCalls(other for other in alarm.frames if other.phase == FramePhase.FORWARD)
        self._before = [f for f in alarm.frames if f.phase == FramePhase.BACKWARD and f.index < frame.index]
        self._name = frame.module or frame.cls
        """The name of the gradient's module in `between`."""

    def of_parameter(self) -> LocalDiagnosis:
        """A parameter's gradient. The module itself made it, if the gradient of its output was finite."""
        module = self._frame.module
        if self._sharing():  # of a module's own parameters the frames tell enough
            found = self._of_graph()
            if found is not None:
                return found
        mine = self._calls_of(module) or self._calls_around(module)
        if not mine or not self._seen_finite(mine):
            around = self._unseen_around(mine[0]) if mine else None
            if around is not None:
                return self._of_unseen(around)
            users = users_of(self._calls, mine, [row.role for call in mine for row in call.outputs])
            users.own_code.append(module)
            users.unwatched = users.unwatched or not mine
            return self._somewhere(users, sure=False)
        first = mine[0]
        if not self._calls_of(module) and first.cls != "MultiheadAttention":  # it uses its `out_proj` itself
            compiled = "compiled code that was not inspected, in which case a module inside it can have made it"
            used = f"{quoted(first.module)} used its parameter itself, or ran {compiled}"
            note = f"no frame shows a call of {quoted(module)}: {used}"
            return self._made_inside(first, note, below=True)
        if self._may_be_reduced(mine):
            return self._diagnosis((module, self._frame.cls), received=True)
        sharing = sorted(self._sharing())
        if sharing:
            named = ", ".join(map(quoted, sharing))
            note = f"{named} used the same parameter: its gradient is the sum over all of them"
            return self._diagnosis((module, self._frame.cls), sure=False, notes=(note,))
        if any(_is_inside(other.module, first.module) for other in self._calls.frames):
            # made by its own code, or by a call that used what its own code had made
            inside = users_inside(self._calls, first, -1)
            suspects = tuple(dict.fromkeys(call.module for call in inside.takers))
            return self._diagnosis(
                (first.module, first.cls),
                between=(self._last_finite(first.module, below=True), self._name),
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
        handed = ([row for _, row in self._gradients_of(call)] for call in mine)
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
            received=self._may_be_reduced([call]),
            between=(self._last_finite(call.module, below=below), self._name),
            sure=False,
            makers=PossibleMakers(own_code=(*own_code, call.module)),
            notes=(note,),
        )

    def of_output(self) -> LocalDiagnosis:
        """The gradient of an output: a user of that output made it."""
        found = self._of_graph()
        if found is not None:
            return found
        made = self._calls_of(self._frame.module)
        users = users_of(self._calls, made, [self._row.parsed_role.name])
        if len(made) != 1:  # it is unknown which of its calls this gradient belongs to
            users.own_code.append(self._frame.module.rpartition(".")[0])
            return self._somewhere(users, sure=bool(made))
        return self._of_users(users)

    def _of_graph(self) -> LocalDiagnosis | None:
        """The diagnosis where the graph's operations and the gradients above leave a known choice; else None."""
        if not self._alarm.is_about(self._frame, self._row):
            return None
        is_nan = self._row.nan and not (self._row.posinf or self._row.neginf)
        found = makers_of(self._alarm.again.graph, self._all_finite, self._returned_finite if is_nan else None)
        if found is None or not self._is_no_sum():
            return None
        calls: dict[GradientMaker, Frame] = {}
        excluded = [f"{node.op} of {quoted(node.module)}" for node in found.passed]
        for maker in found.makers:
            of = self._calls_of(maker.module)
            if maker.call < 0 or len(of) != 1 or (maker.opaque and self._calls.children(of[0])):
                return None  # of the script's own code, of an unknown one of several calls, or modules are hidden in it
            if not self._cannot_overflow(maker, of[0]):
                calls[maker] = of[0]
            else:
                excluded.append(f"{quoted(maker.module)}, whose values are too small")
        if not calls or any(call.collectives for call in calls.values()) or self._may_be_received([*calls.values()]):
            return None
        if len(calls) > 1:
            inner = [call for call in calls.values() if not self._calls.children(call)]
            users = TensorUsers(inner, [call.module for call in calls.values() if self._calls.children(call)])
            return self._somewhere(users, sure=False, excluded=tuple(excluded))
        (call,) = calls.values()
        role = self._role_in(call)
        if self._calls.children(call) or not role:
            between = (self._last_finite(call.module, below=True), self._name)
            makers = PossibleMakers(own_code=(call.module,), excluded=tuple(excluded))
            return self._diagnosis((call.module, call.cls), between=between, makers=makers)
        makers = PossibleMakers(excluded=tuple(excluded))
        return self._diagnosis((call.module, call.cls), role=f"grad {role}", makers=makers)

    def _all_finite(self, module: str, outputs: int) -> bool:
        """Whether the gradients of all outputs of a module, at least `outputs` of them, were seen and finite."""
        calls = self._calls_of(module)
        if not calls or not self._seen_finite(calls):
            return False
        return len({row.role for call in calls for _, row in self._gradients_of(call)}) >= outputs

    def _returned_finite(self, module: str) -> bool:
        """Whether all outputs of a module in the forward were measured and finite."""
        rows = [row for call in self._calls_of(module) for row in call.outputs]
        return bool(rows) and all(row.finite and row.kind == RowKind.MEASURED for row in rows)

    def _cannot_overflow(self, maker: GradientMaker, call: Frame) -> bool:
        """Whether a call's operations are of a kind, and its numbers so small, that it can only make finite ones."""
        if self._calls.exchange or self._calls.children(call):
            return False
        of_parameter = self._row.role_kind is not RoleKind.GRAD_OUTPUT
        gradients = [row for _, row in self._gradients_of(call)]
        bound = largest_gradient(call, maker.ops, gradients, of_parameter=of_parameter)
        dtypes = [row.dtype for row in (self._row, *gradients, *call.weights)]
        return bound is not None and bound < min(DTYPE_MAX.get(dtype, 0.0) for dtype in dtypes) / _FAR

    def _role_in(self, call: Frame) -> str:
        """Which argument of a call the bad gradient belongs to, or its parameter's role; "" if that is unclear."""
        if self._row.role_kind is not RoleKind.GRAD_OUTPUT:
            return self._row.parsed_role.name
        values = {row.value for made in self._calls_of(self._frame.module) for row in made.outputs if row.value >= 0}
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
        if not self._calls.children(user):
            if not self._seen_finite([user]):
                return self._somewhere(users, own_code, sure=False)
            role = next(row.role for row in user.inputs if row.value == users.value)
            return self._diagnosis(
                (user.module, user.cls),
                role=f"grad {role}",
                received=user.collectives > 0 or self._may_be_received([user]),
                sure=not own_code,
                makers=PossibleMakers(own_code=own_code),
            )
        if self._seen_finite([user]) and self._is_unseen_inside(user):
            return self._of_unseen(user, own_code)
        return self._of_users(users_inside(self._calls, user, users.value), own_code)

    def _is_no_sum(self) -> bool:
        """Whether the value is no sum of finite gradients: it is nan, or those before were far from overflow."""
        if self._row.nan:
            return True
        rows = [row for frame in self._before for row in frame.gradients if row.finite]
        largest = DTYPE_MAX.get(self._row.dtype)
        return largest is not None and max((row.abs_max or 0.0 for row in rows), default=0.0) < largest / _FAR

    def _sharing(self) -> set[str]:
        """Other modules that used the same parameter."""
        name, module = self._row.parsed_role.name, self._frame.module
        weights = [row for call in self._calls_of(module) for row in call.weights]
        values = {row.value for row in weights if row.parsed_role.name == name and row.value >= 0}
        others = (call for call in self._calls.frames if call.module != module)
        return {call.module for call in others if any(row.value in values for row in call.weights)}

    def _calls_of(self, module: str) -> list[Frame]:
        return [call for call in self._calls.frames if call.module == module]

    def _calls_around(self, module: str) -> list[Frame]:
        """For a module that is never called, the calls of the innermost module around it, which uses its parameters."""
        around = [call.module for call in self._calls.frames if _is_inside(module, call.module)]
        return self._calls_of(max(around, key=len)) if around else []

    def _gradients_of(self, call: Frame) -> list[tuple[Frame, Row]]:
        """The gradients of a call's outputs. They carry the name of the first call that returned those tensors."""
        values = {row.value for row in call.outputs if row.value >= 0}
        outputs = ((other.module, row) for other in self._calls.frames for row in other.outputs)
        names = {(module, f"grad {row.role}") for module, row in outputs if row.value in values}
        return [(frame, row) for frame in self._before for row in frame.rows if (frame.module, row.role) in names]

    def _seen_finite(self, calls: list[Frame]) -> bool:
        """Whether each call of these modules has a gradient before this one, and all of those are finite."""
        every = [call for module in {call.module for call in calls} for call in self._calls_of(module)]
        found = {frame.index: row.finite for call in every for frame, row in self._gradients_of(call)}
        return len(found) >= len(every) and all(found.values())

    def _is_unseen_inside(self, call: Frame) -> bool:
        """Whether no gradient was seen for the outputs of calls inside of this one."""
        own = {row.value for row in call.outputs}
        below = (other for other in self._calls.frames if _is_inside(other.module, call.module))
        inside = [other for other in below if not any(row.value in own for row in other.outputs)]
        return bool(inside) and not any(self._gradients_of(other) for other in inside)

    def _unseen_around(self, call: Frame) -> Frame | None:
        """The nearest call around this one whose gradient was seen and finite, if none was seen inside of it."""
        around = [other for other in self._calls.frames if _is_inside(call.module, other.module)]
        for other in sorted(around, key=lambda other: -len(other.module)):
            if self._seen_finite([other]):
                return other if self._is_unseen_inside(other) else None
        return None

    def _last_finite(self, scope: str, *, below: bool = False) -> str:
        for frame in reversed(self._before):
            inside = _is_inside(frame.module, scope) or (frame.module == scope and not below)
            if inside and any(row.role_kind is RoleKind.GRAD_OUTPUT and row.finite for row in frame.rows):
                return frame.module
        return ""

    def _may_be_received(self, finite: list[Frame]) -> bool:
        """Whether collectives ran between the last finite gradient and this one, in a model spread over ranks.

        DDP's collectives and FSDP's all-gathers do not change the gradients of activations.
        """
        return self._calls.exchange and self._moved_since(finite)

    def _may_be_reduced(self, mine: list[Frame]) -> bool:
        """Whether a parameter's gradient came out of a collective: FSDP's gradients are already reduced."""
        own = [
            call.collectives - sum(child.collectives for child in self._calls.children(call))
            for call in self._calls.frames
            if self._calls.children(call)
        ]
        return any(number > 0 for number in own) and self._moved_since(mine)

    def _moved_since(self, finite: list[Frame]) -> bool:
        seen = [frame.seq for call in finite for frame, row in self._gradients_of(call) if row.finite]
        last = max(seen, default=self._before[-1].seq if self._before else -1)
        return 0 <= last < self._frame.seq

    def _somewhere(
        self, users: TensorUsers, own_code: tuple[str, ...] = (), *, sure: bool = True, excluded: tuple[str, ...] = ()
    ) -> LocalDiagnosis:
        """Several users, or their sum, can have made it. Name the smallest module that holds all of them."""
        suspects = tuple(dict.fromkeys(call.module for call in [*users.calls, *users.takers]))
        scope = users.scope
        last = [(frame.index, call.module) for call in users.calls for frame, row in self._gradients_of(call)]
        after = max(last)[1] if last else self._last_finite(scope)
        calls = self._calls_of(scope)
        cls = calls[-1].cls if calls else self._alarm.root_class if scope == "" else "?"
        return self._diagnosis(
            (scope, cls),
            received=self._may_be_received(users.calls),
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


def _is_inside(module: str, scope: str) -> bool:
    return module != scope and (scope == "" or module.startswith(f"{scope}."))
