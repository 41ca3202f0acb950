"""What ends an error within a rank lets a signal's handler's through: core/signal_errors.py."""

from __future__ import annotations

import ast
import gc
import signal
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpuwatch.core.signal_errors import from_outside, handler_in, suppress_own

from ..parsed import nodes_of

ROOT = Path(__file__).parents[2]
IN_A_RANK = ["worker", "core", "collector/facts", "collector/decide", "collector/assemble", "collector/report"]
"""What runs between the bytecodes of a script. The last four make the report of `gpuwatch.watch`."""
ELSEWHERE = {
    "worker/preflight": "before the script, and in processes of its own",
    "worker/path": "before the script",
    "worker/__main__.py": "around the script: what it raises ends it",
    "worker/explain/replaying.py": "`gpuwatch replay`, a process of its own",
    "worker/explain/reproduce.py": "likewise",
    "core/gpu": "the node agent",
    "core/wire": "likewise",
    "core/recorder/stalls.py": "likewise",
    "core/guest/start.py": "before the script",
}
NARROW = {"ImportError", "ModuleNotFoundError", "FileExistsError", "UnicodeEncodeError", "OverflowError", "BufferError"}
"""Builtins that no handler raises."""
THREADS = {"worker/explain/forward_thread.py", "worker/explain/capture.py", "core/guest/threads.py"}
"""They catch BaseException in threads of their own, where no handler runs."""


def files() -> Iterator[tuple[str, tuple[ast.AST, ...]]]:
    for folder in IN_A_RANK:
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            if not any(name == place or name.startswith(f"{place}/") for place in ELSEWHERE):
                yield name, nodes_of(file)


def names_of(caught: ast.expr | None) -> set[str]:
    if caught is None:
        return {"BaseException"}
    return {ast.unparse(each) for each in (caught.elts if isinstance(caught, ast.Tuple) else [caught])}


def own_classes() -> set[str]:
    found = {
        node.name
        for folder in ("core", "worker")
        for file in (ROOT / folder).rglob("*.py")
        for node in nodes_of(file)
        if isinstance(node, ast.ClassDef)
    }
    return found | {f"reproduce.{name}" for name in found}


def lets_through(handler: ast.ExceptHandler) -> bool:
    """It asks first, or raises all."""
    first = handler.body[0]
    asks = isinstance(first, ast.If) and "from_outside(" in ast.unparse(first.test)
    return asks or any(isinstance(step, ast.Raise) and step.exc is None for step in handler.body)


def test_what_ends_an_error_in_a_rank_asks_whose_it_is():
    own = own_classes() | NARROW
    found = []
    for name, nodes in files():
        for node in nodes:
            if isinstance(node, ast.ExceptHandler):
                caught = names_of(node.type)
                in_thread = name in THREADS and caught == {"BaseException"}
                if not (caught <= own or in_thread or lets_through(node)):
                    found.append(f"{name}:{node.lineno}: except {', '.join(sorted(caught))}")
            is_suppress = isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress")
            if is_suppress and not {ast.unparse(each) for each in node.args} <= own:
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(["ask core/signal_errors.py's from_outside first, or use its suppress_own:", *found])


def test_nothing_of_this_is_exempt_that_is_not_there():
    assert [place for place in [*ELSEWHERE, *THREADS] if not (ROOT / place).exists()] == []


def test_no_exception_is_cleared_in_c_but_at_one_place():
    sources = [*(ROOT / "worker/native").rglob("*.[ch]")]
    assert {file.name for file in sources if "PyErr_Clear(" in file.read_text()} == {"errors.c"}


# -- from_outside ---------------------------------------------------------------------------------------------------


def raises(number: int, frame: Any) -> None:
    raise ValueError("of a handler")


def raises_of_any(*given: Any) -> None:
    raise ValueError("of a handler")


def raises_below(number: int, frame: Any) -> None:
    raises_of_any()


def has_rebound(number: int, frame: Any) -> None:
    del number, frame
    raise ValueError("of a handler")


class Raises:
    def __call__(self, number: int, frame: Any) -> None:
        raise ValueError("of a handler")

    def method(self, number: int, frame: Any) -> None:
        raise ValueError("of a handler")


HANDLERS = {
    "function": raises,
    "of any arguments": raises_of_any,
    "that calls another": raises_below,
    "lambda": lambda number, frame: raises_below(0, None),
    "that has rebound its arguments": has_rebound,
    "object": Raises(),
    "method": Raises().method,
    "partial": partial(lambda context, number, frame: 1 / 0, "context"),
    "partial of one that has rebound them": partial(has_rebound),
}


@pytest.fixture
def handled() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler) and None
    signal.signal(signal.SIGUSR1, before)


def interrupted() -> None:
    """Our code, in which a signal comes."""
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize("kind", HANDLERS)
def test_what_a_handler_raises_is_not_ours(handled, kind):
    handled(HANDLERS[kind])
    with pytest.raises((ValueError, ZeroDivisionError)) as caught:
        interrupted()
    assert from_outside(caught.value)


def test_the_signal_whose_handler_ended_the_script_is_known(handled):
    def leaves(number: int, frame: Any) -> None:
        raise SystemExit(7)

    handled(leaves)
    with pytest.raises(SystemExit) as caught:
        interrupted()
    assert handler_in(caught.value) == signal.SIGUSR1
    with pytest.raises(SystemExit) as caught:
        leaves(signal.SIGUSR1, None)
    assert handler_in(caught.value) == handler_in(SystemExit(7)) == 0


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_error_is_not_ours(kind):
    assert from_outside(kind())


def of_ours(number: int, frame: Any) -> None:
    raise ValueError("ours")


def test_an_error_of_ours_is_ours_though_a_handler_is_installed(handled):
    handled(raises)
    for given in ((1, None), (1, "frame"), (signal.SIGUSR1, object())):
        with pytest.raises(ValueError, match="ours") as caught:
            of_ours(*given)
        assert not from_outside(caught.value)
    assert not from_outside(ValueError("never raised"))


class _Held:
    pass


def _fails_while_this_is_held() -> weakref.ref[_Held]:
    held = _Held()
    try:
        of_ours(1, None)
    except ValueError as error:
        assert not from_outside(error)
    return weakref.ref(held)


def test_nothing_is_kept_until_a_garbage_collection_by_asking():
    """A run's tensors are locals of the functions around: some trainings collect no garbage between their steps."""
    gc.collect()
    gc.disable()
    try:
        assert _fails_while_this_is_held()() is None
    finally:
        gc.enable()


def test_a_value_that_an_enum_does_not_have_is_an_error_of_ours():
    """signal.getsignal gives members of an enum for the signals that nobody handles."""
    with pytest.raises(ValueError, match="not a valid Signals") as caught:
        signal.Signals(40)
    assert not from_outside(caught.value)


def test_suppress_own_ends_ours_alone(handled):
    with suppress_own(ValueError):
        of_ours(1, None)
    with pytest.raises(KeyError), suppress_own(ValueError):
        raise KeyError
    handled(raises)
    with pytest.raises(ValueError, match="of a handler"), suppress_own(Exception):
        interrupted()
