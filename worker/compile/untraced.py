"""What dynamo sees of the hooks where they trace nothing into its graphs: that there was a graph.

Works with names that all versions of torch have.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._dynamo import assume_constant_result, eval_frame
from torch._dynamo import types as strategies
from torch._guards import CompileContext

from ...core.signal_errors import from_outside, suppress_own
from .region_parts import is_a_backward

_PACKAGE = __name__.partition(".")[0] + "."


class UntracedGraphs:
    """The graphs of a rank whose modules get no frames. One instance is current at a time."""

    current: UntracedGraphs | None = None

    def __init__(self, not_looked_into: Callable[[str], None], fault: Callable[[str, Exception], None]) -> None:
        """`not_looked_into` gets the class of the first module in each graph."""
        self._not_looked_into = not_looked_into
        self._fault = fault
        self._last: object = None
        """Dynamo's id of the graph that it last began to trace."""

    def attach(self) -> None:
        """Report the graphs that are traced from now on."""
        UntracedGraphs.current = self

    def detach(self) -> None:
        """Stop reporting graphs."""
        if UntracedGraphs.current is self:
            UntracedGraphs.current = None

    def entered(self, cls: str) -> None:
        """A module is entered in a trace."""
        try:
            if is_a_backward(cls):
                return
            graph = CompileContext.current_compile_id()
            if graph is None or graph != self._last:
                self._last = graph
                self._not_looked_into(cls)
        except Exception as error:  # it must not end the compilation
            if from_outside(error):
                raise
            self._fault("a compiled forward", error)


@assume_constant_result  # type: ignore[untyped-decorator]  # torch has no annotation: called while tracing alone
def _entered(cls: str) -> bool:
    if UntracedGraphs.current is not None:
        UntracedGraphs.current.entered(cls)
    return True


def as_constant(call: Callable[[], None]) -> Callable[[], bool]:
    """A function that dynamo calls while it traces. It adds no operation to the graph."""

    def called() -> bool:
        call()
        return True

    return assume_constant_result(called)  # type: ignore[no-any-return, no-untyped-call]  # no annotation


def untraced_before(module: torch.nn.Module) -> None:
    """Note that a module is entered. Dynamo traces this function, which adds no operation to the graph."""
    _entered(type(module).__name__)


def leave_alone(hooks: Iterable[Callable[..., Any]], around: Iterable[Callable[..., Any]] = ()) -> None:
    """Make dynamo skip these functions and the functions that they call. It still traces them into other graphs.

    `around`: functions that stand around one of torch's, which are skipped without what they call.

    At a graph break, dynamo tries to compile each Python function that the call makes, our hooks among them. A compiled
    hook would then do outside of a graph what it should do only while dynamo traces.
    """
    codes, outer = ([inspect.unwrap(each).__code__ for each in some] for some in (hooks, around))
    if hasattr(eval_frame, "set_code_exec_strategy"):
        action = strategies.FrameAction  # type: ignore[attr-defined]  # no export
        for some, further in ((codes, action.SKIP), (outer, action.DEFAULT)):
            for code in some:
                eval_frame.set_code_exec_strategy(code, strategies.FrameExecStrategy(action.SKIP, further))  # type: ignore[attr-defined]  # likewise
        return
    with suppress_own(AttributeError):  # torch before 2.7 must also skip what they call (see apart_from_dynamo)
        for code in [*codes, *outer, *_codes_of_ours()]:
            eval_frame.skip_code(code)


def _codes_of_ours() -> Iterator[types.CodeType]:
    for name, module in [*sys.modules.items()]:
        if name.startswith(_PACKAGE):
            for value in [*vars(module).values()]:
                yield from _codes_in(value)


def _codes_in(value: Any) -> Iterator[types.CodeType]:
    if isinstance(value, type) and value.__module__.startswith(_PACKAGE):
        for member in [*vars(value).values()]:
            for part in (
                member,
                *(getattr(member, name, None) for name in ("fget", "__func__", "func", "__wrapped__")),
            ):
                if isinstance(part, types.FunctionType):
                    yield from _nested(part.__code__)
    elif isinstance(value, types.FunctionType) and value.__module__.startswith(_PACKAGE):
        yield from _nested(value.__code__)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
